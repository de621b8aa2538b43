"""A schedule as text: one line a step, then what a rank sends in all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from pycollective.cli.schedule_messages import Counts, Sizes
from pycollective.cli.schedule_wire import between_hosts
from pycollective.schedule import Schedule
from pycollective.schedule.cost import COUNTED_RANKS, TYPICAL, Element, Link, price

MOST_LINES = 40  # of a table that has a line for each step
_KINDS = ("leaves", "nodes", "results")  # in the order of KINDS


def report(
    schedule: Schedule, counts: Counts, sizes: Sizes, shards: int | None = None
) -> Iterator[str]:
    """What it is, what happens in each step, and what a rank sends in all.

    Args:
        schedule: the schedule.
        counts: what is sent.
        sizes: how large that is.
        shards: of so many shards; None for all.
    """
    topology = schedule.topology
    rooted = f" with root {schedule.root}" if schedule.operation.rooted else ""
    yield (
        f"{schedule.operation.name}{rooted} by {schedule.algorithm.name}, "
        f"{_number(topology.ranks, 'rank')} on {_number(len(topology.hosts), 'host')} "
        f"({topology}): {schedule.algorithm.summary}"
    )
    yield ""
    some = shards is not None and shards < schedule.shards
    if some:
        yield (
            f"counted: {shards:,} of {schedule.shards:,} shards, spread evenly; a rank sends what "
            f"belongs to the others beside it (all of them, in minutes: --shards {schedule.shards})"
        )
        yield ""
    if counts.steps:
        yield from _table(schedule, counts, sizes)
        yield ""
    yield _buffer(schedule, sizes)
    of = "of these shards" if some else "in all"
    yield _totals(schedule, counts, sizes, of)
    if len(schedule.topology.hosts) > 1:
        yield between_hosts(schedule, counts, sizes, f", {of}" if some else "")
    if topology.ranks <= COUNTED_RANKS:
        yield _prediction(schedule, sizes)


def proof(schedule: Schedule, shards: int) -> str:
    """What was proved of so many shards."""
    which = f"{shards:,} of {schedule.shards:,} shards, each of which"
    if shards == schedule.shards:
        which = "every shard"
    reduced = ", each node from its own children" if schedule.operation.reduces else ""
    return (
        f"proved: {which} ends at every rank that must have it{reduced}; each send meets its "
        "receive; no deadlock"
    )


def _table(schedule: Schedule, counts: Counts, sizes: Sizes) -> Iterator[str]:
    """A line for each step; for each run of like steps where there are too many."""
    messages, buffers = counts.messages(), counts.buffers()
    size = np.rint((buffers @ sizes.shard(schedule)).max(1))
    alike = list(
        zip(messages.sum(1), messages.max(1), map(_what_travels, buffers.sum(1)), strict=True)
    )
    runs = _runs(range(counts.steps))
    if len(runs) > MOST_LINES:
        runs = _runs(zip(alike, size, strict=True))
    if len(runs) > MOST_LINES:  # as of a ring, whose bytes change from hop to hop
        runs = _runs(alike)
    yield f"{'':12}  {'':>12}  {'---- the busiest rank ----':>32}"
    yield f"{'step':>12}  {'messages':>12}  {'messages':>9}  {'bytes':>21}  what travels"
    for first, end in runs:
        steps = str(first) if end == first + 1 else f"{first} .. {end - 1}"
        total, busiest, what = alike[first]
        sent = _range(size[first:end], ",.0f", " .. ")
        yield f"{steps:>12}  {total:12,}  {busiest:9,}  {sent:>21}  {what}"


def _runs(values: Iterable[object]) -> list[tuple[int, int]]:
    """First step and end of each run of equal values."""
    lengths = [len(list(run)) for _, run in groupby(values)]
    ends = list(accumulate(lengths))
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _buffer(schedule: Schedule, sizes: Sizes) -> str:
    wide = sizes.accumulator if schedule.operation.reduces else sizes.dtype
    nodes = f"; nodes travel in {wide}" if wide != sizes.dtype else ""
    return (
        f"buffer: {sizes.total:,} bytes of {sizes.dtype} in {_number(schedule.shards, 'shard')}"
        f"{nodes}"
    )


def _totals(schedule: Schedule, counts: Counts, sizes: Sizes, of: str) -> str:
    if not counts.steps:
        return f"{of}: nothing travels"
    sent = (counts.buffers() @ sizes.shard(schedule)).sum(0)
    times = sent / sizes.total
    return (
        f"{of}: {_number(counts.steps, 'step')}; a rank sends "
        f"{_range(counts.messages().sum(0), ',.0f')} messages, {_range(sent, ',.0f')} bytes "
        f"({_range(times, '.4g')} times the buffer)"
    )


def _prediction(schedule: Schedule, sizes: Sizes) -> str:
    """What the cost model says, and of which links: nothing was measured for this."""
    links = TYPICAL
    seconds = price(
        schedule.operation.name,
        schedule.algorithm.name,
        schedule.topology,
        sizes.total,
        Element(sizes.element, sizes.wide),
        links,
    )
    of = f"within a host {_link(links.local)}"
    if len(schedule.topology.hosts) > 1:
        of += f", between hosts {_link(links.across)}"
    return f"predicted: {_time(seconds)}, not measured ({of})"


def _link(link: Link) -> str:
    return f"{_time(link.latency)} and {1e-9 / link.byte:.3g} GB/s"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _what_travels(buffers: NDArray[np.int64]) -> str:
    there = (name for name, count in zip(_KINDS, buffers, strict=True) if count)
    return ", ".join(there) or "nothing"


def _range(values: NDArray[np.int64] | NDArray[np.float64], form: str, to: str = " to ") -> str:
    """The least and the largest, or one number where they are written alike."""
    ends = [format(float(end), form) for end in (values.min(), values.max())]
    return to.join(dict.fromkeys(ends))


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
