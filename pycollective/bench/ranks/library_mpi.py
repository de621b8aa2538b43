"""An MPI, through mpi4py: the fastest form it has, with in-place buffers and ready-made types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import numpy as np
from mpi4py import MPI

from .case import Bytes, Case, Prepared, Unsupported

_TYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "bool": MPI.C_BOOL,
}
_OPERATIONS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}


class MpiLibrary:
    """`MPI.COMM_WORLD`, as `Library`."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.rank
        self.ranks = self._comm.size
        first_line = MPI.Get_library_version().replace("\0", "").strip().splitlines()[0]
        self.versions = {
            "library": " ".join(first_line.split(",")[0].split()),
            "mpi4py": version("mpi4py"),
            "numpy": np.__version__,
        }

    def prepare(self, case: Case, variant: str, buffer: Bytes) -> Prepared:
        dtype = _find_type(case.dtype)
        result = buffer[case.result(self.rank, self.ranks)]
        if not case.reduce_op:
            return Prepared(self._moving_call(case, dtype, buffer), result)
        comm, operation = self._comm, _find_operation(case.reduce_op)
        count = case.size // case.item_size
        if case.operation == "all_reduce":
            call = partial(comm.Allreduce, MPI.IN_PLACE, [buffer, count, dtype], operation)
        else:
            # In place means, in MPI, that the shard ends at the start of the buffer.
            shards = [buffer, count // self.ranks, dtype]
            call = partial(comm.Reduce_scatter_block, MPI.IN_PLACE, shards, operation)
            result = buffer[: case.size // self.ranks]
        self._try(case, dtype, operation)
        return Prepared(call, result)

    def _moving_call(self, case: Case, dtype: MPI.Datatype, buffer: Bytes) -> Callable[[], None]:
        """Return the call of an operation that reduces nothing."""
        comm, root = self._comm, case.root
        count = case.size // case.item_size
        if case.operation == "broadcast":
            return partial(comm.Bcast, [buffer, count, dtype], root)
        shards = [buffer, count // self.ranks, dtype]
        if case.operation == "all_gather":
            return partial(comm.Allgather, MPI.IN_PLACE, shards)
        if case.operation == "all_to_all":
            return partial(comm.Alltoall, shards, [buffer[case.size :], *shards[1:]])
        own = [buffer[case.shard(self.rank, self.ranks)], *shards[1:]]
        at_root = self.rank == root
        if case.operation == "gather":
            return partial(comm.Gather, *((MPI.IN_PLACE, shards) if at_root else (own, None)), root)
        return partial(comm.Scatter, *((shards, MPI.IN_PLACE) if at_root else (None, own)), root)

    def _try(self, case: Case, dtype: MPI.Datatype, operation: MPI.Op) -> None:
        """A one-element all-reduce: whether this MPI can combine this type at all."""
        element = np.zeros(case.item_size, np.uint8)
        try:
            self._comm.Allreduce(MPI.IN_PLACE, [element, 1, dtype], operation)
        except MPI.Exception as error:
            raise Unsupported(
                f"{case.reduce_op} of {case.dtype}: {error.Get_error_string()}"
            ) from error

    def close(self) -> None:
        """Finalize MPI."""
        MPI.Finalize()


def _find_type(name: str) -> MPI.Datatype:
    if name in _TYPES:
        return _TYPES[name]
    # mpi4py knows where each MPI keeps its half type: NumPy's code for it is "e".
    found = MPI.DATATYPE_NULL
    if name == "float16":
        found = MPI.Datatype.fromcode("e")
    elif name == "bfloat16":
        found = _bfloat16()
    if found == MPI.DATATYPE_NULL:
        raise Unsupported(f"this MPI has no {name}")
    return found


def _bfloat16() -> MPI.Datatype:
    """MPI's bfloat16, where there is one: an extension of MPICH's until MPI 5 has spread."""
    standard = getattr(MPI, "BFLOAT16_T", MPI.DATATYPE_NULL)
    if standard != MPI.DATATYPE_NULL:
        return standard
    if "MPICH" not in MPI.Get_library_version():
        return MPI.DATATYPE_NULL
    extension = MPI.Datatype.fromhandle(0x4C00024C)  # MPIX_BFLOAT16 in the mpi.h of MPICH 5.0
    try:
        named = extension.Get_name() == "MPIX_BFLOAT16"
    except MPI.Exception:  # another version, in which that is no handle
        named = False
    return extension if named else MPI.DATATYPE_NULL


def _find_operation(name: str) -> MPI.Op:
    if name not in _OPERATIONS:
        raise Unsupported(f"MPI has no {name}")
    return _OPERATIONS[name]
