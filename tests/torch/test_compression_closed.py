"""A closed state of compression: every call says so at once, and closing again does nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch as pct
from pycollective import ConfigurationError
from tests.torch.compressed import HOOKS, Given, given, group_of, ranks_of, state_of

# A call that waits for a thread that has ended waits for ever: the ranks are ended soon.
WAITS = 30.0

CALLS = {
    "all_reduce": lambda state, _: state.all_reduce({"w": torch.ones(80, 90)}),
    "reduce_scatter": lambda state, _: state.reduce_scatter(
        torch.empty(1800), torch.ones(80, 90), "w"
    ),
    "compressed_all_reduce": lambda state, _: pct.compressed_all_reduce(
        torch.ones(80, 90), state, "w"
    ),
    "step": lambda state, _: state.step().__enter__(),
    "backward": lambda _, model: model(given(dist.get_rank(), 9)).backward(),
    "flush": lambda state, _: state.flush(),
    "state_dict": lambda state, _: state.state_dict(),
    "load_state_dict": lambda state, _: state.load_state_dict({}),
}


ranks = ranks_of(__name__, 4, WAITS)


def closed(comm, codec, topology, used):
    """A closed state and its model, which was used before or never."""
    group = group_of(comm, "pycollective")
    model = DistributedDataParallel(Given(), process_group=group)
    state = state_of(model, codec, topology, group)
    model.register_comm_hook(state, HOOKS[codec])
    if used:
        model(given(comm.rank, 0)).backward()
    state.close()
    return state, model


def called(comm, codec, topology, used, what):
    state, model = closed(comm, codec, topology, used)
    with pytest.raises(ConfigurationError) as raised:
        CALLS[what](state, model)
    return str(raised.value)


@pytest.mark.parametrize("what", CALLS)
def test_a_call_of_a_closed_state_is_refused_at_once(ranks, what):
    # On one host the hooks pass buckets on; on several a thread exchanges them.
    for codec, topology, used in (("top_k", "2x2", True), ("int8", "2x2", False)):
        assert all("was closed" in said for said in ranks(called, codec, topology, used, what))
    assert all("was closed" in said for said in ranks(called, "one_bit", "1x4", True, what))


def closed_again(comm):
    """Closing twice, also before anything went; what is counted is still to be had."""
    for used in (True, False):
        state, _ = closed(comm, "one_bit", "2x2", used)
        state.close()
    return state.stats()["steps"]


def test_closing_again_does_nothing(ranks):
    assert ranks(closed_again) == [0] * 4


def ended(comm):
    """The threads of the state that are left when its groups could not be left."""
    broken = state_of(Given(), "one_bit", "2x2", group_of(comm, "pycollective"))
    broken.all_reduce(given(comm.rank, 0))
    thread = broken._worker._thread
    whole = broken._feedback.groups.all
    last, whole.close = whole.close, None  # cannot be called
    with pytest.raises(TypeError):
        broken.close()
    last()
    with pytest.raises(ConfigurationError, match="was closed"):
        broken.flush()
    return thread.is_alive()


def test_the_thread_ends_though_a_group_cannot_be_left(ranks):
    assert ranks(ended) == [False] * 4


def left(comm, backend, topology):
    """How many process groups a state that was made, used and closed has left on this rank."""
    group = group_of(comm, backend)
    before = len(dist.distributed_c10d._world.pg_names)
    state = state_of(Given(), "int8", topology, group)
    state.all_reduce(given(comm.rank, 0))
    state.close()
    return len(dist.distributed_c10d._world.pg_names) - before


@pytest.mark.parametrize("backend", ["pycollective", "gloo"])
@pytest.mark.parametrize("topology", ["4x1", "2x2", "3,1", "1x4"])  # 3,1: two have no share
def test_closing_leaves_no_group(ranks, topology, backend):
    assert ranks(left, backend, topology) == [0] * 4
