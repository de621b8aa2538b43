"""torch.distributed: Gloo, NCCL, this library's own backend, or one that does nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .case import Case, Prepared, Unsupported

if TYPE_CHECKING:
    from pycollective.testing.places import Gpu

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


class TorchLibrary:
    """A default process group, as `Library`."""

    def __init__(
        self,
        backend: str,
        rank: int,
        ranks: int,
        request: Callable[[dict[str, Any]], dict[str, Any]],
        gpu: Gpu | None = None,
    ) -> None:
        if backend == "pycollective":
            import pycollective.torch  # noqa: F401  registers the backend
        torch.set_num_threads(1)  # as torchrun does: no intra-op threads beside the ranks
        self.rank, self.ranks = rank, ranks
        self._backend = backend
        self._gpu = gpu
        self.versions = {"library": f"torch {torch.__version__} {backend}"}
        self._refusal = _why_not_nccl(ranks) if backend == "nccl" else ""
        if self._refusal:
            return
        if gpu:
            torch.cuda.set_device(gpu.device)
        timeout = timedelta(seconds=120)
        host = "127.0.0.1"
        store: dist.Store
        if backend == "fake":
            from torch.testing._internal.distributed.fake_pg import FakeStore  # the backend, too

            store = FakeStore()
        elif rank == 0:
            store = dist.TCPStore(
                host, 0, None, is_master=True, timeout=timeout, wait_for_workers=False
            )
            request({"set": "port", "value": store.port})
        else:
            port = request({"get": "port"})["value"]
            store = dist.TCPStore(host, port, None, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        if "GLOO_SOCKET_IFNAME" in os.environ:
            self.versions["interface"] = os.environ["GLOO_SOCKET_IFNAME"]

    def prepare(self, case: Case, variant: str, buffer: Any) -> Prepared:
        if self._refusal:
            raise Unsupported(self._refusal)
        whole = torch.from_dlpack(buffer) if self._gpu else torch.from_numpy(buffer)
        result = buffer[case.result(self.rank, self.ranks)]
        call = self._call(case, whole.view(getattr(torch, case.dtype)))
        try:
            call()
        except (RuntimeError, ValueError) as error:
            # Refused before anything moved: every rank of the group is told the same.
            first_line = str(error).splitlines()[0]
            raise Unsupported(f"{self._backend}: {first_line}") from error
        sent = self._sent if self._backend == "pycollective" else None
        if self._gpu:
            return Prepared(call, result, None, sent, torch.cuda.current_stream().synchronize)
        return Prepared(call, result, None, sent)

    def _call(self, case: Case, buffer: torch.Tensor) -> Callable[[], Any]:
        count = case.size // case.item_size
        tensor, root = buffer[:count], case.root
        if case.operation == "all_reduce":
            return partial(dist.all_reduce, tensor, op=_OPERATIONS[case.reduce_op])
        if case.operation == "broadcast":
            return partial(dist.broadcast, tensor, root)
        if case.operation == "all_to_all":
            return partial(dist.all_to_all_single, buffer[count:], tensor)
        shards = list(tensor.chunk(self.ranks))
        shard, at_root = shards[self.rank], shards if self.rank == root else None
        if case.operation == "gather":
            return partial(dist.gather, shard, at_root, root)
        if case.operation == "scatter":
            return partial(dist.scatter, shard, at_root, root)
        if case.operation == "all_gather":
            return partial(dist.all_gather_into_tensor, tensor, shard)
        op = _OPERATIONS[case.reduce_op]
        return partial(dist.reduce_scatter_tensor, shard, tensor, op=op)

    def _sent(self) -> tuple[int, int]:
        from pycollective.torch import stats

        counted = stats()
        return counted["sent_bytes"], counted["sent_raw_bytes"]

    def close(self) -> None:
        """Destroy the process group."""
        if not self._refusal:
            dist.destroy_process_group()


def _why_not_nccl(ranks: int) -> str:
    """Why `ranks` ranks on this host cannot have it; empty where they can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    if ranks > torch.cuda.device_count():
        return f"NCCL refuses ranks that share a GPU, and {ranks} ranks have " + (
            f"{torch.cuda.device_count()}"
        )
    return ""
