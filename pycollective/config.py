"""Names, limits and the version, which the ranks of a job and their launcher share."""

from __future__ import annotations

import os

from pycollective.errors import ConfigurationError

VERSION = "0.1.0"  # all ranks of a job must have the same

MAX_RANKS_PER_HOST = 64  # the width of the masks in shared memory: kMaxMembers
# Of a world, on however many hosts: what is tested. Native code checks only what its numbers can
# count, which is more: kCountableRanks (csrc/types.h).
MAX_RANKS = 4096

# Environment variables. `pycollective run` sets these for its ranks:
ENV_RANK, ENV_SIZE = "PYCOLLECTIVE_RANK", "PYCOLLECTIVE_SIZE"
ENV_STORE, ENV_SECRET = "PYCOLLECTIVE_STORE", "PYCOLLECTIVE_SECRET"
# A user may set these under any launcher. The file holds the secret, in place of the variable.
ENV_SECRET_FILE = "PYCOLLECTIVE_SECRET_FILE"
ENV_TOPOLOGY, ENV_TUNING = "PYCOLLECTIVE_TOPOLOGY", "PYCOLLECTIVE_TUNING"
ENV_WIRE = "PYCOLLECTIVE_WIRE"
ENV_PORT = "PYCOLLECTIVE_PORT"
ENV_DEVICE_PATH = "PYCOLLECTIVE_DEVICE_PATH"
# Which rank mpiexec has started this process as, and of how many.
MPI_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
MPI_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

# How a missing piece is installed, for messages: true of a wheel and of an editable install.
INSTALL_MATPLOTLIB = "pip install matplotlib"
INSTALL_TORCH = "pip install 'torch>=2.12,<2.15'"
BUILD_TORCH_BACKEND = "pycollective build-torch"
INSTALL_MPI4PY = "pip install mpi4py beside the MPI whose mpiexec it is"


def environment_number(name: str) -> int:
    """Return the number that an environment variable holds.

    Raises:
        ConfigurationError: it holds none.
    """
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ConfigurationError(f"the environment variable {name} is {value!r}, not a number")
    return int(value)
