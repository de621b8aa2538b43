"""The error hierarchy, and what still holds after each (docs/errors.md).

`CollectiveError` and its kinds fail the communicator: it refuses further work at once, on every
rank; buffers of the failed call are undefined, all others are untouched; `Communicator.failure`
keeps the cause. `ConfigurationError` is raised before anything moves and leaves the communicator
usable.
"""

from __future__ import annotations


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
    """Ranks called different operations, counts, dtypes or reduce-ops; no data moved."""


class CollectiveAborted(CollectiveError):
    """A rank aborted the group: by `abort()`, by Ctrl-C, or by leaving with work pending."""


class ConfigurationError(ValueError):
    """The call or the set-up cannot be right as given; nothing moved, nothing was changed."""
