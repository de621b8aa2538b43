"""From steps to what the native engine carries out for one rank over shared memory.

Every rank can work out every other's steps, so a receive needs no message: whoever hands something
over puts it into a place of its own slot and counts an event, and the receiver waits for that count
and reads the place. ``csrc/engine/program.h`` says what the numbers mean.

The cost of assembling is that of lowering all shards, for all ranks; a communicator keeps what it
has assembled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from pycollective.order import Node, split

from .schedule import Schedule
from .steps import INPUT, OUTPUT, Combine, Copy, Receive, Send, Step, Type

Ref = tuple[int, int, int, int]  # place, rank, shard, index
IN_INPUT, IN_OUTPUT, IN_NODE, IN_ITEM = range(4)
WAIT, COPY, COMBINE, PUBLISH = range(4)
TAKE, JOIN = range(2)  # of a recipe


@dataclass
class Program:
    """One rank's part of a schedule; all numbers as in ``csrc/engine/program.h``."""

    algorithm: str
    operation: str
    root: int
    rank: int
    ranks: int
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
            if isinstance(step, Send):
                own.readers.add(step.to)
                own.sent[shard, step.step, step.to] = step.buffers
                for buffer in step.buffers:
                    own.place(shard, buffer)
                    own.events.setdefault((shard, buffer), len(own.events) + 1)
            elif isinstance(step, Combine) and step.out != OUTPUT:
                own.place(shard, step.out)  # also where it is for this rank alone
    return ranks


def _recipe(node: Node, operands: list[Node]) -> list[int]:
    """How `node` is made of `operands`, the last of which are used up: postfix."""
    if operands and operands[-1] == node:
        operands.pop()
        return [TAKE]
    middle = split(*node)
    return [*_recipe((node[0], middle), operands), *_recipe((middle, node[1]), operands), JOIN]


def assemble(schedule: Schedule, rank: int) -> Program:
    """The program of `rank`, where all ranks share a host."""
    ranks = _all_ranks(schedule)
    own = ranks[rank]
    program = Program(
        schedule.algorithm.name,
        schedule.operation.name,
        schedule.root,
        rank,
        schedule.topology.ranks,
        schedule.operation.pieces,
        schedule.shards,
        nodes=max(each.sizes[IN_NODE] for each in ranks),
        items=max(each.sizes[IN_ITEM] for each in ranks),
        readers=sorted(own.readers),
    )
    _Assembler(program, ranks).run()
    return program


class _Assembler:
    def __init__(self, program: Program, ranks: list[_Rank]) -> None:
        self.program = program
        self.ranks = ranks
        self.own = ranks[program.rank]
        self.numbers: dict[Ref, int] = {}  # of refs
        self.published = 0
        self.unpublished = 0
        self.awaited: dict[int, int] = {}  # events, by rank
        # What was received lies with its sender: (shard, buffer) -> (sender, its buffer).
        self.lent: dict[tuple[int, int], tuple[int, int]] = {}
        self.in_place: set[tuple[int, int]] = set()  # computed straight into the own slot

    def run(self) -> None:
        for shard, step in self.own.steps:
            if isinstance(step, Send):
                self.send(shard, step)
                continue
            self.publish()
            if isinstance(step, Receive):
                self.receive(shard, step)
            elif isinstance(step, Combine):
                self.combine(shard, step)
            else:
                self.emit(COPY, self.ref(shard, step.source), self.ref(shard, step.out))
        self.publish()

    def emit(self, kind: int, a: int, b: int = 0, c: int = 0) -> None:
        self.program.instructions.append((kind, a, b, c))

    def ref_at(self, place: int, rank: int, shard: int, index: int) -> int:
        ref = place, rank, shard, index
        if ref not in self.numbers:
            self.numbers[ref] = len(self.program.refs)
            self.program.refs.append(ref)
        return self.numbers[ref]

    def slot(self, rank: int, shard: int, buffer: int) -> int:
        place, index = self.ranks[rank].place(shard, buffer)
        return self.ref_at(place, rank, shard, index)

    def ref(self, shard: int, buffer: int) -> int:
        """Where a buffer is to be read, or, if it is an output, written."""
        rank = self.program.rank
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
                place = self.slot(self.program.rank, shard, buffer)
                self.emit(COPY, self.ref(shard, buffer), place)
            self.unpublished += 1

    def publish(self) -> None:
        """Tell of what was handed over since the last time."""
        if self.unpublished:
            self.emit(PUBLISH, self.unpublished)
            self.published += self.unpublished
            self.unpublished = 0

    def receive(self, shard: int, step: Receive) -> None:
        theirs = self.ranks[step.source].sent[shard, step.step, self.program.rank]
        events = self.ranks[step.source].events
        last = max(events[shard, buffer] for buffer in theirs)
        if last > self.awaited.get(step.source, 0):
            self.awaited[step.source] = last
            self.emit(WAIT, step.source, last)
        for mine, buffer in zip(step.buffers, theirs, strict=True):
            if mine == OUTPUT:
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
            copy_to = self.slot(program.rank, shard, OUTPUT)
        self.emit(COMBINE, number, self.ref(shard, step.out), copy_to)
        self.in_place.add((shard, step.out))
