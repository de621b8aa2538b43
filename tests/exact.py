"""Floating-point arithmetic on exact fractions: what IEEE 754 says, with no float in it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary format: bits of precision, and the exponents of its least and greatest normals.

    Where nothing is `infinite`, NaN has the place of the greatest number alone, and what overflows
    is NaN.
    """

    precision: int
    lowest: int
    highest: int
    infinite: bool = True

    @property
    def beyond(self) -> Fraction:
        """The least magnitude that is no number, were there one more."""
        top = Fraction(2) ** (self.highest + 1)
        return top if self.infinite else top - Fraction(2) ** (self.highest - self.precision + 1)

    def numbers(self) -> list[Fraction]:
        """All magnitudes, ascending from 0, and what would be the next; for small formats."""
        found, step = [], Fraction(2) ** (self.lowest - self.precision + 1)
        while not found or found[-1] < self.beyond:
            found.append(found[-1] + step if found else Fraction(0))
            if found[-1] == step * 2**self.precision:
                step *= 2
        return found

    def round(self, exact: Fraction | float) -> Fraction | float:
        """The nearest number of the format, ties to even; an infinity or NaN where it overflows.

        Zeros have no sign here. Of floats, infinities and NaN may come in.
        """
        if isinstance(exact, float):
            return exact if self.infinite else float("nan")
        if exact == 0:
            return exact
        # 2**exponent <= |exact| < 2**(exponent + 1)
        exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
        if abs(exact) < Fraction(2) ** exponent:
            exponent -= 1
        unit = Fraction(2) ** (max(exponent, self.lowest) - self.precision + 1)
        nearest = round(exact / unit) * unit  # Python rounds a tie to the even integer
        if abs(nearest) >= self.beyond:
            overflown = float("inf") if exact > 0 else float("-inf")
            return overflown if self.infinite else float("nan")
        return nearest


FORMATS = {
    "float8_e4m3fn": Format(4, -6, 8, infinite=False),
    "float8_e5m2": Format(3, -14, 15),
    "float16": Format(11, -14, 15),
    "bfloat16": Format(8, -126, 127),
    "float32": Format(24, -126, 127),
    "float64": Format(53, -1022, 1023),
}
