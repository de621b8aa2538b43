"""Residuals in two buffers, so that the new ones of a step count only when it is committed.

The *old* residual, which is held, is what the last committed step left. The *new* one is what the
step under way will leave. A step that any rank gives up (a gradient that is not finite) changes no
old residual by a bit. So these stay in the loss scale of the step that left them, and a step in
another scale takes a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective.compression.arrays import Floats
from pycollective.compression.kernels import CpuKernels, Kernels


@dataclass(frozen=True)
class Scaled:
    """An error with the loss scale that it is in.

    Attributes:
        values: fp32.
        scale: the loss scale.
    """

    values: Any
    scale: float

    def to(self, scale: float, kernels: Kernels) -> Any:
        """The error in another scale, each number rounded once; it may not be finite there."""
        if scale == self.scale:
            return self.values
        # The ratio rounded to fp32, whose range it may leave.
        mantissa, exponent = math.frexp(scale / self.scale)
        factor = math.ldexp(float(np.float32(mantissa)), exponent)
        return kernels.scaled(self.values, factor)


class Residuals:
    """The residuals of one kind, by parameter: this rank's part of each, fp32."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._held: dict[str, Scaled] = {}
        self._left: dict[str, Any] = {}
        self._touched: set[str] = set()
        self._scale = 1.0

    def begin(self, scale: float) -> None:
        """Begin a step in a loss scale; the new residuals of an unfinished one are forgotten."""
        self._touched.clear()
        self._scale = scale

    def of(self, name: str, count: int) -> tuple[Any, Any]:
        """A parameter's (old, new) for the step under way; the old one is None where none is."""
        left = self._left.get(name)
        if left is None:
            left = self._left[name] = self._kernels.floats(count)
        self._touched.add(name)
        held = self._held.get(name)
        return None if held is None else held.to(self._scale, self._kernels), left

    def skip_update(self, name: str) -> None:
        """Keep a parameter's old residual in the step under way."""
        self._touched.discard(name)

    def commit(self, decay: float = 1.0) -> None:
        """Make the step's new residuals the old ones of the next."""
        for name in self._touched:
            spare, values = self._held.get(name), self._left.pop(name)
            if decay != 1.0:
                values *= decay
            self._held[name] = Scaled(values, self._scale)
            if spare is not None:
                self._left[name] = spare.values
        self._touched.clear()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, held.values) for name, held in self._held.items())

    def saved(self, name: str, scale: float) -> Floats | None:
        """The held residual of a parameter, in a loss scale, on the host, which waits for it."""
        held = self._held.get(name)
        if held is None:
            return None
        return self._kernels.to_host(held.to(scale, self._kernels))

    def set(self, name: str, held: Floats, scale: float) -> None:
        """Hold this copy instead."""
        self._held[name] = Scaled(self._kernels.from_host(held), scale)

    def clear(self) -> None:
        """Hold nothing, and give the memory back."""
        self._held.clear()
        self._left.clear()
        self._touched.clear()

    @property
    def nbytes(self) -> int:
        """How much memory both buffers take."""
        held = [each.values for each in self._held.values()]
        return sum(int(each.nbytes) for each in [*held, *self._left.values()])


_HOST = CpuKernels()


class CarriedErrors(dict[str, Scaled]):
    """Errors that go with the next average of their parameter, all at once; alike on all ranks.

    They were held where gradients were compressed, and loaded where all is dense. A `flush` passes
    through here, too. They are in the host's memory.
    """

    @classmethod
    def of(cls, saved: Mapping[str, Floats], scale: float) -> CarriedErrors:
        """Copies of what was saved, without what is all zero."""
        copies = {n: np.array(each, np.float32) for n, each in saved.items() if np.any(each)}
        return cls({name: Scaled(each, scale) for name, each in copies.items()})

    def add(self, mean: Mapping[str, Floats], scale: float) -> None:
        """Carry more, in a loss scale."""
        here = self.to(scale)
        for name, error in mean.items():
            self[name] = Scaled(here[name] + error if name in here else error, scale)

    def to(self, scale: float) -> dict[str, Floats]:
        """All of them, in a loss scale."""
        return {name: error.to(scale, _HOST) for name, error in self.items()}

    def part(self, name: str, start: int, stop: int) -> Floats | None:
        """Some elements of an error, in the step's loss scale; None if none is carried."""
        error = self.get(name)
        if error is None:
            return None
        values: Floats = Scaled(error.values[start:stop], error.scale).to(self._scale, _HOST)
        return values

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return sum(error.values.nbytes for error in self.values())

    def begin(self, scale: float) -> None:
        """Begin a step in a loss scale."""
        self._delivered: set[str] = set()
        self._scale = scale

    def note_delivered(self, name: str) -> None:
        """Let the step's commit forget an error."""
        self._delivered.add(name)

    def commit(self) -> None:
        """Forget what the step has delivered."""
        for name in self._delivered:
            del self[name]
