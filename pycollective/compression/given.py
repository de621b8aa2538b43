"""What ranks were given, compared by all of them before anything is done with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pycollective.agree import agree
from pycollective.compression.groups import Group
from pycollective.errors import CollectiveMismatch

_T = TypeVar("_T")


@dataclass(frozen=True)
class Given(Generic[_T]):
    """What one rank was given.

    Attributes:
        digest: of all that must be the same on every rank.
        text: the same in words, for the error where ranks differ.
        value: what the rank made of it.
    """

    digest: int
    text: str
    value: _T


def compare(group: Group, what: str, given: Callable[[], Given[_T]]) -> Given[_T]:
    """Compare what ranks were given; collective, also for a rank that refuses it.

    Args:
        group: of the ranks.
        what: the name of the call, for errors.
        given: looks at this rank's arguments, and raises where it refuses them.

    Raises:
        Exception: what `given` raised; no other rank waits for this one.
        CollectiveMismatch: another rank's `given` raised, or what it was given differs.
    """
    mine: list[Given[_T]] = []

    def tell() -> tuple[int, str]:
        found = given()
        mine.append(found)
        return found.digest, found.text

    def check(said: list[tuple[int, str]]) -> None:
        others = [rank for rank, (digest, _) in enumerate(said) if digest != said[0][0]]
        if others:
            raise CollectiveMismatch(
                f"{what}: rank(s) {others} were given something else than rank 0: rank "
                f"{others[0]} {said[others[0]][1]}; rank 0 {said[0][1]}"
            )

    agree(group.all_gather, what, tell, check, refusal=CollectiveMismatch)
    return mine[0]
