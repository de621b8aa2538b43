"""What the user asked to be measured, checked before anything starts; and sizes as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pycollective import reference
from pycollective.bench.libraries import DEVICES, Library
from pycollective.bench.operations import Operation, find_operation
from pycollective.bench.ranks.case import PAGE
from pycollective.communicator import WIRES
from pycollective.config import MAX_RANKS_PER_HOST
from pycollective.dtypes import DTYPES, REDUCE_OPS, numpy_type
from pycollective.errors import ConfigurationError
from pycollective.schedule import Topology

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """One benchmark. Raises `ConfigurationError` if it cannot be measured.

    Attributes:
        operation: name of the collective.
        sizes: bytes of the whole message, each.
        ranks: processes a library.
        dtype: name of the element type, unless a library has one of its own.
        reduce_op: sum, avg, …; ignored where nothing is reduced.
        root: of broadcast, gather and scatter.
        algorithm: for this library's ranks.
        topology: the hosts that this library's ranks simulate, as in `pycollective.init`; empty for
            the real one.
        wire: how this library's ranks send data to other hosts, as in `pycollective.init`.
        device: where the arrays lie: cpu, or cuda, each host's GPUs in turn.
        offsets: bytes behind a page where the ranks' buffers begin, in turn.
        peers: what it is compared with.
        iterations: timed calls a round; 0 lets `round_seconds` decide.
        warmup: untimed calls before a size.
        checks: calls a size whose result is compared with the reference.
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
    wire: str = "raw"
    device: str = "cpu"
    offsets: tuple[int, ...] = (16,)
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
        if self.reduce_op not in REDUCE_OPS:
            raise ConfigurationError(
                f"unknown reduce operation {self.reduce_op!r}; there are {', '.join(REDUCE_OPS)}"
            )
        for name in (self.dtype, *(peer.dtype for peer in self.peers if peer.dtype)):
            dtype = numpy_type(name)
            if operation.reduces and not reference.is_defined(dtype, self.reduce_op):
                raise ConfigurationError(f"{self.reduce_op} has no meaning for {name}")
            for size in self.sizes:
                operation.whole(size, dtype.itemsize, self.ranks)
        item = max(
            DTYPES[name] for name in (self.dtype, *(p.dtype or "" for p in self.peers)) if name
        )
        for offset in self.offsets:
            if not 0 <= offset < PAGE or offset % item:
                raise ConfigurationError(
                    f"--offsets {offset}: give multiples of the element size ({item} bytes) "
                    f"below {PAGE}"
                )
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
            raise ConfigurationError("--iterations, -w and -c cannot be negative")
        if self.rounds < 1:
            raise ConfigurationError("--rounds must be at least 1")

    @property
    def the_operation(self) -> Operation:
        """The operation that `operation` names."""
        return find_operation(self.operation)

    @property
    def hosts(self) -> int:
        """The number of hosts that this library's ranks simulate."""
        return len(Topology.parse(self.topology, self.ranks).hosts) if self.topology else 1

    def item_size(self, library: Library) -> int:
        """Return the bytes of an element of this library's."""
        return DTYPES[library.dtype or self.dtype]


def parse_offsets(text: str) -> tuple[int, ...]:
    """Return the numbers of ``"16"`` or ``"16,1040"``.

    Raises:
        ConfigurationError: something else stands there.
    """
    if not re.fullmatch(r"\d+(,\d+)*", text.strip()):
        raise ConfigurationError(f"--offsets {text!r}: give numbers of bytes, separated by commas")
    return tuple(map(int, text.split(",")))


def parse_size(text: str) -> int:
    """Return the bytes of ``"4096"``, ``"64K"``, ``"1.5M"``, ``"2GiB"``; suffixes are binary.

    Raises:
        ConfigurationError: not a size, or not a whole number of bytes.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"{text!r} is not a size: write bytes, or a number with K, M or G, such as 64K"
        )
    number, unit = match.groups()
    size = float(number) * _UNITS[unit.upper()]
    if size != int(size):
        raise ConfigurationError(f"{text!r} is {size} bytes, which is not a whole number")
    return int(size)


def format_size(size: int) -> str:
    """Return the shortest exact form: 65536 is ``"64K"``, 1000 is ``"1000"``."""
    for unit in ("G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def ladder(begin: int, end: int, step_bytes: int, step_factor: float) -> list[int]:
    """Return sizes from `begin` to `end` bytes: each `step_factor` times the one before, or, where
    that is 0, `step_bytes` apart.

    Raises:
        ConfigurationError: the ladder is empty or would never end.
    """
    if begin < 1 or end < begin:
        raise ConfigurationError(
            f"sizes go from -b {begin} to -e {end}: need 1 <= begin <= end (in bytes)"
        )
    if step_factor and step_factor <= 1:
        raise ConfigurationError(f"-f {step_factor:g} does not grow: it must be more than 1")
    if not step_factor and step_bytes < 1:
        raise ConfigurationError("give a step: -f FACTOR (more than 1) or -i BYTES (at least 1)")
    sizes = [begin]
    while True:
        last = sizes[-1]
        # A factor close to 1 on a small size rounds to no step at all.
        following = max(int(last * step_factor), last + 1) if step_factor else last + step_bytes
        if following > end:
            return sizes
        sizes.append(following)
