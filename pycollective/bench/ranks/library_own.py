"""This library, as a NumPy program uses it; without Python in the loop; and the memory's limit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np

from pycollective import _core
from pycollective.bootstrap import joining
from pycollective.bootstrap.init import simulated_hosts
from pycollective.communicator import Communicator
from pycollective.config import ENV_WIRE, VERSION
from pycollective.dtypes import numpy_type
from pycollective.testing.places import Gpu
from pycollective.typing import Wire

from .case import Bytes, Case, HostBuffers, Prepared, Unsupported

_WAIT = 60.0  # seconds, for what calls have left on the stream


class ExchangeStore:
    """A store over the bench's control channel, as `pycollective.bootstrap.joining` wants it."""

    def __init__(self, request: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._request = request

    def set(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`, for every rank of the group."""
        self._request({"set": key, "value": value.hex()})

    def get(self, key: str) -> bytes:
        """The value under `key`; blocks until a rank has set it."""
        return bytes.fromhex(self._request({"get": key})["value"])


class SharedBuffers(HostBuffers):
    """Arrays that the ranks of a host share."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def new(self, size: int, offset: int) -> Bytes:
        return self._communicator.empty(size, np.uint8)


class OwnLibrary:
    """A communicator, as `Library`; `buffers` are those that its ranks use, if not the usual ones.

    Variants: ``python`` calls the communicator's method, ``native`` the same operation from a loop
    in C++, ``stream`` reads and writes the buffer in place and moves nothing.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        request: Callable[[dict[str, Any]], dict[str, Any]],
        gpu: Gpu | None = None,
        shared: bool = False,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._gpu = gpu
        hosts = simulated_hosts(ranks)
        store = ExchangeStore(request)
        self._comm = joining.connect(store, rank, ranks, timeout=120.0, simulated=hosts)
        self.buffers = SharedBuffers(self._comm) if shared else None
        self._comm.wire = cast(Wire, os.environ[ENV_WIRE])  # checked as it is set
        if gpu:
            self._comm.use_device(gpu.device)
        self.versions = {
            "library": f"pycollective {VERSION}",
            "numpy": np.__version__,
            "simd": _core.simd_level(),
        }
        if gpu:
            devices = _core.cuda_report([])["devices"]
            self.versions["gpus"] = f"{len(devices)} x {devices[gpu.device][0]}"
            self.versions["device path"] = ": ".join(self._comm.device_path)

    def prepare(self, case: Case, variant: str, buffer: Any) -> Prepared:
        if variant == "stream":
            return Prepared(
                partial(_core.stream_in_place, buffer[: case.size], 1),
                buffer,
                partial(_core.stream_in_place, buffer[: case.size]),
            )
        if self._gpu and variant == "native":
            raise Unsupported("the native loop runs on host memory only")
        call = self._python_call(case, buffer)
        # What it refuses ends the benchmark: another rank may have called it, and wait.
        call()
        result = buffer[case.result(self.rank, self.ranks)]
        if self._gpu:
            finish = partial(self._gpu.stream.synchronize, _WAIT)
            return Prepared(call, result, None, self._sent, finish)
        loop = self._native_loop(case, buffer) if variant == "native" else None
        return Prepared(call, result, loop, self._sent)

    def _sent(self) -> tuple[int, int]:
        stats = self._comm.stats()
        return stats["sent_bytes"], stats["sent_raw_bytes"]

    def _python_call(self, case: Case, buffer: Any) -> Callable[[], Any]:
        dtype: Any = case.dtype if self._gpu else numpy_type(case.dtype)
        whole = buffer[: case.size].view(dtype)
        comm, root = self._comm, case.root
        chosen: dict[str, Any] = {} if case.algorithm == "auto" else {"algorithm": case.algorithm}
        if self._gpu:
            chosen["stream"] = self._gpu.stream
        if case.operation == "all_reduce":
            return partial(comm.all_reduce, whole, case.reduce_op, **chosen)
        if case.operation == "broadcast":
            return partial(comm.broadcast, whole, root, **chosen)
        if case.operation == "all_to_all":
            return partial(comm.all_to_all, buffer[case.size :].view(dtype), whole, **chosen)
        shard = buffer[case.shard(self.rank, self.ranks)].view(dtype)
        root_only = whole if self.rank == root else None
        if case.operation == "gather":
            return partial(comm.gather, root_only, shard, root, **chosen)
        if case.operation == "scatter":
            return partial(comm.scatter, shard, root_only, root, **chosen)
        if case.operation == "reduce_scatter":
            return partial(comm.reduce_scatter, shard, whole, case.reduce_op, **chosen)
        return partial(comm.all_gather, whole, shard, **chosen)

    def _native_loop(self, case: Case, buffer: Bytes) -> Callable[[int], float]:
        if case.algorithm != "auto":
            raise Unsupported("the native loop runs the automatic choice only")
        whole, shard = buffer[: case.size], buffer[case.shard(self.rank, self.ranks)]
        # In place, as csrc/engine/api.h has it: one side may be the rank's own shard of the other.
        source, target = {
            "all_reduce": (whole, whole),
            "broadcast": (whole, whole),
            "reduce_scatter": (whole, shard),
            "all_gather": (shard, whole),
            "gather": (shard, whole),
            "scatter": (whole, shard),
            "all_to_all": (whole, buffer[case.size :]),
        }[case.operation]
        sharded = case.operation not in ("all_reduce", "broadcast")
        return partial(
            _core.time_collective,
            self._comm._capsule(),
            case.operation,
            case.dtype,
            case.reduce_op or "sum",
            case.root,
            source,
            target,
            case.size // case.item_size // (self.ranks if sharded else 1),
        )

    def close(self) -> None:
        """Close the communicator."""
        self._comm.close()
