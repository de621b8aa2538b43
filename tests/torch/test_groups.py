"""Process groups: many, part of the ranks, with other backends beside; what they leave behind."""

from __future__ import annotations

import datetime
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import pycollective.torch
from pycollective import ConfigurationError, _torch
from tests.harness import results, run_ranks
from tests.torch.groups import backend_of, process_group, standing_group


def identity(comm):
    group = standing_group(comm)
    backend = backend_of(group)
    before = backend._get_sequence_number_for_group()
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 1
    assert not backend.supports_splitting
    assert backend.options._timeout == datetime.timedelta(seconds=30)
    pycollective.torch.backend.register()  # a second time changes nothing
    return dist.get_backend(), backend.name(), backend.rank(), backend.size()


def test_the_backend_says_who_it_is(pool):
    expected = [("pycollective", "pycollective", r, 3) for r in range(3)]
    assert pool(3).call(identity) == expected


def objects(comm):
    standing_group(comm)
    mine = {"rank": comm.rank, "text": "x" * (comm.rank * 1000)}
    everyone = [None] * 3
    dist.all_gather_object(everyone, mine)
    told = [mine if comm.rank == 1 else None]
    dist.broadcast_object_list(told, 1)
    return [(each["rank"], len(each["text"])) for each in everyone], told[0]["rank"]


def test_object_collectives(pool):
    assert pool(3).call(objects) == [([(0, 0), (1, 1000), (2, 2000)], 1)] * 3


def subsets(comm):
    standing_group(comm)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (1, 3), (0, 2, 3), (2,)]}
    sums = {}
    for ranks, group in groups.items():
        if comm.rank in ranks:
            tensor = torch.tensor([10.0**comm.rank])
            dist.all_reduce(tensor, group=group)
            root = torch.tensor([float(comm.rank)])
            dist.broadcast(root, src=ranks[-1], group=group)
            sums[ranks] = tensor.item(), root.item()
            dist.destroy_process_group(group)
    return sums


def test_groups_of_part_of_the_ranks(pool):
    expected = {(0, 1): (11, 1), (1, 3): (1010, 3), (0, 2, 3): (1101, 3), (2,): (100, 2)}
    for rank, sums in enumerate(pool(4).call(subsets)):
        assert sums == {ranks: expected[ranks] for ranks in expected if rank in ranks}


def after_destroying(comm):
    standing_group(comm)
    group = dist.new_group()
    backend = backend_of(group)
    dist.destroy_process_group(group)
    with pytest.raises(ConfigurationError, match="this communicator is closed"):
        backend.allreduce([torch.ones(1)])
    backend.shutdown()  # again: nothing


def test_a_destroyed_group_refuses_work(pool):
    pool(2).call(after_destroying)


def composite(comm):
    """One device of a composite string, and another backend's group beside it."""
    with process_group(comm, backend="cpu:pycollective") as group:
        assert backend_of(group).name() == "pycollective"
        gloo = dist.new_group(backend="gloo")
        tensors = [torch.ones(3), torch.ones(3)]
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[1], group=gloo)
        mixed = dist.new_group(backend="cpu:pycollective,cuda:gloo")
        dist.all_reduce(tensors[0], group=mixed)
        assert mixed._get_backend(torch.device("cuda")).name() == "gloo"
    with process_group(comm):  # and once more
        dist.all_reduce(tensors[1])
    return [tensor.tolist() for tensor in tensors]


def test_beside_other_backends_and_again_after_destroying():
    assert results(run_ranks(composite, 2)) == [[[4.0] * 3, [4.0] * 3]] * 2


def debug_detail(comm):
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does
    with process_group(comm):
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model.register_comm_hook(None, pycollective.torch.all_reduce_hook)
        model(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
        assert pycollective.torch.empty(3).shape == (3,)
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        state = pycollective.torch.OneBitState(ddp)
        ddp.register_comm_hook(state, pycollective.torch.one_bit_hook)
        ddp(torch.ones(1, 2)).sum().backward()
        state.close()
        with pytest.raises(RuntimeError, match="Detected mismatch between collectives"):
            dist.all_reduce(torch.ones(3 + comm.rank))
        return tensor[0].item(), model.module.weight.grad[0, 0].item()


def test_under_torchs_own_checks():
    assert results(run_ranks(debug_detail, 2)) == [(2.0, 1.5)] * 2


def functional_and_tensors(comm):
    group = standing_group(comm)
    ones = torch.ones(4)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(32.0).reshape(4, 8)
    left = distribute_tensor(whole, mesh, [Shard(1)])
    right = distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    return [
        functional.all_reduce(ones, "avg", group).tolist() == [1.0] * 4,
        functional.all_gather_tensor(ones * comm.rank, 0, group).tolist() == [0.0] * 4 + [1.0] * 4,
        functional.reduce_scatter_tensor(ones, "sum", 0, group).tolist() == [2.0] * 2,
        functional.broadcast(ones * comm.rank, 1, group).tolist() == [1.0] * 4,
        functional.all_to_all_single(ones * comm.rank, None, None, group).tolist()
        == [0.0, 0.0, 1.0, 1.0],
        torch.equal((left @ right).full_tensor(), whole @ whole.t()),
    ]


def test_functional_collectives_and_dtensor(pool):
    for checks in pool(2).call(functional_and_tensors):
        assert checks == [True] * 6


def coalesced(comm):
    standing_group(comm)
    tensors = [torch.ones(3), torch.ones(5, 2).t()]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    outputs = [torch.empty(2), torch.empty(4)]
    with dist.distributed_c10d._coalescing_manager():
        for output in outputs:
            half = torch.full((output.numel() // 2,), float(comm.rank))
            dist.all_gather_into_tensor(output, half)
    shards = [torch.empty(1), torch.empty(2)]
    with dist.distributed_c10d._coalescing_manager():
        for shard in shards:
            dist.reduce_scatter_tensor(shard, torch.ones(shard.numel() * 2))
    large = torch.full((1 << 18,), float(comm.rank))
    received = torch.empty(1 << 18)
    peer = 1 - comm.rank
    both = [dist.P2POp(dist.isend, large, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    lists = [tensor.tolist() for tensor in [*tensors, *outputs, *shards]]
    return lists, bool((received == peer).all())


def test_coalesced_calls(pool):
    expected = [[2.0] * 3, [[2.0] * 5] * 2, [0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [2.0], [2.0, 2.0]]
    assert pool(2).call(coalesced) == [(expected, True)] * 2


def fsdp(comm, policy, shared):
    standing_group(comm)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    plain = [p.detach().clone() for p in model.parameters()]
    mesh = init_device_mesh("cpu", (2,))
    options = {"mesh": mesh, **({"mp_policy": policy} if policy else {})}
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
        layer.set_allocate_memory_from_process_group_for_comm(shared)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    allocate = _torch.Backend.allocate_tensor
    allocated = []

    def allocating(backend, size, **options):
        allocated.append(size)
        return allocate(backend, size, **options)

    with mock.patch.object(_torch.Backend, "allocate_tensor", allocating):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((4, 10), comm.rank + 1.0)).square().mean().backward()
            optimizer.step()
    after = [p.full_tensor().detach() for p in model.parameters()]
    return (
        [not torch.equal(a, b) for a, b in zip(after, plain, strict=True)],
        [a.view(torch.uint8).numpy().tobytes() for a in after],
        len(allocated),
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_fsdp(pool, mixed):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else None
    outcomes = pool(2).call(fsdp, policy, False)
    assert all(all(changed) and calls == 0 for changed, _, calls in outcomes)
    assert outcomes[0][1] == outcomes[1][1]
    # In memory of the process group: what a layer gathers, and what it reduces, in each step.
    shared = pool(2).call(fsdp, policy, True)
    assert [bits for _, bits, _ in shared] == [bits for _, bits, _ in outcomes]
    assert all(calls >= 3 * 2 * 2 for *_, calls in shared)


def tensors_of_the_group(comm):
    standing_group(comm)
    empty = pycollective.torch.empty
    made = [empty(2, 3), empty((2, 3)), empty(torch.Size([4])), empty(np.int64(4)), empty(0, 2)]
    made += [empty(()), empty(7, dtype=torch.bfloat16)]
    shapes = [(tuple(x.shape), x.dtype, x.is_contiguous()) for x in made]
    with pytest.raises(RuntimeError, match="negative"):
        empty(2, -1)
    with pytest.raises(ConfigurationError, match="MiB of shared memory"):
        empty(1 << 40, 1 << 10)
    other = dist.new_group(backend="gloo")
    with pytest.raises(ConfigurationError, match="gloo"):
        empty(3, group=other)
    x = empty(1 << 18).fill_(comm.rank + 1.0)
    dist.all_reduce(x)
    return shapes, x.unique().tolist()


def test_tensors_in_memory_of_the_group(pool):
    fp32 = [(2, 3), (2, 3), (4,), (4,), (0, 2), ()]
    shapes = [(shape, torch.float32, True) for shape in fp32]
    shapes.append(((7,), torch.bfloat16, True))
    assert pool(2).call(tensors_of_the_group) == [(shapes, [3.0])] * 2


def alone(comm):
    """A group of one rank."""
    with process_group(comm):
        tensor = torch.tensor([1.0, float("nan")]).view(torch.int32)
        tensor[1] |= 12345  # a payload
        value = tensor.view(torch.float32)
        dist.all_reduce(value)
        gathered = [torch.zeros(2)]
        dist.all_gather(gathered, value)
        return gathered[0].view(torch.int32).tolist()


def test_one_rank():
    # Every NaN becomes the canonical one, on one rank too.
    assert results(run_ranks(alone, 1)) == [[0x3F800000, 0x7FC00000]]


def gathers_lists(comm):
    """Tensors of several shapes and layouts, of each rank, in one call."""
    group = standing_group(comm)
    mine = [torch.full((2, 3), 1.0 + comm.rank), torch.arange(4.0) + 10 * comm.rank, torch.ones(0)]
    outputs = [[torch.empty(3, 2).t(), torch.empty(4), torch.empty(0)] for _ in range(comm.size)]
    work = group.allgather_coalesced(outputs, mine)
    work.wait()
    return [[tensor.tolist() for tensor in of_rank] for of_rank in outputs]


def test_lists_of_tensors_are_gathered(pool):
    expected = [[[[1.0 + r] * 3] * 2, [10.0 * r + i for i in range(4)], []] for r in range(3)]
    assert pool(3).call(gathers_lists) == [expected] * 3
