"""Ranks compare what they were given before any of them goes on, also with one that refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from pycollective.compression.bucket import Agreement, header_bytes, read_headers
from pycollective.compression.groups import Group, Groups
from pycollective.errors import CollectiveMismatch
from pycollective.refusal import let_all_hear

_T = TypeVar("_T")
_SAID = 600  # bytes of what a rank says of itself where ranks differ
# Messages that begin calls of different kinds are of different lengths, by which ranks find out:
# none is a multiple of 8 bytes, as what `exchange_lengths` begins with is.
_DIGEST = 9
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
    told, refusal = None, None
    try:
        told = given()
    except Exception as error:  # raised below, when the others know
        refusal = error
    row = np.zeros(_DIGEST, np.uint8)
    row[:8] = np.array([told.digest if told else 0], np.uint64).view(np.uint8)
    row[8] = refusal is not None
    rows = group.all_gather(row)
    refused = np.flatnonzero(rows[:, 8])
    others = np.flatnonzero((rows[:, :8] != rows[0, :8]).any(axis=1))
    if told and not refused.size and not others.size:
        return told
    said = _said(group, told.text if told else f"{type(refusal).__name__}: {refusal}")
    # Of a length that begins no other call.
    let_all_hear(lambda: group.all_gather(np.zeros(1, np.uint8)))
    if refusal is not None:
        raise refusal
    if refused.size:
        first = int(refused[0])
        raise CollectiveMismatch(f"{what}: refused on rank(s) {refused.tolist()}: {said[first]}")
    raise CollectiveMismatch(
        f"{what}: rank(s) {others.tolist()} were given something else than rank 0: rank "
        f"{int(others[0])} {said[int(others[0])]}; rank 0 {said[0]}"
    )


def _said(group: Group, text: str) -> list[str]:
    """Every rank's text."""
    row = np.zeros(_SAID, np.uint8)
    mine = np.frombuffer(text.encode()[:_SAID], np.uint8)
    row[: mine.size] = mine
    return [each.tobytes().rstrip(b"\0").decode(errors="replace") for each in group.all_gather(row)]


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
