"""What leaves log: means over all leaves, the same bits on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from pycollective.agree import Bytes, all_gather_texts, let_all_hear
from pycollective.errors import CollectiveMismatch, ConfigurationError
from pycollective.order import join

_MOST_BYTES = 1 << 30  # that a rank's leaves log in a step


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

    def means(
        self, all_gather: Callable[[Bytes], Bytes], leaves: int, divisor: int
    ) -> dict[str, float]:
        """Return each name's mean over all ranks' leaves. Collective.

        Values are added in fp64 in the contract's order over the leaves, and divided once. A step
        in which nobody logs takes one message of a few bytes.

        Raises:
            CollectiveMismatch: on all ranks, leaves log other names.
        """
        mine = json.dumps([*self._said.items()]) if self._said else ""
        said: dict[int, dict[str, float]] = {}
        for text in all_gather_texts(all_gather, mine, _MOST_BYTES):
            said |= dict(json.loads(text or b"[]"))
        each = [said.get(leaf, {}) for leaf in range(leaves)]
        names = sorted(each[0])
        for leaf, values in enumerate(each):
            if sorted(values) != names:
                let_all_hear(all_gather)
                raise CollectiveMismatch(
                    f"step {self._step}: leaf 0 logs {names}, and leaf {leaf} {sorted(values)}: "
                    "all leaves of a step log the same names"
                )
        ones = [1] * leaves
        return {name: join([values[name] for values in each], ones) / divisor for name in names}
