"""Collective communication for gradient synchronisation: the same bits everywhere, fast."""

from pycollective.bootstrap import init
from pycollective.communicator import Communicator
from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigurationError,
    PeerFailure,
)
from pycollective.version import VERSION as __version__

__all__ = [
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
