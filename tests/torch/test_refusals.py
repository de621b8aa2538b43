"""What cannot be done raises with its name, before anything moves, and leaves the group usable."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from pycollective import ConfigurationError
from tests.torch.groups import backend_of, standing_group


def ones(count=2, dtype=torch.float32, **options):
    return torch.ones(count, dtype=dtype, **options)


def _root(rank):
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def to_all(output, given, dtype=torch.float32):
    """`all_to_all_single` of four elements, by torch's group."""
    dist.group.WORLD.alltoall_base(ones(4), ones(4, dtype), output, given)


WORLD = lambda: dist.group.WORLD  # noqa: E731  there is none yet
OP = dist.ReduceOp
# What it says; the error; a call of two ranks.
REFUSALS = {
    "all_reduce: torch.uint16 cannot be reduced": (
        TypeError,
        lambda: dist.all_reduce(ones(2, torch.uint16)),
    ),
    "reduce: torch.float8_e4m3fnuz cannot be reduced": (
        TypeError,
        lambda: dist.reduce(ones().to(torch.float8_e4m3fnuz), 0),
    ),
    "all_reduce: torch.complex64 cannot be reduced": (
        TypeError,
        lambda: WORLD().allreduce([ones(2, torch.complex64)], OP.PRODUCT),
    ),
    "avg has no meaning for bool": (
        ConfigurationError,
        lambda: dist.all_reduce(ones(2, torch.bool), op=OP.AVG),
    ),
    "all_reduce: ReduceOp.PREMUL_SUM is not supported": (
        NotImplementedError,
        lambda: dist.all_reduce(ones(), op=dist._make_nccl_premul_sum(2.0)),
    ),
    "broadcast: the pycollective backend takes dense tensors, not Sparse": (
        NotImplementedError,
        lambda: backend_of(WORLD()).broadcast([torch.eye(3).to_sparse()], _root(0)),
    ),
    "all_reduce: sparse tensors can be summed and averaged": (
        NotImplementedError,
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), OP.MAX),
    ),
    "sum has no meaning for bool": (
        ConfigurationError,
        lambda: dist.all_reduce(torch.eye(3).to(torch.bool).to_sparse()),
    ),
    "all_reduce: the sparse tensors of rank 0 and rank 1 differ in shape": (
        ValueError,
        lambda: dist.all_reduce(torch.eye(2 + dist.get_rank()).to_sparse()),
    ),
    "more than one element of the written-to tensor refers to a single memory location": (
        RuntimeError,
        lambda: dist.all_reduce(ones(1).expand(4)),
    ),
    r"all_gather: the tensors must have one shape, not \[2\] and \[3\]": (
        ValueError,
        lambda: dist.all_gather([ones(2), ones(3)], ones()),
    ),
    "all_gather: the tensors must have one dtype, not torch.float32 and torch.float64": (
        TypeError,
        lambda: WORLD().allgather([[ones(), ones(2, torch.float64)]], [ones()]),
    ),
    "reduce_scatter: the tensors must have one shape": (
        ValueError,
        lambda: dist.reduce_scatter(ones(), [ones(2), ones(3)]),
    ),
    "all_to_all: the list must have one tensor for each of 2 ranks, not 1": (
        ValueError,
        lambda: dist.all_to_all([ones()], [ones()]),
    ),
    "all_gather_into_tensor: a tensor for all of 2 ranks must hold 2 times the 2 elements": (
        ValueError,
        lambda: dist.all_gather_into_tensor(ones(3), ones()),
    ),
    r"all_to_all_single: the output split sizes \[1, 2\] do not add up to .* output, 4": (
        ValueError,
        lambda: to_all([1, 2], [3, 1]),
    ),
    r"all_to_all_single: the input split sizes \[5, -1\] do not add up": (
        ValueError,
        lambda: to_all([1, 3], [5, -1]),
    ),
    "all_to_all_single: input and output must have one dtype": (
        TypeError,
        lambda: to_all([1, 3], [3, 1], torch.float64),
    ),
    "all_to_all_single: the first dimension, 3, must be a multiple of the 2 ranks": (
        ValueError,
        lambda: dist.all_to_all_single(ones(3), ones(3)),
    ),
    "send: the tag must not be negative, such as -7": (
        ValueError,
        lambda: dist.send(ones(1), 1 - dist.get_rank(), tag=-7),
    ),
    "all_gather_coalesced: there must be one list of outputs for each of 2 ranks, not 1": (
        ValueError,
        lambda: WORLD().allgather_coalesced([[ones(1)]], [ones(1)]),
    ),
    "all_gather_coalesced: as many outputs as inputs, not 0 and 1": (
        ValueError,
        lambda: WORLD().allgather_coalesced([[ones(1)], []], [ones(1)]),
    ),
    "broadcast: rank 5 is not one of 0 to 1": (
        ValueError,
        lambda: backend_of(WORLD()).broadcast([ones(1)], _root(5)),
    ),
    "the timeout must be positive": (
        ValueError,
        lambda: WORLD().set_timeout(datetime.timedelta(0)),
    ),
    "monitored_barrier is only implemented for GLOO backend": (ValueError, dist.monitored_barrier),
    "split": (RuntimeError, lambda: dist.split_group(WORLD(), [[0, 1]])),
    "takes tensors on the CPU or on a CUDA device, all of a call on one, not one on meta": (
        NotImplementedError,
        lambda: backend_of(WORLD()).allreduce([ones(2, device="meta")]),
    ),
}


def refuse(comm, said):
    standing_group(comm)
    error, call = REFUSALS[said]
    with pytest.raises(error, match=said):
        call()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # the group works on
    return tensor.tolist()


@pytest.mark.parametrize("said", REFUSALS)
def test_refused_by_name(pool, said):
    assert pool(2).call(refuse, said) == [[2.0, 2.0]] * 2


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
