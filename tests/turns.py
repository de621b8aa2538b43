"""A product of parameters of which the usual run has what shows something."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest


def in_turns(*axes: Sequence[Any], among: Collection[tuple[Any, ...]] = ()) -> list[Any]:
    """The product of three axes or more; the usual run has every two values that meet in it.

    With each combination of the others that is one value of the last axis, in turns, and whatever
    else it takes for every pair. The rest is for `make storm`. (Of two axes that would be all.)

    Args:
        among: if given, what the first of each combination must be.
    """
    assert len(axes) > 2, "every pair of two axes is their product"
    cases = [
        places
        for places in itertools.product(*(range(len(axis)) for axis in axes))
        if not among or _values(axes, places)[: len(next(iter(among)))] in among
    ]
    usual = {each for each in cases if sum(each[:-1]) % len(axes[-1]) == each[-1]}
    met = {pair for each in usual for pair in _pairs(each)}
    for each in cases:
        if not met.issuperset(_pairs(each)):
            usual.add(each)
            met.update(_pairs(each))
    return [
        pytest.param(*_values(axes, each), marks=() if each in usual else pytest.mark.storm)
        for each in cases
    ]


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """The product of axes; the usual run has each value of each axis, in turns of all at once.

    It is for axes of which each shows the same whatever the others are. The rest is for `make
    storm`.
    """
    lengths = [len(axis) for axis in axes]
    turns = {tuple(turn % length for length in lengths) for turn in range(max(lengths))}
    usual = [_values(axes, places) for places in turns]
    return usually(lambda *values: values in usual, *axes)


def usually(usual: Callable[..., bool], *axes: Iterable[Any]) -> list[Any]:
    """The product of axes; the usual run has those that `usual` says, `make storm` the rest."""
    return [
        pytest.param(*values, marks=() if usual(*values) else pytest.mark.storm)
        for values in itertools.product(*axes)
    ]


def _values(axes: Sequence[Sequence[Any]], places: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(axis[place] for axis, place in zip(axes, places, strict=True))


def _pairs(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Every two values of a combination, each with its axis."""
    return set(itertools.combinations(enumerate(places), 2))
