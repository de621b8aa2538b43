"""Sparse all-reduce: the bits of the dense one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.joining import failing
from tests.torch.groups import process_group, standing_group

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
# (sparse dimensions, dense ones)
SHAPES = [((7,), ()), ((5, 1, 6), ()), ((9,), (2, 3)), ((0,), (4,)), ((4, 4), (0,))]


def of_rank(rank: int, sparse, dense, dtype, elements: int) -> torch.Tensor:
    """Random places, some of them twice; values of all sizes, whose sums depend on the order."""
    drawn = torch.Generator().manual_seed(rank)
    elements *= min(sparse) > 0
    places = torch.stack(
        [torch.randint(0, max(size, 1), (elements,), generator=drawn) for size in sparse]
    )
    values = torch.randn(elements, *dense, generator=drawn)
    values *= 2.0 ** torch.randint(-12, 12, values.shape, generator=drawn)
    return torch.sparse_coo_tensor(places, values.to(dtype), (*sparse, *dense))


def reduced(comm, dtype, op):
    """For each shape: are the bits the dense ones, on each rank, of each call?"""
    standing_group(comm)
    alike = []
    for sparse, dense in SHAPES:
        for asynchronous in (False, True):
            # No rank has as many as another; rank 1 has none.
            elements = 0 if comm.rank == 1 else 6 + 5 * comm.rank
            tensor = of_rank(comm.rank, sparse, dense, dtype, elements)
            expected = tensor.coalesce().to_dense()
            dist.all_reduce(expected, op)
            work = dist.all_reduce(tensor, op, async_op=asynchronous)
            if asynchronous:
                work.wait()
                assert work.get_future().value()[0] is tensor
            assert tensor.is_coalesced()
            alike.append(
                torch.equal(tensor.to_dense().view(torch.uint8), expected.view(torch.uint8))
            )
    return alike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("op", [SUM, AVG])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_are_those_of_dense_tensors(pool, size, dtype, op):
    for alike in pool(size).call(reduced, dtype, op):
        assert alike == [True] * 2 * len(SHAPES)


def embeds(comm):
    """DDP with gradients of an embedding that are sparse."""
    group = standing_group(comm)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=True), torch.nn.Linear(4, 1))
    copy = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    copy(torch.tensor([comm.rank, 7, 20 + comm.rank])).sum().backward()
    gradient = model[0].weight.grad.coalesce()
    weight = model[1].weight.detach()
    # A half of a weight is exact, and so is the sum of two.
    dense = gradient.to_dense()
    same = torch.equal(dense[7], weight[0]) and torch.equal(dense[0], weight[0] / comm.size)
    return gradient.indices()[0].tolist(), same


def test_ddp_averages_sparse_gradients(pool):
    assert pool(2).call(embeds) == [([0, 1, 7, 20, 21], True)] * 2


def complex_and_inference(comm):
    standing_group(comm)
    places = [[0, 2 + comm.rank]]
    tensor = torch.sparse_coo_tensor(places, torch.tensor([1 + 2j, 3j]), (4,)).coalesce()
    dist.all_reduce(tensor)
    with torch.inference_mode():
        other = torch.sparse_coo_tensor(places, torch.tensor([1.0, 3.0]), (4,))
        dist.all_reduce(other)
    return tensor.to_dense().tolist(), other.to_dense().tolist()


def test_complex_tensors_and_those_of_inference_mode(pool):
    assert pool(2).call(complex_and_inference) == [([2 + 4j, 0, 3j, 3j], [2.0, 0.0, 3.0, 3.0])] * 2


def runs_out_of_memory(comm):
    with process_group(comm, timeout=60):
        ones = torch.ones(1 << 20)
        places = torch.zeros(1, 1, dtype=torch.int64) + comm.rank
        tensor = torch.sparse_coo_tensor(places, ones[None], (2, 1 << 20))
        if comm.rank == 1:
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (in_use + (6 << 20), resource.RLIM_INFINITY))
        error, took = failing(dist.all_reduce, tensor)
        return type(error).__name__, str(error), took


def test_a_rank_that_fails_between_steps_leaves_nobody_waiting():
    first, second = (outcome.result for outcome in run_ranks(runs_out_of_memory, 2))
    assert second[0] == "RuntimeError"
    assert first[0] == "CollectiveAborted"
    assert "rank 1 aborted the communicator: all_reduce of a sparse tensor failed" in first[1]
    assert first[2] < 20
