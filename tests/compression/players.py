"""Ranks of a pool that play hosts, states over them, and gradients that all can make."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from pycollective import Communicator, _core
from pycollective.compression import CODECS, State, TopKState
from pycollective.compression.groups import Groups, groups_of_communicator
from pycollective.compression.residuals import Residuals
from tests.inputs import dtype_of

# The host of each rank: one rank a host, aligned hosts, uneven ones with ranks to spare.
TOPOLOGIES = [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 0), (0, 1, 1, 0)]
TYPES = ["float32", "float16", "bfloat16"]

# Chunk ends inside and outside of parameters, a small one, one without elements.
SHAPES = {"w": (70, 100), "bias": (33,), "v": (5, 1031), "none": (0, 4)}

KINDS: dict[str, tuple[type[State], dict[str, Any]]] = {
    **{name: (CODECS[name], {"chunk": 256}) for name in _core.quantize_codecs()},
    "top_k": (TopKState, {"density": 0.03, "exchange": "gather"}),
    "top_k by region": (TopKState, {"density": 0.03, "exchange": "region"}),
    "top_k of chunks": (
        TopKState,
        {"density": 0.05, "by": "chunk", "chunk": 512, "exchange": "gather", "values": "float16"},
    ),
    "top_k of chunks by region": (
        TopKState,
        {"density": 0.05, "by": "chunk", "chunk": 512, "exchange": "region", "values": "float32"},
    ),
}


@contextmanager
def noted_splits() -> Iterator[list[Communicator | None]]:
    """What communicators are split into meanwhile."""
    made: list[Communicator | None] = []
    split = Communicator.split

    def noted(*args: Any) -> Communicator | None:
        made.append(split(*args))
        return made[-1]

    Communicator.split = noted
    try:
        yield made
    finally:
        Communicator.split = split


_ends: dict[tuple[int, ...], Groups | None] = {}


def ends_of(comm: Communicator, host_of: tuple[int, ...]) -> Groups | None:
    """Groups of the first ranks, one for each host given, made once; None on the others."""
    if host_of not in _ends:
        ranks: Communicator | None = comm
        if len(host_of) < comm.size:
            ranks = comm.split(0 if comm.rank < len(host_of) else None, comm.rank)
        _ends[host_of] = None if ranks is None else groups_of_communicator(ranks, host_of=host_of)
    return _ends[host_of]


def make(
    comm: Communicator,
    host_of: tuple[int, ...],
    kind: str,
    shapes: Mapping[str, Sequence[int]] = SHAPES,
    **more: Any,
) -> State:
    """A state over some of the ranks; only for those."""
    ends = ends_of(comm, host_of)
    assert ends is not None
    of, options = KINDS[kind]
    return of(shapes, ends, **{**options, **more})


def gradients(
    seed: int,
    rank: int,
    step: int,
    shapes: Mapping[str, Sequence[int]] = SHAPES,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """A rank's in a step: heavy tails and zeros; any rank can make every rank's."""
    drawn = _drawn(seed, rank, step, tuple((name, tuple(of)) for name, of in shapes.items()))
    return {name: values.astype(dtype_of(dtype)) for name, values in drawn.items()}


# Half of a test's time, and the same from test to test.
@lru_cache(maxsize=500)
def _drawn(
    seed: int, rank: int, step: int, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> dict[str, np.ndarray]:
    random = np.random.default_rng([seed, rank, step])
    found = {}
    for name, shape in shapes:
        values = random.standard_normal(shape) * np.exp(random.normal(-4, 2, shape))
        values[random.random(shape) < 0.1] = 0
        found[name] = values.astype(np.float32)
    return found


def wide(x: np.ndarray) -> np.ndarray:
    """In fp64, exactly."""
    return x.astype(np.float32).astype(np.float64)


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Of names and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        found.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()


def held_by(state: State) -> dict[str, np.ndarray]:
    """A copy of this rank's residuals."""
    return {
        f"{kind} of {name}": held.copy() for kind, of in residuals_of(state) for name, held in of
    }


def residuals_of(state: State) -> Iterable[tuple[str, Residuals]]:
    """This rank's residuals by kind."""
    return state._feedback.codec.residuals.items()


def size_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Elements by name."""
    return {name: math.prod(shape) for name, shape in shapes.items()}
