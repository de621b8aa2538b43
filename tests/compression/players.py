"""Ranks of a pool that simulate hosts, states over them, and gradients that all can make."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from pycollective import Communicator, _core
from pycollective.compression import CODECS, State, TopKState
from pycollective.compression.groups import Groups, groups_of_communicator
from pycollective.compression.residuals import Residuals
from tests.inputs import dtype_of

SOON = 20  # seconds; the operations' timeout is 30

# NumPy's states, and torch's over pycollective and over gloo.
FACES = ["numpy", "torch", "gloo"]

# The host of each rank: one rank a host, aligned hosts, uneven ones with ranks to spare.
TOPOLOGIES = [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 0), (0, 1, 1, 0)]
TYPES = ["float32", "float16", "bfloat16"]

# Chunk ends inside and outside of parameters, a small one, one without elements.
SHAPES = {"w": (70, 100), "bias": (33,), "v": (5, 1031), "none": (0, 4)}

KINDS: dict[str, tuple[type[State], dict[str, Any]]] = {
    **{name: (CODECS[name], {"chunk": 256}) for name in _core.quantize_codecs()},
    "top_k": (TopKState, {"density": 0.03}),
    "top_k of chunks": (
        TopKState,
        {"density": 0.05, "by": "chunk", "chunk": 512, "values": "float16"},
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


def state_of(
    comm: Communicator,
    face: str,
    kind: str,
    host_of: tuple[int, ...] | None = None,
    shapes: Mapping[str, Sequence[int]] = SHAPES,
    **more: Any,
) -> Any:
    """A state of either face with groups of its own, which takes and gives NumPy arrays."""
    of, options = KINDS[kind]
    options = {**options, **more}
    if face != "numpy":
        from tests.torch.compressed import arrays_over

        return arrays_over(comm, face, of.__name__, shapes, host_of, **options)
    groups = comm if host_of is None else groups_of_communicator(comm, host_of=host_of)
    return of(shapes, groups, **options)


def by_face(whole: Iterable[Any], few: Iterable[Any]) -> list[tuple[str, Any]]:
    """Cases of which NumPy's face has all, and each of torch's a few."""
    return [("numpy", each) for each in whole] + [(f, each) for f in FACES[1:] for each in few]


@contextmanager
def open_groups(face: str) -> Iterator[Callable[[], int]]:
    """How many of the groups that are made meanwhile are open."""
    if face == "numpy":
        with noted_splits() as made:
            yield lambda: sum(not each.closed for each in made if each)
        return
    import torch.distributed as dist

    names = dist.distributed_c10d._world.pg_names
    before = set(names.values()) if dist.is_initialized() else {"0"}
    yield lambda: len(set(names.values()) - before)


def ends_with(call: Callable[[], object]) -> tuple[str, str, float]:
    """How a call ends: the type and the text of its error, seconds."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


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
