"""The native core (csrc/bindings), for type checkers. tools/core_stub.py writes it."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeAlias, overload

from typing_extensions import TypeVar  # of type checkers, which alone read this

from pycollective.errors import CollectiveError
from pycollective.leaves.accumulator import Accumulator
from pycollective.leaves.deal import Deal
from pycollective.leaves.reduction import Reduction
from pycollective.typing import Algorithm, Array, ReduceOp, Stream, Wire
from pycollective.typing import Dtype as DtypeName

_T_co = TypeVar("_T_co", covariant=True, default=Any)
_A = TypeVar("_A", bound=Array)
_Capsule: TypeAlias = object

class Dtype:
    @property
    def name(self) -> DtypeName: ...
    @property
    def numbers(self) -> Literal["float", "integer", "bool"]: ...
    @property
    def reduce_ops(self) -> list[ReduceOp]: ...
    @property
    def accumulator(self) -> int: ...
    @property
    def alias(self) -> str: ...
    @property
    def in_numpy(self) -> bool: ...
    @property
    def largest(self) -> int: ...
    @property
    def mantissa(self) -> int: ...
    @property
    def nan(self) -> int: ...
    @property
    def size(self) -> int: ...

class Operation:
    @property
    def pieces(self) -> Literal["cut", "ranks", "pairs"]: ...
    @property
    def name(self) -> str: ...
    @property
    def pair(self) -> bool: ...
    @property
    def reduces(self) -> bool: ...
    @property
    def rooted(self) -> bool: ...
    @property
    def takes_counts(self) -> bool: ...

class Node:
    ...

    def __init__(self) -> None: ...
    def allocate(self, size: int, internode: bool = False) -> tuple[int, int]: ...
    def attach(self, token: bytes, fd: int, pid: int) -> None: ...
    def fileno(self) -> int: ...
    def has_mailbox(self, token: bytes, offset: int, data_bytes: int, size: int) -> bool: ...
    def is_attached(self, token: bytes) -> bool: ...
    def mailbox_bytes(self, size: int, internode: bool = False) -> int: ...
    def reclaim(self) -> None: ...
    def refusal(self, token: bytes) -> int: ...
    def release(self, offset: int) -> None: ...
    @property
    def forked(self) -> bool: ...
    @property
    def token(self) -> bytes: ...

class Program:
    def __init__(self, program: Any) -> None: ...

class Work(Generic[_T_co]):
    def wait(self, timeout: float | None = None) -> _T_co: ...
    def done(self) -> bool: ...
    @property
    def source(self) -> int | None: ...

class SharedMemory: ...

class Communicator:
    def __init__(
        self,
        node: Node,
        rank: int,
        tokens: Sequence[bytes],
        offsets: Sequence[int],
        data_bytes: int,
        timeout: float,
        world: Any,
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
    def _gone(self) -> list[int]: ...
    def _close(self) -> None: ...
    def _capsule(self) -> _Capsule: ...
    def _reduce_leaves(self, reduction: Reduction, /) -> Any: ...
    def _allocate(self, bytes: int, /) -> Any: ...
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
        x: Accumulator,
        op: ReduceOp = "sum",
        out: _A = ...,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        *,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> _A: ...
    @overload
    def all_reduce(
        self,
        x: Accumulator,
        op: ReduceOp = "sum",
        out: _A = ...,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        divisor: float | None = None,
        deal: Deal | None = None,
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
    ) -> Work[_A] | _A: ...
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
    ) -> Work[_A] | _A: ...
    @overload
    def all_reduce(
        self,
        x: Accumulator,
        op: ReduceOp = "sum",
        out: _A = ...,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        *,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> Work[_A] | _A: ...
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
        x: Accumulator,
        root: int = 0,
        op: ReduceOp = "sum",
        out: _A = ...,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        *,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> _A | None: ...
    @overload
    def reduce(
        self,
        x: Accumulator,
        root: int = 0,
        op: ReduceOp = "sum",
        out: _A = ...,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        divisor: float | None = None,
        deal: Deal | None = None,
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
    ) -> Work[_A | None] | _A | None: ...
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
    ) -> Work[_A | None] | _A | None: ...
    @overload
    def reduce(
        self,
        x: Accumulator,
        root: int = 0,
        op: ReduceOp = "sum",
        out: _A = ...,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        *,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> Work[_A | None] | _A | None: ...
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
        x: Accumulator,
        op: ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        *,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> _A: ...
    @overload
    def reduce_scatter(
        self,
        out: _A,
        x: Accumulator,
        op: ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        divisor: float | None = None,
        deal: Deal | None = None,
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
    ) -> Work[_A] | _A: ...
    @overload
    def reduce_scatter(
        self,
        out: _A,
        x: Accumulator,
        op: ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        *,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> Work[_A] | _A: ...
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
    ) -> Work[_A] | _A: ...
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
    ) -> Work[_A] | _A: ...
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
    ) -> Work[_A] | _A: ...
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
    ) -> Work[_A | None] | _A | None: ...
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
    ) -> Work[_A] | _A: ...
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
        self, x: Array, dst: int, async_op: bool = False, stream: Stream | None = None, tag: int = 0
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
    ) -> Work[int] | int: ...
    @overload
    def barrier(self, async_op: Literal[False] = False) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work[None]: ...
    @overload
    def barrier(self, async_op: bool = False) -> Work[None] | None: ...

class DeviceMemory:
    def __init__(self, device: int, nbytes: int) -> None: ...
    def capsule(
        self, offset: int, shape: Sequence[int], dtype: str, versioned: bool = True
    ) -> Any: ...
    def fill(self, word: int, stream: int = 0) -> None: ...
    def read(self, offset: int, nbytes: int, stream: int = 0) -> bytes: ...
    def write(self, buffer: Any, offset: int = 0, stream: int = 0) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class DeviceStream:
    def __cuda_stream__(self) -> tuple[int, int]: ...
    def __init__(self, device: int, non_blocking: bool = True) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self, timeout: float) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def handle(self) -> int: ...
    @property
    def ptr(self) -> int: ...

class DeviceMailbox:
    def __init__(self, device: int, nvrtc_folders: Sequence[str]) -> None: ...
    def export(self, communicator: Any) -> bytes: ...
    def take_back(self, communicator: Any) -> None: ...

class DeviceGroup:
    def unmap(self) -> bool: ...

def abort_all(reason: str) -> None: ...
def accumulate(
    leaf: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    nodes: Sequence[Any],
    out: Any,
    simd: str = "",
) -> None: ...
def check_finite(table: Any, found: Any) -> None: ...
def close_all() -> bool: ...
def combine_into(
    inputs: Sequence[Any],
    recipe: Sequence[int],
    divisor: float,
    op: str,
    dtype: str,
    out: Any,
    finish: bool,
    simd: str = "",
) -> None: ...
def core_to_core_copy(cpu_a: int, cpu_b: int, total: int, chunk: int) -> float: ...
def core_to_core_latency(cpu_a: int, cpu_b: int, round_trips: int) -> float: ...
def cuda_report(nvrtc_folders: Sequence[str]) -> dict[str, Any]: ...
def dequantize(
    codec: str,
    chunk: int,
    table: Any,
    messages: Any,
    divisor: float,
    found: Any,
    zero_at: int = 0,
    simd: str = "",
) -> None: ...
def device_count() -> int: ...
def dtypes() -> list[Dtype]: ...
def fill_nan(table: Any, found: Any) -> None: ...
def flat_floats(array: Any, name: str, written: bool) -> tuple[int, int, int]: ...
def gpu_of(card: bytes) -> bytes: ...
def leaf_is_node(leaf: Sequence[Any], shapes: Sequence[Sequence[int]]) -> bool: ...
def map_devices(
    communicator: Any, mailbox: DeviceMailbox, cards: Sequence[bytes]
) -> DeviceGroup: ...
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
    ranks: Sequence[int],
    frees_unused: bool,
) -> _Capsule: ...
def operations() -> list[Operation]: ...
def pack_indices(indices: Any, size: int, out: Any, simd: str = "") -> int: ...
def pack_indices_bound(count: int, size: int) -> int: ...
def prepare_kernels(nvrtc_folders: Sequence[str], device: int | None) -> None: ...
def quantize(
    codec: str, chunk: int, table: Any, messages: Any, found: Any, zero_at: int = 0, simd: str = ""
) -> None: ...
def quantize_codecs() -> list[str]: ...
def quantized_bytes(codec: str, chunk: int, count: int) -> int: ...
def reduce_into(
    inputs: Sequence[Any], op: str, out: Any, copy: Any = None, simd: str = ""
) -> None: ...
def reduce_ops() -> list[ReduceOp]: ...
def simd_level() -> str: ...
def simd_levels() -> list[str]: ...
def sparse_add(table: Any, messages: Any, found: Any, simd: str = "") -> None: ...
def sparse_histogram(
    table: Any, shift: int, bits: int, prefixes: Any, bins: Any, simd: str = ""
) -> None: ...
def sparse_scatter(
    table: Any, places: Any, values: Any, divisor: float, found: Any, all_zero: Any, simd: str = ""
) -> None: ...
def sparse_select(
    table: Any, keys: Any, ties: Any, places: Any, values: Any, simd: str = ""
) -> int: ...
def sparse_sum(
    indices: Sequence[Any], values: Sequence[Any], out_indices: Any, out_values: Any, simd: str = ""
) -> int: ...
def stop_progress() -> None: ...
def stream_in_place(buffer: Any, repetitions: int) -> float: ...
def sum_squares(
    arrays: Sequence[Any], rows: Sequence[Sequence[int]], out: Any, simd: str = ""
) -> None: ...
def time_collective(
    capsule: _Capsule,
    kind: str,
    dtype: str,
    reduce_op: str,
    root: int,
    input: Any,
    output: Any,
    count: int,
    repetitions: int,
) -> float: ...
def top_k(
    table: Any, chunk: int, places: Any, values: Any, messages: Any, found: Any, simd: str = ""
) -> None: ...
def unpack_indices(payload: Any, size: int, indices: Any, simd: str = "") -> None: ...
def use_devices(communicator: Any, group: DeviceGroup) -> None: ...
def wires() -> list[Wire]: ...
