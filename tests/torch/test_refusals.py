"""What cannot be done raises with its name, before anything moves, and leaves the group usable."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from pycollective import ConfigurationError
from tests.torch.groups import backend_of, standing_group

NO_AVERAGE = "avg has no meaning for bool"


def uneven(size):
    return [torch.empty(2 + (r == size - 1)) for r in range(size)]


def of_two_dtypes(size):
    return [torch.empty(2, dtype=torch.float64 if r else torch.float32) for r in range(size)]


# (name, call of the number of ranks, error, what it says)
REFUSALS = [
    (
        "an unsigned type",
        lambda n: dist.all_reduce(torch.ones(2, dtype=torch.uint16)),
        TypeError,
        "all_reduce: torch.uint16 cannot be reduced",
    ),
    (
        "an eight-bit float of another kind",
        lambda n: dist.reduce(torch.ones(2).to(torch.float8_e4m3fnuz), 0),
        TypeError,
        "reduce: torch.float8_e4m3fnuz cannot be reduced",
    ),
    (
        "a product of complex numbers",
        lambda n: dist.group.WORLD.allreduce(
            [torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.PRODUCT
        ),
        TypeError,
        "all_reduce: torch.complex64 cannot be reduced",
    ),
    (
        "an operation without a meaning",
        lambda n: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG),
        ConfigurationError,
        NO_AVERAGE,
    ),
    (
        "the same, asynchronously",
        lambda n: dist.all_reduce(
            torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG, async_op=True
        ),
        ConfigurationError,
        NO_AVERAGE,
    ),
    (
        "PREMUL_SUM",
        lambda n: dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0)),
        NotImplementedError,
        "all_reduce: ReduceOp.PREMUL_SUM is not supported",
    ),
    (
        "a sparse tensor in broadcast",
        lambda n: backend_of(dist.group.WORLD).broadcast([torch.eye(3).to_sparse()], _root(0)),
        NotImplementedError,
        "broadcast: the pycollective backend takes dense tensors, not Sparse",
    ),
    (
        "the largest of sparse tensors",
        lambda n: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX),
        NotImplementedError,
        "all_reduce: sparse tensors can be summed and averaged",
    ),
    (
        "the sum of sparse truth values",
        lambda n: dist.all_reduce(torch.eye(3).to(torch.bool).to_sparse()),
        ConfigurationError,
        "sum has no meaning for bool",
    ),
    (
        "sparse tensors of two shapes",
        lambda n: dist.all_reduce(torch.eye(2 + dist.get_rank()).to_sparse()),
        ValueError,
        "all_reduce: the sparse tensors of rank 0 and rank 1 differ in shape",
    ),
    (
        "an output whose elements share memory",
        lambda n: dist.all_reduce(torch.ones(1).expand(4)),
        RuntimeError,
        "more than one element of the written-to tensor refers to a single memory location",
    ),
    (
        "uneven outputs of all_gather",
        lambda n: dist.all_gather(uneven(n), torch.ones(2)),
        ValueError,
        r"all_gather: the tensors must have one shape, not \[2\] and \[3\]",
    ),
    (
        "two dtypes in all_gather",
        lambda n: dist.group.WORLD.allgather([of_two_dtypes(n)], [torch.ones(2)]),
        TypeError,
        "all_gather: the tensors must have one dtype, not torch.float32 and torch.float64",
    ),
    (
        "uneven inputs of reduce_scatter",
        lambda n: dist.reduce_scatter(torch.empty(2), uneven(n)),
        ValueError,
        "reduce_scatter: the tensors must have one shape",
    ),
    (
        "too short a list",
        lambda n: dist.all_to_all([torch.empty(2)], [torch.empty(2)]),
        ValueError,
        "all_to_all: the list must have one tensor for each of 2 ranks, not 1",
    ),
    (
        "too small an output",
        lambda n: dist.all_gather_into_tensor(torch.empty(3), torch.empty(2)),
        ValueError,
        "all_gather_into_tensor: a tensor for all of 2 ranks must hold 2 times the 2 elements",
    ),
    (
        "split sizes of another sum",
        lambda n: dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 2], [3, 1]),
        ValueError,
        r"all_to_all_single: the output split sizes \[1, 2\] do not add up to .* output, 4",
    ),
    (
        "a negative split size",
        lambda n: dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 3], [5, -1]),
        ValueError,
        r"all_to_all_single: the input split sizes \[5, -1\] do not add up",
    ),
    (
        "split sizes of one dtype for another",
        lambda n: dist.group.WORLD.alltoall_base(
            torch.empty(4), torch.empty(4, dtype=torch.float64), [1, 3], [3, 1]
        ),
        TypeError,
        "all_to_all_single: input and output must have one dtype",
    ),
    (
        "an odd length to split",
        lambda n: dist.all_to_all_single(torch.empty(3), torch.empty(3)),
        ValueError,
        "all_to_all_single: the first dimension, 3, must be a multiple of the 2 ranks",
    ),
    (
        "a negative tag",
        lambda n: dist.send(torch.ones(1), 1 - dist.get_rank(), tag=-7),
        ValueError,
        "send: the tag must not be negative, such as -7",
    ),
    (
        "too few lists of outputs",
        lambda n: dist.group.WORLD.allgather_coalesced([[torch.ones(1)]], [torch.ones(1)]),
        ValueError,
        "all_gather_coalesced: there must be one list of outputs for each of 2 ranks, not 1",
    ),
    (
        "too short a list of outputs",
        lambda n: dist.group.WORLD.allgather_coalesced([[torch.ones(1)], []], [torch.ones(1)]),
        ValueError,
        "all_gather_coalesced: as many outputs as inputs, not 0 and 1",
    ),
    (
        "a root outside of the group",
        lambda n: backend_of(dist.group.WORLD).broadcast([torch.ones(1)], _root(5)),
        ValueError,
        "broadcast: rank 5 is not one of 0 to 1",
    ),
    (
        "a timeout that is none",
        lambda n: dist.group.WORLD.set_timeout(datetime.timedelta(0)),
        ValueError,
        "the timeout must be positive",
    ),
    (
        "the barrier that tells, by torch's function",
        lambda n: dist.monitored_barrier(),
        ValueError,
        "monitored_barrier is only implemented for GLOO backend",
    ),
    ("splitting", lambda n: dist.split_group(dist.group.WORLD, [[0, 1]]), RuntimeError, "split"),
]


def _root(rank):
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def refuse(comm, index):
    standing_group(comm)
    _, call, error, match = REFUSALS[index]
    with pytest.raises(error, match=match):
        call(dist.get_world_size())
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # the group works on
    return tensor.tolist()


@pytest.mark.parametrize("index", range(len(REFUSALS)), ids=[each[0] for each in REFUSALS])
def test_refused_by_name(pool, index):
    assert pool(2).call(refuse, index) == [[2.0, 2.0]] * 2


def tensor_elsewhere(comm):
    standing_group(comm)
    with pytest.raises(NotImplementedError, match="takes CPU tensors, not one on meta"):
        backend_of(dist.group.WORLD).allreduce([torch.ones(2, device="meta")])


def test_tensors_on_other_devices_are_refused(pool):
    pool(2).call(tensor_elsewhere)


def moves_as_bytes(comm, names):
    """Data movement takes any dtype, byte for byte."""
    standing_group(comm)
    for name in names:
        dtype = getattr(torch, name)
        bits = torch.arange(24 * dtype.itemsize, dtype=torch.uint8) * (comm.rank + 3)
        tensor = bits.view(dtype)
        gathered = torch.zeros(48 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        backend_of(dist.group.WORLD)._allgather_base(gathered, tensor).wait()
        expected = torch.cat(
            [torch.arange(24 * dtype.itemsize, dtype=torch.uint8) * (r + 3) for r in range(2)]
        )
        assert torch.equal(gathered.view(torch.uint8), expected), name
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor.view(torch.uint8), expected[24 * dtype.itemsize :]), name


def test_dtypes_that_cannot_be_reduced_still_move(pool):
    names = ["complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fnuz"]
    pool(2).call(moves_as_bytes, names)


def odd_layouts(comm):
    """Tensors that are not plain memory: right results, and nothing beside them written."""
    standing_group(comm)
    group = dist.group.WORLD
    base = torch.zeros(3, 4)
    dist.all_reduce(base.t()[1].add_(comm.rank + 1.0))
    assert base[:, 1].tolist() == [3.0] * 3
    assert base.sum() == 9

    transposed = torch.arange(6.0).reshape(2, 3).t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed, 2 * torch.arange(6.0).reshape(2, 3).t())

    image = torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last)
    outputs = [torch.empty(1, 2, 2, 4) for _ in range(2)]
    dist.all_gather(outputs, image * (comm.rank + 1))
    assert torch.equal(outputs[1], 2 * torch.arange(16.0).reshape(1, 2, 2, 4))

    conjugated = torch.full((2,), 1 + 2j).conj()
    received = torch.zeros(4, dtype=torch.complex64)
    backend_of(group)._allgather_base(received, conjugated).wait()
    assert received.tolist() == [1 - 2j] * 4
    negated = torch.imag(conjugated)  # a view that says "negative" of the memory below it
    assert negated.is_neg()
    # (Not through dist, whose dispatcher resolves such views into copies that nobody gets back.)
    backend_of(group).allreduce([negated]).wait()
    assert negated.tolist() == [-4.0] * 2

    leaf = torch.ones(2, 3, requires_grad=True).t().detach().requires_grad_()
    dist.all_reduce(leaf.data)
    assert leaf.sum() == 12

    empty = torch.empty(0, 5)
    dist.all_reduce(empty)
    dist.all_gather_into_tensor(torch.empty(0, 5), empty)
    dist.all_gather([torch.empty(0) for _ in range(2)], torch.empty(0))
    scalar = torch.tensor(comm.rank + 1.0)
    dist.all_reduce(scalar)
    return scalar.item()


def test_layouts_that_are_not_plain_memory(pool):
    assert pool(2).call(odd_layouts) == [3.0, 3.0]
