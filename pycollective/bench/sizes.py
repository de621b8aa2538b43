"""Message sizes: suffixes, and the ladder that a benchmark climbs."""

from __future__ import annotations

import re

from pycollective.errors import ConfigurationError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from ``"4096"``, ``"64K"``, ``"1.5M"``, ``"2GiB"``; the suffixes are binary.

    Raises:
        ConfigurationError: not a size, or not a whole number of bytes.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"{text!r} is not a size: write bytes, or a number with K, M or G, such as 64K"
        )
    number, unit = match.groups()
    size = float(number) * _UNITS[unit.upper()]
    if size != int(size):
        raise ConfigurationError(f"{text!r} is {size} bytes, which is not a whole number")
    return int(size)


def format_size(size: int) -> str:
    """The shortest exact form: 65536 is ``"64K"``, 1000 is ``"1000"``."""
    for unit in ("G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def ladder(begin: int, end: int, step_bytes: int, step_factor: float) -> list[int]:
    """Sizes from `begin` to `end` bytes: multiplied by `step_factor`, or, where that is 0, one
    `step_bytes` apart.

    Raises:
        ConfigurationError: the ladder is empty or would never end.
    """
    if begin < 1 or end < begin:
        raise ConfigurationError(
            f"sizes go from -b {begin} to -e {end}: need 1 <= begin <= end (in bytes)"
        )
    if step_factor and step_factor <= 1:
        raise ConfigurationError(f"-f {step_factor:g} does not grow: it must be more than 1")
    if not step_factor and step_bytes < 1:
        raise ConfigurationError("give a step: -f FACTOR (more than 1) or -i BYTES (at least 1)")
    sizes = [begin]
    while True:
        last = sizes[-1]
        # A factor close to 1 on a small size rounds to no step at all.
        following = max(int(last * step_factor), last + 1) if step_factor else last + step_bytes
        if following > end:
            return sizes
        sizes.append(following)
