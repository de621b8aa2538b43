"""From steps to what the native engine carries out for one rank over shared memory.

Every rank can work out every other's steps, so a receive needs no message: whoever hands something
over puts it into a place of its own slot and counts an event, and the receiver waits for that count
and reads the place. ``csrc/engine/program.h`` says what the numbers mean.

Ranks of other hosts send each other messages: all that goes from one rank to another in one step is
one, its pieces in the order of the shards. A piece is sent from where it lies, and received where
it belongs: so before anything is written into the caller's output, which may be the caller's input,
what was sent from there must have left.

The cost of assembling is that of lowering all shards, for all ranks; a communicator keeps what it
has assembled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from pycollective.order import Node, split

from .schedule import Schedule
from .steps import INPUT, OUTPUT, Combine, Copy, Receive, Send, Step, Type

Ref = tuple[int, int, int, int]  # place, rank, shard, index
IN_INPUT, IN_OUTPUT, IN_NODE, IN_ITEM = range(4)
WAIT, COPY, COMBINE, PUBLISH, POST, RECEIVE, SEND, SETTLE = range(8)
TAKE, JOIN = range(2)  # of a recipe


@dataclass
class Program:
    """One rank's part of a schedule; all numbers as in ``csrc/engine/program.h``."""

    algorithm: str
    operation: str
    root: int
    rank: int
    ranks: int
    member: int
    members: int
    tags: int
    pieces: str
    shards: int
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
    far: list[int] = field(default_factory=list)


@dataclass
class _Rank:
    """What a rank hands over, and where."""

    steps: list[tuple[int, Step]]  # (shard, step) in the order in which it does them
    types: dict[int, list[Type]]  # by shard
    places: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # likewise
    events: dict[tuple[int, int], int] = field(default_factory=dict)  # by (shard, buffer)
    sizes: dict[int, int] = field(default_factory=lambda: {IN_NODE: 0, IN_ITEM: 0})
    readers: set[int] = field(default_factory=set)
    sent: dict[tuple[int, int, int], tuple[int, ...]] = field(
        default_factory=dict
    )  # by (shard, step, receiver)

    def place(self, shard: int, buffer: int) -> tuple[int, int]:
        """The place of a buffer in this rank's slot; a new one the first time."""
        if (shard, buffer) not in self.places:
            kind = IN_NODE if self.types[shard][buffer] is Type.NODE else IN_ITEM
            self.places[shard, buffer] = kind, self.sizes[kind]
            self.sizes[kind] += 1
        return self.places[shard, buffer]


@lru_cache(maxsize=32)
def _all_ranks(schedule: Schedule) -> list[_Rank]:
    """Each rank's steps of all shards in order, and where it keeps what it hands over."""
    n = schedule.topology.ranks
    host_of = schedule.topology.host_of
    copies_first = _copies_first(schedule)
    ranks = [_Rank([], {}) for _ in range(n)]
    for shard in range(schedule.shards):
        for rank, program in schedule.lowered(shard).items():
            ranks[rank].types[shard] = program.types
            ranks[rank].steps += [(shard, step) for step in program.steps]
    phases = {Send: 0, Receive: 1, Combine: 2, Copy: 2}
    for rank, own in enumerate(ranks):
        # Each begins with another shard, so that they do not all want the same one's owner.
        own.steps.sort(
            key=lambda at: (at[1].step, phases[type(at[1])], (at[0] - rank) % schedule.shards)
        )
        for shard, step in own.steps:
            if isinstance(step, Send) and host_of[step.to] != host_of[rank]:
                for buffer in step.buffers:
                    if buffer == INPUT and copies_first:
                        own.place(shard, buffer)
            elif isinstance(step, Receive) and host_of[step.source] != host_of[rank]:
                for buffer in step.buffers:
                    if buffer != OUTPUT:
                        own.place(shard, buffer)
            elif isinstance(step, Send):
                own.readers.add(step.to)
                own.sent[shard, step.step, step.to] = step.buffers
                for buffer in step.buffers:
                    own.place(shard, buffer)
                    own.events.setdefault((shard, buffer), len(own.events) + 1)
            elif isinstance(step, Combine) and step.out != OUTPUT:
                own.place(shard, step.out)  # also where it is for this rank alone
    return ranks


def _copies_first(schedule: Schedule) -> bool:
    """Whether inputs are copied before they are sent to another host.

    In an all-to-all in place, what arrives from a rank belongs where lies what goes to it.
    """
    return schedule.operation.pieces == "pairs"


def _recipe(node: Node, operands: list[Node]) -> list[int]:
    """How `node` is made of `operands`, the last of which are used up: postfix."""
    if operands and operands[-1] == node:
        operands.pop()
        return [TAKE]
    middle = split(*node)
    return [*_recipe((node[0], middle), operands), *_recipe((middle, node[1]), operands), JOIN]


def assemble(schedule: Schedule, rank: int) -> Program:
    """The program of `rank`."""
    ranks = _all_ranks(schedule)
    own = ranks[rank]
    topology = schedule.topology
    near = topology.hosts[topology.host_of[rank]]
    program = Program(
        schedule.algorithm.name,
        schedule.operation.name,
        schedule.root,
        rank,
        topology.ranks,
        near.index(rank),
        len(near),
        max((step.step for each in ranks for _, step in each.steps), default=0) + 1,
        schedule.operation.pieces,
        schedule.shards,
        nodes=max(each.sizes[IN_NODE] for each in ranks),
        items=max(each.sizes[IN_ITEM] for each in ranks),
        readers=sorted(near.index(reader) for reader in own.readers),
    )
    _Assembler(program, schedule, ranks, rank).run()
    return program


class _Assembler:
    def __init__(self, program: Program, schedule: Schedule, ranks: list[_Rank], rank: int) -> None:
        self.program = program
        self.ranks = ranks
        self.rank = rank
        self.own = ranks[rank]
        topology = schedule.topology
        self.member = {r: m for m, r in enumerate(topology.hosts[topology.host_of[rank]])}
        self.copies_first = _copies_first(schedule)
        # Only what is reduced comes back to where an input lies.
        self.must_settle = schedule.operation.reduces
        self.sends = 0
        self.unsettled = 0  # sends, to the last that goes from where an input lies
        self.messages: dict[tuple[int, int, bool], int] = {}  # by (step, rank, whether received)
        self.numbers: dict[Ref, int] = {}  # of refs
        self.published = 0
        self.unpublished = 0
        self.awaited: dict[int, int] = {}  # events, by rank
        # What was received lies with its sender: (shard, buffer) -> (sender, its buffer).
        self.lent: dict[tuple[int, int], tuple[int, int]] = {}
        self.in_place: set[tuple[int, int]] = set()  # computed straight into the own slot

    def run(self) -> None:
        """Step by step; in each, first what other hosts wait for, last what comes from them."""
        self.post_early()
        for _, together in groupby(self.own.steps, key=lambda at: at[1].step):
            steps = list(together)
            self.send_far(steps)
            for shard, step in steps:
                if isinstance(step, Send) and step.to in self.member:
                    self.send(shard, step)
            self.publish()
            for shard, step in steps:
                if isinstance(step, Receive) and step.source in self.member:
                    self.receive(shard, step)
            self.receive_far(steps)
            for shard, step in steps:
                if isinstance(step, Combine):
                    self.combine(shard, step)
                elif isinstance(step, Copy):
                    self.emit(COPY, self.ref(shard, step.source), self.ref(shard, step.out))
        self.program.far = sorted({rank for rank, _, _, _ in self.program.messages})

    def far_messages(
        self, steps: list[tuple[int, Step]], received: bool
    ) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """(step, other rank, (shard, buffer) of each piece), by rank."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for shard, step in sorted(steps, key=lambda at: at[0]):
            if isinstance(step, Receive if received else Send):
                other = step.source if isinstance(step, Receive) else step.to
                if other not in self.member:
                    pieces = found.setdefault((step.step, other), [])
                    pieces += [(shard, buffer) for buffer in step.buffers]
        return [(number, other, pieces) for (number, other), pieces in sorted(found.items())]

    def message(
        self, number: int, other: int, pieces: list[tuple[int, int]], received: bool
    ) -> int:
        key = number, other, received
        if key not in self.messages:
            program = self.program
            self.messages[key] = len(program.messages)
            first = len(program.message_pieces)
            program.message_pieces += [self.ref(shard, buffer) for shard, buffer in pieces]
            # A step of the schedule may be -1: none of these sends.
            program.messages.append((other, number, first, len(pieces)))
        return self.messages[key]

    def is_late(self, pieces: list[tuple[int, int]]) -> bool:
        """Whether a message goes straight into the output, which may still be in use as input."""
        return (self.must_settle or self.copies_first) and pieces[0][1] == OUTPUT

    def post_early(self) -> None:
        for number, other, pieces in self.far_messages(self.own.steps, received=True):
            if len(pieces) > 1 or not self.is_late(pieces):
                self.emit(POST, self.message(number, other, pieces, received=True))

    def send_far(self, steps: list[tuple[int, Step]]) -> None:
        for number, other, pieces in self.far_messages(steps, received=False):
            for shard, buffer in pieces:
                if buffer != INPUT:
                    continue
                if self.copies_first:
                    if (shard, buffer) not in self.in_place:
                        here = self.slot(self.rank, shard, buffer)
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

    def receive_far(self, steps: list[tuple[int, Step]]) -> None:
        messages = self.far_messages(steps, received=True)
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
        self.program.instructions.append((kind, a, b, c))

    def ref_at(self, place: int, rank: int, shard: int, index: int) -> int:
        ref = place, self.member[rank], shard, index
        if ref not in self.numbers:
            self.numbers[ref] = len(self.program.refs)
            self.program.refs.append(ref)
        return self.numbers[ref]

    def slot(self, rank: int, shard: int, buffer: int) -> int:
        place, index = self.ranks[rank].place(shard, buffer)
        return self.ref_at(place, rank, shard, index)

    def ref(self, shard: int, buffer: int) -> int:
        """Where a buffer is to be read, or, if it is an output, written."""
        rank = self.rank
        if buffer == -1:  # the input, in a place of its own
            return self.slot(rank, shard, INPUT)
        if buffer == INPUT:
            return self.ref_at(IN_INPUT, rank, shard, 0)
        if buffer == OUTPUT:
            return self.ref_at(IN_OUTPUT, rank, shard, 0)
        if (shard, buffer) in self.lent:
            sender, theirs = self.lent[shard, buffer]
            return self.slot(sender, shard, theirs)
        return self.slot(rank, shard, buffer)

    def send(self, shard: int, step: Send) -> None:
        for buffer in step.buffers:
            event = self.own.events[shard, buffer]
            if event <= self.published + self.unpublished:
                continue  # handed over before, for another rank
            if (shard, buffer) not in self.in_place:
                place = self.slot(self.rank, shard, buffer)
                self.emit(COPY, self.ref(shard, buffer), place)
            self.unpublished += 1

    def publish(self) -> None:
        """Tell of what was handed over since the last time."""
        if self.unpublished:
            self.emit(PUBLISH, self.unpublished)
            self.published += self.unpublished
            self.unpublished = 0

    def receive(self, shard: int, step: Receive) -> None:
        theirs = self.ranks[step.source].sent[shard, step.step, self.rank]
        events = self.ranks[step.source].events
        last = max(events[shard, buffer] for buffer in theirs)
        if last > self.awaited.get(step.source, 0):
            self.awaited[step.source] = last
            self.emit(WAIT, self.member[step.source], last)
        for mine, buffer in zip(step.buffers, theirs, strict=True):
            if mine == OUTPUT:
                self.settle()
                self.emit(COPY, self.slot(step.source, shard, buffer), self.ref(shard, OUTPUT))
            else:
                self.lent[shard, mine] = step.source, buffer

    def combine(self, shard: int, step: Combine) -> None:
        program = self.program
        nodes = [node for node, _ in reversed(step.operands)]
        recipe = _recipe(step.node, nodes)
        number = len(program.combines)
        program.combines.append(
            (len(program.terms), len(step.operands), len(program.recipes), len(recipe), step.finish)
        )
        program.terms += [self.ref(shard, buffer) for _, buffer in step.operands]
        program.recipes += recipe
        copy_to = -1
        if step.out == OUTPUT and (shard, OUTPUT) in self.own.events:
            copy_to = self.slot(self.rank, shard, OUTPUT)
        if step.out == OUTPUT:
            self.settle()
        self.emit(COMBINE, number, self.ref(shard, step.out), copy_to)
        self.in_place.add((shard, step.out))
