"""How ranks leave: at the end of the process every communicator says goodbye."""

from __future__ import annotations

import atexit
import os
import sys
import weakref

from pycollective import mpi_launch
from pycollective.communicator import Communicator
from pycollective.environment import ENV_RANK, ENV_SECRET, ENV_STORE, environment_number
from pycollective.errors import CollectiveError, CollectiveTimeout, ConfigurationError
from pycollective.store import StoreClient

_live: weakref.WeakSet[Communicator] = weakref.WeakSet()
_exit_hook_set = False


def leave_at_exit(communicator: Communicator) -> Communicator:
    """See to it that the communicator is closed before the process ends; gives it back."""
    global _exit_hook_set
    if not _exit_hook_set:
        _exit_hook_set = True
        atexit.register(leave_all)
    _live.add(communicator)
    return communicator


def leave_all() -> None:
    """Say goodbye at exit, so that the peers need not find out: the last chance for both sides."""
    crashed = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    if isinstance(crashed, CollectiveError) and ENV_STORE in os.environ:
        _tell_launcher_that_others_failed()
    for communicator in list(_live):
        if communicator.closed:
            continue
        if communicator.pending:
            communicator.abort("the process exits with operations pending")
        elif crashed is not None:
            communicator.abort("the process exits with an exception")
        try:
            communicator.close()
        except CollectiveError:
            continue  # it had failed before; its own calls have said so
    if crashed is not None:
        mpi_launch.end_after_failure()


def followed_key(rank: int) -> str:
    """The key under which a rank tells `pycollective run` that it ends because of another."""
    return f"pycollective/followed/{rank}"


def _tell_launcher_that_others_failed() -> None:
    address, secret = os.environ[ENV_STORE], os.environ.get(ENV_SECRET, "")
    try:
        client = StoreClient(address, secret, timeout=1.0)
        client.set(followed_key(environment_number(ENV_RANK)), b"")
        client.close()
    except (CollectiveTimeout, ConfigurationError):
        return  # the launcher has gone; it only makes its report more exact
