"""What leaves log: means over all leaves, the same bits on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from pycollective.errors import CollectiveMismatch, ConfigurationError
from pycollective.order import join

MOST_TEXT_BYTES = 1 << 30  # that a rank's leaves log in a step


class Log:
    """The values that the leaves of one step log.

    Args:
        step: its number, for errors.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._said: dict[int, dict[str, float]] = {}  # by this rank's leaves

    def add(self, leaf: int, values: dict[str, Any]) -> None:
        """Note some values of a leaf."""
        said = self._said.setdefault(leaf, {})
        for name, value in values.items():
            if name in said:
                raise ConfigurationError(f"leaf {leaf} logs {name} twice: log each name once")
            try:
                said[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ConfigurationError(
                    f"leaf {leaf} logs {name}, which is no number: {error}"
                ) from None

    @property
    def text(self) -> str:
        """What this rank's leaves have logged, as all ranks are told; "" for nothing."""
        return json.dumps([*self._said.items()]) if self._said else ""

    def means(self, texts: Sequence[bytes], leaves: int, divisor: int) -> dict[str, float]:
        """Return each name's mean over all ranks' leaves.

        Values are added in fp64 in the contract's order over the leaves, and divided once.

        Args:
            texts: of all ranks.
            leaves: of the step.
            divisor: of its averages.

        Raises:
            CollectiveMismatch: leaves log other names.
        """
        said: dict[int, dict[str, float]] = {}
        for text in texts:
            said |= dict(json.loads(text or b"[]"))
        each = [said.get(leaf, {}) for leaf in range(leaves)]
        names = sorted(each[0])
        for leaf, values in enumerate(each):
            if sorted(values) != names:
                raise CollectiveMismatch(
                    f"step {self._step}: leaf 0 logs {names}, and leaf {leaf} {sorted(values)}: "
                    "all leaves of a step log the same names"
                )
        ones = [1] * leaves
        return {name: join([values[name] for values in each], ones) / divisor for name in names}
