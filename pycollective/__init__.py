"""Collective communication for gradient synchronisation: the same bits everywhere, fast."""

from pycollective.communicator import ANY_SOURCE, Communicator
from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigurationError,
    PeerFailure,
)
from pycollective.join.bootstrap import init
from pycollective.version import VERSION as __version__

__all__ = [
    "ANY_SOURCE",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "ConfigurationError",
    "PeerFailure",
    "__version__",
    "init",
]
