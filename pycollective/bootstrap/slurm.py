"""Finds where ranks that Slurm's srun started meet, from the variables of their step.

Only the variables of a step count: batch scripts and the shells of salloc have those of their job,
and are one process each. On one node the ranks meet at an abstract Unix socket, which serves only
their own user. Those of several nodes meet at a port of the step's first node, behind a secret that
the user gives to the job: others can learn whatever Slurm tells its tasks.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from pycollective.bootstrap.store import StoreServer, job_secret
from pycollective.config import (
    ENV_PORT,
    ENV_SECRET,
    MAX_RANKS,
    MPI_RANK_VARIABLES,
    MPI_SIZE_VARIABLES,
    environment_number,
)
from pycollective.errors import ConfigurationError

_RANK, _SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
# Below the ports that Linux gives to connections. Steps of one job, and jobs that follow each
# other, have different ones.
_PORTS = range(10000, 30000)
_APART = 31


@dataclass(frozen=True)
class Step:
    """Where the ranks of a step meet.

    Attributes:
        rank: this rank.
        size: number of ranks.
        address: of the store.
        secret: of the store; empty where it serves its own user alone.
        listen: where this rank serves it; empty on all ranks but one.
    """

    rank: int
    size: int
    address: str
    secret: str
    listen: str

    def server(self) -> StoreServer | None:
        """Return the store that this rank serves, or None.

        Raises:
            ConfigurationError: its address is taken.
        """
        if not self.listen:
            return None
        try:
            return StoreServer(self.listen, self.secret, clients=self.size)
        except ConfigurationError as error:
            if not self.secret:
                raise
            raise ConfigurationError(f"{error}. {ENV_PORT} names another port") from error


def detected() -> bool:
    """Return whether srun has started this process as one of several."""
    size, rank = os.environ.get(_SIZE, ""), os.environ.get(_RANK)
    if not size.isdigit() or int(size) < 2:
        return False
    # mpiexec may start its ranks by srun: these have the variables of what started them, too.
    return all(os.environ.get(name, size) == size for name in MPI_SIZE_VARIABLES) and all(
        os.environ.get(name, rank) == rank for name in MPI_RANK_VARIABLES
    )


def find_step() -> Step:
    """Return the step that this process is part of.

    Raises:
        ConfigurationError: variables are missing or wrong, or there is no secret for several nodes.
    """
    rank, size = environment_number(_RANK), environment_number(_SIZE)
    if not 0 <= rank < size <= MAX_RANKS:
        raise ConfigurationError(
            f"by {_RANK} and {_SIZE} this is rank {rank} of {size}: ranks count from 0, and there "
            f"are at most {MAX_RANKS}"
        )
    job, step = environment_number("SLURM_JOB_ID"), environment_number("SLURM_STEP_ID")
    # Rank 0 may be on another node: `srun --distribution` says so.
    first = environment_number("SLURM_NODEID") == environment_number("SLURM_LOCALID") == 0
    if environment_number("SLURM_STEP_NUM_NODES") == 1:
        address = f"unix:@pycollective-slurm-{os.getuid()}-{job}-{step}"
        return Step(rank, size, address, "", address if first else "")
    secret = job_secret()
    if not secret:
        raise ConfigurationError(
            f"Slurm's step has several nodes, whose ranks meet at a port of the first: that wants "
            f"a secret of this job, which srun hands on. Say once before srun: "
            f"export {ENV_SECRET}=$(openssl rand -hex 16)"
        )
    chosen = os.environ.get(ENV_PORT)
    port = environment_number(ENV_PORT) if chosen else _PORTS[(job * _APART + step) % len(_PORTS)]
    node = first_node(os.environ.get("SLURM_STEP_NODELIST", ""))
    # Its name may stand for its loopback address there.
    listen = f"tcp://0.0.0.0:{port}" if first else ""
    return Step(rank, size, f"tcp://{node}:{port}", secret, listen)


def first_node(nodes: str) -> str:
    """Return the first of a list as Slurm writes it: ``node03`` of ``node[03-05,7],other1``.

    Raises:
        ConfigurationError: it is none.
    """
    found = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+", nodes)
    if found is None:
        raise ConfigurationError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no node")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])
