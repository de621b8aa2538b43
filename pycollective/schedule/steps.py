"""What a lowered schedule is made of: plain steps over numbered, typed buffers, for one rank.

A buffer belongs to one rank and one shard, is written once, and holds one value:

- a **leaf**, a rank's input, in the input's type;
- a **node**, an inner node of the order, in the accumulator's type;
- a **result**, in the input's type: the finished root, or data that is only moved.

Buffer `INPUT` is the caller's input, `OUTPUT` the caller's output; the others are the engine's.
With a deal (`pycollective/leaves/deal.py`) a rank's input is as many nodes as make up its leaves,
and may be none: `input_buffers` says which buffers they are. What is sent while the partial is
empty has no buffer: between hosts it stands for the announcement, by which all learn of a mismatch.

Steps have numbers. Within one number a rank first posts its sends, then receives, then combines; so
nothing that is sent at a number depends on what arrives at that number.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from pycollective.order import Node

INPUT, OUTPUT = 0, 1


def input_buffers(inputs: int) -> tuple[int, ...]:
    """The buffers of so many inputs of a rank, in their order."""
    return (INPUT, *range(OUTPUT + 1, OUTPUT + inputs)) if inputs else ()


class Type(Enum):
    """Which type a buffer's elements have."""

    LEAF = "leaf"
    NODE = "node"
    RESULT = "result"


class Send(NamedTuple):
    """Send these buffers, as one message or part of one, to rank `to`."""

    step: int
    to: int
    buffers: tuple[int, ...]


class Receive(NamedTuple):
    """Receive these buffers from rank `source`, in the order in which it sends them."""

    step: int
    source: int
    buffers: tuple[int, ...]


class Combine(NamedTuple):
    """Compute a node of the order into buffer `out`.

    `operands` are nodes with their buffers, ascending, that make up `node` and lie under it in the
    order; they are added as the order says. `finish`: the node is the root, and `out` gets the
    result: divided where the operation asks for it, rounded once.
    """

    step: int
    out: int
    node: Node
    operands: tuple[tuple[Node, int], ...]
    finish: bool


class Copy(NamedTuple):
    """Copy a result, byte for byte."""

    step: int
    out: int
    source: int


Step = Send | Receive | Combine | Copy


class RankSteps(NamedTuple):
    """One rank's steps for one shard, in the order in which it does them; each buffer's type."""

    steps: list[Step]
    types: list[Type]
