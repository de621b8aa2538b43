"""A step counts as a whole or not at all; scales, warm-up, decay; what no rank used stays."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import ConfigurationError
from pycollective.compression.top_k import count_of
from tests.compression.players import (
    KINDS,
    TOPOLOGIES,
    digest,
    ends_of,
    gradients,
    held_by,
    make,
)
from tests.inputs import same_bits
from tests.turns import in_turns

SHAPES = {"w": (70, 100), "bias": (33,), "v": (5, 1031), "x": (64, 70)}
BUCKETS = [["v"], ["w", "bias"], ["x"]]
ONE_HOST = (0, 0, 0, 0)


def buckets_of(state, mine):
    """One step, a call a bucket; what each came to."""
    with state.step():
        return [state.all_reduce({name: mine[name] for name in bucket}) for bucket in BUCKETS]


def spoilt(comm, host_of, kind, spoil, carried=False):
    """What `spoil` gives for a third step; whether all is then as if that had not been."""
    wide = {"values": "bfloat16"} if kind.startswith("top_k") else {}
    state, without = (make(comm, host_of, kind, SHAPES, **wide) for _ in range(2))
    for step in range(2):
        for each in (state, without):
            assert buckets_of(each, gradients(1, comm.rank, step, SHAPES)) == [True] * 3
    for each in (state, without) if carried else ():  # as a load on one host leaves it
        each._feedback.carried.add({"w": np.ones(7000, np.float32)}, 1.0)
    before = digest(held_by(state)), digest(saved_by(state))
    found = spoil(state, gradients(1, comm.rank, 2, SHAPES))
    kept = (digest(held_by(state)), digest(saved_by(state))) == before
    state.set_loss_scale(1.0)
    outputs = []
    for each in (state, without):
        mine = gradients(1, comm.rank, 3, SHAPES)
        assert buckets_of(each, mine) == [True] * 3
        outputs.append(digest(mine) + digest(held_by(each)))
    assert not state._feedback.carried
    return found, (kept, outputs[0] == outputs[1], state.stats()["steps"])


def bad_step(comm, host_of, kind, where, value, culprit):
    """What came of each bucket's call, and which outputs are finite and which NaN."""

    def spoil(state, mine):
        if culprit in (comm.rank, "all"):
            mine[where].reshape(-1)[-2] = value
        said = buckets_of(state, mine)
        finite = [name for name in mine if np.isfinite(mine[name]).all()]
        nan = [name for name in mine if np.isnan(mine[name]).all()]
        return said, finite, nan, state.stats()["steps_given_up"]

    return spoilt(comm, host_of, kind, spoil)


GIVEN_UP = ([True, False, True], ["v", "x"], ["w", "bias"], 1), (True, True, 3)
HELD = [(kind, host_of) for kind in KINDS for host_of in TOPOLOGIES]


BAD = [
    ("w", float("nan"), 1),
    ("w", float("-inf"), 3),
    ("bias", float("inf"), 2),
    ("bias", float("nan"), 0),
    ("bias", 3e38, "all"),  # finite: their sum is not
]


# Every number comes to every kind, each of which comes to all hosts; and two kinds on one host.
@pytest.mark.parametrize(
    ("kind", "bad", "host_of"),
    [
        *in_turns([*KINDS], BAD, TOPOLOGIES),
        ("one_bit", BAD[4], ONE_HOST),
        ("top_k", BAD[0], ONE_HOST),
    ],
)
def test_a_bad_number_on_one_rank_gives_up_the_step_on_all(pool, kind, bad, host_of):
    assert pool(4).call(bad_step, host_of, kind, *bad) == [GIVEN_UP] * 4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("top_k")])
def test_a_sum_that_overflows_gives_up_the_step(pool, kind):
    for host_of in TOPOLOGIES:
        outcomes = pool(4).call(bad_step, host_of, kind, "w", 3e38, "all")
        for (said, _, nan, given_up), as_if in outcomes:
            assert (said, nan, given_up) == ([True, False, True], ["w", "bias"], 1)
            assert as_if == (True, True, 3)


def interrupted(comm, kind):
    """An exception in the middle of a step of all ranks."""

    def interrupt(state, mine):
        with state.step():
            assert state.all_reduce({"w": mine["w"], "bias": mine["bias"]})
            raise KeyError("the program's own")

    def spoil(state, mine):
        with pytest.raises(KeyError):
            interrupt(state, mine)

    return spoilt(comm, (0, 0, 1, 1), kind, spoil)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_leaves_what_is_held_as_it_was(pool, kind):
    assert pool(4).call(interrupted, kind) == [(None, (True, True, 3))] * 4


def zero_somewhere(comm, host_of, kind, zero_on):
    """Whether w's residual changed in a step in which some ranks' gradients of it were zero."""
    state = make(comm, host_of, kind, SHAPES)
    state.all_reduce(gradients(3, comm.rank, 0, SHAPES))
    before = state._feedback.keeper.gather()
    mine = gradients(3, comm.rank, 1, SHAPES)
    if comm.rank in zero_on:
        mine["w"][:] = 0
    state.all_reduce(mine)
    after = state._feedback.keeper.gather()
    changed = {
        name: any(not same_bits(before[kind][name], after[kind][name]) for kind in before)
        for name in ("w", "v")
    }
    return changed, bool(mine["w"].any()), digest(mine)


@pytest.mark.parametrize(("kind", "host_of"), HELD)
def test_what_is_zero_on_all_ranks_keeps_its_residual(pool, kind, host_of):
    outcomes = pool(4).call(zero_somewhere, host_of, kind, range(4))
    assert [each[:2] for each in outcomes] == [({"w": False, "v": True}, False)] * 4
    for alone in (0, 1):
        outcomes = pool(4).call(zero_somewhere, host_of, kind, [alone])
        assert [each[:2] for each in outcomes] == [({"w": True, "v": True}, True)] * 4
        assert len({each[2] for each in outcomes}) == 1


def cancelled(comm, kind):
    """Whether residuals changed in a step in which the sums of w over each host were zero."""
    state = make(comm, (0, 0, 1, 1), kind, SHAPES)
    state.all_reduce(gradients(3, comm.rank, 0, SHAPES))
    before = held_by(state)
    mine = gradients(3, comm.rank // 2, 1, SHAPES)
    mine["w"] *= 1 - 2 * (comm.rank % 2)
    state.all_reduce(mine)
    same = {name: same_bits(held, before[name]) for name, held in held_by(state).items()}
    return {same[name] for name in same if name.endswith("w")}, bool(mine["w"].any())


@pytest.mark.parametrize("kind", KINDS)
def test_what_cancels_within_each_host_is_zero_on_all(pool, kind):
    assert pool(4).call(cancelled, kind) == [({True}, False)] * 4


def negative_zeros(comm, host_of, scatters):
    """The average of -0.0 on all ranks, of a parameter that is not compressed."""
    state = make(comm, host_of, "top_k", {"w": (70, 100), "bias": (32,)})
    bias = np.full(32, -0.0, np.float32)
    out = np.ones(32 // comm.size, np.float32) if scatters else bias
    with state.step():
        if scatters:
            state.reduce_scatter(out, bias, "bias")
        else:
            state.all_reduce({**gradients(3, comm.rank, 0, {"w": (70, 100)}), "bias": bias})
    return bool((out == 0).all()), bool(np.signbit(out).all())


@pytest.mark.parametrize(
    ("host_of", "scatters"),
    [((0, 1, 2, 3), False), ((0, 0, 1, 1), False), ((0, 1, 2, 3), True), (ONE_HOST, True)],
)
def test_negative_zeros_that_top_k_does_not_compress_keep_their_sign(pool, host_of, scatters):
    assert pool(4).call(negative_zeros, host_of, scatters) == [(True, True)] * 4


SCALES = [1024.0, 512.0, 512.0, 0.125, 2.0**16]


def scaled(comm, host_of, kind):
    """Steps under a loss scale that changes, beside the same ones without."""
    wide = {"values": "bfloat16"} if kind.startswith("top_k") else {}  # fp16 saturates
    state, without = (make(comm, host_of, kind, SHAPES, **wide) for _ in range(2))
    scale = [1.0]
    state.set_loss_scale(lambda: scale[0])
    same = []
    for step, now in enumerate(SCALES):
        scale[0] = now
        mine, plain = (gradients(4, comm.rank, step, SHAPES) for _ in range(2))
        for each in mine.values():
            each *= np.float32(now)
        state.all_reduce(mine)
        without.all_reduce(plain)
        same += [same_bits(mine[name], plain[name] * np.float32(now)) for name in SHAPES]
    held, wants = held_by(state), held_by(without)
    same += [same_bits(held[name], wants[name] * np.float32(SCALES[-1])) for name in wants]
    return all(same), len(wants)


@pytest.mark.parametrize(("kind", "host_of"), HELD)
def test_powers_of_two_as_loss_scale_do_not_change_a_bit(pool, kind, host_of):
    outcomes = pool(4).call(scaled, host_of, kind)
    assert [same for same, _ in outcomes] == [True] * 4
    assert outcomes[0][1]  # something is held where there is a local shard


def saved_by(state):
    """The residuals of all ranks, in the loss scale of the last step that counted."""
    saved = state.state_dict()["residuals"]
    return {f"{kind} of {name}": held for kind, of in saved.items() for name, held in of.items()}


def odd_scales(comm):
    """Scales that fp32 has not; and ones that cannot be."""
    state = make(comm, (0, 1, 2, 3), "int8", SHAPES)
    ratios = []
    for step, scale in enumerate([0.1, 3.3, 1 / 3]):
        state.set_loss_scale(scale)
        before = saved_by(state)
        state._feedback.begin()
        state._feedback.end()
        after = saved_by(state)
        ratios += [
            float(after[name][held != 0][0] / held[held != 0][0])
            for name, held in before.items()
            if held.any()
        ]
        state.all_reduce(gradients(5, comm.rank, step, SHAPES))
    refused = []
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        state.set_loss_scale(scale)
        try:
            state.all_reduce(gradients(5, comm.rank, 9, SHAPES))
        except ConfigurationError as error:
            refused.append(f"{scale}" in str(error))
    return ratios, refused


def test_any_positive_loss_scale_will_do(pool):
    for ratios, refused in pool(4).call(odd_scales):
        assert ratios == pytest.approx([33] * 6 + [1 / 9.9] * 6, rel=1e-6)
        assert refused == [True] * 4


EXTREME = [2.0**127, 2.0**-100, 2.0**-149, 1.0, 2.0**-149, 2.0**127, 1e-38]


def given_up_in(comm, host_of, kind, carried):
    """Steps in extreme loss scales, which do not count."""

    def spoil(state, mine):
        if comm.rank == 1:
            mine["v"][3, 3] = np.nan
        for scale in EXTREME:
            state.set_loss_scale(scale)
            assert not state.all_reduce({name: x.copy() for name, x in mine.items()})
        for scale in (0.0, float("inf")):
            state.set_loss_scale(scale)
            with pytest.raises(ConfigurationError):
                state.all_reduce(mine)

    return spoilt(comm, host_of, kind, spoil, carried)


@pytest.mark.parametrize(
    ("kind", "host_of", "carried"), [*in_turns([*KINDS], TOPOLOGIES, [False, True])]
)
def test_a_step_that_does_not_count_leaves_no_trace_of_its_loss_scale(pool, kind, host_of, carried):
    wants = [(None, (True, True, 3))] * 4
    assert pool(4).call(given_up_in, host_of, kind, carried) == wants


def out_of_range(comm, kind):
    """Steps in a loss scale in which what is held is not finite, alone or owed; then in others."""
    state = make(comm, (0, 0, 1, 1), kind, {"w": (70, 100), "v": (70, 100)})
    w, v = (np.full((70, 100), comm.rank + each, np.float32) for each in (1, 2))
    w[::2] *= 100
    assert state.all_reduce({"w": w})
    if "top_k" in kind:  # its residuals are large
        state.set_loss_scale(2.0**127)
        assert not state.all_reduce({"w": np.ones_like(w)})
    state._feedback.carried.add({"v": np.full(7000, 8, np.float32)}, 1.0)
    state.set_loss_scale(2.0**126)
    assert not state.all_reduce({"v": v})
    assert np.isnan(v).all()
    # From the smallest scale there is to a large one: the ratio is beyond fp32.
    state.set_loss_scale(2.0**-149)
    assert state.all_reduce({"w": np.full_like(w, 2.0**-149)})
    state.set_loss_scale(2.0**20)
    return state.all_reduce({"w": np.ones_like(w)}), state.stats()["steps_given_up"]


@pytest.mark.parametrize("kind", ["one_bit", "int8", "top_k"])
def test_what_is_not_finite_in_a_loss_scale_waits_for_another(pool, kind):
    assert pool(4).call(out_of_range, kind) == [(True, 1 + ("top_k" in kind))] * 4


def warm(comm):
    """Densities and elements sent of a warm-up, with a step given up in it."""
    state = make(comm, (0, 1, 1, 1), "top_k", {"w": (100, 100)}, warm_up=3, density=1e-3)
    found = []
    for step in range(6):
        density = state.density
        mine = {"w": gradients(6, comm.rank, step, {"w": (100, 100)})["w"] + np.float32(10)}
        if comm.rank:
            mine["w"][:] = 0  # so that what arrives is what one host has sent
        if step == 1:
            mine["w"][3, 3] = np.nan
        if state.all_reduce(mine):
            found.append((density, np.count_nonzero(mine["w"])))
    return found


def test_warm_up_lowers_the_density_by_equal_ratios(pool):
    want = [10 ** (-0.75 * step) for step in (1, 2, 3, 4)] + [1e-3]
    for found in pool(4).call(warm):
        assert [density for density, _ in found] == pytest.approx(want)
        assert [sent for _, sent in found] == [count_of(each, 10_000) for each in want]


def twice(comm):
    """The same parameter two times in a step: the second would overwrite the first's residual."""
    state = make(comm, (0, 1, 2, 3), "one_bit", SHAPES)
    mine = gradients(8, comm.rank, 0, SHAPES)
    copy = mine["w"].copy()
    try:
        with state.step():
            state.all_reduce({"w": mine["w"]})
            state.all_reduce({"w": copy})
    except ConfigurationError as error:
        return str(error), same_bits(copy, gradients(8, comm.rank, 0, SHAPES)["w"])
    return None


def test_a_parameter_goes_once_in_a_step(pool):
    for refused in pool(4).call(twice):
        assert refused is not None
        assert "'w'" in refused[0]
        assert refused[1]


def one_host(comm):
    """Nothing is compressed on one host, and nothing is held."""
    state = make(comm, ONE_HOST, "one_bit", SHAPES)
    mine = gradients(9, comm.rank, 0, SHAPES)
    dense = {name: x.copy() for name, x in mine.items()}
    state.all_reduce(mine)
    for x in dense.values():
        comm.all_reduce(x, "avg")
    stats = state.stats()
    ends = ends_of(comm, ONE_HOST)
    return digest(mine) == digest(dense), stats["compressed_calls"], stats["way"], ends is not None


def test_one_host_goes_dense_and_says_so(pool):
    assert pool(4).call(one_host) == [(True, 0, "dense", True)] * 4
