"""reduce_scatter: each rank its shard of the average, the error kept, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import pycollective as pc
from pycollective import reference
from pycollective.compression import CODECS, compressed_reduce_scatter
from tests.compression import expected
from tests.compression.players import (
    FACES,
    KINDS,
    SOON,
    by_face,
    ends_with,
    gradients,
    make,
    state_of,
    wide,
)
from tests.inputs import same_bits
from tests.kernels.quantized import decode, encode, rounded
from tests.turns import in_turns

SHAPES = {"w": (64, 120), "small": (40,)}  # shards that end within a chunk, and dense ones
EVEN = [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 1, 0), (0, 0, 0, 0)]


def shards(comm, host_of, kind, seed, **options):
    """The worst error of delivered and held, what compression changed, and both, of each name."""
    state = make(comm, host_of, kind, SHAPES, **options)
    found = {}
    counts = {name: int(np.prod(shape)) // comm.size for name, shape in SHAPES.items()}
    put_in = {name: np.zeros(count) for name, count in counts.items()}
    came = {name: np.zeros(count) for name, count in counts.items()}
    owed = np.arange(7680, dtype=np.float32) / 7680
    state._feedback.carried.add({"w": owed}, 1.0)  # as a load on one host leaves it
    put_in["w"] += owed[comm.rank * counts["w"] :][: counts["w"]]
    for step in range(5):
        every = [gradients(seed, rank, step, SHAPES) for rank in range(comm.size)]
        with state.step():
            for name, count in counts.items():
                out = np.empty(count, np.float32)
                before = every[comm.rank][name].tobytes()
                assert compressed_reduce_scatter(out, every[comm.rank][name], state, name)
                assert every[comm.rank][name].tobytes() == before
                mean = sum(wide(each[name]) for each in every).reshape(-1) / comm.size
                put_in[name] += mean[comm.rank * count :][:count]
                came[name] += wide(out)
    state.load_state_dict(state.state_dict())  # goes through the whole, and back
    held = state.flush()
    for name, count in counts.items():
        kept = wide(held.get(name, np.zeros(SHAPES[name]))).reshape(-1)
        error = came[name] + kept[comm.rank * count :][:count] - put_in[name]
        found[name] = float(abs(error).max()), float(abs(came[name] - put_in[name]).max())
    return found, state.stats()


@pytest.mark.parametrize("host_of", EVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_and_what_is_held_are_what_was_put_in(pool, kind, host_of):
    for found, stats in pool(4).call(shards, host_of, kind, EVEN.index(host_of)):
        assert found["w"][0] < 1e-4
        assert found["small"][0] < 1e-5
        if max(host_of):
            assert found["w"][1] > 1e-3, "it was not compressed"
            assert 0 < stats["payload_bytes"] < stats["dense_bytes"]


# Bits, by the document.

STEPS = 4


def inputs(rank, step, dtype):
    """In step 2 the first rank's shard is zero on all ranks, as of parameters that none used."""
    found = gradients(11, rank, step, SHAPES, dtype)
    if step == 2:
        found["w"][:16] = 0
    return found


def outputs_of(comm, face, codec, host_of, dtype):
    """This rank's shards by step and name; and whether inputs were left alone."""
    state = state_of(comm, face, codec, host_of, SHAPES)
    outputs, untouched = [], True
    for step in range(STEPS):
        mine = inputs(comm.rank, step, dtype)
        outputs.append({})
        with state.step():
            for name, x in mine.items():
                before = x.copy()
                out = outputs[-1][name] = np.full(x.size // comm.size, 7, x.dtype)
                assert state.reduce_scatter(out, x, name)
                untouched &= same_bits(x, before)
    stats = state.stats()
    assert 0 < stats["payload_bytes"] < stats["dense_bytes"]
    return outputs, untouched, stats["steps"]


class Quantized:
    """A shard that goes with a scale for each 256 elements, and what its senders hold."""

    def __init__(self, codec, count, hosts):
        self.codec, self.worker = codec, np.zeros((hosts, count), np.float32)

    def step(self, flat, host_of):
        came = []
        for host, x in enumerate(expected.host_sums(flat, host_of)):
            payload, left = encode(self.codec, expected.CHUNK, x + self.worker[host])
            came.append(decode(self.codec, expected.CHUNK, payload, x.size))
            self.worker[host] = left
        return reference.tree(came, np.add) / np.float32(len(flat))


class Sparse(expected.TopK):
    """The same of one that goes as its largest elements, in bf16."""

    def __init__(self, count, hosts):
        super().__init__(count, hosts, round(0.03 * count), ml_dtypes.bfloat16)

    def step(self, flat, host_of):
        return super().step([x.astype(np.float32) for x in flat], host_of)


def wanted(codec, host_of, dtype):
    """Of each rank the shards that it must get, by step and name."""
    ranks, hosts = len(host_of), max(host_of) + 1
    count = 64 * 120 // ranks
    states = [
        Sparse(count, hosts) if codec == "top_k" else Quantized(codec, count, hosts)
        for _ in range(ranks)
    ]
    found = [[{} for _ in range(STEPS)] for _ in range(ranks)]
    for step in range(STEPS):
        every = [inputs(rank, step, dtype) for rank in range(ranks)]
        small = expected.dense([each["small"] for each in every], host_of)
        for rank, (state, of) in enumerate(zip(states, found, strict=True)):
            parts = [each["w"].reshape(-1)[rank * count :][:count] for each in every]
            none = not any(part.any() for part in parts)  # then what is held stays
            mean = np.zeros(count, np.float32) if none else state.step(parts, host_of)
            of[step] = {"w": rounded(mean, dtype), "small": small.reshape(ranks, -1)[rank]}
    return found


@pytest.mark.parametrize(
    ("face", "codec", "host_of", "dtype"),
    in_turns(FACES, [*CODECS], [(0, 1, 2, 3), (0, 0, 1, 1)], ["float32", "bfloat16"]),
    indirect=["face"],
)
def test_each_rank_gets_the_bits_of_its_shard(face, codec, host_of, dtype):
    want = wanted(codec, host_of, dtype)
    for rank, found in enumerate(face(outputs_of, codec, host_of, dtype)):
        outputs, untouched, steps = found
        assert untouched
        assert steps == STEPS
        for step in range(STEPS):
            for key in SHAPES:
                assert same_bits(outputs[step][key], want[rank][step][key]), step


def not_finite(comm, face, kind):
    """Whether all outputs were NaN, and the next step as if the bad one had not been."""
    states = [state_of(comm, face, kind, (0, 0, 1, 1), SHAPES) for _ in range(2)]
    outs = [np.empty(64 * 30, np.float32) for _ in states]
    good, bad = (gradients(7, comm.rank, step, SHAPES)["w"] for step in range(2))
    if comm.rank == 2:
        bad[5, 7] = np.inf  # of another rank's shard
    for state, out in zip(states, outs, strict=True):
        assert state.reduce_scatter(out, good, "w")
    assert not states[0].reduce_scatter(outs[0], bad, "w")
    nan = bool(np.isnan(outs[0]).all())
    for state, out in zip(states, outs, strict=True):
        assert state.reduce_scatter(out, good, "w")
    counts = states[0].stats()
    same = outs[0].tobytes() == outs[1].tobytes()
    return nan, same, counts["steps"], counts["steps_given_up"]


@pytest.mark.parametrize(("face", "kind"), by_face(KINDS, ["int8", "top_k"]), indirect=["face"])
def test_a_bad_step_is_as_if_it_had_not_been(face, kind):
    assert face(not_finite, kind) == [(True, True, 2, 1)] * 4


def refused(comm, face):
    """What is said of shards that cannot be, by what is wrong; the state works on."""
    shapes = {**SHAPES, "odd": (71, 101)}
    state = state_of(comm, face, "int8", (0, 0, 1, 1), shapes)
    uneven = state_of(comm, face, "int8", (0, 0, 0, 1), shapes)
    x, out, small = np.ones((64, 120), np.float32), np.empty(1920, np.float32), np.ones(40, "f4")
    calls = {
        "name": lambda: state.reduce_scatter(out, x, "z"),
        "size": lambda: state.reduce_scatter(out, x[1:], "w"),
        "longer": lambda: state.reduce_scatter(np.empty(1921, np.float32), x, "w"),
        "type": lambda: state.reduce_scatter(out, x.astype(np.float64), "w"),
        "type of out": lambda: state.reduce_scatter(out.astype(np.float64), x, "w"),
        "layout": lambda: state.reduce_scatter(out, np.ones((120, 64), np.float32).T, "w"),
        "layout of out": lambda: state.reduce_scatter(np.ones(3840, np.float32)[::2], x, "w"),
        "odd": lambda: state.reduce_scatter(out[:1792], np.ones((71, 101), np.float32), "odd"),
        "uneven": lambda: uneven.reduce_scatter(out, x, "w"),
        "": lambda: state.reduce_scatter(out, x, "w") and state.all_reduce({"small": small}),
        "whole": lambda: state.all_reduce({"w": x}),
        "sharded": lambda: state.reduce_scatter(np.empty(10, np.float32), small, "small"),
    }
    ends = {what: ends_with(call) for what, call in calls.items()}
    wrong = pc.ConfigurationError.__name__
    said = {what: text for what, (name, text, _) in ends.items() if name == wrong}
    return said, bool((x == 1).all()), state.reduce_scatter(out, x, "w")


def test_what_has_no_shards_is_refused(face):
    for said, untouched, works in face(refused):
        assert untouched
        assert works
        assert "no parameter is named 'z'" in said.pop("name")
        assert "7560 elements" in said.pop("size")
        assert "1920 elements, not 1921" in said.pop("longer")
        assert "float64" in said.pop("type")
        assert "float64" in said.pop("type of out")
        assert "contiguous" in said.pop("layout")
        assert "contiguous" in said.pop("layout of out")
        assert "cannot be shared out evenly" in said.pop("odd")
        assert "as many ranks on every host" in said.pop("uneven")
        assert "went by reduce_scatter before" in said.pop("whole")
        assert "went by all_reduce before" in said.pop("sharded")
        assert not said


def another(comm, face):
    """How a call ends in which rank 1 passes another parameter than the others."""
    shapes = {"w": (64, 120), "v": (64, 120)}
    state = state_of(comm, face, "int8", (0, 0, 1, 1), shapes)
    out = np.full(1920, 7, np.float32)
    x, name = np.ones((64, 120), np.float32), "v" if comm.rank == 1 else "w"
    return *ends_with(lambda: state.reduce_scatter(out, x, name)), bool((out == 7).all())


@pytest.mark.parametrize("face", ["numpy", "torch"], indirect=True)
def test_ranks_that_pass_different_parameters_are_told(face):
    for rank, (name, _, seconds, untouched) in enumerate(face(another)):
        assert untouched
        assert seconds < SOON
        # Who meets the other name; the others are told.
        assert issubclass(
            getattr(pc, name), pc.CollectiveMismatch if rank < 2 else pc.CollectiveError
        )
