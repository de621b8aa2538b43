"""What error feedback keeps, in two buffers: a step's new residuals count when it is committed.

`held` is what the last committed step left; `left` is what the step under way will leave. A step
that any rank gives up (a gradient that is not finite) leaves `held` as it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pycollective.compression.arrays import Floats
from pycollective.errors import ConfigurationError


class Reduced(set[str]):
    """Parameters averaged in the step under way: a second time would overwrite what is left."""

    def note(self, names: Iterable[str]) -> None:
        """Add some.

        Raises:
            ConfigurationError: one of them went before.
        """
        for name in names:
            if name in self:
                raise ConfigurationError(
                    f"{name!r} went in this step already: add gradients up before, or end the step"
                )
            self.add(name)


class Residuals:
    """The residuals of one kind, by parameter: this rank's part of each, fp32."""

    def __init__(self) -> None:
        self._held: dict[str, Floats] = {}
        self._left: dict[str, Floats] = {}
        self._touched: set[str] = set()

    def of(self, name: str, count: int) -> tuple[Floats | None, Floats]:
        """(held, left) of a parameter for the step under way; None where nothing is held yet."""
        left = self._left.get(name)
        if left is None:
            left = self._left[name] = np.empty(count, np.float32)
        self._touched.add(name)
        return self._held.get(name), left

    def left(self, name: str) -> Floats:
        """What the step under way will leave of a parameter that it has asked for (`of`)."""
        return self._left[name]

    def keep(self, name: str) -> None:
        """Leave one parameter's residual out of the step under way."""
        self._touched.discard(name)

    def commit(self, decay: float = 1.0) -> None:
        """Make what the step left what is held."""
        for name in self._touched:
            spare = self._held.get(name)
            self._held[name] = self._left.pop(name)
            if decay != 1.0:
                self._held[name] *= np.float32(decay)
            if spare is not None:
                self._left[name] = spare
        self._touched.clear()

    def discard(self) -> None:
        """Forget what the step under way left."""
        self._touched.clear()

    def scale(self, factor: float) -> None:
        """Multiply what is held; of a step that has not begun."""
        for held in self._held.values():
            held *= np.float32(factor)

    def __iter__(self) -> Iterator[tuple[str, Floats]]:
        return iter(self._held.items())

    def get(self, name: str) -> Floats | None:
        """What is held of a parameter."""
        return self._held.get(name)

    def set(self, name: str, held: Floats) -> None:
        """Hold this copy instead."""
        self._held[name] = np.array(held, np.float32)

    def clear(self) -> None:
        """Hold nothing, and give the memory back."""
        self._held.clear()
        self._left.clear()
        self._touched.clear()

    @property
    def nbytes(self) -> int:
        """Of both buffers."""
        return sum(each.nbytes for each in [*self._held.values(), *self._left.values()])
