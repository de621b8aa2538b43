"""What a collective costs: what its steps send and add, counted and priced in seconds.

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

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

from pycollective.errors import ConfigurationError

from .schedule import make_schedule
from .steps import Combine, Send, Type
from .topology import Topology


@dataclass(frozen=True)
class Element:
    """How large elements are; of each type, see `pycollective.planning.tuning_table`.

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


# Of more ranks not all steps are counted (`select.py`, `layout.py`): this takes some tenths of a
# second.
COUNTED_RANKS = 64

# Round numbers to begin with, where nothing is measured: shared memory, and 100 Gb/s between hosts.
TYPICAL = Links(
    local=Link(latency=1e-6, message=0.3e-6, byte=1 / 10e9),
    across=Link(latency=10e-6, message=1e-6, byte=1 / 12.5e9),
    add=1 / 20e9,
)

# What ``algorithm="auto"`` goes by between hosts, by transport: round numbers with which it chooses
# well among what was measured (benchmarks/results: auto_choice, cost_model, between_hosts_mpi).
# They price nothing well, for they must serve slow links and fast ones. What decides is how many
# bytes cost as much as a message: some 25 KB over MPI, and 200 KB over Gloo (less on a link of 1
# Gbit/s, more where hosts are simulated on one machine).
BETWEEN_HOSTS = {
    "mpi": Links(
        local=Link(latency=2e-6, message=0.5e-6, byte=1 / 8e9),
        across=Link(latency=15e-6, message=6e-6, byte=1 / 4e9),
        add=1 / 8e9,
    ),
    "gloo": Links(
        local=Link(latency=5e-6, message=1e-6, byte=1 / 8e9),
        across=Link(latency=20e-6, message=200e-6, byte=1 / 1e9),
        add=1 / 8e9,
    ),
}


@dataclass(frozen=True)
class Load:
    """What the busiest sends, or receives if that is more.

    Attributes:
        messages: within a host those of one rank; across hosts what all ranks of a host send and
            receive together, since each takes its cores some time.
        leaves, nodes, results: buffers, as multiples of the whole buffer, which is a rank's input
            or output, whichever is larger. Within a host those of one rank; across hosts those of
            all ranks of a host together, since they share its link.
    """

    messages: int = 0
    leaves: float = 0
    nodes: float = 0
    results: float = 0


@dataclass(frozen=True)
class StepCost:
    """What the busiest do in a step.

    Attributes:
        local: what is sent between ranks of one host.
        across: what is sent between hosts.
        adds: additions of a rank, as multiples of the whole buffer's elements.
    """

    local: Load
    across: Load
    adds: float


class _Sent(dict[int, list[int]]):
    """Messages, leaves, nodes and results, by rank or by host."""

    def __missing__(self, who: int) -> list[int]:
        own = self[who] = [0, 0, 0, 0]
        return own

    def busiest(self) -> list[int]:
        """Of the one that sends most; nodes of 16-bit types are twice as large as leaves."""
        return max(self.values(), key=lambda own: own[1] + 2 * own[2] + own[3], default=[0] * 4)


# By name here, since a member of an enum takes longer to find than the rest of a line.
_LEAF, _NODE = Type.LEAF, Type.NODE


@dataclass
class _Step:
    """What is sent in a step."""

    # By source and target: leaves, nodes and results, in shards.
    messages: dict[tuple[int, int], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0, 0])
    )
    adds: Counter[int] = field(default_factory=Counter)  # by rank

    def cost(self, host_of: tuple[int, ...], shards: int) -> StepCost:
        sent_here, received_here, sent_across, received_across = _Sent(), _Sent(), _Sent(), _Sent()
        for (source, target), buffers in self.messages.items():
            here, there = host_of[source], host_of[target]
            if here == there:
                ends = sent_here[source], received_here[target]
            else:
                ends = sent_across[here], received_across[there]
            for own in ends:
                own[0] += 1
                for kind, count in enumerate(buffers, 1):
                    own[kind] += count
        handled = Counter({host: own[0] for host, own in sent_across.items()})
        handled.update({host: own[0] for host, own in received_across.items()})
        local = max(
            each[0] for sent in (sent_here, received_here) for each in (*sent.values(), [0])
        )
        return StepCost(
            _load(local, sent_here, received_here, shards),
            _load(max(handled.values(), default=0), sent_across, received_across, shards),
            max(self.adds.values(), default=0) / shards,
        )


def _load(messages: int, sent: _Sent, received: _Sent, shards: int) -> Load:
    both = _Sent(enumerate((sent.busiest(), received.busiest())))
    return Load(messages, *(count / shards for count in both.busiest()[1:]))


@lru_cache(maxsize=256)
def counts(operation: str, algorithm: str, topology: Topology) -> tuple[StepCost, ...]:
    """What the busiest rank and host do in each step, for root 0: counted from all ranks' steps.

    Raises:
        ConfigurationError: there is no such operation or algorithm, or the one cannot do the other.
    """
    schedule = make_schedule(operation, algorithm, topology)
    shards = topology.ranks if schedule.operation.pieces == "pairs" else schedule.shards
    found: defaultdict[int, _Step] = defaultdict(_Step)
    for rank in range(topology.ranks):
        for _, (steps, types) in schedule.lowered_for(rank):
            for step in steps:
                if type(step) is Send:
                    buffers = found[step.step].messages[rank, step.to]
                    for buffer in step.buffers:
                        kind = types[buffer]
                        buffers[0 if kind is _LEAF else 1 if kind is _NODE else 2] += 1
                elif type(step) is Combine:
                    found[step.step].adds[rank] += len(step.operands) - 1
    return tuple(
        found[number].cost(topology.host_of, shards)
        for number in sorted(found)
        if found[number].messages
    )


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
    for step in counts(operation, algorithm, topology):
        slowest = links.across if step.across.messages else links.local
        seconds += slowest.latency
        seconds += _sending(step.local, links.local, size, wide)
        seconds += _sending(step.across, links.across, size, wide)
        seconds += step.adds * size * wide * links.add
    return seconds


def _sending(load: Load, link: Link, size: int, wide: float) -> float:
    buffers = load.leaves + load.nodes * wide + load.results
    return load.messages * link.message + buffers * size * link.byte
