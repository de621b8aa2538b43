"""What the lanes of a warp make together of their registers: shuffles, votes and reductions.

Functions take and give arrays of (warp, lane). All 32 lanes of a warp take part, always.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.instructions import TYPES, Meaning, meaning

LANES = 32
_WORD, _PREDICATE = TYPES["b32"], TYPES["pred"]


def exchange(op: str) -> Meaning | None:
    """What an instruction computes, whose last source is the mask of those that take part."""
    head, *parts = op.split(".")
    if parts[:1] != ["sync"]:
        return None
    rule = {"shfl": _shuffle, "vote": _vote, "redux": _reduction}.get(head)
    return rule(parts[1:]) if rule else None


def _shuffle(parts):
    """A lane gets another's word, or keeps its own where that is out of its segment."""
    if len(parts) != 2 or parts[1] != "b32" or parts[0] not in ("up", "down", "bfly", "idx"):
        return None
    how = parts[0]

    def shuffled(words, by, clamp, _):
        lane = np.arange(LANES)
        by, segment = (by & np.uint32(31)).astype(int), (clamp >> np.uint32(8) & 31).astype(int)
        clamp = (clamp & np.uint32(31)).astype(int)
        end = lane & segment | clamp & ~segment
        first = lane & segment
        of = {
            "up": lane - by,
            "down": lane + by,
            "bfly": lane ^ by,
            "idx": first | by & ~segment,
        }[how]
        within = of >= end if how == "up" else of <= end
        return np.take_along_axis(words, np.where(within, of, lane), axis=1)

    return Meaning(_WORD, [_WORD] * 4, shuffled)


def _vote(parts):
    if parts == ["ballot", "b32"]:

        def ballot(votes, _):
            bits = votes.astype(np.uint32) << np.arange(LANES, dtype=np.uint32)
            return _everywhere(np.bitwise_or.reduce(bits, axis=1))

        return Meaning(_WORD, [_PREDICATE, _WORD], ballot)
    function = {("any", "pred"): np.any, ("all", "pred"): np.all}.get(tuple(parts))
    return function and Meaning(
        _PREDICATE,
        [_PREDICATE, _WORD],
        lambda votes, _: _everywhere(function(votes, axis=1)),
    )


def _reduction(parts):
    """As that of two numbers, in any order: none shows."""
    known = meaning(".".join(parts))
    integer = parts in [["add", "u32"], ["add", "s32"]]
    bits = len(parts) == 2 and parts[0] in ("and", "or", "xor") and parts[1] == "b32"
    extreme = parts[0] in ("min", "max") and parts[-1] in ("u32", "s32", "f32")
    if known is None or not (integer or bits or extreme):
        return None

    def reduced(numbers, _):
        while numbers.shape[1] > 1:
            numbers = known.function(numbers[:, 0::2], numbers[:, 1::2])
        return _everywhere(numbers[:, 0])

    return Meaning(known.result, [known.result, _WORD], reduced)


def _everywhere(of_warps):
    return np.repeat(of_warps[:, None], LANES, axis=1)
