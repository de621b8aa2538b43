"""Kernels that wait for those of another process which shares the GPU: do they replay, and end?

Usage: python -m benchmarks.gpu.peer_processes replay|killed|timeout

Starts two ranks, whose calls kernels carry out though they share a GPU. Contexts take turns there,
so all is small, and waits are long. Prints a line of JSON.

- replay: a graph of a call by one-shot and one by "direct", replayed with other inputs, gives the
  oracle's bits.
- killed: rank 1 is killed while a kernel of rank 0 waits for it: rank 0 is told, and its context
  works on.
- timeout: rank 1 does not replay: the wait ends with its time, all are told, and later replays do
  nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

import numpy as np

import pycollective as pc
from pycollective import _core, reference
from pycollective.config import ENV_RANK
from pycollective.testing.device_array import DeviceArray
from pycollective.testing.inputs import leaves

REPLAYS = 5
ONE_SHOT, DIRECT = 1000, 200_001  # elements of float16, on either side of 256 KiB
TOLD = 8.0  # seconds, at most, from a wait's end on; with it, on a machine that is busy
BOUND = 1.0  # that the table holds it to
TIMEOUT = 2.0  # of the wait that ends with it
LONG = 60.0

_GLOBAL = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL


class Graph:
    """A CUDA graph, by the driver itself: no library of arrays is needed.

    It captures on a stream of GPU `device`, in a `with` block; then it can be launched there. It
    stays as long as the process does.
    """

    def __init__(self, device: int, stream: int) -> None:
        # The one that the core opened.
        library = os.environ.get("PYCOLLECTIVE_CUDA_DRIVER") or "libcuda.so.1"
        self._driver = ctypes.CDLL(library)
        self._stream = ctypes.c_void_p(stream)
        self._context = ctypes.c_void_p()
        self._executable = ctypes.c_void_p()
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def __enter__(self) -> Graph:
        self._in_context("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_GLOBAL))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        graph = ctypes.c_void_p()
        self._in_context("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        if error is not None:
            return
        flags = ctypes.c_ulonglong(0)
        made = ctypes.byref(self._executable)
        self._in_context("cuGraphInstantiateWithFlags", made, graph, flags)
        self._in_context("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Put all of it on the stream."""
        self._in_context("cuGraphLaunch", self._executable, self._stream)

    def _in_context(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name}: CUDA error {result}")


def on_gpu(comm: pc.Communicator, x: np.ndarray, stream: _core.DeviceStream) -> DeviceArray:
    """A copy."""
    assert comm.device is not None
    return DeviceArray.from_numpy(x, comm.device, stream)


def replay(comm: pc.Communicator) -> dict[str, Any]:
    """What differs from the oracle is an error."""
    stream = _core.DeviceStream(comm.device or 0)
    turns = [leaves("float16", "sum", comm.size, DIRECT, seed) for seed in range(REPLAYS)]
    mine = [inputs[comm.rank] for inputs in turns]
    small, large = on_gpu(comm, mine[0][:ONE_SHOT], stream), on_gpu(comm, mine[0], stream)
    for array in (small, large):  # so that the GPU knows the programs
        comm.all_reduce(array)
    comm.barrier()
    with Graph(comm.device or 0, stream.handle) as graph:
        for array in (small, large):
            comm.all_reduce(array, stream=stream)
    wrong = 0
    for x, inputs in zip(mine, turns, strict=True):
        small.write(x[:ONE_SHOT])
        large.write(x)
        graph.launch()
        stream.synchronize(LONG)
        want = reference.reduce(inputs, "sum")
        wrong += small.to_numpy().tobytes() != want[:ONE_SHOT].tobytes()
        wrong += large.to_numpy().tobytes() != want.tobytes()
    comm.barrier()  # nobody leaves while others replay
    comm.close()
    return {"replays": REPLAYS, "wrong": wrong, "right": wrong == 0}


def waiting(
    comm: pc.Communicator, timeout: float
) -> tuple[Graph, DeviceArray, _core.DeviceStream, float]:
    """Rank 0's kernel waits for rank 1's, which does not come; since when."""
    stream = _core.DeviceStream(comm.device or 0)
    array = on_gpu(comm, np.ones(ONE_SHOT, np.float32), stream)
    comm.all_reduce(array)
    stream.synchronize(LONG)
    comm.barrier()
    comm.timeout = timeout
    with Graph(comm.device or 0, stream.handle) as graph:
        comm.all_reduce(array, stream=stream)
    comm.timeout = LONG
    comm.barrier()
    if comm.rank == 0:
        graph.launch()
    return graph, array, stream, time.monotonic()


def told(comm: pc.Communicator, since: float, within: float) -> tuple[str, float]:
    """The kind of failure, and when it came."""
    while comm.failure is None and time.monotonic() < since + within:
        time.sleep(0.002)
    return type(comm.failure).__name__, round(time.monotonic() - since, 3)


def context_lives(comm: pc.Communicator) -> bool:
    """Whether the GPU works on, for this process."""
    x = np.arange(1000)
    return bool((on_gpu(comm, x, _core.DeviceStream(comm.device or 0)).to_numpy() == x).all())


def killed(comm: pc.Communicator) -> dict[str, Any]:
    """On rank 0 alone; the other one ends here."""
    # The launcher ends who is left a second later; and who says so may come after that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, _, stream, since = waiting(comm, LONG)
    if comm.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.15)
    waited = not stream.query()
    kind, after = told(comm, since + 0.3, TOLD)
    stream.synchronize(TOLD)
    lives = context_lives(comm)
    right = waited and kind == "PeerFailure" and lives
    became = {"waited": waited, "told": kind, "seconds": after, "bound": BOUND}
    return {**became, "context": lives, "right": right}


def timeout(comm: pc.Communicator) -> dict[str, Any]:
    """Both are told; then both replay, and nothing moves."""
    graph, array, stream, since = waiting(comm, TIMEOUT)
    kind, after = told(comm, since, TIMEOUT + TOLD)
    stream.synchronize(TOLD)
    sevens = np.full(ONE_SHOT, 7, np.float32)
    array.write(sevens)
    graph.launch()
    stream.synchronize(TOLD)
    untouched = array.to_numpy().tobytes() == sevens.tobytes()
    lives = context_lives(comm)
    right = kind == "CollectiveTimeout" and untouched and lives
    became = {"told": kind, "seconds": after, "bound": TIMEOUT + BOUND}
    return {**became, "untouched": untouched, "context": lives, "right": right}


CASES = {"replay": replay, "killed": killed, "timeout": timeout}


def rank(case: str) -> None:
    """Of the launch; status 1 where it has gone wrong."""
    comm = pc.init(device="cuda", timeout=LONG)
    if comm.device_path[0] != "peer":
        sys.exit(f"the device path is {comm.device_path}")
    became = CASES[case](comm)
    if comm.rank == 0:
        print(json.dumps(became), flush=True)
    sys.stdout.flush()
    os._exit(0 if became["right"] else 1)  # a failed group has nothing to say at its end


def main() -> None:
    """Start the ranks; status 1 unless all has gone as it should."""
    [case] = sys.argv[1:]
    if ENV_RANK in os.environ:
        return rank(case)
    run = ["pycollective", "run", "--no-tag-output", "-n", "2"]
    command = [sys.executable, "-m", *run, "-m", __spec__.name, case]
    env = {**os.environ, "PYCOLLECTIVE_DEVICE_PATH": "peer"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    expected = 128 + signal.SIGKILL if case == "killed" else 0
    if done.returncode != expected or '"right": true' not in done.stdout:
        sys.exit(f"status {done.returncode}, and not {expected}, or not right")


if __name__ == "__main__":
    main()
