"""Ledgers of trainings that never were: what a test says was noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from pycollective.ledger.layout import Header, Parameter
from pycollective.ledger.writer import Writer

Bits = Callable[[int, int, str], bytes]  # of a step, a leaf (RESULT: the average), a parameter
NAMES = ("first.weight", "first.bias", "last.weight")


def header(names: Iterable[str] = NAMES, leaves: int = 6, seed: int = 3) -> Header:
    return Header(tuple(Parameter(name, "float32", (2, 3)) for name in names), leaves, seed)


def alike(step: int, leaf: int, name: str) -> bytes:
    return f"{step} {leaf} {name}".encode()


def changed(*where: tuple[int, int, str]) -> Bits:
    """Other bits there, and those of `alike` elsewhere."""
    return lambda *at: alike(*at) + b"!" * (at in where)


def note(
    folder: Path,
    rank: int = 0,
    size: int = 1,
    steps: Iterable[int] = range(4),
    bits: Bits = alike,
    leaves: Iterable[int] | None = None,
    of: Header | None = None,
) -> Path:
    """Write what one rank notes, the parameters in the order of backward; return the file."""
    of = of or header()
    names = [each.name for each in of.parameters]
    mine = range(rank * of.leaves // size, (rank + 1) * of.leaves // size)
    writer = Writer(folder, of, rank, size)
    for step in steps:
        for leaf in mine if leaves is None else leaves:
            for place in reversed(range(len(names))):
                writer.gradient(step, leaf, place, bits(step, leaf, names[place]))
            writer.end_leaf()
        for place in reversed(range(len(names))):
            writer.result(step, place, bits(step, -1, names[place]))
        writer.flush()
    writer.close()
    return writer.path


def run(folder: Path, size: int, bits: Bits = alike, steps: Iterable[int] = range(4)) -> Path:
    """Write what all ranks of a run note; return the folder."""
    steps = [*steps]
    for rank in range(size):
        note(folder, rank, size, steps, bits)
    return folder
