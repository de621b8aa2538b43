"""The execution plan of a rank: the instructions that the native engine carries out for it.

On a host a receive needs no message. The sender puts a buffer into a place of its own slot and
counts an event; the receiver waits for that count and reads the place. It knows both, because every
rank can work out every other's steps. ``csrc/engine/plans/program.h`` says what the numbers mean.

Between hosts all that goes from one rank to another in one step is one message, its pieces in the
order of the shards. A piece is sent from where it lies, and received where it belongs. So before
anything is written into the caller's output, which may be the caller's input, what was sent from
there must have left.

To make a plan all shards are lowered, for this rank and for those of its host that send it
something. A communicator keeps its plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from pycollective.order import recipe

from .cost import COUNTED_RANKS
from .layout import (
    IN_INPUT,
    IN_OUTPUT,
    Layout,
    Sent,
    copies_first,
    lay_out,
    needed,
    workspace,
)
from .schedule import Schedule
from .steps import INPUT, OUTPUT, Combine, Copy, Receive, Send, Step, input_buffers

Ref = tuple[int, int, int, int]  # place, rank, shard, index; of a dealt input its number
WAIT, COPY, COMBINE, PUBLISH, POST, RECEIVE, SEND, SETTLE = range(8)


@dataclass
class Plan:
    """One rank's part of a schedule; all numbers as in ``csrc/engine/plans/program.h``."""

    algorithm: str
    operation: str
    root: int
    rank: int
    ranks: int
    member: int
    members: int
    steps: int
    pieces: str
    shards: int
    leaves: int
    rows: int
    deal: int
    nodes: int = 0
    items: int = 0
    refs: list[Ref] = field(default_factory=list)
    instructions: list[tuple[int, int, int, int]] = field(default_factory=list)
    combines: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    terms: list[int] = field(default_factory=list)
    recipes: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    messages: list[tuple[int, int, int, int]] = field(default_factory=list)
    message_pieces: list[int] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)


def make_plan(schedule: Schedule, rank: int, layouts: dict[int, Layout] | None = None) -> Plan:
    """Make the plan of a rank.

    Args:
        schedule: the schedule.
        rank: the rank.
        layouts: by rank, those already made, to which this adds what it makes. Give them to make
            the plans of many ranks of one host.
    """
    topology = schedule.topology
    local = topology.hosts[topology.host_of[rank]]
    if layouts is None and topology.ranks <= COUNTED_RANKS:
        layouts = {each: lay_out(schedule, each) for each in range(topology.ranks)}
        set_aside = needed(layouts.values())
    else:
        set_aside = workspace(schedule)
    own = _layout(schedule, rank, layouts)
    arrives = _sent_here(schedule, own, layouts)
    plan = Plan(
        schedule.algorithm.name,
        schedule.operation.name,
        schedule.root,
        rank,
        topology.ranks,
        topology.local_index[rank],
        len(local),
        set_aside.steps,
        schedule.operation.pieces,
        schedule.shards,
        leaves=0 if schedule.deal is None else schedule.deal.leaves,
        rows=0 if schedule.deal is None else schedule.inputs_of(rank),
        deal=0 if schedule.deal is None else schedule.deal.digest,
        nodes=set_aside.nodes,
        items=set_aside.items,
        readers=sorted(topology.local_index[reader] for reader in own.readers),
    )
    _Maker(plan, schedule, own, arrives).run()
    return plan


def _layout(schedule: Schedule, rank: int, layouts: dict[int, Layout] | None) -> Layout:
    if layouts is None:
        return lay_out(schedule, rank)
    if rank not in layouts:
        layouts[rank] = lay_out(schedule, rank)
    return layouts[rank]


def _sent_here(
    schedule: Schedule, own: Layout, layouts: dict[int, Layout] | None
) -> dict[tuple[int, int, int], list[Sent]]:
    """What ranks of the same host send to this one: by (shard, step number, sender)."""
    host_of = schedule.topology.host_of
    receives: dict[int, list[tuple[int, int]]] = {}
    for shard, step in own.steps:
        if type(step) is Receive and host_of[step.source] == host_of[own.rank]:
            receives.setdefault(step.source, []).append((shard, step.step))
    found = {}
    for source, pieces in receives.items():
        theirs = _layout(schedule, source, layouts)
        for shard, number in pieces:
            found[shard, number, source] = theirs.sent_to(own.rank, shard, number)
    return found


class _Maker:
    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        own: Layout,
        arrives: dict[tuple[int, int, int], list[Sent]],
    ) -> None:
        self.plan = plan
        self.rank = own.rank
        inputs = input_buffers(schedule.inputs_of(own.rank))
        self.inputs = {buffer: number for number, buffer in enumerate(inputs)}
        self.own = own
        self.arrives = arrives
        topology = schedule.topology
        self.member = {r: m for m, r in enumerate(topology.hosts[topology.host_of[own.rank]])}
        self.copies_first = copies_first(schedule)
        # Only what is reduced comes back to where an input lies; nodes that were dealt lie apart.
        self.must_settle = schedule.operation.reduces and schedule.deal is None
        self.sends = 0
        self.unsettled = 0  # sends, to the last that goes from where an input lies
        self.messages: dict[tuple[int, int, bool], int] = {}  # by (step, rank, whether received)
        self.peers: set[int] = set()  # of other hosts, also those to whom an empty partial goes
        self.numbers: dict[Ref, int] = {}  # of refs
        self.published = 0
        self.unpublished = 0
        self.awaited: dict[int, int] = {}  # events, by rank
        # What was received lies with its sender: (shard, buffer) -> place, sender, index.
        self.received: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.in_place: set[tuple[int, int]] = set()  # computed straight into the own slot

    def run(self) -> None:
        """Step by step; in each, first what other hosts wait for, last what comes from them."""
        self.post_early()
        for _, together in groupby(self.own.steps, key=lambda at: at[1].step):
            steps = list(together)
            self.send_between_hosts(steps)
            for shard, step in steps:
                if isinstance(step, Send) and step.to in self.member:
                    self.send(shard, step)
            self.publish()
            for shard, step in steps:
                if isinstance(step, Receive) and step.source in self.member:
                    self.receive(shard, step)
            self.receive_between_hosts(steps)
            for shard, step in steps:
                if isinstance(step, Combine):
                    self.combine(shard, step)
                elif isinstance(step, Copy):
                    self.emit(COPY, self.ref(shard, step.source), self.ref(shard, step.out))
        self.plan.peers = sorted(self.peers)

    def messages_between_hosts(
        self, steps: list[tuple[int, Step]], received: bool
    ) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """(step, other rank, (shard, buffer) of each piece), by rank."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for shard, step in sorted(steps, key=lambda at: at[0]):
            if isinstance(step, Receive if received else Send):
                other = step.source if isinstance(step, Receive) else step.to
                if other not in self.member:
                    self.peers.add(other)
                    if step.buffers:
                        pieces = found.setdefault((step.step, other), [])
                        pieces += [(shard, buffer) for buffer in step.buffers]
        return [(number, other, pieces) for (number, other), pieces in sorted(found.items())]

    def message(
        self, number: int, other: int, pieces: list[tuple[int, int]], received: bool
    ) -> int:
        key = number, other, received
        if key not in self.messages:
            plan = self.plan
            self.messages[key] = len(plan.messages)
            first = len(plan.message_pieces)
            plan.message_pieces += [self.ref(shard, buffer) for shard, buffer in pieces]
            # A step of the schedule may be -1: none of these sends.
            plan.messages.append((other, number, first, len(pieces)))
        return self.messages[key]

    def is_late(self, pieces: list[tuple[int, int]]) -> bool:
        """Whether a message goes straight into the output, which may still be in use as input."""
        return (self.must_settle or self.copies_first) and pieces[0][1] == OUTPUT

    def post_early(self) -> None:
        for number, other, pieces in self.messages_between_hosts(self.own.steps, received=True):
            if len(pieces) > 1 or not self.is_late(pieces):
                self.emit(POST, self.message(number, other, pieces, received=True))

    def send_between_hosts(self, steps: list[tuple[int, Step]]) -> None:
        for number, other, pieces in self.messages_between_hosts(steps, received=False):
            for shard, buffer in pieces:
                if buffer not in self.inputs:
                    continue
                if self.copies_first:
                    if (shard, buffer) not in self.in_place:
                        here = self.slot(shard, buffer)
                        self.emit(COPY, self.ref(shard, INPUT), here)
                        self.in_place.add((shard, buffer))
                elif len(pieces) == 1:
                    self.unsettled = self.sends + 1
            places = [
                (shard, buffer) if not (buffer == INPUT and self.copies_first) else (shard, -1)
                for shard, buffer in pieces
            ]
            self.emit(SEND, self.message(number, other, places, received=False))
            self.sends += 1

    def receive_between_hosts(self, steps: list[tuple[int, Step]]) -> None:
        messages = self.messages_between_hosts(steps, received=True)
        for number, other, pieces in messages:
            if any(buffer == OUTPUT for _, buffer in pieces):
                self.settle()
            if len(pieces) == 1 and self.is_late(pieces):
                self.emit(POST, self.message(number, other, pieces, received=True))
        for number, other, pieces in messages:
            self.emit(RECEIVE, self.message(number, other, pieces, received=True))
            self.in_place.update(piece for piece in pieces if piece[1] != OUTPUT)

    def settle(self) -> None:
        """Before the output is written: what was sent from the input, which may lie there."""
        if self.unsettled and self.must_settle:
            self.emit(SETTLE, self.unsettled)
            self.unsettled = 0

    def emit(self, kind: int, a: int, b: int = 0, c: int = 0) -> None:
        self.plan.instructions.append((kind, a, b, c))

    def ref_at(self, place: int, rank: int, shard: int, index: int) -> int:
        ref = place, self.member[rank], shard, index
        if ref not in self.numbers:
            self.numbers[ref] = len(self.plan.refs)
            self.plan.refs.append(ref)
        return self.numbers[ref]

    def slot(self, shard: int, buffer: int) -> int:
        """Where this rank keeps a buffer."""
        place, index = self.own.places[shard, buffer]
        return self.ref_at(place, self.rank, shard, index)

    def ref(self, shard: int, buffer: int) -> int:
        """Where a buffer is to be read, or, if it is an output, written."""
        rank = self.rank
        if buffer == -1:  # the input, in a place of its own
            return self.slot(shard, INPUT)
        if buffer in self.inputs:
            return self.ref_at(IN_INPUT, rank, shard, self.inputs[buffer])
        if buffer == OUTPUT:
            return self.ref_at(IN_OUTPUT, rank, shard, 0)
        if (shard, buffer) in self.received:
            place, sender, index = self.received[shard, buffer]
            return self.ref_at(place, sender, shard, index)
        return self.slot(shard, buffer)

    def send(self, shard: int, step: Send) -> None:
        for buffer in step.buffers:
            event = self.own.events[shard, buffer]
            if event <= self.published + self.unpublished:
                continue  # published before, for another rank
            if (shard, buffer) not in self.in_place:
                place = self.slot(shard, buffer)
                self.emit(COPY, self.ref(shard, buffer), place)
            self.unpublished += 1

    def publish(self) -> None:
        """Count the events of what was sent on this host since the last time."""
        if self.unpublished:
            self.emit(PUBLISH, self.unpublished)
            self.published += self.unpublished
            self.unpublished = 0

    def receive(self, shard: int, step: Receive) -> None:
        theirs = self.arrives[shard, step.step, step.source]
        if not theirs:
            return
        last = max(event for _, _, event in theirs)
        if last > self.awaited.get(step.source, 0):
            self.awaited[step.source] = last
            self.emit(WAIT, self.member[step.source], last)
        for mine, (place, index, _) in zip(step.buffers, theirs, strict=True):
            if mine == OUTPUT:
                self.settle()
                there = self.ref_at(place, step.source, shard, index)
                self.emit(COPY, there, self.ref(shard, OUTPUT))
            else:
                self.received[shard, mine] = place, step.source, index

    def combine(self, shard: int, step: Combine) -> None:
        plan = self.plan
        made = recipe(step.node, [node for node, _ in step.operands])
        number = len(plan.combines)
        plan.combines.append(
            (len(plan.terms), len(step.operands), len(plan.recipes), len(made), step.finish)
        )
        plan.terms += [self.ref(shard, buffer) for _, buffer in step.operands]
        plan.recipes += made
        copy_to = -1
        if step.out == OUTPUT and (shard, OUTPUT) in self.own.events:
            copy_to = self.slot(shard, OUTPUT)
        if step.out == OUTPUT:
            self.settle()
        self.emit(COMBINE, number, self.ref(shard, step.out), copy_to)
        self.in_place.add((shard, step.out))
