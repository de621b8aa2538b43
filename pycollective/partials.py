"""Reductions of what accumulators hold: the arguments, and the plan of a deal.

The native collectives hand over to `reduce_accumulator` where they are given one in place of an
array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any

from pycollective.accumulator import Accumulator
from pycollective.agree import Bytes, agree
from pycollective.deal import Deal, checked_leaves
from pycollective.errors import CollectiveMismatch, ConfigurationError

if TYPE_CHECKING:
    from pycollective import _core
    from pycollective.planning.planner import Planner


def reduce_accumulator(
    comm: _core.Communicator,
    planner: Planner,
    kind: str,
    given: Accumulator,
    out: Any,
    root: int,
    op: str,
    counts: Sequence[int] | None,
    divisor: float | None,
    deal: Deal | None,
    algorithm: str | None,
    wire: str | None,
    async_op: bool,
) -> Any:
    """Reduce what the accumulators of all ranks hold into `out`; the rest as the collectives say.

    Args:
        comm: the communicator.
        planner: its plans.
        kind: ``all_reduce``, ``reduce`` or ``reduce_scatter``.
        given: this rank's accumulator.

    Raises:
        ConfigurationError: the arguments cannot be right, or the accumulator holds other leaves
            than the deal gives this rank; nothing has moved, and the accumulator is not spent.
    """
    if op not in ("sum", "avg"):
        raise ConfigurationError(f"{kind}: accumulators have op 'sum' and 'avg', not {op!r}")
    if not 0 <= root < comm.size:
        raise ConfigurationError(f"{kind}: rank {root} is not one of 0 to {comm.size - 1}")
    if out is None and (kind != "reduce" or root == comm.rank):
        raise ConfigurationError(f"{kind}: the result of an accumulator needs an array: out=")
    deal = _checked(comm, kind, given, deal)
    by = _divisor(kind, op, divisor, deal.leaves)
    program = planner.of_deal(kind, deal, root, algorithm or "auto", 4 * given.size)
    had_failed = comm.failure is not None
    rows = given._spend()
    try:
        result = comm._reduce_nodes(
            *(kind, rows, given.shape, out, root, op, counts, by, deal.digest, deal.leaves),
            *(program, wire, async_op),
        )
    except BaseException:
        if had_failed or comm.failure is None:
            given._take_back()
        else:  # while it ran
            given._drop()
        raise
    if async_op:
        given._work = result
    return result


def _checked(comm: _core.Communicator, kind: str, given: Accumulator, deal: Deal | None) -> Deal:
    """The deal of an accumulator, once that holds what this gives the rank."""
    if deal is None:
        deal = Deal.contiguous(comm.size, given.leaves)
    elif not isinstance(deal, Deal) or (deal.size, deal.leaves) != (comm.size, given.leaves):
        raise ConfigurationError(
            f"{kind}: the deal must be one of {given.leaves} leaves to {comm.size} ranks; "
            "Communicator.deal makes one"
        )
    if tuple(deal.nodes(comm.rank)) == given.nodes:
        return deal
    mine = {leaf for lo, hi in deal.held[comm.rank] for leaf in range(lo, hi)}
    held = {leaf for lo, hi in given.nodes for leaf in range(lo, hi)}
    if lacking := sorted(mine - held):
        raise ConfigurationError(
            f"{kind}: the accumulator lacks leaf {lacking[0]}, which is rank {comm.rank}'s: add it "
            "first"
        )
    leaf = min(held - mine)
    owner = next(r for r, runs in enumerate(deal.held) if any(lo <= leaf < hi for lo, hi in runs))
    raise ConfigurationError(
        f"{kind}: the accumulator holds leaf {leaf}, which is rank {owner}'s and not rank "
        f"{comm.rank}'s: leaves_of says which a rank has, and Communicator.deal makes another deal"
    )


def _divisor(kind: str, op: str, divisor: float | None, leaves: int) -> float:
    if divisor is None:
        return leaves
    if op != "avg":
        raise ConfigurationError(f"{kind}: divisor= goes with op='avg'")
    given = (
        int(divisor) if isinstance(divisor, Integral) else divisor
    )  # NumPy's would compare as floats
    try:
        value = float(given)
    except (OverflowError, TypeError, ValueError):
        value = math.nan
    if not (value > 0 and math.isfinite(value) and value == given):
        raise ConfigurationError(
            f"{kind}: divisor {divisor!r} must be above 0, and a number that float64 holds "
            "exactly, such as an integer up to 2**53"
        )
    return value


def make_deal(all_gather: Callable[[Bytes], Bytes], leaves: int, mine: Iterable[int]) -> Deal:
    """Agree on who gives which leaves; see `Communicator.deal`."""

    def given() -> tuple[int, str]:
        count, bits = checked_leaves(leaves), 0
        for leaf in map(index, mine):
            if not 0 <= leaf < count:
                raise ConfigurationError(f"leaf {leaf} is none of 0 to {count - 1}")
            if bits >> leaf & 1:
                raise ConfigurationError(f"leaf {leaf} is named twice: name each leaf once")
            bits |= 1 << leaf
        return count, hex(bits)

    made: list[Deal] = []

    def check(values: list[tuple[int, str]]) -> None:
        counts = [count for count, _ in values]
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise CollectiveMismatch(
                    f"rank 0 deals {counts[0]} leaves and rank {rank} deals {count}: all ranks "
                    "must say how many leaves there are in all"
                )
        sets = [_leaves_in(int(bits, 16)) for _, bits in values]
        try:
            made.append(Deal.of(leaves, sets))
        except ConfigurationError as error:
            raise CollectiveMismatch(str(error)) from None

    agree(all_gather, "deal", given, check)
    return made[0]


def _leaves_in(bits: int) -> list[int]:
    return [leaf for leaf in range(bits.bit_length()) if bits >> leaf & 1]
