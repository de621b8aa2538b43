"""What the user asked to be measured, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from pycollective import reference
from pycollective.bench.libraries import DEVICES, Library
from pycollective.bench.operations import Operation, find_operation
from pycollective.bench.problem import DTYPES, REDUCE_OPS, numpy_type
from pycollective.communicator import WIRES
from pycollective.config import MAX_RANKS_PER_HOST
from pycollective.errors import ConfigurationError
from pycollective.schedule import Topology


@dataclass(frozen=True)
class Settings:
    """One benchmark. Raises `ConfigurationError` when made from what cannot be measured.

    Attributes:
        operation: name of the collective.
        sizes: bytes of the whole message, each.
        ranks: processes a library.
        dtype: name of the element type.
        reduce_op: sum, avg, …; ignored where nothing is reduced.
        root: of broadcast.
        algorithm: for this library's ranks.
        topology: the hosts that this library's ranks play, as `pycollective.init` has it; empty for
            the one that there is.
        wire: how what this library's ranks send to other hosts travels, as `pycollective.init` has
            it.
        device: where the arrays lie: cpu, or cuda, each host's GPUs in turn.
        peers: what it is compared with.
        iterations: timed calls a round; 0 lets `round_seconds` decide.
        warmup: untimed calls before a size.
        checks: calls a size whose result is compared with the oracle.
        rounds: how often each library has its turn, for each size.
        round_seconds: about how long a turn is, where `iterations` is 0.
        seed: of the inputs.
        mpi_environments: folder of the environment of each MPI, by name.
    """

    operation: str = "all_reduce"
    sizes: tuple[int, ...] = (1 << 10,)
    ranks: int = 2
    dtype: str = "float32"
    reduce_op: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    topology: str = ""
    wire: str = "auto"
    device: str = "cpu"
    peers: tuple[Library, ...] = ()
    iterations: int = 0
    warmup: int = 5
    checks: int = 1
    rounds: int = 7
    round_seconds: float = 0.02
    seed: int = 1
    mpi_environments: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        operation = find_operation(self.operation)
        if not 1 <= self.ranks <= MAX_RANKS_PER_HOST:
            raise ConfigurationError(
                f"--ranks {self.ranks}: from 1 to {MAX_RANKS_PER_HOST} ranks share a host"
            )
        dtype = numpy_type(self.dtype)
        if self.reduce_op not in REDUCE_OPS:
            raise ConfigurationError(
                f"unknown reduce operation {self.reduce_op!r}; there are {', '.join(REDUCE_OPS)}"
            )
        if operation.reduces and not reference.is_defined(dtype, self.reduce_op):
            raise ConfigurationError(f"{self.reduce_op} has no meaning for {self.dtype}")
        if not 0 <= self.root < self.ranks:
            raise ConfigurationError(f"root {self.root} is not one of {self.ranks} ranks")
        if self.wire not in WIRES:
            raise ConfigurationError(f"unknown wire {self.wire!r}; there are {', '.join(WIRES)}")
        if self.device not in DEVICES:
            raise ConfigurationError(
                f"unknown device {self.device!r}; there are {', '.join(DEVICES)}"
            )
        if self.topology:
            Topology.parse(self.topology, self.ranks)
        if self.iterations < 0 or self.warmup < 0 or self.checks < 0:
            raise ConfigurationError("-n, -w and -c cannot be negative")
        if self.rounds < 1:
            raise ConfigurationError("--rounds must be at least 1")
        for size in self.sizes:
            operation.whole(size, dtype.itemsize, self.ranks)

    @property
    def the_operation(self) -> Operation:
        """What `operation` names."""
        return find_operation(self.operation)

    @property
    def hosts(self) -> int:
        """How many hosts this library's ranks play."""
        return len(Topology.parse(self.topology, self.ranks).hosts) if self.topology else 1

    @property
    def item_size(self) -> int:
        """Bytes an element."""
        return DTYPES[self.dtype]
