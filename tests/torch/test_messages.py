"""Tags, any source and uneven splits through torch.distributed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import pycollective as pc
from tests.harness import results, run_ranks
from tests.torch.groups import join, process_group, standing_group


def tags(comm):
    standing_group(comm)
    rank, size = comm.rank, comm.size
    others = [other for other in range(size) if other != rank]
    # The higher tag is asked for first, and waited for last.
    got = {(other, tag): torch.empty(20) for tag in (2, 1) for other in others}
    receives = {key: dist.irecv(x, key[0], tag=key[1]) for key, x in got.items()}
    sends = [
        dist.isend(torch.full((20,), 10.0 * rank + tag), other, tag=tag)
        for tag in (1, 2)
        for other in others
    ]
    for key in reversed(receives):
        receives[key].wait()
        assert receives[key]._source_rank() == key[0]
    for work in sends:
        work.wait()
    return all((x == 10 * other + tag).all() for (other, tag), x in got.items())


def any_source(comm):
    standing_group(comm)
    rank, size = comm.rank, comm.size
    sources = []
    if rank == 0:
        for _ in range(2 * (size - 1)):
            x = torch.empty(3, dtype=torch.int64)
            source = dist.recv(x, tag=5)
            assert (x == source).all()
            sources.append(source)
        work = dist.irecv(torch.empty(3), tag=6)
        work.wait()
        assert work._source_rank() == 1
    else:
        for _ in range(2):
            dist.send(torch.full((3,), rank), 0, tag=5)
        if rank == 1:
            dist.send(torch.zeros(3), 0, tag=6)
    return sorted(sources)


def split(source, target, seed):
    return (3 * source + 5 * target + seed) % 4  # zeros among them


def exchange(comm, seed, asynchronous, dtype, width):
    standing_group(comm)
    rank, size = comm.rank, comm.size
    sends = [split(rank, other, seed) for other in range(size)]
    expects = [split(other, rank, seed) for other in range(size)]

    def rows(source, target):
        shape = (split(source, target, seed), width)
        return torch.full(shape, 16 * source + 4 * target + seed).to(dtype)

    given = torch.cat([rows(rank, other) for other in range(size)])
    want = torch.cat([rows(other, rank) for other in range(size)])
    output = torch.zeros_like(want)
    work = dist.all_to_all_single(output, given, expects, sends, async_op=asynchronous)
    if asynchronous:
        work.wait()
    assert torch.equal(output, want)
    # As lists, of transposed tensors: not contiguous.
    inputs = [rows(rank, other).t().contiguous().t() for other in range(size)]
    outputs = [torch.zeros_like(rows(other, rank)).t().contiguous().t() for other in range(size)]
    work = dist.all_to_all(outputs, inputs, async_op=asynchronous)
    if asynchronous:
        work.wait()
    return all(torch.equal(x, rows(other, rank)) for other, x in enumerate(outputs))


def equal_on_one_rank(comm):
    """Rank 0's splits are equal, by chance; it cannot know of the others'."""
    standing_group(comm)
    rows = [[1, 1, 1], [1, 0, 2], [1, 3, 1]]
    sends, expects = rows[comm.rank], [row[comm.rank] for row in rows]
    given = torch.full((sum(sends),), float(comm.rank))
    output = torch.empty(sum(expects))
    dist.all_to_all_single(output, given, expects, sends)
    lists = [torch.empty(n) for n in expects]
    dist.all_to_all(lists, list(given.split(sends)))
    want = [float(other) for other, n in enumerate(expects) for _ in range(n)]
    return output.tolist() == want and torch.cat(lists).tolist() == want


def overlapping(comm, rows):
    """Inputs that outputs overlap: each rank gets what the others had before the call."""
    standing_group(comm)
    rank, size = comm.rank, comm.size

    def values(source, target):
        return torch.arange(rows) + 1e6 * source + 1e7 * target

    given = torch.cat([values(rank, other) for other in range(size)])
    want = torch.cat([values(other, rank) for other in range(size)])
    splits = [rows] * size
    right = []
    for _ in range(3):
        whole = given.clone()
        dist.all_to_all_single(whole, whole, splits, splits)
        right.append(torch.equal(whole, want))
        lists = list(given.clone().split(splits))
        dist.all_to_all(lists, lists)
        right.append(torch.equal(torch.cat(lists), want))
        for shift in (1, rows, rows * size - 1):  # the one behind the other, either way
            memory = torch.empty(rows * size + shift, dtype=given.dtype)
            for low, high in ((0, shift), (shift, 0)):
                source, output = memory[low:][: rows * size], memory[high:][: rows * size]
                source.copy_(given)
                dist.all_to_all_single(output, source, splits, splits)
                right.append(torch.equal(output, want))
                source.copy_(given)
                dist.all_to_all(list(output.split(splits)), list(source.split(splits)))
                right.append(torch.equal(output, want))
        # Every other element: outputs are written where inputs lie, but not to the same elements.
        memory = torch.empty(2 * rows * size, dtype=given.dtype)
        source, output = memory[::2], memory[1::2]
        source.copy_(given)
        dist.all_to_all_single(output, source, splits, splits)
        right += [torch.equal(output, want), torch.equal(source, given)]
    return all(right)


@pytest.mark.parametrize("size", [2, 3])
def test_tags_are_independent(pool, size):
    assert pool(size).call(tags) == [True] * size


def test_any_source_says_which(pool):
    assert pool(3).call(any_source) == [[1, 1, 2, 2], [], []]


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 1), (torch.bfloat16, 30_001), (torch.complex128, 7)]
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_uneven_splits(pool, seed, asynchronous, dtype, width):
    assert pool(3).call(exchange, seed, asynchronous, dtype, width) == [True] * 3


def test_splits_that_are_equal_on_one_rank(pool):
    assert pool(3).call(equal_on_one_rank) == [True] * 3


@pytest.mark.parametrize("rows", [3, 20_011])  # float64: more than a channel or a call holds
def test_outputs_over_inputs(pool, rows):
    assert pool(3).call(overlapping, rows) == [True] * 3


def misfit(comm, what):
    with process_group(comm, timeout=20):
        rank = comm.rank
        splits = {
            "splits": ([2, 2], [2, 2]) if rank == 0 else ([3, 1], [3, 1]),
            "none on one": (None, None) if rank == 0 else ([2, 2], [2, 2]),
        }[what]
        try:
            dist.all_to_all_single(torch.zeros(4), torch.ones(4), *splits)
        except pc.CollectiveMismatch as error:
            return str(error)
    return "no mismatch"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("splits", ["all_to_all_single", "rank 0", "rank 1", "elements of float32"]),
        ("none on one", ["all_to_all(float32, count 2", "all_to_all(float32, uneven counts"]),
    ],
)
def test_splits_that_do_not_fit_are_a_mismatch(what, said):
    for text in results(run_ranks(misfit, 2, what)):
        for part in said:
            assert part in text


def over_gloo(comm):
    join(comm)
    done = overlapping(comm, 20_011) and tags(comm)
    done = done and all(exchange(comm, seed, seed == 1, torch.float32, 4000) for seed in (0, 1))
    sources = any_source(comm)
    dist.destroy_process_group()
    return done, sources


def test_between_simulated_hosts():
    variables = {"PYCOLLECTIVE_TOPOLOGY": "2,1"}
    told = results(run_ranks(over_gloo, 3, variables=variables, timeout=120))
    assert told == [(True, [1, 1, 2, 2]), (True, []), (True, [])]
