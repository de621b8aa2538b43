"""Which elements of a parameter top-k sends: by tensor, over all of a host's shares, or by chunk.

By tensor, on a host of several ranks, the shares' histograms of magnitudes are added up three times
(11, 10 and 10 bits of the 31), which gives the magnitude of the k-th element exactly; of those that
are equal to it the first in the parameter's order are taken. So a host sends the k elements that it
would send if one rank held them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import _core
from pycollective.compression.arrays import Floats
from pycollective.compression.domain import Indices
from pycollective.compression.groups import Group
from pycollective.compression.placing import Range
from pycollective.errors import ConfigurationError

# Bits of a magnitude that each round of histograms settles: (shift, bits).
_ROUNDS = ((20, 11), (10, 10), (0, 10))


@dataclass
class Piece:
    """This rank's share of one parameter.

    Attributes:
        share: its elements.
        x: the host's sum of the gradient there; None on a rank without a share.
        held, left: its residuals.
        k: how many elements of the whole parameter the host sends.
    """

    share: Range
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


def over_shares(pieces: Sequence[Piece], local: Group) -> list[Indices] | None:
    """The same for parameters in several pieces, one a rank of `local`; collective over it.

    Ranks without a share give empty pieces. None, on all of them, if an element is not finite.
    """
    finite = all(
        [_core.sparse_add(piece.x, piece.held, piece.left) for piece in pieces if piece.left.size]
    )
    prefixes = [0] * len(pieces)
    wanted = [piece.k for piece in pieces]
    ties: list[int] = []
    for shift, bits in _ROUNDS:
        mine = np.zeros((len(pieces), 2 + (1 << bits)), np.int64)
        for piece, row, prefix in zip(pieces, mine, prefixes, strict=True):
            row[0], row[1] = not finite, piece.share[0] if piece.left.size else -1
            if finite and piece.left.size:
                _core.sparse_histogram(piece.left, shift, bits, prefix, row[2:])
        every = local.all_gather(mine.view(np.uint8).reshape(-1)).view(np.int64)
        every = every.reshape(local.size, len(pieces), -1)
        if every[:, :, 0].any():
            return None
        ties = []
        for number, piece in enumerate(pieces):
            bins = every[:, number, 2:]
            above = np.cumsum(bins.sum(0)[::-1])  # how many have this magnitude or a larger one
            place = int(np.searchsorted(above, wanted[number]))
            wanted[number] -= int(above[place]) - int(bins.sum(0)[::-1][place])
            found = (1 << bits) - 1 - place
            prefixes[number] = prefixes[number] << bits | found
            # Of those that are equal the first: what the ranks before this one have comes off.
            before = [
                int(bins[r, found])
                for r in range(local.size)
                if 0 <= every[r, number, 1] < piece.share[0]
            ]
            ties.append(max(0, wanted[number] - sum(before)))
    return [
        _select(piece, prefix, tie)
        for piece, prefix, tie in zip(pieces, prefixes, ties, strict=True)
    ]


def _select(piece: Piece, key: int, ties: int) -> Indices:
    if not piece.left.size:
        return np.empty(0, np.uint32)
    indices = np.empty(min(piece.k, piece.left.size), np.uint32)
    return indices[: _core.sparse_select(piece.left, key, min(ties, piece.left.size), indices)]
