"""Where a rank keeps its buffers: the places of its slot, and the order in which it publishes them.

The ranks of its host that receive them must know both. So a rank works them out for itself and for
those of its host that it receives from, each from that rank's own steps. The cost grows with the
shards, and not with shards times ranks.

A buffer has a place in the slot of its rank if it is sent to a rank of the same host, has come from
another host, or is computed; but what is received or computed straight into the output has none.
All ranks set aside the same number of places, their `Workspace`: the most that any rank needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from .cost import COUNTED_RANKS
from .schedule import Schedule
from .steps import INPUT, OUTPUT, Combine, Copy, Receive, Send, Step, Type

IN_INPUT, IN_OUTPUT, IN_NODE, IN_ITEM = range(4)
# Within a step number: as `steps.py` has it.
_PHASE = {Send: 0, Receive: 1, Combine: 2, Copy: 2}

# Place in a slot, its index, and the number of the event that says it is filled.
Sent = tuple[int, int, int]


class Workspace(NamedTuple):
    """What all ranks set aside, so that each knows where the others' places are.

    Attributes:
        nodes, items: places in a slot, for nodes and for what is in the stored type: at least what
            any rank needs.
        steps: step numbers, from 0 to that of the last transfer.
    """

    nodes: int
    items: int
    steps: int


@dataclass
class Layout:
    """A rank's steps, what it sends to ranks of its host, and where that lies.

    Attributes:
        rank: the rank.
        steps: (shard, step), in the order in which it does them.
        places: in its slot: which kind, and the index; by (shard, buffer).
        events: the number of each that it sends on its host; likewise.
        sizes: places of each kind.
        readers: ranks of its host that it sends something.
        sent: by (shard, step number, receiver on its host), the buffers.
    """

    rank: int
    steps: list[tuple[int, Step]]
    places: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    events: dict[tuple[int, int], int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=lambda: {IN_NODE: 0, IN_ITEM: 0})
    readers: set[int] = field(default_factory=set)
    sent: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)

    def place(self, shard: int, buffer: int, kind: Type) -> None:
        """Give a buffer a place, unless it has one."""
        if (shard, buffer) not in self.places:
            where = IN_NODE if kind is Type.NODE else IN_ITEM
            self.places[shard, buffer] = where, self.sizes[where]
            self.sizes[where] += 1

    def sent_to(self, receiver: int, shard: int, step: int) -> list[Sent]:
        """What a rank of its host receives of a shard in a step."""
        return [
            (*self.places[shard, buffer], self.events[shard, buffer])
            for buffer in self.sent[shard, step, receiver]
        ]


def copies_first(schedule: Schedule) -> bool:
    """Whether inputs are copied before they are sent to another host.

    In an all-to-all in place, what arrives from a rank belongs where lies what goes to it.
    """
    return schedule.operation.pieces == "pairs"


def lay_out(schedule: Schedule, rank: int) -> Layout:
    """A rank's layout."""
    host_of = schedule.topology.host_of
    host = host_of[rank]
    copy_inputs = copies_first(schedule)
    types: dict[int, list[Type]] = {}
    steps: list[tuple[int, Step]] = []
    for shard, own_steps in schedule.lowered_for(rank):
        types[shard] = own_steps.types
        steps += [(shard, step) for step in own_steps.steps]
    # Each begins with another shard, so that they do not all want the same one's owner.
    steps.sort(key=lambda at: (at[1][0], _PHASE[type(at[1])], (at[0] - rank) % schedule.shards))
    own = Layout(rank, steps)
    for shard, step in steps:
        if type(step) is Send:
            local = host_of[step.to] == host
            if local:
                own.readers.add(step.to)
                own.sent[shard, step.step, step.to] = step.buffers
            for buffer in step.buffers:
                if local or (copy_inputs and buffer == INPUT):
                    own.place(shard, buffer, types[shard][buffer])
                if local:
                    own.events.setdefault((shard, buffer), len(own.events) + 1)
        elif type(step) is Receive:
            if host_of[step.source] != host:
                for buffer in step.buffers:
                    if buffer != OUTPUT:
                        own.place(shard, buffer, types[shard][buffer])
        elif type(step) is Combine and step.out != OUTPUT:
            own.place(shard, step.out, types[shard][step.out])  # also if it is for this rank alone
    return own


@lru_cache(maxsize=8)
def workspace(schedule: Schedule) -> Workspace:
    """What all ranks set aside: the same on every rank.

    The most that any rank needs. Beyond `COUNTED_RANKS`, of an operation without a root and without
    a deal among hosts of equal blocks of ranks, some ranks are counted, and more is set aside than
    these need: a sixteenth where the number of ranks is a power of two, else half as much. A rank
    that lacked a place would be refused alone, and the others would wait for it; so elsewhere all
    are counted.
    """
    topology = schedule.topology
    n, size = topology.ranks, len(topology.hosts[0])
    equal = n % size == 0 and topology.host_of == tuple(rank // size for rank in range(n))
    counted = n <= COUNTED_RANKS or not equal or schedule.deal is not None
    if counted or schedule.operation.rooted:
        return needed(lay_out(schedule, rank) for rank in range(n))
    nodes, items, steps = needed(lay_out(schedule, rank) for rank in _neediest(n))
    parts = 2 if n & (n - 1) else 16
    return Workspace(nodes + -(-nodes // parts), items + -(-items // parts), steps)


def needed(layouts: Iterable[Layout]) -> Workspace:
    """The most that any of some ranks needs."""
    nodes = items = steps = 0
    for each in layouts:
        nodes, items = max(nodes, each.sizes[IN_NODE]), max(items, each.sizes[IN_ITEM])
        if each.steps:
            steps = max(steps, each.steps[-1][1].step + 1)
    return Workspace(nodes, items, steps)


def _neediest(n: int) -> set[int]:
    """Ranks at or just below distances of powers of two from rank 0."""
    below = 4 if n & (n - 1) else 1  # elsewhere a ring's neediest ranks are 2**k - 3 to 2**k - 1
    distances = [0, *((1 << bit) - less for bit in range(n.bit_length()) for less in range(below))]
    return {way * each % n for each in distances for way in (1, -1)}
