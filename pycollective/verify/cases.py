"""Which calls a combination of operation, algorithm and dtype consists of.

Each rank makes them in this order. They are the same for every algorithm: else neither could their
digests be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pycollective import _core, reference
from pycollective.bench.problem import DTYPES, REDUCE_OPS, numpy_type
from pycollective.schedule import OPERATIONS

_UNEVEN = tuple(each.name for each in _core.operations() if each.takes_counts)  # shards may be
_ELEMENTS = 1_200_004  # of all ranks, at most, in the largest case: ranks hold everyone's inputs


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
    """Elements of a call: none, one, fewer than ranks, odd, some thousand, several chunks."""
    most = _ELEMENTS // ranks | 1  # below 10,007 from 120 ranks on, and below the ranks from 1,096
    wanted = {1, ranks - 1, 10_007} if quick else {0, 1, ranks - 1, 17, 5_003, 300_001}
    return sorted({min(count, most) for count in wanted})


def cases(operation: str, dtype: str, ranks: int, quick: bool) -> Iterator[Case]:
    """The calls of every combination with this operation and dtype."""
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
    """(reduce op, whether the shards are uneven)."""
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
