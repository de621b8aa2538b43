"""Ranks agree: each says something, all compare all of it, and all raise or none.

A rank raises only once all others have heard why. Whoever leaves a ``with`` block by an exception
aborts its communicator, and a rank that has not heard yet would raise that abort instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import numpy as np

from pycollective.errors import CollectiveMismatch, ConfigurationError, named

T = TypeVar("T")
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_MOST_BYTES = 1 << 16  # that a rank says
MOST_TEXT = 600  # characters of an error that others are told
# Bytes of the first message. Calls of other kinds begin with multiples of 8, by which ranks find
# out that they make different ones.
_LENGTH = 9


def agree(
    all_gather: Callable[[Bytes], Bytes],
    what: str,
    given: Callable[[], T],
    check: Callable[[list[T]], None] = lambda values: None,
    *,
    concerns: Container[int] | None = None,
    refusal: type[Exception] = ConfigurationError,
) -> list[T]:
    """Return what `given` returns on each rank. Collective, also for a rank where it raises.

    Args:
        all_gather: hands every rank's row of bytes to all ranks: (n,) in, (size, n) out.
        what: names the call in errors.
        given: returns what this rank says, a value that JSON has, or raises.
        check: raises where the values do not go together; the same on all ranks.
        concerns: the ranks whose errors this rank raises too; None for all.
        refusal: what this rank raises where another's `given` has raised.

    Raises:
        Exception: what `given` or `check` raised here, or a `refusal` that names other ranks.
    """
    problem: Exception | None = None
    try:
        mine = json.dumps({"value": given()})
    except Exception as error:  # raised below, when all have heard
        problem = error
        mine = json.dumps({"error": f"{type(error).__name__}: {error}"[:MOST_TEXT]})
    said = [json.loads(each) for each in all_gather_texts(all_gather, mine)]
    refused = [rank for rank, each in enumerate(said) if "error" in each]
    values = [each.get("value") for each in said]
    if not refused:
        try:
            check(values)
            return values
        except Exception as error:
            problem = error
    its = [rank for rank in refused if concerns is None or rank in concerns]
    if problem is None and its:
        problem = refusal(f"{what}: refused on {named(its)}: {said[its[0]]['error']}")
    let_all_hear(all_gather)
    if problem is not None:
        raise problem
    return values


def let_all_hear(all_gather: Callable[[Bytes], Bytes]) -> None:
    """Wait until every rank knows what follows; at most the group's timeout."""
    # Whatever the group raises, torch's RuntimeErrors among it: the refusal is what matters now.
    with suppress(Exception):
        all_gather(np.zeros(1, np.uint8))


def refuse_unlike(call: str, said: list[dict[str, Any]], but: str = "") -> None:
    """Refuse ranks that say other than rank 0, as `check` of `agree`; `but` may be unlike."""
    for what, value in said[0].items():
        others = [rank for rank, each in enumerate(said) if each[what] != value]
        if others and what != but:
            raise CollectiveMismatch(
                f"{call}: {named(others)} have other {what} than rank 0: "
                f"{said[others[0]][what]}, not {value}"
            )


def all_gather_texts(
    all_gather: Callable[[Bytes], Bytes], mine: str, most: int = _MOST_BYTES
) -> list[bytes]:
    """Return every rank's text of up to `most` bytes; where all are empty in one message.

    The lengths go first, then all texts as long as the longest.
    """
    text = np.frombuffer(mine.encode(), np.uint8)
    length = np.zeros(_LENGTH, np.uint8)
    length[:8] = np.array([text.size], np.int64).view(np.uint8)
    lengths = np.ascontiguousarray(all_gather(length)[:, :8]).view(np.int64)[:, 0]
    if lengths.min() < 0 or lengths.max() > most:
        raise CollectiveMismatch("ranks make different calls, or what they said was damaged")
    if not lengths.any():
        return [b""] * len(lengths)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: text.size] = text
    rows = all_gather(padded)
    return [row[:n].tobytes() for row, n in zip(rows, lengths, strict=True)]
