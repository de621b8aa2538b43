"""A product of parameters of which the usual run has what shows something."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def in_turns(*axes: Sequence[Any], among: Collection[tuple[Any, ...]] = ()) -> list[Any]:
    """The product; with each combination of the others the usual run has one value of the last
    axis, in turns: a value of another axis meets as many of them as the axes besides these two have
    values together (where there are only two: one; of those that `among` leaves, about as many).
    The rest is for `make storm`.

    Args:
        among: if given, what the first of each combination must be.
    """
    made = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        case = tuple(axis[place] for axis, place in zip(axes, places, strict=True))
        if among and case[: len(next(iter(among)))] not in among:
            continue
        usual = sum(places[:-1]) % len(axes[-1]) == places[-1]
        made.append(pytest.param(*case, marks=() if usual else pytest.mark.storm))
    return made
