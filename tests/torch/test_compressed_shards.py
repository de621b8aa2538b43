"""`compressed_reduce_scatter` of tensors over each backend: bits, what is held, what is refused."""

from __future__ import annotations

import datetime
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pycollective.torch as pct
from pycollective import CollectiveError, CollectiveMismatch, ConfigurationError, reference
from tests.compression import oracle
from tests.compression.players import gradients
from tests.harness import Ranks, results
from tests.inputs import same_bits
from tests.kernels.quantized import decode, encode, rounded
from tests.torch.compressed import HOOKS, group_of, state_of
from tests.torch.groups import to_numpy, to_torch

BACKENDS = ["pycollective", "gloo"]
HOSTS = {"2x1": (0, 1), "2x2": (0, 0, 1, 1)}
TYPES = ["float32", "bfloat16"]
SHAPES = {"w": (64, 120), "small": (40,)}  # shards that end within a chunk, and dense ones
STEPS = 4


@pytest.fixture(scope="module", params=HOSTS)
def topology(request):
    """A topology, and how its ranks are called."""
    size = len(HOSTS[request.param])
    with Ranks(size, timeout=100.0, module=__name__) as started:
        yield request.param, lambda function, *args: results(started.call(function, *args))


def inputs(rank, step, dtype):
    """In step 2 the first rank's shard is zero on all ranks, as of parameters that none used."""
    found = gradients(11, rank, step, SHAPES, dtype)
    if step == 2:
        found["w"][:16] = 0
    return found


def parameters(shapes=SHAPES):
    return [(name, torch.zeros(shape, requires_grad=True)) for name, shape in shapes.items()]


def shards(comm, backend, codec, topology, dtype):
    """This rank's shards by step and name, as they came; and whether inputs were left alone."""
    state = state_of(parameters(), codec, topology, group_of(comm, backend))
    outputs, untouched = [], True
    for step in range(STEPS):
        mine = inputs(comm.rank, step, dtype)
        outputs.append({})
        with state.step():
            for name, x in mine.items():
                tensor = to_torch(x)
                out = torch.full((x.size // comm.size,), 7.0, dtype=tensor.dtype)
                assert pct.compressed_reduce_scatter(out, tensor, state, name)
                outputs[-1][name] = to_numpy(out)
                untouched &= same_bits(to_numpy(tensor), x)
    stats = state.stats()
    assert 0 < stats["payload_bytes"] < stats["dense_bytes"]
    return outputs, untouched, stats["steps"]


class Quantized:
    """A shard that goes with a scale for each 256 elements, and what its senders hold."""

    def __init__(self, codec, count, hosts):
        self.codec, self.worker = codec, np.zeros((hosts, count), np.float32)

    def step(self, flat, host_of):
        came = []
        for host, x in enumerate(oracle.host_sums(flat, host_of)):
            payload, left = encode(self.codec, oracle.CHUNK, x + self.worker[host])
            came.append(decode(self.codec, oracle.CHUNK, payload, x.size))
            self.worker[host] = left
        return reference.tree(came, np.add) / np.float32(len(flat))


class Sparse(oracle.TopK):
    """The same of one that goes as its largest elements, in bf16."""

    def __init__(self, count, hosts):
        values = to_numpy(torch.zeros(0, dtype=torch.bfloat16)).dtype
        super().__init__("a shard", count, hosts, round(0.03 * count), values)

    def step(self, flat, host_of):
        return super().step([x.astype(np.float32) for x in flat], host_of, by_region=False)


def wanted(codec, host_of, dtype):
    """Of each rank what `shards` gives, by the document."""
    ranks, hosts = len(host_of), max(host_of) + 1
    count = 64 * 120 // ranks
    states = [
        Sparse(count, hosts) if codec == "top_k" else Quantized(codec, count, hosts)
        for _ in range(ranks)
    ]
    found = [[{} for _ in range(STEPS)] for _ in range(ranks)]
    for step in range(STEPS):
        every = [inputs(rank, step, dtype) for rank in range(ranks)]
        small = oracle.dense([each["small"] for each in every], host_of)
        for rank, (state, of) in enumerate(zip(states, found, strict=True)):
            parts = [each["w"].reshape(-1)[rank * count :][:count] for each in every]
            none = not any(part.any() for part in parts)  # then what is held stays
            mean = np.zeros(count, np.float32) if none else state.step(parts, host_of)
            of[step] = {"w": rounded(mean, dtype), "small": small.reshape(ranks, -1)[rank]}
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("codec", HOOKS)
def test_each_rank_gets_the_bits_of_its_shard_over_any_backend(topology, codec, dtype):
    name, call = topology
    want = wanted(codec, HOSTS[name], dtype)
    for backend in BACKENDS:
        for rank, found in enumerate(call(shards, backend, codec, name, dtype)):
            outputs, untouched, steps = found
            assert untouched
            assert steps == STEPS
            for step in range(STEPS):
                for key in SHAPES:
                    assert same_bits(outputs[step][key], want[rank][step][key]), (backend, step)


def not_finite(comm, backend, codec, topology):
    """A step that is bad on one rank: whether all were NaN, and the next as if it had not been."""
    group = group_of(comm, backend)
    states = [state_of(parameters(), codec, topology, group) for _ in range(2)]
    outs = [torch.empty(64 * 120 // comm.size) for _ in states]
    good, bad = (to_torch(inputs(comm.rank, step, "float32")["w"]) for step in range(2))
    if comm.rank == 1:
        bad[5, 7] = float("inf")  # of another rank's shard
    for state, out in zip(states, outs, strict=True):
        assert pct.compressed_reduce_scatter(out, good, state, "w")
    assert not pct.compressed_reduce_scatter(outs[0], bad, states[0], "w")
    nan = bool(outs[0].isnan().all())
    for state, out in zip(states, outs, strict=True):
        assert pct.compressed_reduce_scatter(out, good, state, "w")
    counts = states[0].stats()
    return nan, torch.equal(*outs), counts["steps"], counts["steps_given_up"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", HOOKS)
def test_a_bad_number_on_one_rank_is_nan_on_all(topology, codec, backend):
    name, call = topology
    for found in call(not_finite, backend, codec, name):
        assert found == (True, True, 2, 1)


def refused(comm, backend, topology):
    """What is said of calls that cannot be; no rank waits, and the state works on."""
    group = group_of(comm, backend)
    state = state_of(parameters({**SHAPES, "odd": (71, 101)}), "int8", topology, group)
    shard = 64 * 120 // comm.size
    x, out = torch.ones(64, 120), torch.full((shard,), 7.0)
    indices = torch.zeros(2, 1, dtype=torch.int64)
    sparse = torch.sparse_coo_tensor(indices, torch.ones(1), (64, 120), check_invariants=False)
    calls = {
        "name": (out, x, state, "z"),
        "size": (out, x[1:], state, "w"),
        "longer": (torch.ones(shard + 1), x, state, "w"),
        "type": (out, x.double(), state, "w"),
        "type of out": (out.double(), x, state, "w"),
        "sparse": (out, sparse, state, "w"),
        "layout": (out, torch.ones(120, 64).t(), state, "w"),
        "layout of out": (torch.ones(2 * shard)[::2], x, state, "w"),
        "uneven": (torch.empty(71 * 101 // comm.size), torch.ones(71, 101), state, "odd"),
    }
    said = {}
    for what, arguments in calls.items():
        try:
            pct.compressed_reduce_scatter(*arguments)
        except ConfigurationError as error:
            said[what] = str(error)
    untouched = bool((out == 7).all() and (x == 1).all())
    assert pct.compressed_reduce_scatter(out, x, state, "w")
    assert pct.compressed_all_reduce(torch.ones(40), state, "small")
    for what, call in {
        "whole": lambda: pct.compressed_all_reduce(x, state, "w"),
        "sharded": lambda: pct.compressed_reduce_scatter(
            torch.empty(40 // comm.size), torch.ones(40), state, "small"
        ),
    }.items():
        try:
            call()
        except ConfigurationError as error:
            said[what] = str(error)
    assert pct.compressed_reduce_scatter(out, x, state, "w")
    return said, untouched


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_shards_is_refused_by_name(topology, backend):
    name, call = topology
    for said, untouched in call(refused, backend, name):
        assert untouched
        assert "no parameter is named 'z'" in said["name"]
        assert "7560 elements" in said["size"]
        assert f"{7680 // len(HOSTS[name])} elements, not" in said["longer"]
        assert "float64" in said["type"]
        assert "float64" in said["type of out"]
        assert "dense CPU tensor" in said["sparse"]
        assert "contiguous" in said["layout"]
        assert "contiguous" in said["layout of out"]
        assert "cannot be shared out evenly" in said["uneven"]
        assert "went by reduce_scatter before" in said["whole"]
        assert "went by all_reduce before" in said["sharded"]


def another(comm, backend, topology):
    """How a call ends in which one rank passes another parameter than the others."""
    # It does not live through it; over gloo a rank of the other host waits for its time to end.
    group = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=4))
    of = parameters({"w": (64, 120), "v": (64, 120)})
    state = state_of(of, "int8", topology, group)
    out = torch.full((64 * 120 // comm.size,), 7.0)
    name = "v" if comm.rank == 1 else "w"
    start = time.monotonic()
    try:
        pct.compressed_reduce_scatter(out, torch.ones(64, 120), state, name)
    except RuntimeError as error:
        return type(error), time.monotonic() - start, bool((out == 7).all())
    return None


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_pass_different_parameters_are_told(topology, backend):
    name, call = topology
    outcomes = call(another, backend, name)
    for rank, (kind, seconds, untouched) in enumerate(outcomes):
        assert untouched
        assert seconds < 30
        if rank < 2:  # who meets the other name; the others are told, or wait for those
            assert issubclass(kind, CollectiveMismatch), kind
        elif backend == "pycollective":
            assert issubclass(kind, CollectiveError), kind
