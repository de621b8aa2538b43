"""What ranks have told each other they cannot do: nobody leaves before all know."""

from __future__ import annotations

import time

import numpy as np
import pytest

import pycollective as pc
from pycollective import agree, device_path, host_memory
from pycollective.compression import OneBitState
from tests.harness import results, run_ranks


def use_a_device_that_is_not_there(comm):
    with comm.split(0) as group:
        group.use_device("cuda:99" if comm.rank == 1 else "cuda:98")


def use_a_way_that_cannot_be(comm):
    with pytest.MonkeyPatch.context() as patch, comm.split(0) as group:
        patch.setenv("PYCOLLECTIVE_DEVICE_PATH", "peer")
        patch.setattr(device_path, "number_of", lambda *_: 0)
        group.use_device("cuda")


def split_without_memory(comm):
    with pytest.MonkeyPatch.context() as patch, comm.split(0) as group:
        if comm.rank == 1:
            patch.setattr(host_memory, "headroom", lambda: host_memory.Headroom(9, "a test"))
        group.split(None if comm.rank == 2 else 0)


def make_a_state_that_differs(comm):
    with comm.split(0) as group:
        OneBitState({"w": (4 + comm.rank // 2, 256)}, group)


NO_DRIVER = {"PYCOLLECTIVE_CUDA_DRIVER": "/nowhere/libcuda.so"}
REFUSED = {
    "device": (use_a_device_that_is_not_there, "ConfigurationError"),
    "way": (use_a_way_that_cannot_be, "ConfigurationError"),
    "split": (split_without_memory, "ConfigurationError"),
    "state": (make_a_state_that_differs, "CollectiveMismatch"),
}


def told_late(comm, what):
    """The error, when rank 0 knew that there would be one, and when this rank raised its own."""
    call, _ = REFUSED[what]
    usual, heard = agree.let_all_hear, []

    def late(meet):
        time.sleep(0.3)
        heard.append(time.monotonic())
        usual(meet)

    if comm.rank == 0:
        agree.let_all_hear = device_path.let_all_hear = late
    name = None
    try:
        call(comm)
    except (pc.ConfigurationError, pc.CollectiveError) as error:
        name = type(error).__name__
    raised = time.monotonic()
    agree.let_all_hear = device_path.let_all_hear = usual
    comm.all_reduce(np.ones(1))  # the group that it was split from works
    return name, heard, raised


@pytest.mark.parametrize("what", REFUSED)
def test_nobody_leaves_before_all_have_heard(what):
    (name, [heard], _), *others = results(run_ranks(told_late, 3, what, variables=NO_DRIVER))
    kind = REFUSED[what][1]
    assert name == kind
    for rank, (name, _, raised) in enumerate(others, start=1):
        assert name == (None if (what, rank) == ("split", 2) else kind)
        assert raised >= heard
