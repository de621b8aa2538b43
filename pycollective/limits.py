"""How many there can be: ranks, and open files of this process."""

from __future__ import annotations

import errno
import os
import resource

from pycollective.errors import ConfigurationError

MAX_RANKS_PER_HOST = 64  # the width of the masks in shared memory: kMaxMembers
# Of a world, on however many hosts: what is tested. Native code checks only what its numbers can
# count, which is more: kCountableRanks (csrc/types.h).
MAX_RANKS = 4096

_STRANGERS = 192  # for whom a store has room beside its clients
_OTHER_FILES = 64  # descriptors that the serving process needs for itself


def connections_for(clients: int) -> int:
    """For how many connections a store has room where `clients` must have theirs."""
    if clients <= MAX_RANKS_PER_HOST:
        return MAX_RANKS_PER_HOST + _STRANGERS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = limit - len(os.listdir("/proc/self/fd")) - _OTHER_FILES
    if free < clients:
        raise ConfigurationError(
            f"a store for {clients} ranks needs {clients + limit - free} open files, and this "
            f"process may open {limit}: raise its limit (ulimit -n), or give a store that another "
            "process serves, such as torch's"
        )
    return min(clients + _STRANGERS, free)


def described(error: OSError) -> str:
    """The error in words; with the limit and the cure where no more files can be opened."""
    if error.errno != errno.EMFILE:
        return str(error)
    # csrc/bindings/errors_py.cpp has the same words for errors of native code.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error}: this process may have {limit}, raise its limit (ulimit -n)"
