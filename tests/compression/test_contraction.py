"""1-bit through the whole exchange on inputs made to defeat it: what is held stays small.

A chunk c of n elements goes as Q(c) = sign(c) |c|_1 / n, so that

    |c - Q(c)|^2 = (1 - d) |c|^2,   d = |c|_1^2 / (n |c|^2) >= 1 / n,

and with r = sqrt(1 - d) of the smallest d met, and |c| <= |x| + |held|, what is held of inputs no
longer than |x| stays below |x| r / (1 - r). Both hold of what a worker keeps, whose x is its host's
sum, and of what a server keeps, whose x is the mean of what came.
"""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import reference
from tests.compression import oracle
from tests.compression.players import make, wide

COUNT = 21 * oracle.CHUNK + 77
SHAPES = {"w": (1, COUNT)}
STEPS = 24
SLACK = 2.0**-20  # of |c|^2: fp32's roundings; the least that d can be is 2^-8
ZEROS = slice(3 * oracle.CHUNK, 5 * oracle.CHUNK)


def one_huge(random, rank):
    x = random.standard_normal(COUNT) * 1e-3
    x[:: 2 * oracle.CHUNK] = 1e4
    return x


def alternating(random, rank):
    """Within a chunk, and between hosts: the means all but cancel."""
    places = np.arange(COUNT)
    return (0.5 + 0.1 * rank + places % 5) * (-1.0) ** (places + rank)


def zeros(random, rank):
    x = random.standard_normal(COUNT)
    x[ZEROS] = 0
    return x


def subnormals(random, rank):
    return random.integers(-(1 << 23) + 1, 1 << 23, COUNT) * 2.0**-149


def heavy_tail(random, rank):
    return random.choice([-1.0, 1.0], COUNT) * np.exp(3 * random.standard_normal(COUNT))


INPUTS = [one_huge, alternating, zeros, subnormals, heavy_tail]


def by_chunk(x):
    """Rows of a chunk each, in fp64, filled up with zeros; and how many elements each has."""
    rows = np.zeros((-(-COUNT // oracle.CHUNK), oracle.CHUNK))
    rows.reshape(-1)[:COUNT] = wide(x)
    sizes = np.full(len(rows), oracle.CHUNK)
    sizes[-1] = COUNT - oracle.CHUNK * (len(rows) - 1)
    return rows, sizes


class Kept:
    """What one worker or server holds: how well a step contracts, and what bounds it over all."""

    def __init__(self):
        self.worst = 0.0  # how far beyond (1 - d) |c|^2, in |c|^2
        self.least = np.ones(len(by_chunk(np.zeros(COUNT, np.float32))[0]))  # of d
        self.longest = np.zeros_like(self.least)  # of |x|
        self.most = np.zeros_like(self.least)  # of |held|

    def step(self, x, held, left):
        (c, sizes), (e, _), (x, _) = by_chunk(x + held), by_chunk(left), by_chunk(x)
        square = (c**2).sum(1)
        some = square > 0
        d = np.abs(c).sum(1)[some] ** 2 / (sizes * square)[some]
        assert not e[~some].any()
        beyond = (e**2).sum(1)[some] / square[some] - (1 - d)
        self.worst = max(self.worst, beyond.max())
        self.least[some] = np.minimum(self.least[some], d)
        self.longest = np.maximum(self.longest, np.sqrt((x**2).sum(1)))
        self.most = np.maximum(self.most, np.sqrt((e**2).sum(1)))

    def bounded(self):
        r = np.sqrt(np.maximum(1 - self.least + SLACK, 0))
        return bool((self.most <= self.longest * r / (1 - r)).all())


def steps_of(comm, host_of, kind):
    """Of worker and server, step by step: (beyond, bounded); the error in all; what is held."""
    state = make(comm, host_of, "one_bit", SHAPES)
    ranks, hosts = comm.size, max(host_of) + 1
    every = [kind(np.random.default_rng([7, r]), r).astype(np.float32) for r in range(ranks)]
    sums = oracle.host_sums(every, host_of)
    workers, server = [Kept() for _ in range(hosts)], Kept()
    before = {"worker": {"w": np.zeros((hosts, COUNT), np.float32)}}
    before["server"] = {"w": np.zeros(COUNT, np.float32)}
    delivered, most = np.zeros(COUNT), max(float(abs(x).max()) for x in every)
    for _ in range(STEPS):
        mine = {"w": every[comm.rank].reshape(SHAPES["w"]).copy()}
        assert state.all_reduce(mine)
        delivered += wide(mine["w"]).reshape(-1)
        after = state._feedback.keeper.gather()
        came = []
        for host, kept in enumerate(workers):
            held = before["worker"]["w"][host]
            kept.step(sums[host], held, after["worker"]["w"][host])
            came.append(oracle.quantized("one_bit", sums[host] + held))
        mean = reference.tree(came, np.add) / np.float32(ranks)
        server.step(mean, before["server"]["w"].reshape(-1), after["server"]["w"].reshape(-1))
        before = {k: {n: x.copy() for n, x in of.items()} for k, of in after.items()}
        most = max(most, *(float(abs(of["w"]).max()) for of in after.values()))
    held = wide(state._feedback.keeper.mean()["w"]).reshape(-1)
    put_in = STEPS * sum(wide(x) for x in every) / ranks
    error = abs(delivered + held - put_in)
    bound = STEPS * 16 * (2**-24 * most + 2**-149)
    found = [(kept.worst, kept.bounded()) for kept in (*workers, server)]
    still = bool(delivered[ZEROS].any() or held[ZEROS].any())
    return found, float(error.max()) / bound, bool(held.any()), still


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("host_of", [(0, 0, 1, 1), (0, 1, 2, 3)])
def test_what_is_held_contracts_and_is_what_was_not_delivered(pool, kind, host_of):
    for found, error, held, still in pool(4).call(steps_of, host_of, kind):
        assert error <= 1
        for beyond, bounded in found:
            assert beyond <= SLACK
            assert bounded
        assert held, "nothing was compressed"
        if kind is zeros:
            assert not still
