"""The bytes of a schedule that cross hosts, raw, and the fewest that exact packing can make them.

From docs/wire.md alone: a payload of zeros is the shortest there is. What data really take is
measured (benchmarks/packing.py), not known here.
"""

from __future__ import annotations

import math

from pycollective.cli.schedule_messages import KINDS, Counts, Sizes
from pycollective.schedule import Schedule
from pycollective.schedule.steps import Type

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
    return f"{text}, packed at least {packed:,.0f} (of zeros), at most {LENGTH} a piece more"
