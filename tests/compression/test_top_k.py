"""Top-k between real ranks: bits, ties, the host's k, density 1."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import reference
from pycollective.compression import TopKState
from tests.compression.players import KINDS, TYPES, digest, ends_of, gradients, make, wide
from tests.inputs import order_sensitive, same_bits

SHAPES = {"w": (83, 61), "v": (9, 1000)}
TOP_K = [kind for kind in KINDS if kind.startswith("top_k")]


def everything(name, shape):
    return True


def sent_and_kept(comm, kind, values, seed):
    """Host 1's gradients are zero, so twice the average is what host 0 has sent."""
    state = make(comm, (0, 1, 1, 1), kind, SHAPES, values=values)
    found = []
    for step in range(4):
        mine = gradients(seed, 0, step, SHAPES)
        inputs = {name: x.copy() for name, x in mine.items()}
        before = {name: of[0] for name, of in state._feedback.keeper.gather()["worker"].items()}
        if comm.rank:
            for x in mine.values():
                x[:] = 0
        assert state.all_reduce(mine)
        after = {name: of[0] for name, of in state._feedback.keeper.gather()["worker"].items()}
        for name in SHAPES:
            put_in = inputs[name].reshape(-1) + before[name]
            found.append((mine[name].reshape(-1) * np.float32(4), after[name], put_in))
    return found if comm.rank == 0 else digest(mine)


@pytest.mark.parametrize("kind", TOP_K)
def test_sent_and_residual_are_input_and_old_residual_bit_for_bit(pool, kind):
    for sent, left, put_in in pool(4).call(sent_and_kept, kind, "float32", len(kind))[0]:
        assert same_bits(sent + left, put_in)
        assert 0 < np.count_nonzero(sent) < 0.1 * sent.size
        assert not left[sent != 0].any()


@pytest.mark.parametrize("values", ["bfloat16", "float16"])
def test_rounded_values_leave_what_rounding_dropped(pool, values):
    outcomes = pool(4).call(sent_and_kept, "top_k", values, 1)[0]
    for sent, left, put_in in outcomes:
        assert (wide(sent) + wide(left) == wide(put_in)).all()
    assert any(left[sent != 0].any() for sent, left, _ in outcomes)


def dense_and_all(comm, host_of, dtype, seed, options):
    """Whether the average of all elements is the dense all-reduce's, step after step."""
    ends = ends_of(comm, host_of)
    ranks = len(host_of)
    if ends is None:
        return True, ""
    state = TopKState(SHAPES, ends, density=1, values="float32", compress=everything, **options)
    same = True
    for step in range(3):
        inputs = {
            name: order_sensitive(dtype, ranks, int(np.prod(shape)), seed + step)
            for name, shape in SHAPES.items()
        }
        mine = {name: each[comm.rank].copy() for name, each in inputs.items()}
        assert state.all_reduce(mine)
        for name, each in inputs.items():
            same &= same_bits(mine[name], reference.reduce(each, "avg"))
    assert not any(held.any() for _, held in state._feedback.codec.residuals["worker"])
    return same, digest(mine)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("by", ["tensor", "chunk"])
@pytest.mark.parametrize("exchange", ["gather", "region"])
def test_density_1_is_the_dense_average_bit_for_bit(pool, exchange, by, dtype):
    """One rank a host, and hosts that are nodes of the contract's order."""
    options = {"exchange": exchange, "by": by, "chunk": 512}
    for seed, host_of in enumerate([(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 1), (0, 1, 2)]):
        outcomes = pool(4).call(dense_and_all, host_of, dtype, seed, options)
        assert [same for same, _ in outcomes] == [True] * 4, host_of
        assert len({found for _, found in outcomes if found}) == 1


def crowded(seed, rank, step, shapes):
    """Few magnitudes: nearly all of those that are picked, or not, are ties."""
    random = np.random.default_rng([seed, rank, step])
    return {
        name: random.choice(np.array([-2, -1, -1, 0, 1, 1], np.float32), shape)
        for name, shape in shapes.items()
    }


def as_one_rank(comm, host_of, kind, ties, seed, steps):
    """Averages and residuals of hosts of several ranks, and of one rank each with their sums."""
    hosts = max(host_of) + 1
    several = make(comm, host_of, kind, SHAPES, compress=everything)
    single = ends_of(comm, tuple(range(hosts)))
    if single is not None:
        of, options = KINDS[kind]
        one = of(SHAPES, single, compress=everything, **options)
    found = []
    for step in range(steps):
        every = [
            (crowded if ties else gradients)(seed, rank, step, SHAPES) for rank in range(comm.size)
        ]
        mine = {name: x.copy() for name, x in every[comm.rank].items()}
        several.all_reduce(mine)
        held = several._feedback.keeper.gather()["worker"]
        if single is not None:
            sums = {
                name: reference.reduce(
                    [e[name] for e, its in zip(every, host_of, strict=True) if its == comm.rank]
                )
                for name in SHAPES
            }
            one.all_reduce(sums)
            wants = one._feedback.keeper.gather()["worker"]
            factor = np.float32(comm.size / hosts)
            for name in SHAPES:
                found.append(same_bits(mine[name] * factor, sums[name]))
                found.append(same_bits(held[name], wants[name]))
                found.append(bool(mine[name].any()))
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", ["top_k", "top_k of chunks"])
def test_a_host_of_several_ranks_picks_what_one_rank_with_its_sum_would(pool, kind, ties):
    for seed, host_of in enumerate([(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 0, 0)]):
        for found in pool(4).call(as_one_rank, host_of, kind, ties, seed, 3):
            assert all(found), host_of


def kept_after_ties(comm, host_of):
    """Which of equal elements went, of parameters whose shares are turned either way."""
    state = make(comm, host_of, "top_k", dict.fromkeys("abvw", (1, 5000)))
    mine = {name: np.ones((1, 5000), np.float32) for name in state._feedback.shapes}
    state.all_reduce(mine)
    return [np.flatnonzero(x).tolist() for x in mine.values()]


@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1)])
def test_of_equal_elements_the_first_go(pool, host_of):
    for places in pool(4).call(kept_after_ties, host_of):
        assert places == [list(range(150))] * 4
