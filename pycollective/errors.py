"""The error hierarchy (docs/reference/errors.md).

A `CollectiveError` fails the communicator: it refuses further work at once, on every rank. Buffers
of the failed call are undefined, all others are untouched. `Communicator.failure` keeps the cause.
A `ConfigurationError` is raised before anything moves and leaves the communicator usable.
"""

from __future__ import annotations

from collections.abc import Sequence

_NAMED_AT_MOST = 32  # ranks in a message; kMostAbsent of gloo_link.cpp is one more


def named(ranks: Sequence[int], counted: bool = True) -> str:
    """Return these ranks as words of a message: ``rank(s) 1, 3``.

    Args:
        ranks: in order.
        counted: whether they are all; otherwise there may be others beyond the last.
    """
    more = len(ranks) - _NAMED_AT_MOST
    names = ", ".join(map(str, ranks[:_NAMED_AT_MOST]))
    return f"rank(s) {names}" + (f" and {more} more" if counted else " and more") * (more > 0)


def in_words(error: BaseException) -> str:
    """Return an error's type and text, whatever its text may be."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of a broken __str__
        return type(error).__name__


class CollectiveError(RuntimeError):
    """A collective operation failed.

    Attributes:
        rank: the rank that reports, in the communicator of the operation.
        op: name of the operation, such as ``"all_reduce"``.
        sequence: number of the operation in its communicator, from 1.
    """

    def __init__(self, message: str, rank: int = -1, op: str = "", sequence: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.sequence = sequence

    def __reduce__(self) -> tuple[type, tuple[str, int, str, int]]:
        return type(self), (str(self), self.rank, self.op, self.sequence)


class PeerFailure(CollectiveError):
    """A rank died: the message says which, and how it was seen."""


class CollectiveTimeout(CollectiveError):
    """Not every rank arrived in time: the message names the absentees."""


class CollectiveMismatch(CollectiveError):
    """Ranks called different operations, counts, dtypes, reduce-ops or deals; no data moved."""


class CollectiveAborted(CollectiveError):
    """A rank aborted the group: by `Communicator.abort`, Ctrl-C, or leaving with work pending."""


class ConfigurationError(ValueError):
    """The call or the set-up is wrong as given; nothing moved, nothing was changed."""
