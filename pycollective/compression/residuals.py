"""Residuals in two buffers, so that the new ones of a step count only when it is committed.

The *old* residual, which is held, is what the last committed step left. The *new* one is what the
step under way will leave. A step that any rank gives up (a gradient that is not finite) changes no
old residual by a bit. So these stay in the loss scale of the step that left them, and a step in
another scale takes a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective.compression.arrays import Flat, Floats, Item


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
        """The error in another scale, each number rounded once; it may not be finite there."""
        if scale == self.scale:
            return self.values
        found = np.empty_like(self.values)
        with np.errstate(over="ignore"):
            np.multiply(
                self.values,
                self.factor(scale),
                out=found,
                dtype=np.float64,
                casting="same_kind",
            )
        return found

    def factor(self, scale: float) -> float:
        """By what the error is multiplied for another scale: the ratio rounded to fp32, whose range
        it may leave."""
        mantissa, exponent = math.frexp(scale / self.scale)
        return math.ldexp(float(np.float32(mantissa)), exponent)


class Residuals:
    """The residuals of one kind, by parameter: this rank's part of each, fp32."""

    _scaled: type[Scaled] = Scaled

    def __init__(self) -> None:
        self._held: dict[str, Scaled] = {}
        self._left: dict[str, Floats] = {}
        self._touched: set[str] = set()
        self._scale = 1.0

    def begin(self, scale: float) -> None:
        """Begin a step in a loss scale; the new residuals of an unfinished one are forgotten."""
        self._touched.clear()
        self._scale = scale

    def of(self, name: str, count: int) -> tuple[Floats | None, Floats]:
        """A parameter's (old, new) for the step under way; the old one is None where none is."""
        left = self._left.get(name)
        if left is None:
            left = self._left[name] = self._empty(count)
        self._touched.add(name)
        return self.get(name, self._scale), left

    def _empty(self, count: int) -> Any:
        return np.empty(count, np.float32)

    def left(self, name: str) -> Floats:
        """A parameter's new residual; `of` must have been called in this step."""
        return self._left[name]

    def skip_update(self, name: str) -> None:
        """Keep a parameter's old residual in the step under way."""
        self._touched.discard(name)

    def commit(self, decay: float = 1.0) -> None:
        """Make the step's new residuals the old ones of the next."""
        for name in self._touched:
            spare = self._held.get(name)
            self._held[name] = self._scaled(self._left.pop(name), self._scale)
            if decay != 1.0:
                self._held[name].values[:] *= np.float32(decay)
            if spare is not None:
                self._left[name] = spare.values
        self._touched.clear()

    def __iter__(self) -> Iterator[tuple[str, Floats]]:
        return ((name, held.values) for name, held in self._held.items())

    def get(self, name: str, scale: float) -> Floats | None:
        """The held residual of a parameter, in a loss scale."""
        held = self._held.get(name)
        return None if held is None else held.to(scale)

    def saved(self, name: str, scale: float) -> Floats | None:
        """The same, as an array."""
        return self.get(name, scale)

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
        """How much memory both buffers take."""
        return sum(each.nbytes for each in [*dict(self).values(), *self._left.values()])


class CarriedErrors(dict[str, Scaled]):
    """Errors that go with the next average of their parameter, all at once; alike on all ranks.

    They were held where gradients were compressed, and loaded where all is dense. A `flush` passes
    through here, too.
    """

    @classmethod
    def of(cls, saved: Mapping[str, Floats], scale: float) -> CarriedErrors:
        """Copies of what was saved, without what is all zero."""
        copies = {n: np.array(each, np.float32) for n, each in saved.items() if np.any(each)}
        return cls({name: Scaled(each, scale) for name, each in copies.items()})

    def add(self, mean: Mapping[str, Floats], scale: float) -> None:
        """Carry more, in a loss scale."""
        for name, error in mean.items():
            total = self[name].to(scale) + error if name in self else error
            self[name] = Scaled(total, scale)

    def to(self, scale: float) -> dict[str, Floats]:
        """All of them, in a loss scale."""
        return {name: error.to(scale) for name, error in self.items()}

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return sum(error.values.nbytes for error in self.values())

    def begin(self, scale: float) -> None:
        """Begin a step in a loss scale."""
        self._delivered: set[str] = set()
        self._scale = scale

    def deliver(self, items: Sequence[Item]) -> bool:
        """Add them to averages of the step; whether these are finite."""
        finite = True
        for item in items:
            error = self.get(item.name)
            # All zero may be a parameter that no rank used: DDP ignores what comes back.
            if error is not None and not item.flat.is_zero():
                self.note_delivered(item.name)
                total = np.empty(item.flat.count, np.float32)
                item.flat.widen(0, item.flat.count, total)
                item.flat.put(0, total + error.to(self._scale))
                finite &= item.flat.is_finite()
        return finite

    def deliver_part(self, name: str, flat: Flat, start: int) -> None:
        """Add to a shard of an average: the elements from `start` on."""
        error = self.get(name)
        if error is not None:
            self.note_delivered(name)
            total = np.empty(flat.count, np.float32)
            flat.widen(0, flat.count, total)
            part = Scaled(error.values[start : start + flat.count], error.scale)
            flat.put(0, total + part.to(self._scale))

    def note_delivered(self, name: str) -> None:
        """Let the step's commit forget an error."""
        self._delivered.add(name)

    def commit(self) -> None:
        """Forget what the step has delivered."""
        for name in self._delivered:
            del self[name]
