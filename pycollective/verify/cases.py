"""What a run of the table covers, and which calls a combination consists of.

A combination is an operation, an algorithm and a dtype. Each rank makes its calls in this order.
They are the same for every algorithm, or their digests could not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core, reference
from pycollective.communicator import Communicator
from pycollective.dtypes import ALIASES, DTYPES, REDUCE_OPS, numpy_type
from pycollective.errors import ConfigurationError
from pycollective.schedule import ALGORITHMS, OPERATIONS, algorithms_for
from pycollective.testing.inputs import portable_leaves
from pycollective.testing.places import Host, Place

_UNEVEN = tuple(each.name for each in _core.operations() if each.takes_counts)  # shards may be
_ELEMENTS = 1_200_004  # of all ranks, at most, in the largest case: ranks hold everyone's inputs
AUTO = "auto"
# What stands in, in an algorithm's digest, for operations that it cannot do: it can do all.
STAND_IN = "direct"


def can_do(operation: str, algorithm: str) -> bool:
    """Return whether an algorithm, or ``auto``, can do an operation."""
    return algorithm == AUTO or algorithm in algorithms_for(operation)


@dataclass(frozen=True)
class Selection:
    """Which part of the table to run; each tuple in the table's order.

    Attributes:
        operations: collectives.
        algorithms: those to give a digest for.
        dtypes: element types.
        quick: few counts.
        left_out: element types that this installation lacks.
    """

    operations: tuple[str, ...]
    algorithms: tuple[str, ...]
    dtypes: tuple[str, ...]
    quick: bool = False
    left_out: tuple[str, ...] = ()

    def algorithms_for(self, operation: str) -> tuple[str, ...]:
        """Return the algorithms to run for an operation, the stand-in for others among them."""
        wanted = {a if can_do(operation, a) else STAND_IN for a in self.algorithms}
        return tuple(a for a in (*ALGORITHMS, AUTO) if a in wanted)

    @property
    def name(self) -> str:
        """What the digest covers, for people to compare like with like; empty if the whole table.

        Algorithms are not in it: each has a digest of its own, of the same results.
        """
        parts = ["quick"] if self.quick else []
        if self.operations != tuple(OPERATIONS):
            parts.append(" ".join(self.operations))
        if self.left_out:
            parts.append(f"without {' '.join(self.left_out)}")
        elif self.dtypes != tuple(DTYPES):
            parts.append(" ".join(self.dtypes))
        return ", ".join(parts)


def select(
    operations: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    quick: bool = False,
) -> Selection:
    """Return the part of the table that names pick out; an empty list picks all there are.

    Raises:
        ConfigurationError: there is no such name, or an algorithm can do none of the operations, or
            a type of ml_dtypes' is asked for and that is missing.
    """
    chosen = _choose("operation", operations, tuple(OPERATIONS))
    how = _choose("algorithm", algorithms, (*ALGORITHMS, AUTO))
    able = tuple(a for a in how if any(can_do(operation, a) for operation in chosen))
    if algorithms and able != how:
        there = [a for a in (*ALGORITHMS, AUTO) if any(can_do(each, a) for each in chosen)]
        raise ConfigurationError(
            f"{', '.join(chosen)}: cannot be done by {', '.join(a for a in how if a not in able)}; "
            f"there are {', '.join(there)}"
        )
    kinds = _choose("dtype", [ALIASES.get(name, name) for name in dtypes], tuple(DTYPES))
    left_out = []
    for kind in kinds:
        try:
            numpy_type(kind)
        except ConfigurationError:
            if dtypes:
                raise
            left_out.append(kind)
    kinds = tuple(each for each in kinds if each not in left_out)
    return Selection(chosen, able, kinds, quick, tuple(left_out))


def _choose(what: str, names: Sequence[str], there: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `there` that are named, in its order; all if none is."""
    for name in names:
        if name not in there:
            raise ConfigurationError(f"unknown {what} {name!r}; there are {', '.join(there)}")
    return tuple(name for name in there if name in names) if names else there


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        reduce_op: where the operation reduces; else ``sum``, and without meaning.
        shards: elements of each rank's shard, where there are shards; else one number, the count.
        uneven: the shards are given by ``counts=``.
        root: where the operation has one.
        in_place: one array is input and output, where the operation has two.
        asynchronous: by ``async_op=True``.
        start: which element of the inputs is the first. Calls that follow each other take others,
            so that what an earlier one has left behind cannot be right.
    """

    reduce_op: str
    shards: tuple[int, ...]
    uneven: bool
    root: int
    in_place: bool
    asynchronous: bool
    start: int

    @property
    def count(self) -> int:
        """Elements of all shards."""
        return sum(self.shards)


def counts(ranks: int, quick: bool) -> list[int]:
    """Return the elements of a call: none, one, fewer than ranks, odd, thousands, many chunks."""
    most = _ELEMENTS // ranks | 1  # below 10,007 from 120 ranks on, and below the ranks from 1,096
    wanted = {1, ranks - 1, 10_007} if quick else {0, 1, ranks - 1, 17, 5_003, 300_001}
    return sorted({min(count, most) for count in wanted})


def cases(operation: str, dtype: str, ranks: int, quick: bool) -> Iterator[Case]:
    """Yield the calls of every combination with this operation and dtype."""
    what = OPERATIONS[operation]
    in_shards = what.pieces != "cut"
    roots = (0, ranks // 2, ranks - 1) if what.rooted else (0,)
    shift = tuple(DTYPES).index(dtype)
    start = 0
    for row, (reduce_op, uneven) in enumerate(_variants(operation, dtype)):
        for column, count in enumerate(counts(ranks, quick)):
            shards = _shards(count, ranks, uneven) if in_shards else (count,)
            # So that over all dtypes each count meets each root, and each of the four ways.
            turn = row + column + shift
            yield Case(
                reduce_op,
                shards,
                uneven,
                roots[turn % len(roots)],
                in_place=turn % 2 == 1,
                asynchronous=turn // 2 % 2 == 1,
                start=start,
            )
            start += 1


def _variants(operation: str, dtype: str) -> Iterator[tuple[str, bool]]:
    """Yield (reduce op, whether the shards are uneven)."""
    ops = ["sum"]
    if OPERATIONS[operation].reduces:
        ops = [op for op in REDUCE_OPS if reference.is_defined(numpy_type(dtype), op)]
    for op in ops:
        yield op, False
        if operation in _UNEVEN:
            yield op, True


def _shards(count: int, ranks: int, uneven: bool) -> tuple[int, ...]:
    if not uneven:
        return (-(-count // ranks),) * ranks
    weights = [1 + rank % 3 for rank in range(ranks)]
    shards = [count * weight // sum(weights) for weight in weights]
    return (*shards[:-1], count - sum(shards[:-1]))  # of few elements some have none


Array = NDArray[Any]
_GARBAGE = 0xA5


class Data:
    """Every rank's inputs in one dtype, and their reductions; made when first asked for.

    Args:
        dtype: element type.
        ranks: how many inputs.
        count: elements of each, enough for the longest case.
    """

    def __init__(self, dtype: str, ranks: int, count: int) -> None:
        self._dtype, self._ranks, self._count = dtype, ranks, count
        self._reduced: dict[str, Array] = {}

    @cached_property
    def _near_one(self) -> list[Array]:
        return portable_leaves(self._dtype, "prod", self._ranks, self._count)

    @cached_property
    def _wide(self) -> list[Array]:
        return portable_leaves(self._dtype, "sum", self._ranks, self._count)

    def inputs(self, reduce_op: str) -> list[Array]:
        """Return each rank's input."""
        return self._near_one if reduce_op == "prod" else self._wide

    def reduced(self, reduce_op: str) -> Array:
        """Return their reduction by the reference."""
        if reduce_op not in self._reduced:
            self._reduced[reduce_op] = reference.reduce(self.inputs(reduce_op), reduce_op)
        return self._reduced[reduce_op]


@dataclass(frozen=True)
class Check:
    """An array as it is after a call, and as it must be.

    Attributes:
        got: read from where it lies.
        want: by the reference.
        result: whether it is a result, which goes into the digest; else it is an input, which must
            be as it was.
    """

    got: Array
    want: Array
    result: bool = True


@dataclass(frozen=True)
class Call:
    """A case by an algorithm, on this rank."""

    communicator: Communicator
    algorithm: str
    case: Case
    data: Data
    place: Place = field(default_factory=Host)

    def make(self, operation: str) -> Iterator[Check]:
        """Make the call, then yield what there is to check."""
        yield from _CALLS[operation](self)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def is_root(self) -> bool:
        """This rank is the operation's root."""
        return self.case.root == self.rank

    def shard(self, rank: int) -> slice:
        """Return where a rank's shard lies in the whole vector."""
        begin = sum(self.case.shards[:rank])
        return slice(begin, begin + self.case.shards[rank])

    @property
    def own(self) -> slice:
        """Where this rank's shard lies."""
        return self.shard(self.rank)

    def vector(self, rank: int) -> Array:
        """Return a rank's whole vector; do not write to it."""
        start = self.case.start
        return self.data.inputs(self.case.reduce_op)[rank][start : start + self.case.count]

    def shards(self) -> Array:
        """Return the vector that has each rank's shard from that rank."""
        ranks = range(self.communicator.size)
        return np.concatenate([self.vector(rank)[self.shard(rank)] for rank in ranks])

    def reduction(self) -> Array:
        """Return the reduction of all ranks' vectors."""
        start = self.case.start
        return self.data.reduced(self.case.reduce_op)[start : start + self.case.count]

    def copy(self, array: Array) -> Any:
        """Return a copy where this call's arrays lie."""
        return self.place.copy(array)

    def blank(self, count: int) -> Any:
        """Return an output, filled with what no result is likely to be."""
        array = np.empty(count, self.vector(0).dtype)
        array.view(np.uint8).fill(_GARBAGE)
        return self.copy(array)

    def check(self, got: Any, want: Array, result: bool = True) -> Check:
        """Return the check of an array after the call."""
        return Check(self.place.read(got), want, result)

    def run(self, operation: str, *arrays: Any, **options: object) -> None:
        """Call the communicator and wait."""
        options.update(self.place.options)
        if self.case.uneven:
            options["counts"] = self.case.shards
        method = getattr(self.communicator, operation)
        options.update(algorithm=self.algorithm, async_op=self.case.asynchronous)
        work = method(*arrays, **options)
        if self.case.asynchronous:
            work.wait()


def _all_reduce(call: Call) -> Iterator[Check]:
    mine = call.vector(call.rank)
    x = call.copy(mine)
    out = None if call.case.in_place else call.blank(len(x))
    call.run("all_reduce", x, op=call.case.reduce_op, out=out)
    yield call.check(x if out is None else out, call.reduction())
    if out is not None:
        yield call.check(x, mine, result=False)


def _reduce(call: Call) -> Iterator[Check]:
    mine = call.vector(call.rank)
    x = call.copy(mine)
    out = call.blank(len(x)) if call.is_root and not call.case.in_place else None
    call.run("reduce", x, op=call.case.reduce_op, root=call.case.root, out=out)
    if call.is_root:
        yield call.check(x if out is None else out, call.reduction())
    if out is not None or not call.is_root:
        yield call.check(x, mine, result=False)


def _reduce_scatter(call: Call) -> Iterator[Check]:
    mine = call.vector(call.rank)
    x = call.copy(mine)
    out = x[call.own] if call.case.in_place else call.blank(len(x[call.own]))
    call.run("reduce_scatter", out, x, op=call.case.reduce_op)
    yield call.check(out, call.reduction()[call.own])
    if not call.case.in_place:
        yield call.check(x, mine, result=False)


def _all_gather(call: Call) -> Iterator[Check]:
    mine = call.vector(call.rank)[call.own]
    out = call.blank(call.case.count)
    x = out[call.own] if call.case.in_place else call.copy(mine)
    x[:] = mine
    call.run("all_gather", out, x)
    yield call.check(out, call.shards())
    if not call.case.in_place:
        yield call.check(x, mine, result=False)


def _gather(call: Call) -> Iterator[Check]:
    mine = call.vector(call.rank)[call.own]
    out = call.blank(call.case.count) if call.is_root else None
    x = out[call.own] if out is not None and call.case.in_place else call.copy(mine)
    x[:] = mine
    call.run("gather", out, x, root=call.case.root)
    if out is not None:
        yield call.check(out, call.shards())
    if out is None or not call.case.in_place:
        yield call.check(x, mine, result=False)


def _scatter(call: Call) -> Iterator[Check]:
    theirs = call.vector(call.case.root)
    x = call.copy(theirs) if call.is_root else None
    in_place = x is not None and call.case.in_place
    out = x[call.own] if x is not None and in_place else call.blank(len(theirs[call.own]))
    call.run("scatter", out, x, root=call.case.root)
    yield call.check(out, theirs[call.own])
    if x is not None:  # in place, too: its own shard stays what it was
        yield call.check(x, theirs, result=False)


def _broadcast(call: Call) -> Iterator[Check]:
    theirs = call.vector(call.case.root)
    x = call.copy(theirs) if call.is_root else call.blank(call.case.count)
    call.run("broadcast", x, root=call.case.root)
    yield call.check(x, theirs)


def _all_to_all(call: Call) -> Iterator[Check]:
    mine = call.vector(call.rank)
    x = call.copy(mine)
    out = x if call.case.in_place else call.blank(len(x))
    call.run("all_to_all", out, x)
    ranks = range(call.communicator.size)
    yield call.check(out, np.concatenate([call.vector(rank)[call.own] for rank in ranks]))
    if not call.case.in_place:
        yield call.check(x, mine, result=False)


_CALLS: dict[str, Callable[[Call], Iterator[Check]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
