"""Ways to spoil a right schedule: each yields every wrong schedule of its kind that there is.

A schedule is here the steps of one shard, as `lower` makes them; what comes in stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pycollective.schedule.steps import INPUT, OUTPUT, Combine, RankSteps, Receive, Send, Type

Lowered = dict[int, RankSteps]


def positions(lowered: Lowered, kind: type) -> Iterator[tuple[int, int, Any]]:
    """Rank, index and step of each step of a kind."""
    for rank, (steps, _) in lowered.items():
        for index, step in enumerate(steps):
            if type(step) is kind:
                yield rank, index, step


def changed(lowered: Lowered, rank: int, index: int, *steps: Any) -> Lowered:
    """With other steps in the place of one."""
    old = lowered[rank].steps
    new = RankSteps([*old[:index], *steps, *old[index + 1 :]], lowered[rank].types)
    return {**lowered, rank: new}


def with_buffer(lowered: Lowered, rank: int, kind: Type) -> tuple[Lowered, int]:
    """With one more buffer."""
    types = lowered[rank].types
    new = RankSteps(lowered[rank].steps, [*types, kind])
    return {**lowered, rank: new}, len(types)


def dropped(lowered: Lowered, kind: type) -> Iterator[Lowered]:
    for rank, index, _ in positions(lowered, kind):
        yield changed(lowered, rank, index)


def swapped_receives(lowered: Lowered) -> Iterator[Lowered]:
    """Two receives of a rank, each into the other's buffers."""
    for rank in lowered:
        receives = [found for found in positions(lowered, Receive) if found[0] == rank]
        for (_, i, first), (_, j, second) in itertools.combinations(receives, 2):
            half = changed(lowered, rank, i, first._replace(buffers=second.buffers))
            yield changed(half, rank, j, second._replace(buffers=first.buffers))


def rotated(lowered: Lowered, ranks: int) -> Lowered:
    """Each rank does what the next one should, so every leaf stands in the place of another."""

    def turned(rank: int) -> int:
        return (rank - 1) % ranks

    result = {}
    for rank, (steps, types) in lowered.items():
        new: list[Any] = []
        for step in steps:
            if type(step) is Send:
                new.append(step._replace(to=turned(step.to)))
            elif type(step) is Receive:
                new.append(step._replace(source=turned(step.source)))
            else:
                new.append(step)
        result[turned(rank)] = RankSteps(new, types)
    return result


def buffer_used_twice(lowered: Lowered) -> Iterator[Lowered]:
    """A step writes a buffer that another step of the rank writes, or the input."""
    for rank, (steps, _) in lowered.items():
        writers = [(index, step) for index, step in enumerate(steps) if type(step) is not Send]
        taken = {INPUT}
        for index, step in writers:
            for old in list(taken):
                if isinstance(step, Receive):
                    again = step._replace(buffers=(old, *step.buffers[1:]))
                else:
                    again = step._replace(out=old)
                yield changed(lowered, rank, index, again)
            taken.update(step.buffers if isinstance(step, Receive) else (step.out,))


def sent_as_it_arrives(lowered: Lowered) -> Iterator[Lowered]:
    """A message goes out in the very step in which what it holds arrives, or is made."""
    for rank, index, send in positions(lowered, Send):
        steps = lowered[rank].steps
        for arrival in steps[:index]:
            if isinstance(arrival, Send):
                continue
            made = arrival.buffers if isinstance(arrival, Receive) else (arrival.out,)
            if not set(made) & set(send.buffers) or arrival.step < 0:
                continue
            early = send._replace(step=arrival.step)
            without = changed(lowered, rank, index)
            first = next(i for i, step in enumerate(steps) if step.step == arrival.step)
            moved = changed(without, rank, first, early, steps[first])
            # Its receiver takes it just then, where it has nothing else to do.
            j, receive = next(
                (j, step)
                for r, j, step in positions(moved, Receive)
                if (r, step.source, step.step) == (send.to, rank, send.step)
            )
            others = [step.step for k, step in enumerate(moved[send.to].steps) if k != j]
            if all(other < early.step for other in others[:j]):
                moved = changed(moved, send.to, j, receive._replace(step=early.step))
            yield moved


def operands_out_of_order(lowered: Lowered) -> Iterator[Lowered]:
    """Two neighbouring operands, exchanged."""
    for rank, index, step in positions(lowered, Combine):
        for i in range(len(step.operands) - 1):
            new = list(step.operands)
            new[i : i + 2] = reversed(new[i : i + 2])
            yield changed(lowered, rank, index, step._replace(operands=tuple(new)))


def operand_taken_twice(lowered: Lowered) -> Iterator[Lowered]:
    """One operand once more, after any of them."""
    for rank, index, step in positions(lowered, Combine):
        for operand, place in itertools.product(step.operands, range(len(step.operands))):
            new = (*step.operands[: place + 1], operand, *step.operands[place + 1 :])
            yield changed(lowered, rank, index, step._replace(operands=new))


def wrong_children(lowered: Lowered) -> Iterator[Lowered]:
    """A node made of what begins a leaf later, or ends a leaf sooner, and so is none of the order;
    or of all its parts but one."""
    for rank, index, step in positions(lowered, Combine):
        for operands in (step.operands[1:], step.operands[:-1]):
            node = operands[0][0][0], operands[-1][0][1]
            if len(operands) > 1:
                yield changed(lowered, rank, index, step._replace(node=node, operands=operands))
            yield changed(lowered, rank, index, step._replace(operands=operands))


def missing_finish(lowered: Lowered) -> Iterator[Lowered]:
    """The root, not finished: as if it were the result, or kept as a node."""
    for rank, index, step in positions(lowered, Combine):
        if step.finish:
            yield changed(lowered, rank, index, step._replace(finish=False))
            more, buffer = with_buffer(lowered, rank, Type.NODE)
            yield changed(more, rank, index, step._replace(finish=False, out=buffer))


def early_finish(lowered: Lowered) -> Iterator[Lowered]:
    """An inner node, rounded as if it were the root."""
    for rank, index, step in positions(lowered, Combine):
        if not step.finish:
            more, buffer = with_buffer(lowered, rank, Type.RESULT)
            yield changed(more, rank, index, step._replace(finish=True, out=buffer))


def output_nobody_asked_for(lowered: Lowered, owner: int, ranks: int) -> Iterator[Lowered]:
    """The one that must have the result sends it to another, into that one's output."""
    late = 1 + max((step.step for own in lowered.values() for step in own.steps), default=0)
    steps, types = lowered[owner]
    for other in set(range(ranks)) - {owner}:
        theirs = lowered.get(other, RankSteps([], [Type.LEAF, Type.RESULT]))
        receive = Receive(late, owner, (OUTPUT,))
        yield {
            **lowered,
            owner: RankSteps([*steps, Send(late, other, (OUTPUT,))], types),
            other: RankSteps([*theirs.steps, receive], theirs.types),
        }
