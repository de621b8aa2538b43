"""Torch's states: made by all ranks or none, begun densely, used as they may be, saved, closed."""

from __future__ import annotations

import inspect
import io
import logging
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch as pct
from pycollective import CollectiveMismatch, ConfigurationError, agree, compression
from pycollective.torch.backend import communicator_of
from tests.compression.test_between_steps import CALLS
from tests.harness import await_
from tests.joining import failing
from tests.torch.compressed import HOOKS, Given, digest_of, given, group_of, ranks_of, state_of

BACKENDS = ["pycollective", "gloo"]
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
    before = len(dist.distributed_c10d._world.pg_names)
    make = MADE[what][0] if comm.rank == 1 else lambda group: pct.OneBitState(Given(), group=group)
    error, taken = failing(make, group)
    return type(error), str(error), taken, len(dist.distributed_c10d._world.pg_names) - before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", MADE)
def test_ranks_that_make_different_states_are_told_before_there_are_groups(ranks, backend, what):
    for rank, (name, said, taken, groups) in enumerate(ranks(one_differs, backend, what)):
        refuses = rank == 1 and not MADE[what][1]
        assert name is (ConfigurationError if refuses else CollectiveMismatch)
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


def flushed_in_backward(comm, topology):
    """How ranks end of which one flushes while the others go backward."""
    group = group_of(comm, "pycollective")
    model = DistributedDataParallel(Given(), process_group=group)
    state = state_of(model, "one_bit", topology, group)
    model.register_comm_hook(state, HOOKS["one_bit"])

    def call():
        for step in range(3):  # a rank may be in the last of them when the others disagree
            model(given(comm.rank, step)).backward()
        state.flush() if comm.rank == 1 else model(given(comm.rank, 0)).backward()

    return failing(call)


@pytest.mark.parametrize("topology", [HOSTS, "4"])  # compressed; dense, on one host
def test_a_flush_beside_backward_is_a_mismatch_on_every_rank(ranks, topology):
    for error, taken in ranks(flushed_in_backward, topology):
        assert type(error) is CollectiveMismatch
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
    thread = broken._exchange_thread._thread
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


def saved_and_loaded(comm, codec, folder):
    """The next step of a state, and of states loaded from torch.save and from a checkpoint."""
    group = group_of(comm, "pycollective")
    model = Given()
    state, *others = (state_of(model, codec, "2x2", group) for _ in range(3))
    for step in range(2):
        state.all_reduce(given(comm.rank, step))
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    others[0].load_state_dict(torch.load(file))
    torch.distributed.checkpoint.save({"error": state.state_dict()}, checkpoint_id=folder)
    found = {"error": others[1].state_dict()}
    torch.distributed.checkpoint.load(found, checkpoint_id=folder)
    others[1].load_state_dict(found["error"])
    outputs = []
    for each in (state, *others):
        mine = given(comm.rank, 2)
        each.all_reduce(mine)
        outputs.append(digest_of(mine.values()) + str(each.stats()["steps"] > 0))
    return outputs


@pytest.mark.parametrize("codec", HOOKS)
def test_states_go_through_save_and_through_a_checkpoint(ranks, codec, tmp_path):
    outcomes = ranks(saved_and_loaded, codec, str(tmp_path))
    assert len({output for found in outcomes for output in found}) == 1


def refusals(comm):
    """What is said, through backward or at once."""
    group = group_of(comm, "pycollective")
    said = {}

    def attempt(what, call):
        try:
            call()
        except ConfigurationError as error:
            said[what] = str(error)

    def backward(what, state, model=None, dtype=torch.float32):
        ddp = DistributedDataParallel(model or Given(dtype), process_group=group)

        made = state(ddp)
        ddp.register_comm_hook(made, pct.one_bit_hook)
        if comm.rank and isinstance(made, pct.OneBitState):  # what rank 0 tells is there first
            whole = communicator_of(made._feedback.groups.all._group, "await_")
            await_(lambda: whole.failure, 20)
        attempt(what, lambda: ddp(given(comm.rank, 0, dtype)).backward())

    backward("another state", lambda ddp: pct.Int8State(ddp, group=group))
    backward("no state", lambda ddp: None)
    backward("another model", lambda ddp: pct.OneBitState(Given(), group=group))
    backward("fp64", lambda ddp: pct.OneBitState(ddp, group=group), dtype=torch.float64)
    state = pct.OneBitState(Given(), group=group)
    indices = torch.zeros(2, 1, dtype=torch.int64)
    sparse = torch.sparse_coo_tensor(indices, torch.ones(1), (80, 90), check_invariants=False)
    attempt("sparse", lambda: state.all_reduce({"w": sparse}))
    attempt("sparse rows", lambda: state.all_reduce({"w": sparse.to_sparse_csr()}))
    for what, each in without_own_memory().items():
        attempt(what, lambda each=each: state.all_reduce({"w": each}))
    return said


def without_own_memory():
    """Tensors of the size of w that have no memory, or other numbers in it than they show."""
    whole = torch.ones(80, 90)
    mesh = DeviceMesh("cpu", range(dist.get_world_size()))
    with FakeTensorMode():
        fake = torch.ones(80, 90)
    return {
        "negated": torch._neg_view(whole),
        "zeros": torch._efficientzerotensor(80, 90),
        "distributed": DTensor.from_local(whole, mesh, [Replicate()]),
        "fake": fake,
    }


def test_what_cannot_be_is_refused_by_name(ranks):
    for said in ranks(refusals):
        assert "OneBitState, not a Int8State" in said["another state"]
        assert "OneBitState, not a NoneType" in said["no state"]
        assert "the state was not given" in said["another model"]
        assert "float64" in said["fp64"]
        assert "dense CPU tensor" in said["sparse"]
        assert "dense CPU tensor" in said["sparse rows"]
        assert "resolve_neg()" in said["negated"]
        for what in ("zeros", "distributed", "fake"):
            assert "no memory of its own" in said[what]
