"""Reductions of accumulators: the arguments, and the plan of a deal.

A communicator's `all_reduce`, `reduce` and `reduce_scatter` hand over to `LeafReductions`, with the
arguments unread, where they are given an `Accumulator` in place of an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from pycollective.errors import ConfigurationError
from pycollective.leaves.accumulator import Accumulator
from pycollective.leaves.deal import Deal

if TYPE_CHECKING:
    from pycollective import _core


@dataclass(slots=True)
class Reduction:
    """A call, by the arguments of the collective that was called.

    `LeafReductions` checks them and settles the divisor and the deal; then the native core reads
    them, and `rows` and `program`, by these names (csrc/bindings/leaves_py.cpp).
    """

    kind: str
    x: Accumulator
    op: str
    out: Any
    async_op: bool
    algorithm: str | None
    wire: str | None
    stream: Any
    divisor: float | None
    deal: Deal | None
    root: int = 0
    counts: Sequence[int] | None = None
    rows: Sequence[np.ndarray] = ()
    program: _core.Program | None = None


class LeafReductions:
    """The collectives of a communicator for accumulators: see `pycollective.Communicator`.

    Each raises ConfigurationError where the arguments cannot be right, or the accumulator holds
    other leaves than the deal gives this rank; nothing has moved, and it is not spent.

    Args:
        comm: the communicator.
        plan_of: `Planner.of_deal` of its rank.
    """

    def __init__(
        self,
        comm: _core.Communicator,
        plan_of: Callable[[str, Deal, int, str, int], _core.Program | None],
    ) -> None:
        self._comm = comm
        self._plan_of = plan_of

    def all_reduce(
        self,
        x: Accumulator,
        op: str = "sum",
        out: Any = None,
        async_op: bool = False,
        algorithm: str | None = "auto",
        wire: str | None = None,
        stream: Any = None,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> Any:
        """`Communicator.all_reduce`."""
        call = Reduction(
            "all_reduce",
            x,
            op,
            out,
            async_op=async_op,
            algorithm=algorithm,
            wire=wire,
            stream=stream,
            divisor=divisor,
            deal=deal,
        )
        return self._run(call)

    def reduce(
        self,
        x: Accumulator,
        root: int = 0,
        op: str = "sum",
        out: Any = None,
        async_op: bool = False,
        algorithm: str | None = "auto",
        wire: str | None = None,
        stream: Any = None,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> Any:
        """`Communicator.reduce`."""
        call = Reduction(
            "reduce",
            x,
            op,
            out,
            async_op=async_op,
            algorithm=algorithm,
            wire=wire,
            stream=stream,
            divisor=divisor,
            deal=deal,
            root=index(root),
        )
        return self._run(call)

    def reduce_scatter(
        self,
        out: Any,
        x: Accumulator,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: str | None = "auto",
        wire: str | None = None,
        stream: Any = None,
        divisor: float | None = None,
        deal: Deal | None = None,
    ) -> Any:
        """`Communicator.reduce_scatter`."""
        call = Reduction(
            "reduce_scatter",
            x,
            op,
            out,
            async_op=async_op,
            algorithm=algorithm,
            wire=wire,
            stream=stream,
            divisor=divisor,
            deal=deal,
            counts=counts,
        )
        return self._run(call)

    def _run(self, call: Reduction) -> Any:
        comm, acc = self._comm, call.x
        self._check(call)
        call.deal = deal = _checked_deal(call, comm.rank, comm.size)
        call.divisor = _divisor(call, deal.leaves)
        call.program = self._plan_of(
            call.kind, deal, call.root, call.algorithm or "auto", 4 * acc.size
        )
        had_failed = comm.failure is not None
        call.rows = acc._spend()
        try:
            result = comm._reduce_leaves(call)
        except BaseException:
            if had_failed or comm.failure is None:
                acc._take_back()
            else:  # while it ran
                acc._drop()
            raise
        if call.async_op:
            acc._work = result
        return result

    def _check(self, call: Reduction) -> None:
        """Check the arguments, but for the deal and the divisor."""
        kind, size = call.kind, self._comm.size
        if not isinstance(call.x, Accumulator):
            raise ConfigurationError(
                f"{kind}: give one accumulator, not a list of them: Accumulator([shape, ...], "
                "leaves=M) adds up lists of arrays"
            )
        if call.stream is not None:
            raise ConfigurationError(
                f"{kind}: stream= goes with arrays on a GPU, not with an accumulator"
            )
        if call.op not in ("sum", "avg"):
            raise ConfigurationError(
                f"{kind}: accumulators have op 'sum' and 'avg', not {call.op!r}"
            )
        if not 0 <= call.root < size:
            raise ConfigurationError(f"{kind}: rank {call.root} is not one of 0 to {size - 1}")
        if call.out is None and (kind != "reduce" or call.root == self._comm.rank):
            raise ConfigurationError(f"{kind}: the result of an accumulator needs an array: out=")


def _checked_deal(call: Reduction, rank: int, size: int) -> Deal:
    """The deal of a call, whose accumulator holds what it gives the rank."""
    kind, acc, deal = call.kind, call.x, call.deal
    if deal is None:
        deal = Deal.contiguous(size, acc.leaves)
    elif not isinstance(deal, Deal) or (deal.size, deal.leaves) != (size, acc.leaves):
        raise ConfigurationError(
            f"{kind}: the deal must be one of {acc.leaves} leaves to {size} ranks; "
            "Communicator.deal makes one"
        )
    if tuple(deal.nodes(rank)) == acc.nodes:
        return deal
    mine = {leaf for lo, hi in deal.held[rank] for leaf in range(lo, hi)}
    held = {leaf for lo, hi in acc.nodes for leaf in range(lo, hi)}
    if lacking := sorted(mine - held):
        raise ConfigurationError(
            f"{kind}: the accumulator lacks leaf {lacking[0]}, which is rank {rank}'s: add it first"
        )
    leaf = min(held - mine)
    owner = next(r for r, runs in enumerate(deal.held) if any(lo <= leaf < hi for lo, hi in runs))
    raise ConfigurationError(
        f"{kind}: the accumulator holds leaf {leaf}, which is rank {owner}'s and not rank "
        f"{rank}'s: leaves_of says which a rank has, and Communicator.deal makes another deal"
    )


def _divisor(call: Reduction, leaves: int) -> float:
    divisor = call.divisor
    if divisor is None:
        return leaves
    if call.op != "avg":
        raise ConfigurationError(f"{call.kind}: divisor= goes with op='avg'")
    given = (
        int(divisor) if isinstance(divisor, Integral) else divisor
    )  # NumPy's would compare as floats
    try:
        value = float(given)
    except (OverflowError, TypeError, ValueError):
        value = math.nan
    if not (value > 0 and math.isfinite(value) and value == given):
        raise ConfigurationError(
            f"{call.kind}: divisor {divisor!r} must be above 0, and a number that float64 holds "
            "exactly, such as an integer up to 2**53"
        )
    return value
