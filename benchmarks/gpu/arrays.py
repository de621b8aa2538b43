"""Do CuPy's arrays and torch's CUDA tensors go through collectives with the oracle's bits?

Usage, on each rank of a launch: python -m benchmarks.gpu.arrays LIBRARY ...

LIBRARY is cupy, torch or own. One that is not there, or finds no GPU, is named and skipped. A
host's ranks take its GPUs in turn. Rank 0 prints a line of JSON: what became of each.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import pycollective as pc
from pycollective import _core, reference
from pycollective.device_path import number_of
from pycollective.testing.device_array import DeviceArray
from pycollective.testing.inputs import leaves

COUNT = 10_007
DTYPES = ("float16", "float32", "float64", "int32", "uint8")


class Own:
    """This library's own arrays: what the others' are compared with where they are not."""

    def __init__(self, device: int) -> None:
        self.version = "DeviceArray"
        self.stream = _core.DeviceStream(device)
        self._device = device

    def put(self, array: np.ndarray) -> DeviceArray:
        """Onto the GPU."""
        return DeviceArray.from_numpy(array, self._device, self.stream)

    def get(self, array: DeviceArray) -> np.ndarray:
        """Off it."""
        return array.to_numpy()


class Cupy:
    """CuPy's, on a stream that is not the default one."""

    def __init__(self, device: int) -> None:
        self._cupy = importlib.import_module("cupy")
        self.version = f"CuPy {self._cupy.__version__}"
        self._cupy.cuda.Device(device).use()
        self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self.stream.use()

    def put(self, array: np.ndarray) -> Any:
        """Onto the GPU; by work on the stream that the collective has to wait for."""
        return self._cupy.asarray(array) + self._cupy.zeros(1, array.dtype)

    def get(self, array: Any) -> np.ndarray:
        """Off it."""
        return self._cupy.asnumpy(array)


class Torch:
    """torch's, likewise."""

    def __init__(self, device: int) -> None:
        self._torch = importlib.import_module("torch")
        self.version = f"torch {self._torch.__version__}"
        self._torch.cuda.set_device(device)  # AssertionError: built without CUDA
        self.stream = self._torch.cuda.Stream()
        self._torch.cuda.set_stream(self.stream)

    def put(self, array: np.ndarray) -> Any:
        """Onto the GPU; by work on the stream that the collective has to wait for."""
        there = self._torch.from_numpy(array.copy()).to("cuda", non_blocking=True)
        return there + self._torch.zeros(1, dtype=there.dtype, device="cuda")

    def get(self, array: Any) -> np.ndarray:
        """Off it."""
        return array.cpu().numpy()


LIBRARIES = {"own": Own, "cupy": Cupy, "torch": Torch}


def wrong(comm: pc.Communicator, library: Any, dtype: str) -> Iterator[str]:
    """The calls that end with other bits than the oracle's."""
    inputs = leaves(dtype, "sum", comm.size, COUNT * comm.size, 1)
    # A zero that is added as the library puts it there would change a negative one.
    inputs = [each + np.zeros(1, each.dtype) for each in inputs]
    mine = inputs[comm.rank]
    own = slice(comm.rank * COUNT, (comm.rank + 1) * COUNT)
    stream = {"stream": library.stream}
    for op in ("sum", "max"):
        want = reference.reduce(inputs, op)
        x = library.put(mine)
        comm.all_reduce(x, op, **stream)
        y, out = library.put(mine), library.put(mine)
        comm.all_reduce(y, op, out=out, **stream)
        shard = library.put(mine[own])
        comm.reduce_scatter(shard, y, op, **stream)
        whole = library.put(np.zeros_like(mine))
        comm.all_gather(whole, shard, **stream)
        odd = library.put(np.concatenate([mine[:1], mine]))[1:]  # aligned to its elements alone
        comm.all_reduce(odd, op, **stream)
        found = {"in place": x, "out of place": out, "by shards": whole, "unaligned": odd}
        for how, array in found.items():
            if library.get(array).tobytes() != want.tobytes():
                yield f"{dtype} {op} {how}"
        if library.get(y).tobytes() != mine.tobytes():
            yield f"{dtype} {op}: the input changed"


def main() -> None:
    """Run those asked for; status 1 where bits are wrong on this rank."""
    became: dict[str, str] = {}
    bad: list[str] = []
    with pc.init(timeout=60) as comm:
        before = comm.host_of[: comm.rank]
        device = number_of("cuda", before.count(comm.host_of[comm.rank]))
        for name in sys.argv[1:]:
            try:
                library = LIBRARIES[name](device)
            except (ImportError, AssertionError, RuntimeError) as error:
                became[name] = f"skipped: {str(error).splitlines()[0]}"
                continue
            mistakes = [each for dtype in DTYPES for each in wrong(comm, library, dtype)]
            became[name] = f"{len(mistakes)} wrong with {library.version}"
            bad += mistakes
        if comm.rank == 0:
            print(json.dumps(became), flush=True)
    if bad:
        sys.exit(f"rank {comm.rank}: wrong bits: {', '.join(bad)}")


if __name__ == "__main__":
    main()
