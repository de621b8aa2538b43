"""The native core (csrc/bindings) for type checkers; its own docstrings say what it does."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeAlias, final, overload

import numpy as np
from typing_extensions import TypeVar  # of type checkers, which alone read this

from pycollective.errors import CollectiveError
from pycollective.typing import Algorithm, Array, ReduceOp, Stream, Wire
from pycollective.typing import Dtype as DtypeName

_T_co = TypeVar("_T_co", covariant=True, default=Any)
_A = TypeVar("_A", bound=Array)
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
    def name(self) -> DtypeName: ...
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
    def reduce_ops(self) -> list[ReduceOp]: ...

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
class Work(Generic[_T_co]):
    @property
    def source(self) -> int | None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> _T_co: ...

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
    def wire(self) -> Wire: ...
    @wire.setter
    def wire(self, name: Wire, /) -> None: ...
    def stats(self) -> dict[str, int]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def pending(self) -> bool: ...
    @property
    def kernel_calls(self) -> int: ...
    @property
    def failure(self) -> CollectiveError | None: ...
    def abort(self, reason: str = ...) -> None: ...
    def _check_peers(self) -> None: ...
    def _close(self) -> None: ...
    def _capsule(self) -> _Capsule: ...

    # Each collective returns its result when it is done, or, with async_op=True, a `Work` at once,
    # whose wait() returns it. Those that take `out` or x have overloads for each.
    @overload
    def all_reduce(
        self,
        x: _A,
        op: ReduceOp = "sum",
        out: None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    @overload
    def all_reduce(
        self,
        x: _A,
        op: ReduceOp = "sum",
        out: None = None,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A]: ...
    @overload
    def all_reduce(
        self,
        x: Array,
        op: ReduceOp = "sum",
        out: _A = ...,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    @overload
    def all_reduce(
        self,
        x: Array,
        op: ReduceOp = "sum",
        out: _A = ...,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A]: ...
    @overload
    def all_reduce(
        self,
        x: _A,
        op: ReduceOp = "sum",
        out: None = None,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A]: ...
    @overload
    def all_reduce(
        self,
        x: Array,
        op: ReduceOp = "sum",
        out: _A = ...,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A]: ...
    @overload
    def reduce(
        self,
        x: _A,
        root: int = 0,
        op: ReduceOp = "sum",
        out: None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | None: ...
    @overload
    def reduce(
        self,
        x: _A,
        root: int = 0,
        op: ReduceOp = "sum",
        out: None = None,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A | None]: ...
    @overload
    def reduce(
        self,
        x: Array,
        root: int = 0,
        op: ReduceOp = "sum",
        out: _A = ...,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | None: ...
    @overload
    def reduce(
        self,
        x: Array,
        root: int = 0,
        op: ReduceOp = "sum",
        out: _A = ...,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A | None]: ...
    @overload
    def reduce(
        self,
        x: _A,
        root: int = 0,
        op: ReduceOp = "sum",
        out: None = None,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A | None] | None: ...
    @overload
    def reduce(
        self,
        x: Array,
        root: int = 0,
        op: ReduceOp = "sum",
        out: _A = ...,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A | None] | None: ...
    @overload
    def reduce_scatter(
        self,
        out: _A,
        x: Array,
        op: ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    @overload
    def reduce_scatter(
        self,
        out: _A,
        x: Array,
        op: ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A]: ...
    @overload
    def reduce_scatter(
        self,
        out: _A,
        x: Array,
        op: ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A]: ...
    @overload
    def all_gather(
        self,
        out: _A,
        x: Array,
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    @overload
    def all_gather(
        self,
        out: _A,
        x: Array,
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A]: ...
    @overload
    def all_gather(
        self,
        out: _A,
        x: Array,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A]: ...
    @overload
    def broadcast(
        self,
        x: _A,
        root: int = 0,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    @overload
    def broadcast(
        self,
        x: _A,
        root: int = 0,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A]: ...
    @overload
    def broadcast(
        self,
        x: _A,
        root: int = 0,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A]: ...
    @overload
    def all_to_all(
        self,
        out: _A,
        x: Array,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    @overload
    def all_to_all(
        self,
        out: _A,
        x: Array,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A]: ...
    @overload
    def all_to_all(
        self,
        out: _A,
        x: Array,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A]: ...
    @overload
    def gather(
        self,
        out: _A | None,
        x: Array,
        root: int = 0,
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | None: ...
    @overload
    def gather(
        self,
        out: _A | None,
        x: Array,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A | None]: ...
    @overload
    def gather(
        self,
        out: _A | None,
        x: Array,
        root: int = 0,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A | None] | None: ...
    @overload
    def scatter(
        self,
        out: _A,
        x: Array | None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    @overload
    def scatter(
        self,
        out: _A,
        x: Array | None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> Work[_A]: ...
    @overload
    def scatter(
        self,
        out: _A,
        x: Array | None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A | Work[_A]: ...
    @overload
    def send(
        self,
        x: Array,
        dst: int,
        async_op: Literal[False] = False,
        stream: Stream | None = None,
        tag: int = 0,
    ) -> None: ...
    @overload
    def send(
        self,
        x: Array,
        dst: int,
        *,
        async_op: Literal[True],
        stream: Stream | None = None,
        tag: int = 0,
    ) -> Work[None]: ...
    @overload
    def send(
        self,
        x: Array,
        dst: int,
        async_op: bool = False,
        stream: Stream | None = None,
        tag: int = 0,
    ) -> Work[None] | None: ...
    @overload
    def recv(
        self,
        x: Array,
        src: int | None = None,
        async_op: Literal[False] = False,
        stream: Stream | None = None,
        tag: int = 0,
    ) -> int: ...
    @overload
    def recv(
        self,
        x: Array,
        src: int | None = None,
        *,
        async_op: Literal[True],
        stream: Stream | None = None,
        tag: int = 0,
    ) -> Work[int]: ...
    @overload
    def recv(
        self,
        x: Array,
        src: int | None = None,
        async_op: bool = False,
        stream: Stream | None = None,
        tag: int = 0,
    ) -> int | Work[int]: ...
    @overload
    def barrier(
        self,
        async_op: Literal[False] = False,
    ) -> None: ...
    @overload
    def barrier(
        self,
        *,
        async_op: Literal[True],
    ) -> Work[None]: ...
    @overload
    def barrier(
        self,
        async_op: bool = False,
    ) -> Work[None] | None: ...

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
    inputs: Sequence[Array], op: str, out: Array, copy: Array | None = None, simd: str = ""
) -> None: ...
def quantize_codecs() -> list[str]: ...
def quantized_bytes(codec: str, chunk: int, count: int) -> int: ...
def quantize(
    codec: str,
    chunk: int,
    x: Array,
    held: Array | None,
    left: Array,
    payload: Array,
    simd: str = "",
) -> bool: ...
def dequantize(
    codec: str,
    chunk: int,
    messages: Array,
    at: int,
    out: Array,
    divisor: float,
    simd: str = "",
) -> None: ...
def top_k(
    x: Array, held: Array | None, left: Array, k: int, indices: Array, simd: str = ""
) -> int: ...
def top_k_chunks(
    x: Array,
    held: Array | None,
    left: Array,
    k: int,
    chunk: int,
    indices: Array,
    simd: str = "",
) -> int: ...
def sparse_add(x: Array, held: Array | None, left: Array, simd: str = "") -> bool: ...
def sparse_histogram(
    left: Array, shift: int, bits: int, prefix: int, bins: Array, simd: str = ""
) -> None: ...
def sparse_select(left: Array, key: int, ties: int, indices: Array, simd: str = "") -> int: ...
def sparse_take(left: Array, indices: Array, values: Array, simd: str = "") -> None: ...
def pack_indices_bound(count: int, size: int) -> int: ...
def pack_indices(indices: Array, size: int, out: Array, simd: str = "") -> int: ...
def unpack_indices(payload: Array, size: int, indices: Array, simd: str = "") -> None: ...
def sparse_sum(
    indices: Sequence[Array],
    values: Sequence[Array],
    out_indices: Array,
    out_values: Array,
    simd: str = "",
) -> int: ...
def sparse_scatter(
    indices: Array, values: Array, out: Array, divisor: float, simd: str = ""
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
def reduce_ops() -> list[ReduceOp]: ...
def operations() -> list[Operation]: ...
def wires() -> list[Wire]: ...
