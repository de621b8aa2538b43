"""What algorithms are written in: moves of one shard, put together."""

from __future__ import annotations

from collections.abc import Iterable

from pycollective.schedule.lower import Move


def later(moves: Iterable[Move], steps: int) -> list[Move]:
    """The same moves, `steps` steps later."""
    return [Move(step + steps, source, target) for step, source, target in moves]


def backwards(moves: Iterable[Move], steps: int) -> list[Move]:
    """The way back of moves that take `steps` steps: last first, each from target to source.

    What collects a shard from all ranks at one then spreads it from that one to all.
    """
    return [Move(steps - 1 - step, target, source) for step, source, target in moves]


def without_repeats(holder: int, moves: Iterable[Move]) -> list[Move]:
    """Moves that carry a shard from `holder` on, without those to a rank that has had it before."""
    had = {holder}
    kept = []
    for move in sorted(moves):
        if move.target not in had:
            had.add(move.target)
            kept.append(move)
    return kept


def on(members: tuple[int, ...], moves: Iterable[Move]) -> list[Move]:
    """Moves between places 0, 1, ... as moves between the ranks that hold these places."""
    return [Move(step, members[source], members[target]) for step, source, target in moves]


def log2_ceiling(n: int) -> int:
    """The least k with 2**k >= n."""
    return (n - 1).bit_length()
