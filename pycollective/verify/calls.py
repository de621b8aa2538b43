"""Calls each operation, and says by the reference what this rank must end with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import reference
from pycollective.communicator import Communicator
from pycollective.testing.places import Host, Place
from pycollective.testing.portable_inputs import leaves
from pycollective.verify.cases import Case

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
        return leaves(self._dtype, "prod", self._ranks, self._count)

    @cached_property
    def _wide(self) -> list[Array]:
        return leaves(self._dtype, "sum", self._ranks, self._count)

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
