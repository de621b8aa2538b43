"""Names, limits and the version, which the ranks of a job and their launcher share."""

from __future__ import annotations

import os
from difflib import get_close_matches

from pycollective.errors import ConfigurationError

VERSION = "0.1.0"  # all ranks of a job must have the same

MAX_RANKS_PER_HOST = 64  # the width of the masks in shared memory: kMaxMembers
# Of a world, on however many hosts: what is tested. Native code checks only what its numbers can
# count, which is more: kCountableRanks (csrc/types.h).
MAX_RANKS = 4096

# Environment variables. `pycollective run` sets these for its ranks:
ENV_RANK, ENV_SIZE = "PYCOLLECTIVE_RANK", "PYCOLLECTIVE_SIZE"
ENV_STORE, ENV_SECRET = "PYCOLLECTIVE_STORE", "PYCOLLECTIVE_SECRET"
# Under --elastic: the fewest ranks that go on; and, of a process that takes another's place, 1.
ENV_ELASTIC, ENV_JOINS = "PYCOLLECTIVE_ELASTIC", "PYCOLLECTIVE_JOINS"
# A user may set these under any launcher. The file holds the secret, in place of the variable.
ENV_SECRET_FILE = "PYCOLLECTIVE_SECRET_FILE"
ENV_TOPOLOGY, ENV_TUNING = "PYCOLLECTIVE_TOPOLOGY", "PYCOLLECTIVE_TUNING"
ENV_WIRE = "PYCOLLECTIVE_WIRE"
ENV_PORT = "PYCOLLECTIVE_PORT"
ENV_DEVICE_PATH = "PYCOLLECTIVE_DEVICE_PATH"
ENV_LATE_AFTER = "PYCOLLECTIVE_LATE_AFTER"
ENV_LEDGER = "PYCOLLECTIVE_LEDGER"
# Every variable PYCOLLECTIVE_…; tests/test_documents.py holds this to variables.md.
VARIABLES = (
    *(ENV_RANK, ENV_SIZE, ENV_STORE, ENV_SECRET, ENV_SECRET_FILE, ENV_TOPOLOGY, ENV_TUNING),
    *(ENV_WIRE, ENV_PORT, ENV_DEVICE_PATH, ENV_LATE_AFTER, ENV_ELASTIC, ENV_JOINS, ENV_LEDGER),
    *("PYCOLLECTIVE_SIMD", "PYCOLLECTIVE_MOVE", "PYCOLLECTIVE_NVRTC"),
    *("PYCOLLECTIVE_CUDA_DRIVER", "PYCOLLECTIVE_CUDA_IMAGES"),
    *("PYCOLLECTIVE_BUILD_JOBS", "PYCOLLECTIVE_TORCH", "PYCOLLECTIVE_WERROR"),
    *("PYCOLLECTIVE_NVCC", "PYCOLLECTIVE_CUDA_ARCHS"),
    *("PYCOLLECTIVE_REQUIRE_MPI", "PYCOLLECTIVE_MPICH_ENV", "PYCOLLECTIVE_OPENMPI_ENV"),
    *("PYCOLLECTIVE_PLANTED", "PYCOLLECTIVE_SUITE_BACKEND"),
    *("PYCOLLECTIVE_STANDIN_DEVICES", "PYCOLLECTIVE_STANDIN_MULTIPROCESSORS"),
    *("PYCOLLECTIVE_STANDIN_PEERS", "PYCOLLECTIVE_STANDIN_VERSION"),
    *("PYCOLLECTIVE_STANDIN_FAIL", "PYCOLLECTIVE_STANDIN_SEED"),
)
# Which rank mpiexec has started this process as, and of how many.
MPI_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
MPI_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

# How a missing piece is installed, for messages: true of a wheel and of an editable install.
INSTALL_MATPLOTLIB = "pip install matplotlib"
INSTALL_TORCH = "pip install 'torch>=2.12,<2.15'"
BUILD_TORCH_BACKEND = "pycollective build-torch"
INSTALL_XXHASH = "pip install xxhash"
INSTALL_MPI4PY = "pip install mpi4py, built against the MPI of your mpiexec"


def unknown_variables() -> list[str]:
    """Return a sentence for each variable of the environment that looks like one of `VARIABLES`."""
    said = []
    for name in os.environ:
        if name in VARIABLES or not name.upper().startswith("PYCO"):
            continue
        near = get_close_matches(name.upper(), VARIABLES, 1, 0.87)
        if near or name.startswith("PYCOLLECTIVE_"):
            there = "docs/reference/variables.md lists those it has"
            cure = f"did you mean {near[0]}?" if near else there
            said.append(f"pycollective has no environment variable {name}: {cure}")
    return said


def environment_number(name: str) -> int:
    """Return the number that an environment variable holds.

    Raises:
        ConfigurationError: it holds none.
    """
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ConfigurationError(f"the environment variable {name} is {value!r}, not a number")
    return int(value)
