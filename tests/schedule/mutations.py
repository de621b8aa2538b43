"""Ways to spoil a right schedule: each yields every wrong schedule of its kind that there is.

A schedule is here the steps of one shard, as `lower` makes them; what comes in stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from pycollective.schedule import Schedule
from pycollective.schedule.steps import INPUT, OUTPUT, Combine, RankProgram, Receive, Send, Type

Programs = dict[int, RankProgram]


def positions(programs: Programs, kind: type) -> Iterator[tuple[int, int, Any]]:
    """Rank, index and step of each step of a kind."""
    for rank, program in programs.items():
        for index, step in enumerate(program.steps):
            if type(step) is kind:
                yield rank, index, step


def changed(programs: Programs, rank: int, index: int, *steps: Any) -> Programs:
    """With other steps in the place of one."""
    old = programs[rank].steps
    new = RankProgram([*old[:index], *steps, *old[index + 1 :]], programs[rank].types)
    return {**programs, rank: new}


def with_buffer(programs: Programs, rank: int, kind: Type) -> tuple[Programs, int]:
    """With one more buffer."""
    types = programs[rank].types
    new = RankProgram(programs[rank].steps, [*types, kind])
    return {**programs, rank: new}, len(types)


def dropped(programs: Programs, kind: type) -> Iterator[Programs]:
    for rank, index, _ in positions(programs, kind):
        yield changed(programs, rank, index)


def swapped_receives(programs: Programs) -> Iterator[Programs]:
    """Two receives of a rank, each into the other's buffers."""
    for rank in programs:
        receives = [found for found in positions(programs, Receive) if found[0] == rank]
        for (_, i, first), (_, j, second) in itertools.combinations(receives, 2):
            half = changed(programs, rank, i, first._replace(buffers=second.buffers))
            yield changed(half, rank, j, second._replace(buffers=first.buffers))


def rotated(programs: Programs, ranks: int) -> Programs:
    """Each rank does what the next one should, so every leaf stands in the place of another."""

    def turned(rank: int) -> int:
        return (rank - 1) % ranks

    result = {}
    for rank, (steps, types) in programs.items():
        new: list[Any] = []
        for step in steps:
            if type(step) is Send:
                new.append(step._replace(to=turned(step.to)))
            elif type(step) is Receive:
                new.append(step._replace(source=turned(step.source)))
            else:
                new.append(step)
        result[turned(rank)] = RankProgram(new, types)
    return result


def buffer_used_twice(programs: Programs) -> Iterator[Programs]:
    """A step writes a buffer that another step of the rank writes, or the input."""
    for rank, program in programs.items():
        writers = [
            (index, step) for index, step in enumerate(program.steps) if type(step) is not Send
        ]
        taken = {INPUT}
        for index, step in writers:
            for old in list(taken):
                if isinstance(step, Receive):
                    again = step._replace(buffers=(old, *step.buffers[1:]))
                else:
                    again = step._replace(out=old)
                yield changed(programs, rank, index, again)
            taken.update(step.buffers if isinstance(step, Receive) else (step.out,))


def sent_as_it_arrives(programs: Programs) -> Iterator[Programs]:
    """A message goes out in the very step in which what it holds arrives, or is made."""
    for rank, index, send in positions(programs, Send):
        steps = programs[rank].steps
        for arrival in steps[:index]:
            if isinstance(arrival, Send):
                continue
            made = arrival.buffers if isinstance(arrival, Receive) else (arrival.out,)
            if not set(made) & set(send.buffers) or arrival.step < 0:
                continue
            early = send._replace(step=arrival.step)
            without = changed(programs, rank, index)
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


def operands_out_of_order(programs: Programs) -> Iterator[Programs]:
    """Two neighbouring operands, exchanged."""
    for rank, index, step in positions(programs, Combine):
        for i in range(len(step.operands) - 1):
            new = list(step.operands)
            new[i : i + 2] = reversed(new[i : i + 2])
            yield changed(programs, rank, index, step._replace(operands=tuple(new)))


def operand_taken_twice(programs: Programs) -> Iterator[Programs]:
    """One operand once more, after any of them."""
    for rank, index, step in positions(programs, Combine):
        for operand, place in itertools.product(step.operands, range(len(step.operands))):
            new = (*step.operands[: place + 1], operand, *step.operands[place + 1 :])
            yield changed(programs, rank, index, step._replace(operands=new))


def wrong_children(programs: Programs) -> Iterator[Programs]:
    """A node made of what begins a leaf later, or ends a leaf sooner, and so is none of the order;
    or of all its parts but one."""
    for rank, index, step in positions(programs, Combine):
        for operands in (step.operands[1:], step.operands[:-1]):
            node = operands[0][0][0], operands[-1][0][1]
            if len(operands) > 1:
                yield changed(programs, rank, index, step._replace(node=node, operands=operands))
            yield changed(programs, rank, index, step._replace(operands=operands))


def missing_finish(programs: Programs) -> Iterator[Programs]:
    """The root, not finished: as if it were the result, or kept as a node."""
    for rank, index, step in positions(programs, Combine):
        if step.finish:
            yield changed(programs, rank, index, step._replace(finish=False))
            more, buffer = with_buffer(programs, rank, Type.NODE)
            yield changed(more, rank, index, step._replace(finish=False, out=buffer))


def early_finish(programs: Programs) -> Iterator[Programs]:
    """An inner node, rounded as if it were the root."""
    for rank, index, step in positions(programs, Combine):
        if not step.finish:
            more, buffer = with_buffer(programs, rank, Type.RESULT)
            yield changed(more, rank, index, step._replace(finish=True, out=buffer))


def output_nobody_asked_for(programs: Programs, owner: int, ranks: int) -> Iterator[Programs]:
    """The one that must have the result sends it to another, into that one's output."""
    late = 1 + max((step.step for own in programs.values() for step in own.steps), default=0)
    steps, types = programs[owner]
    for other in set(range(ranks)) - {owner}:
        theirs = programs.get(other, RankProgram([], [Type.LEAF, Type.RESULT]))
        receive = Receive(late, owner, (OUTPUT,))
        yield {
            **programs,
            owner: RankProgram([*steps, Send(late, other, (OUTPUT,))], types),
            other: RankProgram([*theirs.steps, receive], theirs.types),
        }


@dataclass(frozen=True)
class Altered(Schedule):
    """A schedule whose steps are others than its algorithm's moves come to."""

    def lowered(self, shard: int) -> Programs:
        return self.alter(super().lowered(shard))

    def alter(self, programs: Programs) -> Programs:
        raise NotImplementedError

    @classmethod
    def of(cls, schedule: Schedule) -> Altered:
        return cls(**{each.name: getattr(schedule, each.name) for each in fields(schedule)})


class Rotated(Altered):
    def alter(self, programs: Programs) -> Programs:
        return rotated(programs, self.topology.ranks)


class OneSendLess(Altered):
    def alter(self, programs: Programs) -> Programs:
        return next(dropped(programs, Send))
