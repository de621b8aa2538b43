"""Floating-point arithmetic on exact fractions: what IEEE 754 says, with no float in it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary format: bits of precision, and the exponents of its least and greatest normals."""

    precision: int
    lowest: int
    highest: int

    def round(self, exact: Fraction | float) -> Fraction | float:
        """The nearest number of the format, ties to even; an infinity where it overflows.

        Zeros have no sign here. Of floats, only infinities may come in: they stay.
        """
        if isinstance(exact, float) or exact == 0:
            return exact
        # 2**exponent <= |exact| < 2**(exponent + 1)
        exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
        if abs(exact) < Fraction(2) ** exponent:
            exponent -= 1
        unit = Fraction(2) ** (max(exponent, self.lowest) - self.precision + 1)
        nearest = round(exact / unit) * unit  # Python rounds a tie to the even integer
        if abs(nearest) >= Fraction(2) ** (self.highest + 1):
            return float("inf") if exact > 0 else float("-inf")
        return nearest


FORMATS = {
    "float16": Format(11, -14, 15),
    "bfloat16": Format(8, -126, 127),
    "float32": Format(24, -126, 127),
    "float64": Format(53, -1022, 1023),
}
