"""What carrying out an algorithm takes, counted by formula: without making its schedule.

Each algorithm has its formulas in a file beside its own (`ring_counts.py`). They follow the
busiest: in each phase the rank, and between hosts the host, that sends or receives most. They are
exact where the ranks are a power of two and hosts hold equal blocks of ranks whose size is a power
of two, and on one host for any number of ranks but by halving-doubling. Elsewhere they may be off,
mostly upwards, because they take the worst of each quantity though no rank meets all of them (the
largest errors stand in tests/schedule/test_counts.py). Operations with a root are counted for root
0.

The cost of a formula grows with the ranks and hosts, never with shards x ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress
from operator import eq, ne

from .topology import Topology


@dataclass(frozen=True)
class Load:
    """What the busiest sends, or receives if that is more.

    Attributes:
        messages: within a host what a rank sends, or receives if that is more; across hosts what
            all ranks of a host send and receive together, since each takes its cores some time.
        leaves, nodes, results: buffers, as multiples of the whole buffer, which is a rank's input
            or output, whichever is larger. Within a host those of one rank; across hosts those of
            all ranks of a host together, since they share its link.
    """

    messages: int = 0
    leaves: float = 0
    nodes: float = 0
    results: float = 0

    @property
    def buffers(self) -> float:
        """Buffers of any kind."""
        return self.leaves + self.nodes + self.results

    @property
    def weight(self) -> float:
        """By which the busiest is found. Nodes of 16-bit types are twice as large as leaves."""
        return self.buffers + self.nodes

    def times(self, buffers: float, messages: int = 1) -> Load:
        """So many times the buffers, in so many times the messages."""
        return Load(
            self.messages * messages,
            self.leaves * buffers,
            self.nodes * buffers,
            self.results * buffers,
        )

    def plus(self, other: Load) -> Load:
        """What one does that has both."""
        return Load(
            self.messages + other.messages,
            self.leaves + other.leaves,
            self.nodes + other.nodes,
            self.results + other.results,
        )

    def or_more(self, other: Load) -> Load:
        """Whichever weighs more; with the larger number of messages."""
        heavier = max(self, other, key=lambda load: (load.weight, load.buffers))
        messages = max(self.messages, other.messages)
        return Load(messages, heavier.leaves, heavier.nodes, heavier.results)


NOTHING = Load()
# A message of one buffer of each kind, to be multiplied with `Load.times`.
LEAF, NODE, RESULT = Load(1, leaves=1), Load(1, nodes=1), Load(1, results=1)


@dataclass(frozen=True)
class Phase:
    """Steps that follow each other and are alike; all numbers are sums over these steps.

    Attributes:
        local: what is sent between ranks of one host.
        across: what is sent between hosts.
        adds: additions of the busiest rank, as multiples of the whole buffer's elements.
        steps: number of steps, of those in which something is sent.
    """

    local: Load = NOTHING
    across: Load = NOTHING
    adds: float = 0
    steps: int = 1


Phases = tuple[Phase, ...]
Formula = Callable[[Topology], Phases]


@dataclass(frozen=True)
class Transfer:
    """Messages of one step that carry alike.

    Attributes:
        sources, targets: ranks, pair by pair. Not looked at where all ranks share a host.
        load: of each message.
        each: messages of a source.
    """

    sources: Iterable[int]
    targets: Iterable[int]
    load: Load
    each: int = 1


class _Crossing:
    """Which messages of a transfer cross hosts.

    Attributes:
        local: the most messages of one rank that do not.
        sent, taken: messages that cross, by host.
    """

    def __init__(self, topology: Topology, transfer: Transfer) -> None:
        ranks = list(transfer.sources)
        host_of = topology.host_of.__getitem__
        sources, targets = list(map(host_of, ranks)), list(map(host_of, transfer.targets))
        crosses = list(map(ne, sources, targets))
        self.sent = Counter(compress(sources, crosses))
        self.taken = Counter(compress(targets, crosses))
        if transfer.each == 1:
            self.local = int(not all(crosses))
        else:
            self.local = _most(compress(ranks, map(eq, sources, targets)))


def _most(ranks: Iterable[int]) -> int:
    """How often the most frequent rank occurs."""
    return max(Counter(ranks).values(), default=0)


def step(topology: Topology, *transfers: Transfer, adds: float = 0) -> Phase:
    """The phase of one step, of which it is counted which messages cross hosts.

    A rank takes part in one transfer only, or what else it has to do there takes less.
    """
    local, busiest = NOTHING, NOTHING
    if len(topology.hosts) == 1:  # no need to look which messages cross
        for transfer in transfers:
            local = local.or_more(transfer.load.times(transfer.each, transfer.each))
        return Phase(local, adds=adds)
    crossings = [_Crossing(topology, transfer) for transfer in transfers]
    for transfer, crossing in zip(transfers, crossings, strict=True):
        local = local.or_more(transfer.load.times(crossing.local, crossing.local))
    for by_host in ([each.sent for each in crossings], [each.taken for each in crossings]):
        # Many hosts, but few ways in which they differ.
        hosts = set().union(*by_host)
        for numbers in {tuple(each[host] for each in by_host) for host in hosts}:
            load = NOTHING
            for transfer, number in zip(transfers, numbers, strict=True):
                load = load.plus(transfer.load.times(number, messages=0))
            busiest = busiest.or_more(load)
    handled: Counter[int] = Counter()
    for crossing in crossings:
        handled.update(crossing.sent)
        handled.update(crossing.taken)
    return Phase(local, Load(max(handled.values(), default=0)).plus(busiest), adds)


def on_the_way_back(phases: Phases) -> Phases:
    """The same messages the other way, last first, each with the result of what it carried."""
    return tuple(
        Phase(
            Load(phase.local.messages, results=phase.local.buffers),
            Load(phase.across.messages, results=phase.across.buffers),
            steps=phase.steps,
        )
        for phase in reversed(phases)
    )


def ceil_div(a: int, b: int) -> int:
    """The least integer that is at least ``a / b``."""
    return -(-a // b)
