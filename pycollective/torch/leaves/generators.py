"""Random numbers that follow from a leaf, not from the rank that computes it."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch

from pycollective.errors import ConfigurationError


def integer(value: object, what: str) -> int:
    """The number, of one type whatever integer it was: True, NumPy's and a tensor's look unlike."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(f"{what} is {value!r}, which is no integer") from None


def seed_of(*numbers: int) -> int:
    """A seed of 63 bits that follows from these numbers and their order."""
    text = "/".join(str(integer(each, "a seed")) for each in numbers).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, NumPy and Python; afterwards they go on as before."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
