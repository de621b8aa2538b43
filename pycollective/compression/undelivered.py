"""Error that nothing sends piece by piece: held before the way became dense, here or elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pycollective.compression.arrays import Flat, Floats, Item
from pycollective.compression.residuals import Scaled


class Undelivered(dict[str, Scaled]):
    """By parameter, the same on all ranks: what goes with its next average, all at once."""

    @classmethod
    def of(cls, saved: Mapping[str, Floats], scale: float) -> Undelivered:
        """A copy of what was saved, without what is all zero."""
        copies = {n: np.array(each, np.float32) for n, each in saved.items() if np.any(each)}
        return cls({name: Scaled(each, scale) for name, each in copies.items()})

    def add(self, mean: Mapping[str, Floats], scale: float) -> None:
        """More of it, in a loss scale."""
        for name, error in mean.items():
            total = self[name].to(scale) + error if name in self else error
            self[name] = Scaled(total, scale)

    def to(self, scale: float) -> dict[str, Floats]:
        """All of it, in a loss scale."""
        return {name: error.to(scale) for name, error in self.items()}

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return sum(error.values.nbytes for error in self.values())

    def begin(self, scale: float) -> None:
        """Begin a step in a loss scale."""
        self._owed: set[str] = set()
        self._scale = scale

    def deliver(self, items: Sequence[Item]) -> bool:
        """Add it to averages of the step; whether these are finite."""
        finite = True
        for item in items:
            error = self.get(item.name)
            # All zero may be a parameter that no rank used: DDP ignores what comes back.
            if error is not None and not item.flat.is_zero():
                self._owed.add(item.name)
                total = np.empty(item.flat.count, np.float32)
                item.flat.widen(0, item.flat.count, total)
                item.flat.put(0, total + error.to(self._scale))
                finite &= item.flat.is_finite()
        return finite

    def deliver_part(self, name: str, flat: Flat, start: int) -> None:
        """Add to a shard of an average: the elements from `start` on."""
        error = self.get(name)
        if error is not None:
            self._owed.add(name)
            total = np.empty(flat.count, np.float32)
            flat.widen(0, flat.count, total)
            part = Scaled(error.values[start : start + flat.count], error.scale)
            flat.put(0, total + part.to(self._scale))

    def commit(self) -> None:
        """What the step delivered is no longer held."""
        for name in self._owed:
            del self[name]
