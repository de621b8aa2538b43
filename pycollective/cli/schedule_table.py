"""A schedule as text: one line a step, then what a rank sends in all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from pycollective.cli.schedule_messages import KINDS, Counts, Sizes
from pycollective.config import ENV_WIRE
from pycollective.schedule import Schedule
from pycollective.schedule.cost import COUNTED_RANKS, TYPICAL, Element, Link, price
from pycollective.schedule.steps import Type

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


# From wire.md alone: a payload of zeros is the shortest there is. What data really take is
# measured (benchmarks/results/packing.json), not known here.
BLOCK = 128  # elements
HEADERS = {"float16": 3, "bfloat16": 3, "float32": 4}  # bytes a block, of the types with a codec
LENGTH = 4  # bytes in front of each piece's payload


def least(dtype: str, element: int, count: float) -> float:
    """Bytes that `count` elements take at least where `wire` may be exact; zeros take so many.

    Raw if that is less: what goes with a call is never packed. A piece that is cut into chunks
    takes no less than the whole.
    """
    raw = element * count
    if dtype not in HEADERS:
        return raw
    blocks = math.floor(count / BLOCK)
    return min(raw, LENGTH + HEADERS[dtype] * blocks + element * (count - BLOCK * blocks))


def between_hosts(schedule: Schedule, counts: Counts, sizes: Sizes, of: str) -> str:
    """What all ranks together send to other hosts, as a range where packing can apply."""
    shard = sizes.shard(schedule)
    raw = float(counts.across @ shard)
    count = shard[KINDS.index(Type.LEAF)] / sizes.element
    wide = sizes.accumulator, sizes.wide
    types = [wide if kind is Type.NODE else (sizes.dtype, sizes.element) for kind in KINDS]
    packed = sum(
        int(buffers) * least(dtype, element, count)
        for buffers, (dtype, element) in zip(counts.across, types, strict=True)
    )
    text = f"between hosts{of}: all ranks together send {raw:,.0f} bytes raw"
    if sizes.dtype not in HEADERS:  # nor are nodes, then
        return f"{text}; {sizes.dtype} is never packed"
    return (
        f"{text}; with {ENV_WIRE}=exact from {packed:,.0f}, where all values are 0, to {LENGTH} a "
        "piece more than raw"
    )
