"""What ranks must agree on: compared before any of them goes on, also with one that cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np

from pycollective.compression.bucket import Agreement, read_headers
from pycollective.compression.ends import Ends
from pycollective.compression.groups import Group
from pycollective.compression.messages import header_bytes
from pycollective.errors import CollectiveMismatch

_T = TypeVar("_T")
_SAID = 600  # bytes of what a rank says of itself where ranks differ


def digest_of(told: Any) -> int:
    """64 bits of whatever JSON can say."""
    text = json.dumps(told)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Told(Generic[_T]):
    """What one rank was given.

    Attributes:
        digest: of all that must be the same everywhere.
        text: in words, for the error where it is not.
        value: what came of looking at it.
    """

    digest: int
    text: str
    value: _T


def agree(group: Group, what: str, given: Callable[[], Told[_T]]) -> Told[_T]:
    """Compare what ranks were given; collective, also for a rank that cannot take it.

    Args:
        group: of the ranks.
        what: is called.
        given: looks at this rank's arguments, and raises where they cannot be.

    Raises:
        Exception: what `given` raised; no other rank waits for this one.
        CollectiveMismatch: another rank's `given` raised, or what it was given differs.
    """
    told, refusal = None, None
    try:
        told = given()
    except Exception as error:  # raised below, when the others know
        refusal = error
    row = np.array([told.digest if told else 0, refusal is not None], np.uint64)
    rows = group.all_gather(row.view(np.uint8)).view(np.uint64)
    refused = np.flatnonzero(rows[:, 1])
    others = np.flatnonzero(rows[:, 0] != rows[0, 0])
    if told and not refused.size and not others.size:
        return told
    said = _said(group, told.text if told else f"{type(refusal).__name__}: {refusal}")
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
    """What every rank says."""
    row = np.zeros(_SAID, np.uint8)
    mine = np.frombuffer(text.encode()[:_SAID], np.uint8)
    row[: mine.size] = mine
    return [each.tobytes().rstrip(b"\0").decode(errors="replace") for each in group.all_gather(row)]


def check_same_call(ends: Ends, agreement: Agreement) -> None:
    """Compare what a call is about, where no message of it says so; collective over all ranks.

    Raises:
        CollectiveMismatch: another rank's is about something else.
    """
    mine = agreement.header(True, [])
    row = np.empty(header_bytes(0), np.uint8)
    mine.write(row)
    for senders, rows in ends.gather(row):
        if (rows != row).any():  # who differs, and in what
            read_headers(list(rows), mine, senders)
