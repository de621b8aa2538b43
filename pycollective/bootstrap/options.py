"""`InitOptions`: what the caller of `init` may choose, whatever launch it is."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import cast

from pycollective.communicator import WIRES, Communicator
from pycollective.config import ENV_TOPOLOGY, ENV_WIRE
from pycollective.errors import ConfigurationError
from pycollective.planning.planner import tuning_path
from pycollective.typing import Wire

# How messages go between hosts. Ranks of one host always meet in shared memory.
TRANSPORTS = {
    "shm": "shared memory alone: all ranks on one host",
    "mpi": "between hosts over MPI, through mpi4py: ranks that mpiexec started",
    "gloo": "between hosts over torch.distributed's Gloo: all other ranks",
}


@dataclass(frozen=True)
class InitOptions:
    """What the caller of `init` may choose under any launch."""

    timeout: float
    topology: str
    transport: str
    tuning: str
    wire: str
    device: str | int | None = None

    @classmethod
    def of(
        cls,
        timeout: float,
        topology: str | None,
        transport: str | None,
        tuning: str | os.PathLike[str] | None,
        wire: str | None,
        device: str | int | None = None,
    ) -> InitOptions:
        """Return them, from the arguments of `init` and the environment."""
        if not 0 < timeout < math.inf:
            raise ConfigurationError(f"timeout {timeout} is not a finite number of seconds above 0")
        topology = topology or os.environ.get(ENV_TOPOLOGY, "")
        wire = wire or os.environ.get(ENV_WIRE) or "raw"
        if wire not in WIRES:
            there_are = ", ".join(map(repr, WIRES))
            raise ConfigurationError(f"wire {wire!r} is not here; there are {there_are}")
        return cls(timeout, topology, transport or "", tuning_path(tuning), wire, device)

    @property
    def more(self) -> str:
        """Other options that all ranks must have been given alike, in words."""
        return f"wire {self.wire}, {'no' if self.device is None else 'a'} device"

    def apply(self, communicator: Communicator) -> Communicator:
        """Return the communicator, once it has its wire and its device."""
        communicator.wire = cast(Wire, self.wire)  # one of WIRES, or `of` refuses
        if self.device is not None:
            communicator._begin_with(self.device)
        return communicator

    def check_transport(self, launch: str, by_mpi: bool) -> None:
        """Raise for a transport that does not exist, or not in this launch."""
        if not self.transport:
            return
        if self.transport not in TRANSPORTS:
            there_are = "; ".join(f"{name!r} ({what})" for name, what in TRANSPORTS.items())
            raise ConfigurationError(
                f"transport {self.transport!r} is not here; there are {there_are}"
            )
        if self.transport == "mpi" and not by_mpi:
            raise ConfigurationError(
                f"transport 'mpi' joins ranks that mpiexec started, and this is {launch}: start "
                "with `mpiexec -n N python ...`, or leave transport out"
            )
        if self.transport == "gloo" and by_mpi:
            raise ConfigurationError(
                "transport 'gloo' meets in a store, and mpiexec has none: start the ranks with "
                "torchrun or `pycollective run`, give rank, size and store, or leave transport out"
            )
