"""Which rank gives which leaves of a reduction (docs/reference/contract.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain, pairwise
from operator import index
from typing import Any, TypeAlias

import numpy as np

from pycollective.agree import Bytes, agree
from pycollective.errors import CollectiveMismatch, ConfigurationError, named
from pycollective.order import Node, cover

_Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

MOST_LEAVES = 1 << 15  # kCountableRanks: what plans and kernels have room for


def leaves_of(rank: int, size: int, leaves: int) -> range:
    """Return the leaves that a rank has by default: a run, the same on all ranks.

    Every rank has as many, or one more. Where there is a choice, the runs are cut such that all
    together are made of the fewest nodes of the order, so that the ranks send the least. With fewer
    leaves than ranks some have none.

    Args:
        rank: 0 to size - 1.
        size: ranks that share the leaves.
        leaves: leaves of the whole reduction, M; its run depends on nothing but these three.

    Raises:
        ConfigurationError: ``rank``, ``size`` or ``leaves`` out of range.
    """
    if size < 1:
        raise ConfigurationError(f"leaves are shared by 1 rank or more, not {size}")
    if not 0 <= rank < size:
        raise ConfigurationError(f"rank must be 0 to {size - 1}, not {rank}")
    cuts = _cuts(size, checked_leaves(leaves))
    return range(cuts[rank], cuts[rank + 1])


def checked_leaves(leaves: int) -> int:
    """Return `leaves` if a reduction can have as many."""
    leaves = index(leaves)
    if not 1 <= leaves <= MOST_LEAVES:
        raise ConfigurationError(f"leaves must be 1 to {MOST_LEAVES}, not {leaves}")
    return leaves


@lru_cache(maxsize=64)
def _cuts(size: int, leaves: int) -> tuple[int, ...]:
    """Where each rank's run begins, and the end of the last: by dynamic programming from the last
    rank to the first. ``nodes[k]`` are those of all runs from here on if `k` longer ones precede.
    """
    each, longer = divmod(leaves, size)
    before = np.arange(longer + 1)
    never = leaves + 1  # more nodes than there can be
    nodes = np.where(before == longer, 0, never)
    takes_more = np.zeros((size, longer + 1), bool)
    for rank in reversed(range(size)):
        begin = rank * each + before
        short = _nodes_of_runs(begin, each, leaves) + nodes
        long = _nodes_of_runs(begin, each + 1, leaves) + np.append(nodes[1:], never)
        takes_more[rank] = long <= short
        nodes = np.minimum(short, long)
    cuts, had = [0], 0
    for rank in range(size):
        more = bool(takes_more[rank, had])
        had += more
        cuts.append(cuts[-1] + each + more)
    return tuple(cuts)


def _nodes_of_runs(begin: _Counts, length: int, leaves: int) -> _Counts:
    """How many nodes make up `length` leaves from each of `begin` on: ``len(cover(...))``.

    A run that ends at the right edge is counted by `cover`; those beyond it do not matter.
    """
    lo, hi = begin.copy(), begin + length
    count = np.zeros_like(lo)
    while (inside := lo < hi).any():
        odd_lo, odd_hi = inside & lo & 1, inside & hi & 1
        count += odd_lo + odd_hi
        lo, hi = lo + odd_lo >> 1, hi - odd_hi >> 1
    for at in np.flatnonzero(begin + length == leaves):
        count[at] = len(cover(int(begin[at]), leaves, leaves))
    return count


@dataclass(frozen=True)
class Deal:
    """Which rank gives which of a reduction's leaves: each leaf is given by exactly one rank.

    Attributes:
        leaves: leaves of the reduction, M.
        held: for each rank its leaves as half-open ranges, which ascend and do not touch.

    Raises:
        ConfigurationError: they are no such ranges, or a leaf is in two of them or in none.
    """

    leaves: int
    held: tuple[tuple[Node, ...], ...]

    def __post_init__(self) -> None:
        # Native code relies on it. Lists and NumPy's integers would give another digest.
        object.__setattr__(self, "leaves", checked_leaves(self.leaves))
        held = tuple(tuple((index(lo), index(hi)) for lo, hi in runs) for runs in self.held)
        object.__setattr__(self, "held", held)
        ends = [0, *(end for run in sorted(chain(*held)) for end in run), self.leaves]
        tiled = all(before == after for before, after in zip(ends[::2], ends[1::2], strict=True))
        apart = all(end < begin for runs in held for (_, end), (begin, _) in pairwise(runs))
        if not (tiled and apart and all(lo < hi for lo, hi in chain(*held))):
            raise ConfigurationError(
                f"these ranges do not give each of {self.leaves} leaves once, or do not ascend; "
                "Communicator.deal makes a Deal"
            )

    @classmethod
    def contiguous(cls, size: int, leaves: int) -> Deal:
        """Return the default deal, `leaves_of` on each of `size` ranks.

        Raises:
            ConfigurationError: `size` or `leaves` out of range.
        """
        if size < 1:
            raise ConfigurationError(f"a deal is among 1 rank or more, not {size}")
        return _contiguous(size, checked_leaves(leaves))

    @classmethod
    def of(cls, leaves: int, given: Sequence[Collection[int]]) -> Deal:
        """Return the deal in which rank ``r`` gives the leaves ``given[r]``, in any order.

        Raises:
            ConfigurationError: a leaf is given twice, by no rank, or is out of range; the message
                names it and the ranks.
        """
        leaves = checked_leaves(leaves)
        owner: dict[int, int] = {}
        for rank, mine in enumerate(given):
            for leaf in map(index, mine):
                if not 0 <= leaf < leaves:
                    raise ConfigurationError(
                        f"rank {rank} gives leaf {leaf}, and leaves are 0 to {leaves - 1}"
                    )
                if leaf in owner:
                    ranks = named(sorted({owner[leaf], rank}))
                    raise ConfigurationError(
                        f"leaf {leaf} is given twice, by {ranks}: give each leaf once"
                    )
                owner[leaf] = rank
        lacking = [leaf for leaf in range(leaves) if leaf not in owner]
        if lacking:
            others = f" and {len(lacking) - 1} more" if lacking[1:] else ""
            raise ConfigurationError(
                f"no rank gives leaf {lacking[0]}{others} of {leaves}: give each leaf once"
            )
        return cls(leaves, tuple(_ranges(sorted(map(index, mine))) for mine in given))

    @property
    def size(self) -> int:
        """How many ranks it is among."""
        return len(self.held)

    def nodes(self, rank: int) -> list[Node]:
        """Return the fewest nodes of the order that make up the leaves of ``rank``; they ascend."""
        return list(self._nodes[rank])

    @cached_property
    def _nodes(self) -> tuple[tuple[Node, ...], ...]:
        return tuple(
            tuple(node for lo, hi in runs for node in cover(lo, hi, self.leaves))
            for runs in self.held
        )

    @cached_property
    def digest(self) -> int:
        """A hash of 63 bits, not 0, by which ranks compare their deals."""
        text = repr((self.leaves, self.held)).encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1 or 1


@lru_cache(maxsize=64)
def _contiguous(size: int, leaves: int) -> Deal:
    runs = pairwise(_cuts(size, leaves))
    return Deal(leaves, tuple(((lo, hi),) if lo < hi else () for lo, hi in runs))


def _ranges(ascending: Sequence[int]) -> tuple[Node, ...]:
    ranges: list[Node] = []
    for leaf in ascending:
        if ranges and ranges[-1][1] == leaf:
            ranges[-1] = ranges[-1][0], leaf + 1
        else:
            ranges.append((leaf, leaf + 1))
    return tuple(ranges)


def agree_on_deal(all_gather: Callable[[Bytes], Bytes], leaves: int, mine: Iterable[int]) -> Deal:
    """Agree on who gives which leaves; see `Communicator.deal`."""

    def given() -> tuple[int, str]:
        count, bits = checked_leaves(leaves), 0
        for leaf in map(index, mine):
            if not 0 <= leaf < count:
                raise ConfigurationError(f"leaf {leaf} is none of 0 to {count - 1}")
            if bits >> leaf & 1:
                raise ConfigurationError(f"leaf {leaf} is named twice: name each leaf once")
            bits |= 1 << leaf
        return count, hex(bits)

    made: list[Deal] = []

    def check(values: list[tuple[int, str]]) -> None:
        counts = [count for count, _ in values]
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise CollectiveMismatch(
                    f"rank 0 deals {counts[0]} leaves and rank {rank} deals {count}: all ranks "
                    "must say how many leaves there are in all"
                )
        sets = [_leaves_in(int(bits, 16)) for _, bits in values]
        try:
            made.append(Deal.of(leaves, sets))
        except ConfigurationError as error:
            raise CollectiveMismatch(str(error)) from None

    agree(all_gather, "deal", given, check)
    return made[0]


def _leaves_in(bits: int) -> list[int]:
    return [leaf for leaf in range(bits.bit_length()) if bits >> leaf & 1]
