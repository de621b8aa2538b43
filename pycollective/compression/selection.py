"""Which elements of a parameter top-k sends: by tensor, over all of a host's ranks, or by chunk.

By tensor, on a host of several ranks, the local shards' histograms of magnitudes are added up three
times (11, 10 and 10 bits of the 31), which gives the magnitude of the k-th element exactly. Of
those that are equal to it the first in the parameter's order are taken. So a host sends the k
elements that it would send if one rank held them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import _core
from pycollective.compression.arrays import Floats
from pycollective.compression.groups import Group
from pycollective.compression.partition import Numbers, Range
from pycollective.compression.sparse_layout import Indices
from pycollective.errors import ConfigurationError

# Bits of a magnitude that each round of histograms settles: (shift, bits).
_ROUNDS = ((20, 11), (10, 10), (0, 10))


@dataclass
class Piece:
    """This rank's local shard of one parameter.

    Attributes:
        shard: its elements.
        x: the host's sum of the gradient there; None on a rank without a local shard.
        held, left: its residuals.
        k: how many elements of the whole parameter the host sends.
    """

    shard: Range
    x: Any
    held: Floats | None
    left: Floats
    k: int


def count_of(density: float, count: int) -> int:
    """How many of `count` elements are sent: the nearest whole number, at least one."""
    return min(count, max(1, round(density * count)))


def check_density(density: float, by: str, chunk: int) -> None:
    """Refuse a density that no chunk can have.

    Raises:
        ConfigurationError: by chunk it would be less than one element of each.
    """
    if by == "chunk" and round(density * chunk, 9) < 1:
        least = math.ceil(round(1 / density, 6) / 64) * 64
        raise ConfigurationError(
            f"density={density!r} by chunk is less than one of chunk={chunk} elements: take chunk="
            f"{least} or more, a density of at least {1 / chunk:.6g}, or by='tensor'"
        )


def by_chunk(piece: Piece, density: float, chunk: int) -> Indices | None:
    """The largest of each chunk, as ascending places in the piece; None if one is not finite."""
    k = count_of(density, chunk)
    size = piece.left.size
    indices = np.empty(-(-size // chunk) * k, np.uint32)
    found = _core.top_k_chunks(piece.x, piece.held, piece.left, k, chunk, indices)
    return indices[:found] if found >= 0 else None


def by_tensor(piece: Piece) -> Indices | None:
    """The largest of a parameter that is all in one piece; None if one is not finite."""
    indices = np.empty(piece.k, np.uint32)
    found = _core.top_k(piece.x, piece.held, piece.left, piece.k, indices)
    return indices[:found] if found >= 0 else None


def over_shards(pieces: Sequence[Piece], local: Group) -> list[Indices] | None:
    """The largest of parameters in several pieces, one a rank of `local`; collective over it.

    Ranks without a local shard give empty pieces. All of them get None if an element is not finite.
    """
    finite = all(
        [_core.sparse_add(piece.x, piece.held, piece.left) for piece in pieces if piece.left.size]
    )
    starts = np.array([piece.shard[0] if piece.left.size else -1 for piece in pieces])
    wanted = np.array([piece.k for piece in pieces])
    prefixes = np.zeros(len(pieces), np.int64)
    ties = wanted
    for shift, bits in _ROUNDS:
        mine = np.zeros((len(pieces), 1 << bits), np.int64)
        for piece, row, prefix in zip(pieces, mine, prefixes.tolist(), strict=True):
            if finite and piece.left.size:
                _core.sparse_histogram(piece.left, shift, bits, prefix, row)
        found = _merge(mine, starts, wanted, finite, local)
        if found is None:
            return None
        place, wanted, ties = found
        prefixes = prefixes << bits | place
    return [
        _select(piece, prefix, tie)
        for piece, prefix, tie in zip(pieces, prefixes.tolist(), ties.tolist(), strict=True)
    ]


def _merge(
    mine: Numbers, starts: Numbers, wanted: Numbers, finite: bool, local: Group
) -> tuple[Numbers, Numbers, Numbers] | None:
    """Where the elements that are wanted end, in the sum of all ranks' histograms.

    Each rank adds up those of some parameters and tells the others: a histogram goes to one rank.

    Args:
        mine: this rank's histogram of each parameter, by ascending magnitude.
        starts: where this rank's pieces start; -1 of empty ones.
        wanted: how many elements of each parameter, the largest.
        finite: whether this rank's are.
        local: the ranks.

    Returns:
        Of each parameter the bin in which they end; how many are wanted of that one, and of these
        how many at most of this rank's. None if some rank's are not finite.
    """
    ranks, count, bins = local.size, len(mine), mine.shape[1]
    each = -(-count // ranks)
    rows = np.zeros((ranks * each, 2 + bins // 2), np.int64)  # bins of 32 bits
    rows[:, 0] = not finite
    rows[:count, 1] = starts
    rows[:count, 2:] = mine.astype(np.uint32).view(np.int64)
    came = local.all_to_all(rows.reshape(ranks, -1).view(np.uint8)).view(np.int64)
    every = came.reshape(ranks, each, -1)
    histograms = np.ascontiguousarray(every[:, :, 2:]).view(np.uint32).astype(np.int64)
    first = local.rank * each
    want = np.zeros(each, np.int64)
    own = wanted[first : first + each]
    want[: own.size] = own
    above = np.cumsum(histograms.sum(0)[:, ::-1], axis=1)  # as large as this or larger
    back = np.minimum((above < want[:, None]).sum(1), bins - 1)
    one = np.arange(each)
    place = bins - 1 - back
    there = histograms[:, one, place]  # of each rank
    left = want - (above[one, back] - there.sum(0))
    # Of those that are equal the first: what the ranks before one have comes off.
    begins = every[:, :, 1]
    before = (begins[:, None] >= 0) & (begins[:, None] < begins[None])
    ties = np.maximum(0, left - (before * there[:, None]).sum(0))
    bad = np.full(each, every[:, 0, 0].any())
    told = np.concatenate([bad[None], place[None], left[None], ties]).astype(np.int64)
    heard = local.all_gather(told.view(np.uint8).reshape(-1)).view(np.int64)
    told = heard.reshape(ranks, 3 + ranks, each).transpose(1, 0, 2).reshape(3 + ranks, -1)
    if told[0].any():
        return None
    return told[1, :count], told[2, :count], told[3 + local.rank, :count]


def _select(piece: Piece, key: int, ties: int) -> Indices:
    if not piece.left.size:
        return np.empty(0, np.uint32)
    indices = np.empty(min(piece.k, piece.left.size), np.uint32)
    return indices[: _core.sparse_select(piece.left, key, min(ties, piece.left.size), indices)]
