"""Whole compressed steps in NumPy, of all ranks at once: what every rank must end with, in bits.

Nothing of the library's exchanges or kernels is in it. Chunks are counted from a parameter's start
and cuts are at their ends, so where a shard lies changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pycollective import reference
from tests.kernels.quantized import decode, encode

CHUNK = 256
FLOAT = np.float32


def host_sums(flat: Sequence[np.ndarray], host_of: Sequence[int]) -> list[np.ndarray]:
    """Each host's, in fp32, in the contract's order over its ranks."""
    return [
        reference.tree(
            [x.astype(FLOAT) for x, its in zip(flat, host_of, strict=True) if its == host], np.add
        )
        for host in range(max(host_of) + 1)
    ]


def dense(flat: Sequence[np.ndarray], host_of: Sequence[int]) -> np.ndarray:
    """The average of a small parameter."""
    total = reference.tree(host_sums(flat, host_of), np.add)
    return (total / FLOAT(len(flat))).astype(flat[0].dtype)


def quantized(codec: str, c: np.ndarray) -> np.ndarray:
    """What is decoded of an array that goes by a quantized codec."""
    encoded = encode(codec, CHUNK, c)
    assert encoded is not None
    return decode(codec, CHUNK, encoded[0], len(c))


class Quantized:
    """A parameter and its residuals, by a quantized codec."""

    def __init__(self, codec: str, count: int, hosts: int) -> None:
        self.codec = codec
        self.worker = np.zeros((hosts, count), FLOAT)
        self.server = np.zeros(count, FLOAT)

    def step(self, flat: Sequence[np.ndarray], host_of: Sequence[int]) -> np.ndarray:
        """The average as every rank gets it."""
        came = []
        for host, x in enumerate(host_sums(flat, host_of)):
            c = x + self.worker[host]
            came.append(quantized(self.codec, c))
            self.worker[host] = c - came[-1]
        c = reference.tree(came, np.add) / FLOAT(len(flat)) + self.server
        out = quantized(self.codec, c)
        self.server = c - out
        return out.astype(flat[0].dtype)


def largest(c: np.ndarray, k: int) -> np.ndarray:
    """The places of the k elements that come first: magnitude descending, then place."""
    magnitude = c.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return np.sort(np.lexsort((np.arange(len(c)), -magnitude.astype(np.int64)))[:k])


def sum_of_present(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(sum, whether there is one) of (value, whether there is one); what is absent adds nothing."""

    def combine(a, b):
        both = np.where(a[1] & b[1], a[0] + b[0], np.where(a[1], a[0], b[0]))
        return both, a[1] | b[1]

    return reference.tree(parts, combine)


class TopK:
    """A parameter and its residuals, of which k elements go, or k of each chunk."""

    def __init__(
        self,
        count: int,
        hosts: int,
        k: int,
        values: type,
        by: str = "tensor",
        decay: float = 1.0,
    ) -> None:
        self.count, self.k, self.values = count, k, values
        self.by, self.decay = by, FLOAT(decay)
        self.worker = np.zeros((hosts, count), FLOAT)

    def picked(self, c: np.ndarray) -> np.ndarray:
        """The places of what a host sends."""
        if self.by == "tensor":
            return largest(c, self.k)
        found = []
        for at in range(0, self.count, CHUNK):
            part = c[at : at + CHUNK]
            found.append(at + largest(part, -(-self.k * len(part) // CHUNK)))
        return np.concatenate(found)

    def step(self, flat: Sequence[np.ndarray], host_of: Sequence[int]) -> np.ndarray:
        """The average as every rank gets it."""
        sent = []
        for host, x in enumerate(host_sums(flat, host_of)):
            c = x + self.worker[host]
            there = np.zeros(self.count, bool)
            there[self.picked(c)] = True
            values = np.where(there, c, FLOAT(0)).astype(self.values).astype(FLOAT)
            self.worker[host] = np.where(there, c - values, c)
            sent.append((values, there))
        total, _ = sum_of_present(sent)
        self.worker *= self.decay
        return (total / FLOAT(len(flat))).astype(flat[0].dtype)
