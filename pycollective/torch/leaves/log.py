"""What leaves log: means over all leaves, the same bits on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pycollective.agree import Bytes, let_all_hear
from pycollective.errors import CollectiveMismatch, ConfigurationError
from pycollective.order import split


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
        in which nobody logs takes one message of 8 bytes.

        Raises:
            CollectiveMismatch: on all ranks, leaves log other names.
        """
        text = json.dumps([*self._said.items()]).encode() if self._said else b""
        length = np.array([len(text)], np.int64).view(np.uint8)
        lengths = np.ascontiguousarray(all_gather(length)).view(np.int64)[:, 0]
        if not lengths.any():
            return {}
        mine = np.zeros(int(lengths.max()), np.uint8)
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        said: dict[int, dict[str, float]] = {}
        for row, size in zip(all_gather(mine), lengths, strict=True):
            said |= dict(json.loads(row[:size].tobytes() or b"[]"))
        each = [said.get(leaf, {}) for leaf in range(leaves)]
        names = sorted(each[0])
        for leaf, values in enumerate(each):
            if sorted(values) != names:
                let_all_hear(all_gather)
                raise CollectiveMismatch(
                    f"step {self._step}: leaf 0 logs {names}, and leaf {leaf} {sorted(values)}: "
                    "all leaves of a step log the same names"
                )
        return {
            name: _sum([values[name] for values in each], 0, leaves) / divisor for name in names
        }


def _sum(values: list[float], lo: int, hi: int) -> float:
    """Add leaves lo to hi - 1 in the contract's order."""
    if hi - lo == 1:
        return values[lo]
    middle = split(lo, hi)
    return _sum(values, lo, middle) + _sum(values, middle, hi)
