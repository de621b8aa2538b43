"""What error feedback keeps, in two buffers: a step's new residuals count when it is committed.

`held` is what the last committed step left; `left` is what the step under way will leave. A step
that any rank gives up (a gradient that is not finite) leaves `held` as it was, bit for bit; so what
is held stays in the loss scale of the step that left it, and a step in another scale takes a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Scaled:
    """An error with the loss scale that it is in.

    Attributes:
        values: fp32.
        scale: the loss scale.
    """

    values: Floats
    scale: float

    def to(self, scale: float) -> Floats:
        """The same in another scale, each number rounded once; it may not be finite there."""
        if scale == self.scale:
            return self.values
        # The ratio rounded to fp32, whose range it may leave.
        mantissa, exponent = math.frexp(scale / self.scale)
        factor = math.ldexp(float(np.float32(mantissa)), exponent)
        found = np.empty_like(self.values)
        with np.errstate(over="ignore"):
            np.multiply(self.values, factor, out=found, dtype=np.float64, casting="same_kind")
        return found


class Residuals:
    """The residuals of one kind, by parameter: this rank's part of each, fp32."""

    def __init__(self) -> None:
        self._held: dict[str, Scaled] = {}
        self._left: dict[str, Floats] = {}
        self._touched: set[str] = set()
        self._scale = 1.0

    def begin(self, scale: float) -> None:
        """Begin a step in a loss scale; what an unfinished one left is forgotten."""
        self._touched.clear()
        self._scale = scale

    def of(self, name: str, count: int) -> tuple[Floats | None, Floats]:
        """(held, left) of a parameter for the step under way; None where nothing is held yet."""
        left = self._left.get(name)
        if left is None:
            left = self._left[name] = np.empty(count, np.float32)
        self._touched.add(name)
        return self.get(name, self._scale), left

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
            self._held[name] = Scaled(self._left.pop(name), self._scale)
            if decay != 1.0:
                self._held[name].values[:] *= np.float32(decay)
            if spare is not None:
                self._left[name] = spare.values
        self._touched.clear()

    def __iter__(self) -> Iterator[tuple[str, Floats]]:
        return ((name, held.values) for name, held in self._held.items())

    def get(self, name: str, scale: float) -> Floats | None:
        """What is held of a parameter, in a loss scale."""
        held = self._held.get(name)
        return None if held is None else held.to(scale)

    def set(self, name: str, held: Floats, scale: float) -> None:
        """Hold this copy instead."""
        self._held[name] = Scaled(np.array(held, np.float32), scale)

    def clear(self) -> None:
        """Hold nothing, and give the memory back."""
        self._held.clear()
        self._left.clear()
        self._touched.clear()

    @property
    def nbytes(self) -> int:
        """Of both buffers."""
        return sum(each.nbytes for each in [*dict(self).values(), *self._left.values()])
