"""What a run of the table covers, and which calls a combination consists of.

A combination is an operation, an algorithm and a dtype. Each rank makes its calls in this order.
They are the same for every algorithm, or their digests could not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pycollective import _core, reference
from pycollective.dtypes import ALIASES, DTYPES, REDUCE_OPS, numpy_type
from pycollective.errors import ConfigurationError
from pycollective.schedule import ALGORITHMS, OPERATIONS, algorithms_for

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
        missing: what was left out because this installation lacks it, in words; empty if nothing.
    """

    operations: tuple[str, ...]
    algorithms: tuple[str, ...]
    dtypes: tuple[str, ...]
    quick: bool = False
    missing: str = ""

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
        if self.dtypes != tuple(DTYPES):
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
    missing = []
    for kind in kinds:
        try:
            numpy_type(kind)
        except ConfigurationError as error:
            if dtypes:
                raise
            kinds = tuple(each for each in kinds if each != kind)
            missing.append(str(error))
    return Selection(chosen, able, kinds, quick, "; ".join(missing))


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
