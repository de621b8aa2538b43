"""Torch's states: made by all ranks or none, begun densely, used as they may be, and closed."""

from __future__ import annotations

import inspect
import logging
import os
import time

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch as pct
from pycollective import CollectiveMismatch, ConfigurationError, agree, compression
from tests.torch.compressed import HOOKS, Given, digest_of, given, group_of, ranks_of, state_of

BACKENDS = {"pycollective": pct.all_reduce_hook, "gloo": default_hooks.allreduce_hook}
HOSTS = "2x2"


ranks = ranks_of(__name__, 4)


def simulating(topology, group):
    """A state like the others', by a rank that sees other hosts."""
    os.environ["PYCOLLECTIVE_TOPOLOGY"] = topology
    try:
        return pct.OneBitState(Given(), group=group)
    finally:
        del os.environ["PYCOLLECTIVE_TOPOLOGY"]


# What rank 1 alone does, and whether it can be; tests/compression has the options.
MADE = {
    "no names": (lambda group: pct.OneBitState(list(Given().parameters()), group=group), False),
    "topology": (lambda group: simulating("3x3", group), False),
    "other hosts": (lambda group: simulating("4x1", group), True),
}


def one_differs(comm, backend, what):
    """How making a state ends, how long it took, and how many groups were made on the way."""
    group = group_of(comm, backend)
    before, start = len(dist.distributed_c10d._world.pg_names), time.monotonic()
    try:
        if comm.rank == 1:
            MADE[what][0](group)
        else:
            pct.OneBitState(Given(), group=group)
    except (ConfigurationError, CollectiveMismatch) as error:
        taken = time.monotonic() - start
        groups = len(dist.distributed_c10d._world.pg_names) - before
        return type(error).__name__, str(error), taken, groups
    return None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", MADE)
def test_ranks_that_make_different_states_are_told_before_there_are_groups(ranks, backend, what):
    for rank, (name, said, taken, groups) in enumerate(ranks(one_differs, backend, what)):
        refuses = rank == 1 and not MADE[what][1]
        assert name == ("ConfigurationError" if refuses else "CollectiveMismatch")
        assert refuses or "rank(s) [1]" in said or "rank(s) 1:" in said
        assert what != "no names" or "named_parameters" in said
        assert groups == 0
        assert taken < 20  # the groups' timeout is 30 s


def made_another_group(comm, backend):
    """What a state over ranks 0 to 2 says where rank 1 has made one group more.

    Then when rank 0 knew that it would, which is late, and when this rank was told.
    """
    group_of(comm, backend)
    part = dist.new_group([0, 1, 2], backend=backend)
    own = dist.new_group([1], backend=backend, use_local_synchronization=True)
    said, heard, usual = None, [], agree.let_all_hear

    def late(meet):
        time.sleep(0.3)
        heard.append(time.monotonic())
        usual(meet)

    if comm.rank == 0:
        agree.let_all_hear = late
    if comm.rank != 3:
        with pytest.raises(ConfigurationError) as raised:
            pct.OneBitState(Given(), between="ranks", group=part)
        said = str(raised.value)
    told = time.monotonic()
    agree.let_all_hear = usual
    if comm.rank == 1:
        dist.destroy_process_group(own)
    if comm.rank != 3:
        dist.destroy_process_group(part)
    return said, heard, told


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_have_made_different_numbers_of_groups_all_say_so(ranks, backend):
    (first, [heard], _), *others = ranks(made_another_group, backend)
    for said in (first, others[0][0], others[1][0]):
        assert "different numbers of process groups before" in said
    assert all(told >= heard for _, _, told in others[:2])


CALLS = {
    "flush": lambda state, saved: state.flush(),
    "reset": lambda state, saved: state.reset(),
    "state_dict": lambda state, saved: state.state_dict(),
    "load_state_dict": lambda state, saved: state.load_state_dict(saved),
}


def unfinished(comm, what):
    """A backward that was not finished is forgotten by what is between steps."""
    state = state_of(Given(), "one_bit", HOSTS, group_of(comm, "pycollective"))
    state.all_reduce(given(comm.rank, 0))
    saved = state.state_dict()
    state._feedback.begin(of_backward=True)  # as the first bucket leaves it
    CALLS[what](state, saved)
    return state.stats()["steps"]


@pytest.mark.parametrize("what", CALLS)
def test_what_is_between_steps_forgets_an_unfinished_backward(ranks, what):
    assert ranks(unfinished, what) == [1] * 4


def start_densely(comm, backend, codec):
    """Averages of the dense hook, of ours, and what ours held; two of four steps are dense."""
    group = group_of(comm, backend)
    found, held = [], []
    for hook in (BACKENDS[backend], HOOKS[codec]):
        model = DistributedDataParallel(Given(), process_group=group, bucket_cap_mb=0.001)
        state = None
        if hook is HOOKS[codec]:
            state = state_of(model, codec, HOSTS, group, dense_steps=2)
        model.register_comm_hook(state or group, hook)
        averages = []
        for step in range(4):
            model.zero_grad()
            model(given(comm.rank, step)).backward()
            averages.append(digest_of(p.grad for p in model.parameters()))
            if state:
                held.append(state.stats()["residual_bytes"])
        found.append(averages)
    return *found, held, state.stats()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", HOOKS)
def test_the_hooks_start_densely(ranks, codec, backend):
    for dense, ours, held, stats in ranks(start_densely, backend, codec):
        assert ours[:2] == dense[:2]
        assert ours[2] != dense[2]
        assert ours[3] != dense[3]
        assert held[:2] == [0, 0]
        assert held[2] > 0
        assert (stats["steps"], stats["way"]) == (4, "compressed")


def warned(comm, topology, between):
    """What is logged when a state is made."""
    said = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler = Handler()
    log = logging.getLogger("pycollective")
    log.addHandler(handler)
    try:
        state = state_of(
            Given(), "one_bit", topology, group_of(comm, "pycollective"), between=between
        )
    finally:
        log.removeHandler(handler)
    state.all_reduce(given(comm.rank, 0))
    return said


def test_one_host_that_compresses_nothing_is_warned_of_once(ranks):
    first, *others = ranks(warned, "1x4", "hosts")
    assert len(first) == 1
    assert "nothing is compressed" in first[0]
    assert others == [[], [], []]
    assert ranks(warned, "1x4", "ranks") == [[]] * 4
    assert ranks(warned, HOSTS, "hosts") == [[]] * 4


@pytest.mark.parametrize("codec", compression.CODECS)
def test_every_codec_has_a_state_and_a_hook_that_takes_no_other(codec):
    name, hook = compression.CODECS[codec].__name__, f"{codec}_hook"
    assert {name, hook} <= set(pct.__all__)
    assert name in compression.__all__
    state = getattr(pct, name)
    assert state.codec == codec
    assert inspect.signature(getattr(pct, hook)).parameters["state"].annotation is state
    with pytest.raises(ConfigurationError, match=f"state is a {name}, not a NoneType"):
        getattr(pct, hook)(None, None)


@pytest.mark.parametrize("name", [of.__name__ for of in compression.CODECS.values()])
def test_torchs_states_have_the_options_of_numpys_by_name(name):
    ours = inspect.signature(getattr(pct, name)).parameters
    wants = inspect.signature(getattr(compression, name)).parameters
    assert set(ours) - {"group"} == set(wants) - {"communicator"}
    for option in set(wants) - {"communicator", "parameters"}:
        assert ours[option].default == wants[option].default
        assert ours[option].kind is inspect.Parameter.KEYWORD_ONLY


PUBLIC = {
    *("step", "all_reduce", "reduce_scatter", "set_loss_scale", "stats", "codec"),
    *("flush", "reset", "state_dict", "load_state_dict", "close"),
}


def public(comm):
    """What users see of states of either face."""
    of_torch = state_of(Given(), "top_k", HOSTS, group_of(comm, "pycollective"))
    of_numpy = compression.OneBitState({"w": (64, 80)}, comm, between="ranks")
    return [{name for name in dir(each) if name[0] != "_"} for each in (of_torch, of_numpy)]


def test_users_see_what_they_may_call_and_nothing_else(ranks):
    for of_torch, of_numpy in ranks(public):
        assert of_numpy == PUBLIC
        assert of_torch == PUBLIC | {"density"}


def flushed_in_backward(comm, topology):
    """How ranks end of which one flushes while the others go backward."""
    group = group_of(comm, "pycollective")
    model = DistributedDataParallel(Given(), process_group=group)
    state = state_of(model, "one_bit", topology, group)
    model.register_comm_hook(state, HOOKS["one_bit"])
    start = time.monotonic()
    try:
        for step in range(3):  # a rank may be in the last of them when the others disagree
            model(given(comm.rank, step)).backward()
        if comm.rank == 1:
            state.flush()
        else:
            model(given(comm.rank, 0)).backward()
    except CollectiveMismatch:
        return time.monotonic() - start
    return None


@pytest.mark.parametrize("topology", [HOSTS, "4"])  # compressed; dense, on one host
def test_a_flush_beside_backward_is_a_mismatch_on_every_rank(ranks, topology):
    for taken in ranks(flushed_in_backward, topology):
        assert taken is not None
        assert taken < 20  # the groups' timeout is 30 s


def closed(comm, topology, used):
    """What a backward says of a closed state, which was used before or never."""
    group = group_of(comm, "pycollective")
    model = DistributedDataParallel(Given(), process_group=group)
    state = state_of(model, "int8", topology, group)
    model.register_comm_hook(state, HOOKS["int8"])
    if used:
        model(given(comm.rank, 0)).backward()
    state.close()
    with pytest.raises(ConfigurationError) as raised:
        model(given(comm.rank, 9)).backward()
    return str(raised.value)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("topology", ["2x2", "1x4"])  # on one host the hooks pass buckets on
def test_a_backward_of_a_closed_state_is_refused_at_once(ranks, topology, used):
    assert all("was closed" in said for said in ranks(closed, topology, used))


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
