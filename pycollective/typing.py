"""Names for annotations: what calls take by name, as `Literal`, and which arrays and streams::

    from pycollective.typing import Algorithm, ReduceOp

Type checkers alone read these: what there is at run time stands in the tables of the core and of
``pycollective.schedule``, and a test holds both to each other.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

#: How elements are combined. contract.md says which dtypes have which.
ReduceOp: TypeAlias = Literal["sum", "avg", "prod", "min", "max", "band", "bor", "bxor"]
#: How a collective moves its data (algorithms.md); ``"auto"`` takes what is fastest.
Algorithm: TypeAlias = Literal[
    "auto", "direct", "ring", "tree", "halving_doubling", "recursive_doubling", "hierarchical"
]
#: How what goes to other hosts travels (wire.md).
Wire: TypeAlias = Literal["raw", "exact"]
#: What carries messages between hosts. With ``"shm"`` nothing does; all ranks are on one host.
Transport: TypeAlias = Literal["shm", "mpi", "gloo"]
#: The types that an array's elements may have, by NumPy's or ml_dtypes' names.
Dtype: TypeAlias = Literal[
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
]

# Options of compression (docs/reference/compression.md).

#: Where data are compressed, between hosts or between all ranks.
Between: TypeAlias = Literal["hosts", "ranks"]
#: Whether top-k takes the largest elements of each tensor, or of each chunk of it.
By: TypeAlias = Literal["tensor", "chunk"]
#: How top-k sends values.
Values: TypeAlias = Literal["float32", "bfloat16", "float16"]
#: How top-k exchanges its messages; the two are the same.
Exchange: TypeAlias = Literal["gather", "auto"]


class SupportsDLPack(Protocol):
    """An array with DLPack, such as a torch tensor."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...


class SupportsCudaArray(Protocol):
    """An array on a GPU by the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaStream(Protocol):
    """A stream of cuda.core, and of others that follow its protocol."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """A stream of torch."""

    @property
    def cuda_stream(self) -> int:
        """Its handle."""
        ...


class CupyStream(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int:
        """Its handle."""
        ...


#: What calls take as an array, NumPy's or one with DLPack or the CUDA array interface.
Array: TypeAlias = np.ndarray[Any, Any] | SupportsDLPack | SupportsCudaArray
#: What calls take as a CUDA stream, its handle or a stream of cuda.core, torch or CuPy.
Stream: TypeAlias = int | SupportsCudaStream | TorchStream | CupyStream
