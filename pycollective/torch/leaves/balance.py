"""Load balancing: the leaves of a step in runs that take ranks equally long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import fsum
from statistics import median
from typing import NamedTuple

from pycollective.errors import ConfigurationError
from pycollective.leaves.cut import cut
from pycollective.leaves.deal import Deal
from pycollective.torch.leaves.sampler import LeafSampler

Cost = Callable[[list[int]], float]

_STEPS = 9  # of which a rank's speed is the median
_SLOWEST = 1 / 8  # of the fastest rank's speed: one that hung for once still has leaves


class _Dealt(NamedTuple):
    deal: Deal
    costs: list[float]  # of each rank's run


class Balance:
    """Deals the leaves of each step of a loop; all ranks deal alike, without a message.

    A deal follows from the costs of the step's leaves and from what all ranks were told of their
    times. A loader draws ahead, so a deal must not change once a rank has asked for it. So a time
    counts for steps that no rank can have asked for when it becomes known: it is told with the
    next step's words, and the deal of a step counts what was computed `ahead` + 2 steps before.

    Args:
        sampler: says which samples a leaf has.
        cost: of a leaf's samples.
        ranks: how many.
    """

    def __init__(self, sampler: LeafSampler, cost: Cost, ranks: int) -> None:
        self._sampler, self._cost, self._ranks = sampler, cost, ranks
        self._ahead: int | None = None  # None to take all ranks for equally fast
        self._dealt: dict[int, _Dealt] = {}  # by step, from the last that is complete
        self._told = sampler.sync.step - 1  # the last step whose times all ranks were told
        self._times: deque[list[float]] = deque(maxlen=_STEPS)  # of a unit of cost, by rank
        self._speeds = {self._told: [1.0] * ranks}  # by the last step that counts in them

    def deal_of(self, step: int) -> Deal:
        """Return who has which leaves in a step, from the last that was complete on.

        Raises:
            ConfigurationError: `cost` returns no number above 0, or the loader draws further ahead
                than it says.
        """
        if step not in self._dealt:
            self._dealt[step] = self._deal(step)
        return self._dealt[step].deal

    def measure(self, ahead: int) -> None:
        """Count how fast ranks are from here on; any rank's loader draws so many steps ahead."""
        self._ahead = ahead

    def completed(self, step: int, seconds_before: Sequence[float]) -> None:
        """Note that a step is complete; and what all ranks took for their leaves of that before."""
        for each in [each for each in self._dealt if each < step - 1]:
            del self._dealt[each]
        before = self._dealt.get(step - 1)
        if self._ahead is None or before is None:
            return
        self._told = step - 1
        if all(before.costs) and all(each > 0 for each in seconds_before):
            pairs = zip(seconds_before, before.costs, strict=True)
            self._times.append([seconds / cost for seconds, cost in pairs])
        self._speeds[self._told] = self._measured()
        for known in [known for known in self._speeds if known < step - self._ahead - 2]:
            del self._speeds[known]

    def _measured(self) -> list[float]:
        if not self._times:
            return [1.0] * self._ranks
        speeds = [1 / median(each) for each in zip(*self._times, strict=True)]
        return [max(each, max(speeds) * _SLOWEST) for each in speeds]

    def _deal(self, step: int) -> _Dealt:
        leaves = range(self._sampler.sync.leaves)
        costs = [self._cost_of(step, leaf) for leaf in leaves]
        try:
            deal = cut(costs, self._speeds_for(step))
        except ConfigurationError as error:
            raise ConfigurationError(f"steps: cost, in step {step}: {error}") from None
        runs = [costs[lo:hi] for held in deal.held for lo, hi in held or [(0, 0)]]
        return _Dealt(deal, [fsum(run) for run in runs])

    def _cost_of(self, step: int, leaf: int) -> float:
        value = self._cost(self._sampler.indices_of(step, leaf))
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise ConfigurationError(
                f"steps: cost, in step {step}: leaf {leaf} costs {value!r}, which is no number"
            ) from None

    def _speeds_for(self, step: int) -> list[float]:
        """Of all ranks; what is known of them when the first rank may ask for this step."""
        first = min(self._speeds)
        if self._ahead is None:
            return self._speeds[first]
        last = max(step - self._ahead - 2, first)
        if last > self._told:
            raise ConfigurationError(
                f"step {step} is asked for while ranks were told of steps to {self._told}: what "
                f"wraps the loader draws more than {self._ahead} steps ahead, which "
                "measure_ranks=True takes from num_workers and prefetch_factor; leave it out"
            )
        return self._speeds[last]
