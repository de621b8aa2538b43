"""The native core (csrc/bindings) for type checkers; its own docstrings say what it does."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, final, overload

import numpy as np

from pycollective.errors import CollectiveError

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...

class _SupportsCudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _SupportsCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...

_Array: TypeAlias = np.ndarray[Any, Any] | _SupportsDLPack | _SupportsCudaArray
_Stream: TypeAlias = int | _SupportsCudaStream | _TorchStream | _CupyStream
_Capsule: TypeAlias = object

@final
class Node:
    def __init__(self) -> None: ...
    @property
    def token(self) -> bytes: ...
    @property
    def forked(self) -> bool: ...
    def fileno(self) -> int: ...
    def attach(self, token: bytes, fd: int, pid: int) -> None: ...
    def is_attached(self, token: bytes) -> bool: ...
    def has_mailbox(self, token: bytes, offset: int, data_bytes: int, size: int) -> bool: ...
    def allocate(self, size: int, far: bool = False) -> tuple[int, int]: ...
    def release(self, offset: int) -> None: ...
    def mailbox_bytes(self, size: int, far: bool = False) -> int: ...

@final
class Dtype:
    @property
    def name(self) -> str: ...
    @property
    def alias(self) -> str: ...
    @property
    def numbers(self) -> Literal["float", "integer", "bool"]: ...
    @property
    def size(self) -> int: ...
    @property
    def accumulator(self) -> int: ...
    @property
    def mantissa(self) -> int: ...
    @property
    def largest(self) -> int: ...
    @property
    def nan(self) -> int: ...
    @property
    def in_numpy(self) -> bool: ...
    @property
    def reduce_ops(self) -> list[str]: ...

@final
class Operation:
    @property
    def name(self) -> str: ...
    @property
    def pieces(self) -> Literal["cut", "ranks", "pairs"]: ...
    @property
    def reduces(self) -> bool: ...
    @property
    def rooted(self) -> bool: ...
    @property
    def pair(self) -> bool: ...
    @property
    def takes_counts(self) -> bool: ...

@final
class Program:
    def __init__(self, program: Any) -> None: ...  # pycollective.schedule.assemble.Program

@final
class Work:
    @property
    def source(self) -> int | None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...

class Communicator:
    def __init__(
        self,
        node: Node,
        rank: int,
        tokens: Sequence[bytes],
        offsets: Sequence[int],
        data_bytes: int,
        timeout: float,
        world: Any,  # pycollective.planning.world.World
        /,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, seconds: float, /) -> None: ...
    @property
    def wire(self) -> str: ...
    @wire.setter
    def wire(self, name: str, /) -> None: ...
    def stats(self) -> dict[str, int]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def pending(self) -> bool: ...
    @property
    def kernel_calls(self) -> int: ...
    @property
    def failure(self) -> CollectiveError | None: ...
    def abort(self, reason: str = ..., /) -> None: ...
    def _check_peers(self) -> None: ...
    def _close(self) -> None: ...
    def _capsule(self) -> _Capsule: ...

    # Each collective returns when it is done, or, with async_op=True, a `Work` at once.
    @overload
    def all_reduce(
        self,
        x: _Array,
        op: str = "sum",
        out: _Array | None = None,
        async_op: Literal[False] = False,
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def all_reduce(
        self,
        x: _Array,
        op: str = "sum",
        out: _Array | None = None,
        *,
        async_op: Literal[True],
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> Work: ...
    @overload
    def reduce(
        self,
        x: _Array,
        root: int = 0,
        op: str = "sum",
        out: _Array | None = None,
        async_op: Literal[False] = False,
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def reduce(
        self,
        x: _Array,
        root: int = 0,
        op: str = "sum",
        out: _Array | None = None,
        *,
        async_op: Literal[True],
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        out: _Array,
        x: _Array,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def reduce_scatter(
        self,
        out: _Array,
        x: _Array,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> Work: ...
    @overload
    def all_gather(
        self,
        out: _Array,
        x: _Array,
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def all_gather(
        self,
        out: _Array,
        x: _Array,
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> Work: ...
    @overload
    def broadcast(
        self,
        x: _Array,
        root: int = 0,
        async_op: Literal[False] = False,
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def broadcast(
        self,
        x: _Array,
        root: int = 0,
        *,
        async_op: Literal[True],
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> Work: ...
    @overload
    def all_to_all(
        self,
        out: _Array,
        x: _Array,
        async_op: Literal[False] = False,
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def all_to_all(
        self,
        out: _Array,
        x: _Array,
        *,
        async_op: Literal[True],
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> Work: ...
    @overload
    def gather(
        self,
        out: _Array | None,
        x: _Array,
        root: int = 0,
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def gather(
        self,
        out: _Array | None,
        x: _Array,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> Work: ...
    @overload
    def scatter(
        self,
        out: _Array,
        x: _Array | None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def scatter(
        self,
        out: _Array,
        x: _Array | None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: str = "auto",
        wire: str | None = None,
        stream: _Stream | None = None,
    ) -> Work: ...
    @overload
    def send(
        self,
        x: _Array,
        dst: int,
        async_op: Literal[False] = False,
        stream: _Stream | None = None,
        tag: int = 0,
    ) -> None: ...
    @overload
    def send(
        self,
        x: _Array,
        dst: int,
        *,
        async_op: Literal[True],
        stream: _Stream | None = None,
        tag: int = 0,
    ) -> Work: ...
    @overload
    def recv(
        self,
        x: _Array,
        src: int | None = None,
        async_op: Literal[False] = False,
        stream: _Stream | None = None,
        tag: int = 0,
    ) -> int: ...
    @overload
    def recv(
        self,
        x: _Array,
        src: int | None = None,
        *,
        async_op: Literal[True],
        stream: _Stream | None = None,
        tag: int = 0,
    ) -> Work: ...
    @overload
    def barrier(self, async_op: Literal[False] = False) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work: ...

# Memory and streams of a GPU, for tests, the benchmark and `verify`. Streams are handles; 0: the
# legacy stream.
@final
class DeviceMemory:
    def __init__(self, device: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    def write(self, buffer: Any, offset: int = 0, stream: int = 0) -> None: ...
    def read(self, offset: int, nbytes: int, stream: int = 0) -> bytes: ...
    def fill(self, word: int, stream: int = 0) -> None: ...
    def capsule(
        self, offset: int, shape: Sequence[int], dtype: str, versioned: bool = True
    ) -> _Capsule: ...

@final
class DeviceStream:
    def __init__(self, device: int, non_blocking: bool = True) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def handle(self) -> int: ...
    @property
    def ptr(self) -> int: ...
    def query(self) -> bool: ...
    def synchronize(self, timeout: float) -> None: ...

def device_count() -> int: ...

# How calls reach kernels (pycollective/gpu/way.py).
@final
class DeviceMailbox:
    def __init__(self, device: int, nvrtc_folders: Sequence[str]) -> None: ...
    def lend(self, communicator: Communicator) -> bytes: ...
    def take_back(self, communicator: Communicator) -> None: ...

@final
class DeviceGroup:
    def unmap(self) -> bool: ...

def gpu_of(card: bytes) -> bytes: ...
def map_devices(
    communicator: Communicator, mailbox: DeviceMailbox, cards: Sequence[bytes]
) -> DeviceGroup: ...
def use_devices(communicator: Communicator, group: DeviceGroup, programs: Any) -> None: ...

# The end of the process.
def abort_all(reason: str) -> None: ...
def leave_all() -> bool: ...
def stop_progress() -> None: ...

# The kernels, one call at a time: what compression is made of.
def reduce_into(
    inputs: Sequence[_Array], op: str, out: _Array, copy: _Array | None = None, simd: str = ""
) -> None: ...
def quantize_codecs() -> list[str]: ...
def quantized_bytes(codec: str, chunk: int, count: int) -> int: ...
def quantize(
    codec: str,
    chunk: int,
    x: _Array,
    held: _Array | None,
    left: _Array,
    payload: _Array,
    simd: str = "",
) -> bool: ...
def dequantize(
    codec: str,
    chunk: int,
    messages: _Array,
    at: int,
    out: _Array,
    divisor: float,
    simd: str = "",
) -> None: ...
def top_k(
    x: _Array, held: _Array | None, left: _Array, k: int, indices: _Array, simd: str = ""
) -> int: ...
def top_k_chunks(
    x: _Array,
    held: _Array | None,
    left: _Array,
    k: int,
    chunk: int,
    indices: _Array,
    simd: str = "",
) -> int: ...
def sparse_add(x: _Array, held: _Array | None, left: _Array, simd: str = "") -> bool: ...
def sparse_histogram(
    left: _Array, shift: int, bits: int, prefix: int, bins: _Array, simd: str = ""
) -> None: ...
def sparse_select(left: _Array, key: int, ties: int, indices: _Array, simd: str = "") -> int: ...
def sparse_take(left: _Array, indices: _Array, values: _Array, simd: str = "") -> None: ...
def pack_indices_bound(count: int, size: int) -> int: ...
def pack_indices(indices: _Array, size: int, out: _Array, simd: str = "") -> int: ...
def unpack_indices(payload: _Array, size: int, indices: _Array, simd: str = "") -> None: ...
def sparse_sum(
    indices: Sequence[_Array],
    values: Sequence[_Array],
    out_indices: _Array,
    out_values: _Array,
    simd: str = "",
) -> int: ...
def sparse_scatter(
    indices: _Array, values: _Array, out: _Array, divisor: float, simd: str = ""
) -> None: ...
def mpi_link(
    library: str,
    handle_bytes: int,
    status_bytes: int,
    byte: int,
    null_request: int,
    any_source: int,
    error_offset: int,
    in_status: int,
    proc_failed: int,
    proc_failed_pending: int,
    comm: int,
    ranks: list[int],
    frees_unused: bool,
) -> _Capsule: ...
def simd_levels() -> list[str]: ...
def simd_level() -> str: ...

# What the machine allows, for the benchmark; times are in seconds.
def stream_in_place(buffer: np.ndarray[Any, Any], repetitions: int) -> float: ...
def core_to_core_latency(cpu_a: int, cpu_b: int, round_trips: int) -> float: ...
def core_to_core_copy(cpu_a: int, cpu_b: int, total: int, chunk: int) -> float: ...
def time_collective(
    capsule: _Capsule,
    kind: str,
    dtype: str,
    reduce_op: str,
    root: int,
    input: np.ndarray[Any, Any],
    output: np.ndarray[Any, Any],
    count: int,
    repetitions: int,
) -> float: ...
def prepare_kernels(nvrtc_folders: Sequence[str], device: int | None) -> None: ...
def cuda_report(nvrtc_folders: Sequence[str]) -> dict[str, Any]: ...
def dtypes() -> list[Dtype]: ...
def reduce_ops() -> list[str]: ...
def operations() -> list[Operation]: ...
def wires() -> list[str]: ...
