"""Error that nothing sends piece by piece: held before the way became dense, here or elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pycollective.compression.arrays import Flat, Floats, Item


class Undelivered(dict[str, Floats]):
    """By parameter, the same on all ranks: what goes with its next average, all at once."""

    @classmethod
    def of(cls, saved: Mapping[str, Floats]) -> Undelivered:
        """A copy of what was saved, without what is all zero."""
        return cls({n: np.array(each, np.float32) for n, each in saved.items() if np.any(each)})

    def add(self, mean: Mapping[str, Floats]) -> None:
        """More of it."""
        for name, error in mean.items():
            self[name] = self[name] + error if name in self else error

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return sum(error.nbytes for error in self.values())

    def scale(self, factor: float) -> None:
        """Multiply it all."""
        for error in self.values():
            error *= np.float32(factor)

    def begin(self) -> None:
        """Begin a step."""
        self._owed: set[str] = set()

    def deliver(self, items: Sequence[Item]) -> None:
        """Add it to averages of the step."""
        for item in items:
            error = self.get(item.name)
            # All zero may be a parameter that no rank used: DDP ignores what comes back.
            if error is not None and not item.flat.is_zero():
                self._owed.add(item.name)
                total = np.empty(item.flat.count, np.float32)
                item.flat.widen(0, item.flat.count, total)
                item.flat.put(0, total + error)

    def deliver_part(self, name: str, flat: Flat, start: int) -> None:
        """Add to a shard of an average: the elements from `start` on."""
        error = self.get(name)
        if error is not None:
            self._owed.add(name)
            total = np.empty(flat.count, np.float32)
            flat.widen(0, flat.count, total)
            flat.put(0, total + error[start : start + flat.count])

    def commit(self) -> None:
        """What the step delivered is no longer held."""
        for name in self._owed:
            del self[name]
