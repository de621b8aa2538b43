"""Many communicators on one GPU: their blocks that wait have a quarter of it between them. On the
stand-in, where that is four."""

from __future__ import annotations

import gc
import os
from contextlib import suppress

import numpy as np

from pycollective import CollectiveAborted, ConfigurationError, _core
from pycollective.testing.device_array import DeviceArray
from tests.cuda.arrays import on_its_gpu, starting
from tests.harness import results

MOST = 3  # of two, one and one block


started = starting(__name__)


def ways_of(comms):
    return [each.device_path[0] for each in comms]


def shared_out(comm):
    """What there is for the first ones, later ones go without; what is closed serves again."""
    comms = [comm] + [comm.split(0) for _ in range(MOST)]
    said = ways_of(comms), comms[-1].device_path[1]
    array = on_its_gpu(comm, np.ones(50_000, np.float32))
    comms[-1].all_reduce(array)
    assert (array.to_numpy() == comm.size).all()
    comms[1].close()
    comms.append(comm.split(0))
    comms[2] = None  # let go of without close()
    gc.collect()
    comms.append(comm.split(0))
    comms.append(comm.split(0))
    for each in comms[4:]:
        each.all_reduce(array)
    assert (array.to_numpy() == comm.size**4).all()
    return *said, ways_of(comms[4:])


def test_blocks_are_shared_out_and_given_back():
    with started(2) as ranks:
        for ways, reason, later in results(ranks.call(shared_out)):
            assert ways == ["peer"] * MOST + ["host"]
            assert reason.startswith("rank 0: the blocks that may wait on GPU 0 at once, 4, a ")
            assert "shared out among 3 communicators of this process: close those" in reason
            assert later == ["peer", "peer", "host"]


def missing_on_one(comm):
    """Rank 1 has no blocks left: all go without, and who has some keeps them for others."""
    alone = [comm.split(comm.rank if comm.rank == 1 else None) for _ in range(MOST - 1)]
    own = []
    for _ in range(3):
        together = comm.split(0)
        own.append(together.device_path)
        together.close()
    os.environ["PYCOLLECTIVE_DEVICE_PATH"] = "peer"
    refused = None
    try:
        comm.split(0)
    except ConfigurationError as error:
        refused = error  # and with it all that the call had
    del os.environ["PYCOLLECTIVE_DEVICE_PATH"]
    mine = [comm.split(comm.rank if comm.rank == 0 else None) for _ in range(MOST - 1)]
    return own, str(refused), ways_of(c for c in (mine if comm.rank == 0 else alone))


def test_where_one_rank_has_none_left_all_are_told():
    with started(2) as ranks:
        for own, refused, mine in results(ranks.call(missing_on_one)):
            assert {name for name, _ in own} == {"host"}
            assert all(why.startswith("rank 1: the blocks that may wait") for _, why in own)
            assert "PYCOLLECTIVE_DEVICE_PATH=peer cannot be: rank 1: the blocks" in refused
            assert mine == ["peer"] * (MOST - 1)


def after_a_failure(comm):
    """What a communicator had that has failed serves again once it is closed."""
    for _ in range(2 * MOST):
        other = comm.split(0)
        assert other.device_path[0] == "peer"
        array = DeviceArray.from_numpy(np.ones(9), comm.device, _core.DeviceStream(comm.device))
        other.all_reduce(array)
        comm.barrier()
        if comm.rank == 0:
            other.abort("enough")
        with suppress(CollectiveAborted):
            other.close()
        comm.barrier()
    return True


def test_a_failed_communicator_gives_back():
    with started(2) as ranks:
        assert results(ranks.call(after_a_failure)) == [True, True]
