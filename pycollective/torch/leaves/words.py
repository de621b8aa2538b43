"""What ranks tell each other once a step: which step, their counts, their deal, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from pycollective.errors import CollectiveMismatch, ConfigurationError, named
from pycollective.leaves.deal import Deal
from pycollective.torch.ordered.pieces import WORDS

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

MOST_COUNT = 1 << 53  # of a leaf, and of all together: what fp64 holds
_NANOSECONDS = 4  # a word; those before are the step, how many counts, their sum, the deal
_NEWCOMERS = 5  # whether a process waits to join, as rank 0 sees it


class StepWords:
    """What this rank tells of one step; and, once all ranks' words are read, what they make.

    Args:
        step: its number.
        deal: who gives which leaves.
        counts: of this rank's leaves, or of none.
        seconds: that this rank's leaves of the step before took.

    Attributes:
        leaves: of the step.
        block: the words as they travel, int64, ``(WORDS,)``.
        divisor: of the step's averages.
        seconds_before: that all ranks' leaves of the step before took, by rank.
        newcomers: whether a process waits to join.
    """

    def __init__(self, step: int, deal: Deal, counts: Sequence[int], seconds: float) -> None:
        self._step, self.leaves = step, deal.leaves
        self.divisor = deal.leaves
        self.seconds_before = [0.0] * deal.size
        self.newcomers = False
        self.block: Rows = np.zeros(WORDS, np.int64)
        # Any total above the limit is refused; this fits 64 bits.
        counted = len(counts), min(sum(counts), 2 * MOST_COUNT)
        self.block[: _NANOSECONDS + 1] = step, *counted, deal.digest, round(seconds * 1e9)

    def tell_newcomers(self, seen: bool) -> None:
        """Say, as rank 0, whether a process waits to join."""
        self.block[_NEWCOMERS] = seen

    def read(self, rows: Rows) -> int:
        """Take what all ranks have told, a row each, and return the divisor of the averages.

        It is the sum of all counts, or M where leaves have none.

        Raises:
            CollectiveMismatch: ranks are at other steps, deal otherwise, or some leaves lack a
                count.
            ConfigurationError: the counts make no divisor.
        """
        steps, counted, counts, deals, nanoseconds = rows.T[: _NANOSECONDS + 1]
        if (steps != steps[0]).any():
            others = [int(rank) for rank in np.flatnonzero(steps != steps[0])]
            raise CollectiveMismatch(
                f"rank 0 is at step {steps[0]}, and {named(others)} at "
                f"{[int(steps[rank]) for rank in others]}"
            )
        if (deals != deals[0]).any():
            others = [int(rank) for rank in np.flatnonzero(deals != deals[0])]
            raise CollectiveMismatch(
                f"step {self._step}: {named(others)} deal its leaves otherwise than rank 0: the "
                "cost of sync.steps must return the same numbers on all ranks"
            )
        self.seconds_before = [each / 1e9 for each in nanoseconds.tolist()]
        self.newcomers = bool(rows[0, _NEWCOMERS])
        if (given := int(counted.sum())) not in (0, self.leaves):
            raise CollectiveMismatch(
                f"step {self._step}: {given} of {self.leaves} leaves have a count; all have one, "
                "or none"
            )
        if not given:
            return self.divisor
        divisor = sum(map(int, counts))
        if not 0 < divisor <= MOST_COUNT:
            raise ConfigurationError(
                f"step {self._step}: the counts make {divisor}, and must make 1 to {MOST_COUNT}"
            )
        self.divisor = divisor
        return divisor

    def divisor_on_device(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the divisor where the rows are: float64, ``(1,)``; NaN where `read` would raise.

        The host does not wait for it.
        """
        steps, counted, counts, deals = (rows[:, word] for word in range(_NANOSECONDS))
        total = counts.clamp(max=MOST_COUNT + 1).sum()
        alike = ((steps == steps[0]) & (deals == deals[0])).all()
        in_range = (total > 0) & (total <= MOST_COUNT) & (counted.sum() == self.leaves)
        by_counts = torch.where(in_range, total.to(torch.float64), float("nan"))
        divisor = torch.where(counted.sum() == 0, float(self.leaves), by_counts)
        return torch.where(alike, divisor, float("nan")).to(torch.float64).view(1)
