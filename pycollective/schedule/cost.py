"""What a collective costs: an algorithm's counts, priced in seconds.

The model is linear. A step costs a latency, a message its handling, a byte its way, an addition its
time, and the parts of an algorithm are added up as though nothing overlapped. Within a host the
busiest rank counts; between hosts the busiest host, because its ranks share one link. (Local and
distant bytes of one step are added, too: where both are much, the truth lies up to a factor of two
below.)

After Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994), with LogGP's
cost of a message (Alexandrov et al., SPAA 1995), and a rate of additions as in Thakur, Rabenseifner
and Gropp, IJHPCA 19 (2005), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pycollective.errors import ConfigurationError

from .counts import Load, Phases
from .schedule import make_schedule
from .topology import Topology


@dataclass(frozen=True)
class Element:
    """How large elements are; of each type, see `pycollective.planning.elements`.

    Attributes:
        size: bytes of one in the caller's buffer.
        accumulator: bytes of one in the type in which it is added, and in which nodes travel.
    """

    size: int
    accumulator: int


@dataclass(frozen=True)
class Link:
    """What it takes to send; all in seconds.

    Attributes:
        latency: of a step, however little it carries.
        message: of handling a message: within a host, for a rank; between hosts, at each end, one
            after the other for all ranks of a host.
        byte: of a byte on its way.
    """

    latency: float
    message: float
    byte: float


@dataclass(frozen=True)
class Links:
    """What the machines can do.

    Attributes:
        local: between ranks of one host; each rank sends at this rate.
        across: between hosts; all ranks of a host share this rate.
        add: seconds to add a byte of accumulators to another.
    """

    local: Link
    across: Link
    add: float


# Round numbers to begin with, where nothing is measured: shared memory, and 100 Gb/s between hosts.
TYPICAL = Links(
    local=Link(latency=1e-6, message=0.3e-6, byte=1 / 10e9),
    across=Link(latency=10e-6, message=1e-6, byte=1 / 12.5e9),
    add=1 / 20e9,
)

# What ``algorithm="auto"`` goes by between hosts, by transport: round numbers with which it chooses
# well among what benchmarks/auto_choice.py, cost_model.py and between_hosts.py measure. They price
# nothing well, for they must serve slow links and fast ones; what decides is how many bytes cost as
# much as a message: some 25 KB over MPI, and 200 KB over Gloo (less on a link of 1 Gbit/s, more
# where hosts are played on one machine).
BETWEEN_HOSTS = {
    "mpi": Links(
        local=Link(latency=2e-6, message=0.5e-6, byte=1 / 8e9),
        across=Link(latency=15e-6, message=6e-6, byte=1 / 4e9),
        add=1 / 8e9,
    ),
    "c10d": Links(
        local=Link(latency=5e-6, message=1e-6, byte=1 / 8e9),
        across=Link(latency=20e-6, message=200e-6, byte=1 / 1e9),
        add=1 / 8e9,
    ),
}


@lru_cache(maxsize=256)
def counts(operation: str, algorithm: str, topology: Topology) -> Phases:
    """What the busiest rank and host do in each phase, by the algorithm's formula.

    Raises:
        ConfigurationError: there is no such operation or algorithm, or the one cannot do the other.
    """
    return make_schedule(operation, algorithm, topology).algorithm.counts[operation](topology)


def price(
    operation: str,
    algorithm: str,
    topology: Topology,
    size: int,
    element: Element,
    links: Links,
) -> float:
    """Seconds that a collective is expected to take.

    Args:
        operation: the collective, as in `Communicator`. One with a root is priced for root 0.
        algorithm: as in ``algorithm=``.
        topology: which ranks share a host.
        size: bytes of a rank's input or output, whichever is larger.
        element: of the buffer.
        links: what the machines can do.

    Raises:
        ConfigurationError: there is no such operation or algorithm, or the one cannot do the other;
            the size is negative.
    """
    if size < 0:
        raise ConfigurationError(f"a buffer of {size} bytes cannot be priced; give 0 or more")
    wide = element.accumulator / element.size
    seconds = 0.0
    for phase in counts(operation, algorithm, topology):
        slowest = links.across if phase.across.messages else links.local
        seconds += slowest.latency * phase.steps
        seconds += _sending(phase.local, links.local, size, wide)
        seconds += _sending(phase.across, links.across, size, wide)
        seconds += phase.adds * size * wide * links.add
    return seconds


def _sending(load: Load, link: Link, size: int, wide: float) -> float:
    buffers = load.leaves + load.nodes * wide + load.results
    return load.messages * link.message + buffers * size * link.byte
