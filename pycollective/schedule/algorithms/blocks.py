"""Binary blocks: a number as a row of powers of two, 4 + 2 + 1 for 7, the largest first."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=16)
def blocks(ranks: int) -> list[tuple[int, int]]:
    """First rank and size of each binary block, the largest first."""
    found = []
    lo = 0
    while lo < ranks:
        size = 1 << ((ranks - lo).bit_length() - 1)
        found.append((lo, size))
        lo += size
    return found


def largest_block(ranks: int) -> int:
    """The largest power of two up to `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def larger_neighbour(ranks: int, block: int) -> int:
    """Size of the binary block before the one of size `block`."""
    larger = ranks // (2 * block) * (2 * block)
    return larger & -larger
