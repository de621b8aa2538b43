# What pycollective/_core.pyi says better than the built module does; tools/core_stub.py puts it in.
#
# A class or function here takes the place of the generated one; of a class, each member does. A
# method with `async_op` returns a `Work` of its result where that is True: the stub has an overload
# for each case.
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

class Node: ...
class SharedMemory: ...

class Operation:
    @property
    def pieces(self) -> Literal["cut", "ranks", "pairs"]: ...

class Work(Generic[_T_co]):
    def wait(self, timeout: float | None = None) -> _T_co: ...
    def done(self) -> bool: ...
    @property
    def source(self) -> int | None: ...

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
    def _gone(self) -> list[int]: ...
    def _close(self) -> None: ...
    def _capsule(self) -> _Capsule: ...
    def _reduce_leaves(self, reduction: Reduction, /) -> Any: ...
    def _allocate(self, bytes: int, /) -> Any: ...  # SharedMemory, a buffer
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
    ) -> _A: ...
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
    ) -> _A: ...
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
    ) -> _A: ...
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
    ) -> _A | None: ...
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
    ) -> _A | None: ...
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
    ) -> _A | None: ...
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
    ) -> _A: ...
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
    ) -> _A: ...
    def all_gather(
        self,
        out: _A,
        x: Array,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    def broadcast(
        self,
        x: _A,
        root: int = 0,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
    def all_to_all(
        self,
        out: _A,
        x: Array,
        async_op: bool = False,
        algorithm: Algorithm = "auto",
        wire: Wire | None = None,
        stream: Stream | None = None,
    ) -> _A: ...
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
    ) -> _A | None: ...
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
    ) -> _A: ...
    def send(
        self,
        x: Array,
        dst: int,
        async_op: bool = False,
        stream: Stream | None = None,
        tag: int = 0,
    ) -> None: ...
    def recv(
        self,
        x: Array,
        src: int | None = None,
        async_op: bool = False,
        stream: Stream | None = None,
        tag: int = 0,
    ) -> int: ...
    def barrier(self, async_op: bool = False) -> None: ...

def cuda_report(nvrtc_folders: Sequence[str]) -> dict[str, Any]: ...
def reduce_ops() -> list[ReduceOp]: ...
def wires() -> list[Wire]: ...
