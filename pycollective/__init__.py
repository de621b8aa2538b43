"""Collective communication for gradient synchronisation: the same bits everywhere, fast."""

from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigurationError,
    PeerFailure,
)

__all__ = [
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigurationError",
    "PeerFailure",
]
