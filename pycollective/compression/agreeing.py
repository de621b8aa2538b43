"""Ranks compare what they were given before any of them goes on, also with one that refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from pycollective.agree import agree as ranks_agree
from pycollective.compression.bucket import Agreement, header_bytes, read_headers
from pycollective.compression.groups import Group, Groups
from pycollective.errors import CollectiveMismatch

_T = TypeVar("_T")
# Bytes of the message. Calls of other kinds begin with messages of other lengths, by which ranks
# find out: `agree` with 9, `exchange_lengths` with a multiple of 8.
_CALL = header_bytes(0) + 2


@dataclass(frozen=True)
class Told(Generic[_T]):
    """What one rank was given.

    Attributes:
        digest: of all that must be the same on every rank.
        text: the same in words, for the error where ranks differ.
        value: what the rank made of it.
    """

    digest: int
    text: str
    value: _T


def agree(group: Group, what: str, given: Callable[[], Told[_T]]) -> Told[_T]:
    """Compare what ranks were given; collective, also for a rank that refuses it.

    Args:
        group: of the ranks.
        what: the name of the call, for errors.
        given: looks at this rank's arguments, and raises where it refuses them.

    Raises:
        Exception: what `given` raised; no other rank waits for this one.
        CollectiveMismatch: another rank's `given` raised, or what it was given differs.
    """
    mine: list[Told[_T]] = []

    def tell() -> tuple[int, str]:
        told = given()
        mine.append(told)
        return told.digest, told.text

    def compare(said: list[tuple[int, str]]) -> None:
        others = [rank for rank, (digest, _) in enumerate(said) if digest != said[0][0]]
        if others:
            raise CollectiveMismatch(
                f"{what}: rank(s) {others} were given something else than rank 0: rank "
                f"{others[0]} {said[others[0]][1]}; rank 0 {said[0][1]}"
            )

    ranks_agree(group.all_gather, what, tell, compare, refusal=CollectiveMismatch)
    return mine[0]


def check_same_call(groups: Groups, agreement: Agreement, in_all: bool) -> None:
    """Compare what a dense call is about, whose messages do not say it; collective.

    Args:
        groups: of this rank.
        agreement: what the call is about.
        in_all: whether calls begin in the group of all ranks, as those of hooks that only average
            do, and not as `Groups.gather` says; the same on all ranks.

    Raises:
        CollectiveMismatch: another rank's call is about something else.
    """
    mine = agreement.header(True, [])
    row = np.zeros(_CALL, np.uint8)
    mine.write(row)
    whole = [(range(groups.all.size), groups.all.all_gather(row))] if in_all else groups.gather(row)
    for senders, rows in whole:
        if (rows != row).any():  # who differs, and in what
            read_headers(list(rows), mine, senders)
