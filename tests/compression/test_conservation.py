"""What is put in comes out or is held: over steps, for each codec, exchange, topology and type."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compression.players import (
    KINDS,
    SHAPES,
    TOPOLOGIES,
    TYPES,
    digest,
    gradients,
    make,
    wide,
)
from tests.turns import in_turns

STEPS = 6
HOSTS = [*TOPOLOGIES, (0, 1, 1, 2)]
# Half a unit in the last place, relative, and of the least numbers.
HALF_ULP = {"float32": (2**-24, 0.0), "float16": (2**-11, 2**-25), "bfloat16": (2**-8, 0.0)}


def steps_of(comm, host_of, kind, dtype, seed):
    """By parameter (error, bound, what compression changed); and digests of all outputs."""
    state = make(comm, host_of, kind)
    ranks = range(comm.size)
    put_in = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    delivered = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    rounded = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    most = dict.fromkeys(SHAPES, 0.0)
    outputs = []
    for step in range(STEPS):
        every = [gradients(seed, rank, step, dtype=dtype) for rank in ranks]
        mine = every[comm.rank]
        mean = {n: sum(wide(each[n]) for each in every) / comm.size for n in SHAPES}
        assert state.all_reduce(mine)
        relative, least = HALF_ULP[dtype]
        for name in SHAPES:
            put_in[name] += mean[name]
            delivered[name] += wide(mine[name])
            if dtype != "float32":  # the average's rounding to its type: nobody holds it
                rounded[name] += np.maximum(abs(wide(mine[name])) * relative, least)
            largest = max((abs(wide(e[name])).max(initial=0) for e in every), default=0)
            most[name] = max(most[name], largest)
        outputs.append(digest(mine))
    held = state._feedback.keeper.mean()
    for name, each in state._feedback.keeper.gather()["worker"].items():
        most[name] = max(most[name], float(abs(each).max(initial=0)))
    found = {}
    for name, shape in SHAPES.items():
        kept = wide(held[name]).reshape(shape) if name in held else np.zeros(shape)
        error = abs(delivered[name] + kept - put_in[name]) - rounded[name]
        # Of each step some ten roundings in fp32, of numbers no larger than these.
        bound = STEPS * 16 * 2**-24 * most[name]
        changed = abs(delivered[name] - put_in[name]).max(initial=0)
        found[name] = (float(error.max(initial=0)), bound, float(changed))
    return found, outputs, state.stats()["compressed_calls"]


def of_each_type():
    """Each kind on all hosts, and each with every type; all three together in `make storm`."""
    for turn, kind in enumerate(KINDS):
        for place, host_of in enumerate(HOSTS):
            for seed, dtype in enumerate(TYPES):
                usual = (turn + place) % len(TYPES) == seed
                marks = [] if usual else [pytest.mark.storm]
                yield pytest.param(kind, host_of, seed, dtype, marks=marks)


@pytest.mark.parametrize(("kind", "host_of", "seed", "dtype"), list(of_each_type()))
def test_delivered_and_held_are_what_was_put_in(pool, kind, host_of, seed, dtype):
    outcomes = pool(4).call(steps_of, host_of, kind, dtype, seed)
    assert len({tuple(outputs) for _, outputs, _ in outcomes}) == 1
    for found, _, compressed in outcomes:
        assert compressed == STEPS
        for name, (error, bound, changed) in found.items():
            assert error <= bound, (name, dtype)
            if name in ("w", "v"):
                assert changed > 30 * bound, "it was not compressed"


def whole_numbers(seed, rank, step):
    """Gradients whose every sum is exact in fp32, with many of one magnitude."""
    random = np.random.default_rng([seed, rank, step])
    found = {}
    for name, shape in SHAPES.items():
        few = random.integers(-3, 4, shape)
        few[random.random(shape) < 0.02] *= 100
        found[name] = few.astype(np.float32)
    return found


def exact_steps(comm, host_of, kind, values, seed):
    """Whether, after each step, delivered and held are exactly what was put in; and digests."""
    state = make(comm, host_of, kind, values=values)
    put_in = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    delivered = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    exact, outputs = True, []
    for step in range(STEPS):
        every = [whole_numbers(seed, rank, step) for rank in range(comm.size)]
        mine = every[comm.rank]
        for name in SHAPES:
            put_in[name] += sum(wide(each[name]) for each in every) / comm.size
        assert state.all_reduce(mine)
        held = state._feedback.keeper.mean()
        for name, shape in SHAPES.items():
            delivered[name] += wide(mine[name])
            kept = wide(held[name]).reshape(shape) if name in held else 0.0
            exact &= bool((delivered[name] + kept == put_in[name]).all())
        outputs.append(digest(mine))
    return exact, outputs


TOP_K = [kind for kind in KINDS if kind.startswith("top_k")]


@pytest.mark.parametrize(("kind", "host_of", "values"), in_turns(TOP_K, HOSTS, TYPES))
def test_top_k_loses_nothing_at_all(pool, kind, host_of, values):
    """Where fp32 adds exactly, so does the exchange, whatever is dropped, rounded or returned."""
    outcomes = pool(4).call(exact_steps, host_of, kind, values, HOSTS.index(host_of))
    assert [exact for exact, _ in outcomes] == [True] * 4
    assert len({tuple(outputs) for _, outputs in outcomes}) == 1


def second_selections(comm, host_of, seed):
    """How many elements of the first step's average are not zero: by gather, by region."""
    found = []
    for kind in ("top_k", "top_k by region"):
        mine = gradients(seed, comm.rank, 0)
        make(comm, host_of, kind).all_reduce(mine)
        found.append(np.count_nonzero(mine["w"]))
    return found


@pytest.mark.parametrize("host_of", TOPOLOGIES)
def test_a_region_sends_on_no_more_than_one_host_has_sent(pool, host_of):
    for by_gather, by_region in pool(4).call(second_selections, host_of, len(host_of)):
        assert by_region < 0.8 * by_gather
