"""Groups of the backend on devices: parts of the world, coalescing, objects, failures, the end."""

from __future__ import annotations

import datetime
import gc
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import pycollective.torch
from pycollective import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigurationError,
    reference,
)
from pycollective.torch import ordered
from pycollective.torch.backend import create
from pycollective.torch.device_side import DeviceSide, nccl
from pycollective.torch.ordered import group as groups
from pycollective.torch.serving import own_backend
from tests.harness import PerRank, results, run_ranks
from tests.inputs import order_sensitive, same_bits
from tests.torch.device_side import GlooInside, gloo, join_on_device, run
from tests.torch.groups import CPU, backend_of, join, process_group, to_numpy, to_torch

# --- Parts of the world.


def parts(comm, world, leaf):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    odd = dist.new_group([1, 3, 0])
    found = []
    for group in (mesh.get_group("rows"), mesh.get_group("columns"), odd):
        tensor = to_torch(leaf)
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        found.append(to_numpy(tensor))
    return found


def test_new_groups_and_meshes():
    leaves = order_sensitive("bfloat16", 4, 1000)
    for rank, (rows, columns, odd) in enumerate(run(parts, 4, PerRank(leaves))):
        of_rows, of_columns = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        for got, ranks in ((rows, of_rows), (columns, of_columns)):
            assert same_bits(got, reference.reduce([leaves[each] for each in ranks], "avg"))
        mine = (
            reference.reduce([leaves[0], leaves[1], leaves[3]], "avg") if rank != 2 else leaves[2]
        )
        assert same_bits(odd, mine)


def served(comm, world):
    """Who serves what, as the library's own calls ask."""
    assert own_backend(world, CPU) is None  # the engine does not
    tensor = torch.full((3,), comm.rank + 1.0)
    ordered.all_reduce(tensor, "avg")
    side = backend_of(world).device_side
    assert ordered.calls.group_of(world, CPU) is side.ordered(CPU)
    assert ordered.stats()["calls"] > 1
    with pytest.raises(ConfigurationError, match="stats needs a process group"):
        pycollective.torch.stats()
    return tensor.tolist()


def test_ordered_calls_use_the_backends_own():
    assert run(served, 2) == [[1.5] * 3] * 2


def beside_others(comm):
    with process_group(comm, backend="cpu:gloo,cuda:pycollective") as group:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert group._get_backend(torch.device("cuda")).name() == "pycollective"
        assert backend_of(group).name() == "gloo"
        dist.barrier()
    with process_group(comm) as group:  # no GPU here: as ever
        backend = backend_of(group)
        assert group._get_backend(torch.device("cuda")) is backend
        assert backend.supports_coalescing == torch.cuda.is_available()
        assert own_backend(group, CPU) is backend
        objects = [None] * comm.size
        dist.all_gather_object(objects, comm.rank)
        assert objects == list(range(comm.size))
        if not dist.is_nccl_available():
            with pytest.raises(ConfigurationError, match=r"needs NCCL .* has only gloo"):
                backend.device_side.carrier()
        wrong = mock.Mock()
        with pytest.raises(ConfigurationError, match=r"ProcessGroupNCCL\.Options, not Mock"):
            dist.new_group(pg_options=wrong)
    return tensor.tolist()


def test_both_devices_have_one_backend_and_either_another():
    assert results(run_ranks(beside_others, 2)) == [[2.0, 2.0]] * 2


# --- Coalescing.


def coalesced(comm, world):
    size, rank = comm.size, comm.rank
    following, before = (rank + 1) % size, (rank - 1) % size
    sent, got = torch.full((4,), float(rank)), torch.zeros(4)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, got, before)]
    )
    assert len(works) == 1
    works[0].wait()
    assert got.tolist() == [float(before)] * 4

    one, two = torch.full((3,), rank + 1.0), torch.full((2,), float(rank))
    with dist._coalescing_manager(async_ops=True) as cm:  # which calls allreduce_coalesced
        dist.all_reduce(one, dist.ReduceOp.AVG)
        dist.all_reduce(two, dist.ReduceOp.AVG)
    cm.wait()
    average = (size + 1) / 2
    assert one.tolist() == [average] * 3
    assert two.tolist() == [average - 1] * 2

    shards, whole = torch.zeros(2), torch.arange(2.0 * size)
    everything = torch.zeros(2 * size)
    got.zero_()
    with dist._coalescing_manager(device=CPU, async_ops=True) as cm:  # the backend's own block
        world._reduce_scatter_base(shards, whole, dist.ReduceScatterOptions())
        unsent = dist.isend(sent, following)
        dist.irecv(got, before)
        world._allgather_base(everything, torch.full((2,), float(rank)))
        with pytest.raises(RuntimeError, match="goes at the end of a block of coalesced calls"):
            unsent.wait()
    cm.wait()
    assert got.tolist() == [float(before)] * 4
    assert shards.tolist() == [size * (2.0 * rank), size * (2.0 * rank + 1)]
    assert everything.tolist() == [float(each) for each in range(size) for _ in range(2)]

    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # no longer
    assert tensor.tolist() == [float(size)] * 2


def test_coalescing():
    run(coalesced, 3)


def left(comm, world):
    """An exception leaves a block, which torch does not say."""
    rank, other = comm.rank, 1 - comm.rank
    tensor, got = torch.full((3,), rank + 1.0), torch.zeros(3)
    with pytest.raises(ZeroDivisionError), dist._coalescing_manager(device=CPU):
        dist.isend(tensor, other, tag=1 // 0)
    world.allreduce([tensor])
    assert tensor.tolist() == [3.0] * 3
    for _ in range(9):  # they are not all kept
        kept, tensor = StorageWeakRef(tensor.untyped_storage()), tensor + 1.0
        world.allreduce([tensor], dist.ReduceOp.AVG).wait()
        assert kept.expired()
    with pytest.raises(RuntimeError, match="an exception has left one"):
        dist.send(tensor, other)
    with pytest.raises(RuntimeError, match="blocks of coalesced calls cannot be nested"):
        world._start_coalescing(CPU)
    messages = [dist.P2POp(dist.isend, tensor + rank, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return got.tolist()


def test_an_exception_in_a_block_loses_no_later_call():
    assert run(left, 2) == [[13.0] * 3, [12.0] * 3]


def engine(store, rank, size, timeout):
    """The CPU's own, as a carrier: one that checks messages, and coalesces them."""
    side = DeviceSide(store, rank, size, timeout, (), mock.Mock())
    side.may_come = True
    return create(store, rank, size, timeout, device_side=side)


def closed(comm, world):
    """A message fails between start and end of the carrier's block."""
    limit, store = datetime.timedelta(seconds=30), world.get_group_store()
    inner, outer = dist.PrefixStore("inner", store), dist.PrefixStore("outer", store)
    side = GlooInside(inner, comm.rank, 2, limit, (), engine)
    backend = create(outer, comm.rank, 2, limit, device_side=side)
    sent, got, other = torch.full((2,), float(comm.rank)), torch.zeros(2), 1 - comm.rank
    for tag in (-1, 0):
        backend._start_coalescing()
        backend.send([sent], other, tag)
        backend.recv([got], other, 0)
        if tag < 0:
            with pytest.raises(ValueError, match="tag"):
                backend._end_coalescing()
        else:
            backend._end_coalescing().wait()
    backend.shutdown()
    return got.tolist()


def test_a_message_that_fails_ends_the_carriers_block():
    assert run(closed, 2) == [[1.0] * 2, [0.0] * 2]


def of_cpu_tensors(comm):
    """Where there may be a device, messages of CPU tensors are coalesced, too."""
    join(comm)
    sent, got = torch.full((4,), float(comm.rank)), torch.zeros(4)
    other = 1 - comm.rank
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert backend_of(dist.group.WORLD).supports_coalescing
    messages = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
    store = dist.group.WORLD.get_group_store()
    if comm.rank == 0:
        store.wait(["rank 1 waits"])
    (work,) = dist.batch_isend_irecv(messages)
    if comm.rank == 1:
        assert not work.is_completed()
        store.set("rank 1 waits", "")
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    dist.all_reduce(sent)  # alone again
    dist.destroy_process_group()
    return got.tolist(), sent.tolist()


def test_coalescing_of_cpu_tensors_beside_devices():
    got = results(run_ranks(of_cpu_tensors, 2))
    assert got == [([1.0] * 4, [1.0] * 4), ([0.0] * 4, [1.0] * 4)]


# --- Works, barriers, objects.


def works(comm, world):
    tensor = torch.full((3,), comm.rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(datetime.timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert [each.data_ptr() for each in work.result()] == [tensor.data_ptr()]
    work.synchronize()
    chained = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])
    assert chained.wait().tolist() == [3.0 * comm.size] * 3
    gone = weakref.ref(side_of(world))
    number = backend_of(world)._get_sequence_number_for_group()
    dist.barrier()
    dist.barrier(device_ids=[0]) if torch.cuda.is_available() else None
    assert backend_of(world)._get_sequence_number_for_group() > number
    found = [None] * comm.size
    dist.all_gather_object(found, {"rank": comm.rank})
    mine = [f"from {comm.rank}"]
    dist.broadcast_object_list(mine, src=1)
    return gone() is not None, found[1]["rank"], mine


def side_of(group):
    return backend_of(group).device_side


def test_works_barriers_and_objects():
    assert run(works, 2) == [(True, 1, ["from 1"])] * 2


def profiled(comm, world):
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0)
    names = {each.name for each in profile.events()}
    return names >= {"pycollective:all_reduce", "pycollective:broadcast"}


def test_calls_have_the_backends_names_in_profiles():
    assert run(profiled, 2) == [True, True]


def debugged(comm):
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does
    world = join_on_device(comm)
    tensor = torch.full((3,), comm.rank + 1.0)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    ordered.all_reduce(tensor, "sum")
    assert own_backend(world, CPU) is None
    dist.destroy_process_group()
    return tensor.tolist()


def test_in_torchs_wrapper_for_debugging():
    assert results(run_ranks(debugged, 2)) == [[3.0] * 3] * 2


# --- Failures.


def differ(comm, world):
    """Ranks that call different reductions, of one size."""
    op = dist.ReduceOp.AVG if comm.rank else dist.ReduceOp.SUM
    tensor = torch.ones(3)
    with pytest.raises(CollectiveMismatch, match=r"rank 0 called all_reduce of 3 float32 \(sum\)"):
        dist.all_reduce(tensor, op)
    assert tensor.isnan().all()
    with pytest.raises(CollectiveMismatch):
        world.allreduce([tensor]).wait()


def test_an_error_of_python_keeps_its_type_through_torch():
    run(differ, 2)


def told_at_once():
    """Peers have nothing to tell of a call that fails."""
    return mock.patch.object(groups, "_TELLING", 0.0)


def late(comm, world):
    dist.all_reduce(torch.ones(3))
    backend_of(world).set_timeout(datetime.timedelta(seconds=0.5))
    store, began = world.get_group_store(), time.monotonic()
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout), told_at_once():
            dist.all_reduce(torch.ones(3))
        assert time.monotonic() - began < 15  # and not the 30 s of before
        store.set("timed out", "")
    store.wait(["timed out"])
    return side_of(world)._timeout.total_seconds()


def test_timeouts_are_the_groups():
    assert run(late, 2) == [0.5, 0.5]


def aborted(comm):
    world = join_on_device(comm)
    dist.all_reduce(torch.ones(3))
    if comm.rank == 1:
        dist.distributed_c10d._abort_process_group()
        return
    with pytest.raises(RuntimeError), told_at_once():
        dist.all_reduce(torch.ones(3))
    with pytest.raises(RuntimeError):
        world.allreduce([torch.ones(3)]).wait()
    dist.destroy_process_group()


def test_aborting_a_group_ends_the_calls_of_peers():
    results(run_ranks(aborted, 2))


def aborting_here(comm):
    world = join_on_device(comm)
    dist.all_reduce(torch.ones(3))
    world.abort()
    with pytest.raises(CollectiveAborted, match="the process group was aborted"):
        world.allreduce([torch.ones(3)])
    dist.destroy_process_group()


def test_an_aborted_group_says_so():
    results(run_ranks(aborting_here, 2))


def destroyed(comm):
    """Nothing of a destroyed group is left, and another can be made."""
    for _ in range(2):
        world = join_on_device(comm)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        backend, side = backend_of(world), weakref.ref(side_of(world))
        dist.destroy_process_group()
        with pytest.raises(ConfigurationError, match="the process group was destroyed"):
            backend.allreduce([torch.ones(1)])
        with pytest.raises(ConfigurationError, match="the process group was destroyed"):
            backend.broadcast([torch.ones(1)], dist.BroadcastOptions())
        backend.shutdown()  # again: nothing
        work.wait()
        del world, backend, work
        gc.collect()
        assert side() is None


def test_a_destroyed_group_refuses_work_and_leaves_nothing():
    results(run_ranks(destroyed, 2))


def forsaken(comm):
    """Nobody waits for a call of a group that is destroyed; the device has not ended it."""
    world = join_on_device(comm)
    dist.all_reduce(torch.ones(3))
    reductions, tensor = side_of(world).ordered(CPU), torch.ones(3)
    streams, memory = reductions.streams, (tensor, reductions._calls._found)
    used = [StorageWeakRef(each.untyped_storage()) for each in memory]
    streams.done = False
    dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    del world, reductions, tensor, memory
    gc.collect()
    join_on_device(comm)
    dist.all_reduce(torch.ones(3))
    kept = [not each.expired() for each in used]
    streams.done = True
    dist.all_reduce(torch.ones(3))
    freed = [each.expired() for each in used]
    dist.destroy_process_group()
    return kept, freed


def test_memory_that_a_device_uses_outlives_the_group():
    assert results(run_ranks(forsaken, 2)) == [([True, True], [True, True])] * 2


def test_the_carrier_ends_before_the_memory_of_its_calls():
    side = GlooInside(dist.HashStore(), 0, 1, datetime.timedelta(seconds=1), (), gloo)
    reductions, there = weakref.ref(side.ordered(CPU)), []
    side._carrier = mock.Mock(shutdown=lambda: there.append(reductions() is not None))
    side.close()
    assert there == [True]
    assert reductions() is None


def of_carrier(comm):
    """Gloo, which cannot tell, is asked for errors once ordered calls alone have made it."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # whose wrapper Python can ask
    world = join_on_device(comm)
    backend = backend_of(world)
    assert backend.get_error() == ErrorType.SUCCESS
    ordered.all_reduce(torch.ones(3))
    with pytest.raises(RuntimeError, match="gloo does not support getError"):
        backend.get_error()
    dist.destroy_process_group()


def test_a_carrier_that_python_made_tells_its_errors():
    results(run_ranks(of_carrier, 2))


def test_the_nccl_side_is_asked_for_nothing_before_a_tensor_comes():
    made = []
    side = DeviceSide(dist.HashStore(), 0, 1, datetime.timedelta(seconds=1), (), made.append)
    side.set_timeout(3.0)
    side.abort()
    side.close()
    assert made == []
    with pytest.raises(ConfigurationError, match="was destroyed"):
        side.carrier()


@pytest.mark.parametrize("given", [False, True])
def test_what_nccl_is_told(given):
    class Options:
        pass

    theirs, made = Options(), mock.Mock(Options=Options)
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(dist, "ProcessGroupNCCL", made, create=True),
    ):
        make = nccl(theirs if given else None, [4, 7], "some group")
        assert make("store", 1, 2, datetime.timedelta(seconds=9)) is made.return_value
    store, rank, size, options = made.call_args.args
    assert (store, rank, size) == ("store", 1, 2)
    assert (options is theirs) == given
    assert options._timeout == datetime.timedelta(seconds=9)
    assert options.global_ranks_in_group == [4, 7]
    assert options.group_name == "some group"
