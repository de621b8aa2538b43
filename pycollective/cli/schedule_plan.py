"""Prints the execution plan of a rank, an instruction a line (csrc/engine/plans/program.h)."""

from __future__ import annotations

from collections.abc import Iterator

from pycollective.config import MAX_RANKS, MAX_RANKS_PER_HOST
from pycollective.errors import ConfigurationError
from pycollective.order import TAKE
from pycollective.schedule import Schedule
from pycollective.schedule.layout import IN_INPUT, IN_NODE, IN_OUTPUT
from pycollective.schedule.plan import (
    COMBINE,
    COPY,
    POST,
    PUBLISH,
    RECEIVE,
    SEND,
    SETTLE,
    WAIT,
    Plan,
    make_plan,
)
from pycollective.schedule.topology import Topology

_NAMES = {
    WAIT: "wait",
    COPY: "copy",
    COMBINE: "combine",
    PUBLISH: "publish",
    POST: "post",
    RECEIVE: "receive",
    SEND: "send",
    SETTLE: "settle",
}


def ranks_named(text: str, topology: Topology) -> range:
    """The ranks that ``--rank`` asks for: a number, or ``all``.

    Raises:
        ConfigurationError: it is neither, or no engine runs so many ranks.
    """
    n = topology.ranks
    if n > MAX_RANKS or topology.widest > MAX_RANKS_PER_HOST:
        raise ConfigurationError(
            f"--plan: the engine runs {MAX_RANKS} ranks at most, {MAX_RANKS_PER_HOST} on a host"
        )
    if text == "all":
        return range(n)
    if not text.isdecimal() or int(text) >= n:
        raise ConfigurationError(f"--rank {text!r} is neither one of 0 to {n - 1} nor 'all'")
    return range(int(text), int(text) + 1)


def plan(schedule: Schedule, rank: int) -> Iterator[str]:
    """A rank's plan: what its slots hold, then an instruction a line."""
    return _Text(make_plan(schedule, rank), schedule.topology).lines()


class _Text:
    def __init__(self, of: Plan, topology: Topology) -> None:
        self.plan = of
        self.topology = topology
        self.members = topology.hosts[topology.host_of[of.rank]]
        self.published = 0

    def lines(self) -> Iterator[str]:
        p = self.plan
        readers = ", ".join(str(self.members[reader]) for reader in p.readers) or "none"
        yield (
            f"rank {p.rank} of {p.ranks}: {len(p.instructions)} instructions for each chunk; "
            f"places in a slot: {p.nodes} for nodes, {p.items} for items; ranks that read it: "
            f"{readers}"
        )
        yield f"{'':>5} {'shard':>6}  instruction"
        for number, instruction in enumerate(p.instructions):
            shard, what = self.instruction(*instruction)
            yield f"{number:5} {shard:>6}  {_NAMES[instruction[0]]:8} {what}".rstrip()

    def instruction(self, kind: int, a: int, b: int, c: int) -> tuple[str, str]:
        """Its shard, if it is about one, and what it does."""
        if kind == WAIT:
            return "", f"until rank {self.members[a]} has published event {b}"
        if kind == PUBLISH:
            first, self.published = self.published + 1, self.published + a
            return "", f"event {first}" if a == 1 else f"events {first} to {self.published}"
        if kind == COPY:
            return self.shard(a), f"{self.place(b)} = {self.place(a)}"
        if kind == COMBINE:
            to = self.place(b) if c == -1 else f"{self.place(b)}, {self.place(c)}"
            return self.shard(b), f"{to} = {self.sum(a)}"
        if kind == SETTLE:
            return "", f"until the first {a} messages sent have left their memory"
        other, step, first, count = self.plan.messages[a]
        where = f"{'to' if kind == SEND else 'from'} rank {other}, step {step}"
        if kind == RECEIVE:  # to where it was posted
            return "", where
        pieces = self.plan.message_pieces[first : first + count]
        where_each = (f"{self.place(ref)} (shard {self.shard(ref)})" for ref in pieces)
        return "", f"{where}: {', '.join(where_each)}"

    def shard(self, ref: int) -> str:
        return str(self.plan.refs[ref][2])

    def place(self, ref: int) -> str:
        """``input``, ``node 2``, ``rank 1's item 0``."""
        place, member, _, index = self.plan.refs[ref]
        if place in (IN_INPUT, IN_OUTPUT):
            return "input" if place == IN_INPUT else "output"
        whose = self.members[member]
        name = f"{'node' if place == IN_NODE else 'item'} {index}"
        return name if whose == self.plan.rank else f"rank {whose}'s {name}"

    def sum(self, number: int) -> str:
        """What is added to what, in the order."""
        p = self.plan
        first, count, first_recipe, length, finish = p.combines[number]
        operands = iter(p.terms[first : first + count])
        stack: list[str] = []
        for step in p.recipes[first_recipe : first_recipe + length]:
            if step == TAKE:
                stack.append(self.place(next(operands)))
            else:
                right = stack.pop()
                stack.append(f"({stack.pop()} + {right})")
        (whole,) = stack
        if finish:
            return f"finish{whole}" if whole.startswith("(") else f"finish({whole})"
        return whole.removeprefix("(").removesuffix(")") if length > 1 else whole
