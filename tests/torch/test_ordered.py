"""Ordered reductions over process groups: the contract's bits, whatever the group, the hosts, the
sizes, and the order in which calls end."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pycollective import CollectiveMismatch, CollectiveTimeout, ConfigurationError, reference
from pycollective.torch import ordered
from pycollective.torch import streams as torch_streams
from pycollective.torch.ordered import calls, header, messages, plain, reduction
from pycollective.torch.streams import Streams
from tests.harness import PerRank, results, run_ranks
from tests.inputs import DTYPES, PAIRS, TRAITS, awkward, order_sensitive, same_bits
from tests.joining import failing
from tests.torch.groups import CPU, join, standing_group, to_numpy, to_torch
from tests.torch.ordered_groups import (
    apart,
    as_on_a_device,
    laid_out,
    named,
    run,
    size_of,
    standing,
)

KINDS = ("all_reduce", "reduce_scatter")
# Bytes of a rank's input: all go to all, with the header or right behind it; in a piece; in pieces.
INLINE, SMALL, MEDIUM, LARGE = header.ROOM, 8 << 10, 20_001, 60_001
PIECE = 24 << 10
LAYOUTS = [
    *(apart(1), apart(2), apart(3), apart(4)),
    *(((0, 1), (2,)), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2, 3))),
]
OF_SIX = [
    *(apart(6), ((0, 1, 2), (3, 4, 5)), ((0, 1, 2, 3), (4, 5)), ((0, 2, 4), (1, 3, 5))),
    *(((0, 1), (2, 3), (4, 5)), ((0, 3), (1, 4), (2, 5)), ((0, 1, 2), (3, 4), (5,))),
]


def in_turns(pairs, sizes, ranks, turn=0):
    """(kind, dtype, op, count): each dtype and operation with one of the kinds and sizes."""
    turns = list(itertools.product(sizes, KINDS))
    for number, (dtype, op) in enumerate(pairs):
        size, kind = turns[(number + turn) % len(turns)]
        count = size // TRAITS[dtype].size
        yield kind, dtype, op, count - count % ranks if kind == "reduce_scatter" else count


def wanted(case, leaves):
    """What each rank gets."""
    kind, _, op, _ = case
    return getattr(reference, kind)(leaves, op)


def issue(case, leaves, group, async_op=False):
    """The result of a call, and its work."""
    kind, _, op, count = case
    tensor = to_torch(leaves)
    if kind == "all_reduce":
        return tensor, ordered.all_reduce(tensor, op, group, async_op)
    out = torch.empty(count // dist.get_world_size(group), dtype=tensor.dtype)
    return out, ordered.reduce_scatter(out, tensor, op, group, async_op)


def reductions(comm, cases, leaves, hosts, piece, backend="gloo"):
    """This rank's result of each case; two of three are asynchronous."""
    group = standing(comm, backend)
    with laid_out(group, hosts, piece):
        issued = [
            issue(case, mine, group, async_op=number % 3 > 0)
            for number, (case, mine) in enumerate(zip(cases, leaves, strict=True))
        ]
        for _, work in issued:
            if work is not None:
                work.wait()
        return [to_numpy(result) for result, _ in issued]


def check(pool, cases, hosts, function=reductions, *rest):
    ranks = size_of(hosts)
    leaves = [awkward(dtype, ranks, count, seed) for seed, (_, dtype, _, count) in enumerate(cases)]
    of_ranks = PerRank([[each[rank] for each in leaves] for rank in range(ranks)])
    outcomes = pool(ranks).call(function, cases, of_ranks, hosts, *rest)
    for number, (case, inputs) in enumerate(zip(cases, leaves, strict=True)):
        for rank, want in enumerate(wanted(case, inputs)):
            assert same_bits(outcomes[rank][number], want), (case, rank)


@pytest.mark.parametrize("hosts", LAYOUTS, ids=named)
def test_every_type_and_operation(pool, hosts):
    """A third of them for each layout, so each for three layouts."""
    first = LAYOUTS.index(hosts) % 3
    cases = list(in_turns(PAIRS[first::3], (INLINE, SMALL, MEDIUM, LARGE), size_of(hosts), first))
    check(pool, cases, hosts, reductions, PIECE)


@pytest.mark.storm
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("hosts", LAYOUTS, ids=named)
def test_every_type_and_operation_of_every_layout(pool, hosts, turn):
    cases = list(in_turns(PAIRS, (INLINE, SMALL, MEDIUM, LARGE), size_of(hosts), turn))
    check(pool, cases, hosts, reductions, PIECE)


@pytest.mark.storm
@pytest.mark.parametrize("hosts", OF_SIX, ids=named)
def test_every_type_and_operation_of_six_ranks(pool, hosts):
    for turn in range(8):
        cases = list(in_turns(PAIRS, (INLINE, SMALL, MEDIUM, LARGE), 6, turn))
        check(pool, cases, hosts, reductions, PIECE)


@pytest.mark.parametrize("hosts", OF_SIX[:3], ids=named)
def test_six_ranks(pool, hosts):
    """Sums of which the host's nodes are several, and hosts some of whose ranks reduce nothing."""
    cases = [
        (kind, dtype, op, 6_000)
        for kind in KINDS
        for dtype, op in (("bfloat16", "avg"), ("float32", "sum"), ("int16", "avg"))
    ]
    check(pool, cases, hosts, reductions, 3_001)


@pytest.mark.parametrize("hosts", LAYOUTS, ids=named)
def test_sizes(pool, hosts):
    """Empty, fewer elements than ranks, and about each border between the ways that data go."""
    ranks = size_of(hosts)
    borders = [header.ROOM // 2, (32 << 10) // ranks // 2, PIECE // 2, 3 * PIECE // 2]
    counts = [0, 1, 2, 3, *(border + more for border in borders for more in (-1, 0, 1)), 40_001]
    cases = [("all_reduce", "bfloat16", "sum", count) for count in counts]
    cases += [("reduce_scatter", "bfloat16", "sum", ranks * (count // ranks)) for count in counts]
    check(pool, cases, hosts, reductions, PIECE)


FEW_EAGER_BYTES = 60_000


def with_less_room(comm, cases, leaves, hosts):
    with mock.patch.object(messages, "EAGER_BYTES", FEW_EAGER_BYTES):
        return reductions(comm, cases, leaves, hosts, None)


@pytest.mark.parametrize("hosts", [*map(apart, (2, 3, 4, 6)), ((0, 1), (2, 3))], ids=named)
def test_sizes_about_what_one_exchange_brings(pool, hosts):
    ranks = size_of(hosts)
    border = FEW_EAGER_BYTES // 8
    counts = [(border + more) // ranks * ranks for more in (-ranks, 0, ranks, 8 * ranks, 1_000)]
    cases = [("reduce_scatter", "float64", "sum", count) for count in counts]
    cases += [("all_reduce", "float64", "sum", count + more) for count in counts for more in (0, 1)]
    check(pool, cases, hosts, with_less_room)


def in_tiny_pieces(comm, cases, leaves, hosts):
    group = standing(comm)
    found = []
    for piece in (24, 333, 2_000):
        with laid_out(group, hosts, piece, in_pieces=True):
            found.append([])
            for case, mine in zip(cases, leaves, strict=True):
                found[-1].append(to_numpy(issue(case, mine, group)[0]))
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0]


# Ranks alone on hosts, uneven hosts, mixed ones, and six ranks; the rest in `make storm`.
IN_PIECES = [LAYOUTS[2], LAYOUTS[4], LAYOUTS[6], OF_SIX[2]]
OTHERS_IN_PIECES = [each for each in LAYOUTS[3:] if each not in IN_PIECES]


@pytest.mark.parametrize(
    "hosts",
    [*IN_PIECES, *(pytest.param(each, marks=pytest.mark.storm) for each in OTHERS_IN_PIECES)],
    ids=named,
)
def test_pieces_do_not_change_the_bits(pool, hosts):
    """Also where a piece has fewer elements than there are ranks."""
    ranks = size_of(hosts)
    few = header.ROOM // 8  # of which one more does not travel with the header
    # Of three elements a piece, and a last one of one.
    counts = {"all_reduce": 3 * (few // 3 + 2) + 1, "reduce_scatter": ranks * (few // ranks + 1)}
    check(pool, [(k, "float64", "sum", counts[k]) for k in KINDS], hosts, in_tiny_pieces)


@pytest.mark.parametrize("hosts", [apart(3), ((0, 1), (2,))], ids=named)
def test_the_generic_path_over_the_backend_pycollective(pool, hosts):
    cases = list(in_turns(PAIRS[::3], (INLINE, SMALL, MEDIUM, LARGE), 3))
    check(pool, cases, hosts, reductions, PIECE, "pycollective")


# --- What the public calls take.


def of_shapes(dtype, seed, ranks=3):
    """Leaves of tensors that are not one contiguous run, or no number at all."""
    shapes = [(), (0, 3), (7, 5), (1,), (3_001,)]
    return {
        shape: [each.reshape(shape) for each in awkward(dtype, ranks, int(np.prod(shape)), seed)]
        for shape in shapes
    }


def layouts_of_tensors(leaf):
    """Tensors with the leaf's elements, by how they lie in memory."""
    tensor = to_torch(leaf)
    yield tensor
    if tensor.dim() == 2 and tensor.numel():
        yield tensor.t().contiguous().t()
        wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)
        wide[:, ::2] = tensor
        yield wide[:, ::2]


def strided(comm, leaves, lists):
    group = standing(comm)
    found = []
    with laid_out(group):
        for leaf in leaves:
            for tensor in list(layouts_of_tensors(leaf)):
                strides = tensor.stride()
                if lists:
                    ordered.all_reduce([tensor], "sum", group)
                else:
                    ordered.all_reduce(tensor, "sum", group)
                assert tensor.stride() == strides
                found.append(to_numpy(tensor.clone(memory_format=torch.contiguous_format)))
    return found


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_shapes_and_strides(pool, dtype, lists):
    leaves = of_shapes(dtype, 5)
    of_ranks = PerRank([[each[rank] for each in leaves.values()] for rank in range(3)])
    want = []
    for shape, each in leaves.items():
        reduced = reference.reduce([leaf.reshape(-1) for leaf in each]).reshape(shape)
        want += [reduced] * len(list(layouts_of_tensors(each[0])))
    for got in pool(3).call(strided, of_ranks, lists):
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def mixed_lists(comm, leaves, async_op):
    """Lists of all types at once, in which types alternate and one tensor is strided."""
    group = standing(comm)
    tensors = [to_torch(each) for each in leaves]
    tensors[1] = tensors[1].view(-1, 5).t().contiguous().t()
    with laid_out(group):
        scattered = [torch.empty(each.numel() // comm.size, dtype=each.dtype) for each in tensors]
        inputs = [each.clone() for each in tensors]
        works = [
            ordered.reduce_scatter(scattered, inputs, "max", group, async_op),
            ordered.all_reduce(tensors, "max", group, async_op),
        ]
        if async_op:
            assert [each is mine for each, mine in zip(works[1].result(), tensors, strict=True)]
            assert all(a is b for a, b in zip(works[1].result(), tensors, strict=True))
            assert all(a is b for a, b in zip(works[0].result(), scattered, strict=True))
        else:
            assert works == [None, None]
    assert all(to_numpy(a).tobytes() == b.tobytes() for a, b in zip(inputs, leaves, strict=True))
    return [to_numpy(each.reshape(-1)) for each in tensors], [to_numpy(each) for each in scattered]


@pytest.mark.parametrize("async_op", [False, True])
def test_lists_of_mixed_types(pool, async_op):
    types = [*DTYPES, *reversed(DTYPES)]
    leaves = [awkward(dtype, 3, 15 * (i + 1), i) for i, dtype in enumerate(types)]
    of_ranks = PerRank([[each[rank] for each in leaves] for rank in range(3)])
    outcomes = pool(3).call(mixed_lists, of_ranks, async_op)
    for number, inputs in enumerate(leaves):
        want = reference.reduce(inputs, "max")
        for rank, (whole, parts) in enumerate(outcomes):
            assert same_bits(whole[number], want), number
            assert same_bits(parts[number], np.split(want, 3)[rank]), number


def complex_numbers(comm, leaves):
    group = standing(comm)
    found = []
    with laid_out(group):
        for op in ("sum", "avg"):
            for name in ("complex64", "complex128"):
                pairs = to_torch(leaves[name]).view(-1, 2)
                tensor = torch.view_as_complex(pairs)
                part = torch.empty(tensor.numel() // comm.size, dtype=tensor.dtype)
                ordered.reduce_scatter(part, tensor, op, group)
                every_other = torch.stack([tensor, tensor], 1)[:, 0]
                ordered.all_reduce([tensor, every_other], op, group)
                found.append(
                    [
                        to_numpy(torch.view_as_real(each).reshape(-1))
                        for each in (tensor, every_other, part)
                    ]
                )
    return found


def test_complex_numbers_are_reduced_part_by_part(pool):
    leaves = {
        "complex64": order_sensitive("float32", 3, 600),
        "complex128": order_sensitive("float64", 3, 600),
    }
    of_ranks = PerRank([{k: each[rank] for k, each in leaves.items()} for rank in range(3)])
    outcomes = pool(3).call(complex_numbers, of_ranks)
    for rank, found in enumerate(outcomes):
        cases = itertools.product(("sum", "avg"), leaves)
        for (op, name), (whole, every_other, part) in zip(cases, found, strict=True):
            want = reference.reduce(leaves[name], op)
            assert same_bits(whole, want)
            assert same_bits(every_other, want)
            assert same_bits(part, np.split(want, 3)[rank])


# Signs that torch holds beside the memory, which alone travels.
LAZY = {
    "a conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "a negated part": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
}


def lazy(comm, name):
    group = standing(comm)
    with laid_out(group), pytest.raises(ConfigurationError, match="resolve"):
        ordered.all_reduce(LAZY[name](), "sum", group)
    with laid_out(group), pytest.raises(ConfigurationError, match="resolve"):
        ordered.reduce_scatter(torch.ones_like(LAZY[name]())[:2], LAZY[name](), "sum", group)


@pytest.mark.parametrize("name", LAZY)
def test_signs_beside_the_memory_are_refused(pool, name):
    pool(2).call(lazy, name)


def wrapped(comm):
    group = standing(comm)
    mesh = DeviceMesh("cpu", torch.arange(comm.size))
    shard = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    wrappers = [shard, torch.nn.Parameter(shard), AsyncCollectiveTensor(torch.ones(4))]
    plain = torch.nn.Parameter(torch.ones(4))
    with laid_out(group) as made:
        for each in wrappers:
            said = rf"{type(each).__name__} has no memory of its own; .* x\.to_local\(\)"
            for call in (
                lambda x: ordered.all_reduce(x, "sum", group),
                lambda x: ordered.all_reduce([plain, x], "sum", group),
                lambda x: ordered.reduce_scatter(plain[:2], x, "sum", group),
                lambda x: ordered.reduce_scatter(x, plain, "sum", group),
            ):
                with pytest.raises(ConfigurationError, match=said):
                    call(each)
        sent = made.stats()["sent_messages"]
        ordered.all_reduce(shard.to_local(), "sum", group)
        ordered.all_reduce(plain, "sum", group)
    return sent, shard.to_local().tolist(), plain.tolist()


def test_tensors_without_memory_of_their_own_are_refused(pool):
    assert pool(2).call(wrapped) == [(0, [2.0] * 4, [2.0] * 4)] * 2


# --- Inference mode, which alone may write the tensors that are made in it.


def in_and_out_of_inference_mode(comm, leaves, on_device, options):
    """Results of calls in and out of the mode, of tensors made in and out of it."""
    group = standing(comm)
    count = leaves.size // comm.size * comm.size
    found = []
    with contextlib.ExitStack() as stack:
        if on_device:
            with torch.inference_mode():
                made = as_on_a_device(group)
            stack.enter_context(mock.patch.object(calls, "group_of", return_value=made))
        else:
            stack.enter_context(laid_out(group))
        for of_tensors, of_calls in ((True, True), (False, False), (True, False), (False, True)):
            with torch.inference_mode(of_tensors):
                tensor, whole = to_torch(leaves).clone(), to_torch(leaves)[:count].clone()
                part = torch.empty(count // comm.size)
                assert part.is_inference() is of_tensors
            with torch.inference_mode(of_calls):
                ordered.all_reduce(tensor, "avg", group, **options)
                ordered.reduce_scatter(part, whole, "avg", group, True, **options).wait()
            found.append((to_numpy(tensor), to_numpy(part)))
    return found


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"narrow": torch.bfloat16},
        {"narrow": torch.bfloat16, "narrow_check": "device"},
    ],
    ids=["wide", "host", "device"],
)
@pytest.mark.parametrize("count", [7, 20_001])
def test_inference_mode_comes_and_goes(pool, on_device, options, count):
    leaves = [each.astype(np.float32) for each in order_sensitive("bfloat16", 2, count)]
    want = reference.reduce(leaves, "avg")
    parts = reference.reduce_scatter([each[: count - 1] for each in leaves], "avg")
    outcomes = pool(2).call(in_and_out_of_inference_mode, PerRank(leaves), on_device, options)
    for found, mine in zip(outcomes, parts, strict=True):
        assert len(found) == 4
        for whole, part in found:
            assert same_bits(whole, want)
            assert same_bits(part, mine)


# --- Leaves that travel in a narrower type.


def narrowed(comm, leaves, kind, op, hosts, narrow):
    """The result, and the bytes that this rank sent for it."""
    group = standing(comm)
    tensor = to_torch(leaves)
    with laid_out(group, hosts, piece=10_000) as made:
        out = tensor if kind == "all_reduce" else torch.empty(tensor.numel() // comm.size)
        if kind == "all_reduce":
            ordered.all_reduce(tensor, op, group, narrow=narrow)
        else:
            ordered.reduce_scatter(out, tensor, op, group, narrow=narrow)
        return to_numpy(out), made.stats()["sent_bytes"]


@pytest.mark.parametrize("count", [60, 900, 30_000])
@pytest.mark.parametrize("hosts", [apart(3), ((0, 1), (2,))], ids=named)
def test_narrow_leaves_give_the_bits_of_wide_ones(pool, hosts, count):
    """Only where all ranks' elements fit: one that does not on one rank, and all go wide."""
    for (small, op), kind in itertools.product(
        [("bfloat16", "avg"), ("float16", "sum"), ("float8_e5m2", "prod")], KINDS
    ):
        leaves = [each.astype(np.float32) for each in order_sensitive(small, 3, count)]
        sent = {}
        for fits in (True, False):
            if not fits:
                leaves[1][count // 2] = np.float32(1 + 2**-20)
            want = getattr(reference, kind)(leaves, op)
            narrow = getattr(torch, small)
            outcomes = pool(3).call(narrowed, PerRank(leaves), kind, op, hosts, narrow)
            for (got, _), mine in zip(outcomes, want, strict=True):
                assert same_bits(got, mine), (small, op, kind, fits)
            sent[fits] = sum(each for _, each in outcomes)
        assert (sent[True] < sent[False]) == (count > 900)  # few travel with the header


REFUSED_NARROW = [
    *(("float64", "float32", "sum"), ("float32", "float64", "sum"), ("float16", "bfloat16", "sum")),
    *(("float32", "bfloat16", "max"), ("int32", "int8", "sum"), ("float32", "int16", "sum")),
    ("complex64", "bfloat16", "sum"),
]


def refused_narrow(comm):
    group = standing(comm)
    with laid_out(group) as made:
        for wide, narrow, op in REFUSED_NARROW:
            tensor = torch.ones(4, dtype=getattr(torch, wide))
            with pytest.raises(ConfigurationError, match=f"{wide} cannot travel as {narrow}"):
                ordered.all_reduce(tensor, op, group, narrow=getattr(torch, narrow))
        return made.stats()["sent_messages"]


def test_what_would_not_have_the_bits_does_not_travel_narrow(pool):
    assert pool(2).call(refused_narrow) == [0, 0]


# --- Who shares a host.


def learned_layouts(comm, topologies):
    """The layout for each PYCOLLECTIVE_TOPOLOGY, of all ranks and of those but the first."""
    group = standing(comm)
    rest = dist.new_group(list(range(1, comm.size)), backend="gloo")
    found = []
    for topology in topologies:
        with mock.patch.dict(os.environ, {"PYCOLLECTIVE_TOPOLOGY": topology}):
            with laid_out(group) as made:
                ordered.prepare(group)
                found.append(made._layout.hosts)
            if comm.rank > 0:
                with laid_out(rest) as made:
                    ordered.all_reduce(torch.ones(3), "sum", rest)
                    found.append(made._layout.hosts)
    if comm.rank > 0:
        dist.destroy_process_group(rest)
    return found


def test_layouts_come_from_the_topology(pool):
    topologies = {
        "": (apart(4), apart(3)),  # one host: nothing leaves it
        "2x2": (((0, 1), (2, 3)), apart(3)),
        "3,1": (apart(4), apart(3)),  # the only rail would carry everything
    }
    for rank, found in enumerate(pool(4).call(learned_layouts, list(topologies))):
        want = [hosts for both in topologies.values() for hosts in (both if rank else both[:1])]
        assert found == want


def topology_of_one_rank(comm):
    """The layout where rank 0 alone has PYCOLLECTIVE_TOPOLOGY."""
    group = standing(comm)
    simulated = {"PYCOLLECTIVE_TOPOLOGY": "2x2"} if comm.rank == 0 else {}
    with mock.patch.dict(os.environ, simulated), laid_out(group) as made:
        ordered.prepare(group)
        return made._layout.hosts


def test_ranks_whose_topologies_differ_have_one_layout(pool):
    assert len(set(pool(4).call(topology_of_one_rank))) == 1


# --- Order of calls.


def orders(comm, leaves, backend="gloo"):
    """Synchronous calls behind asynchronous ones, works waited for from the last, or never."""
    group = standing(comm, backend)
    tensors = [to_torch(each) for each in leaves]
    with laid_out(group):
        works = []
        for number, each in enumerate(tensors):
            works.append(ordered.all_reduce(each, "sum", group, async_op=number % 5 != 4))
            if number % 5 == 4:
                # It came behind all before it.
                assert all(work.is_completed() for work in works if work is not None)
        for work in reversed(works[::2]):
            if work is not None:
                assert work.wait() is True
                assert work.is_success()
                assert work.exception() is None
        ordered.all_reduce(torch.ones(1), "sum", group)
    return [to_numpy(each) for each in tensors]


def test_calls_run_in_the_order_in_which_they_were_issued(pool):
    """Large ones first, so that what overtakes would be seen."""
    leaves = [
        order_sensitive("float32", 3, count, count) for count in (60_000, 5, 900, 0, 20_000) * 4
    ]
    of_ranks = PerRank([[each[rank] for each in leaves] for rank in range(3)])
    for found in pool(3).call(orders, of_ranks):
        for got, inputs in zip(found, leaves, strict=True):
            assert same_bits(got, reference.reduce(inputs, "sum"))


def futures(comm, backend):
    group = standing(comm, backend)
    tensor, other = torch.full((20_000,), comm.rank + 1.0), torch.ones(2)
    with laid_out(group) if backend == "gloo" else contextlib.nullcontext():
        work = ordered.all_reduce(tensor, dist.ReduceOp.SUM, group, async_op=True)
        doubled = work.get_future().then(lambda done: 2 * done.value())
        listed = ordered.all_reduce([other], "sum", group, async_op=True)
        assert listed.get_future().wait()[0] is other
        assert work.get_future().wait() is tensor
        assert work.result()[0] is tensor
        assert doubled.wait().eq(2 * tensor).all()
    return tensor[0].item(), other[0].item()


@pytest.mark.parametrize("backend", ["gloo", "pycollective"])
def test_futures_hold_the_tensors_and_chain(pool, backend):
    assert pool(3).call(futures, backend) == [(6.0, 3.0)] * 3


def own_part(comm, leaves):
    """The output is this rank's part of the input."""
    group = standing(comm)
    found = []
    with laid_out(group, piece=5_000):
        for mine in leaves:
            tensor = to_torch(mine)
            part = tensor.chunk(comm.size)[comm.rank]
            ordered.reduce_scatter(part, tensor, "sum", group)
            found.append(to_numpy(part))
    return found


def test_an_output_may_be_a_part_of_the_input(pool):
    leaves = [order_sensitive("float32", 3, count, count) for count in (30, 3_000, 30_000)]
    of_ranks = PerRank([[each[rank] for each in leaves] for rank in range(3)])
    for rank, found in enumerate(pool(3).call(own_part, of_ranks)):
        for got, inputs in zip(found, leaves, strict=True):
            assert same_bits(got, reference.reduce_scatter(inputs, "sum")[rank])


# --- Over the backend pycollective.


def forwarded(comm, leaves):
    group = standing(comm, "pycollective")
    tensor, part = to_torch(leaves), torch.empty(leaves.size // comm.size)
    ordered.prepare(group)
    ordered.reduce_scatter(part, tensor, "avg", group)
    work = ordered.all_reduce([tensor], "avg", group, async_op=True)
    assert work.result()[0] is tensor
    alone = torch.ones(3)
    assert ordered.all_reduce(alone, "sum", group, async_op=True).wait()
    assert alone[0].item() == comm.size
    return to_numpy(tensor), to_numpy(part), ordered.stats(group)


def test_the_backend_pycollective_makes_the_calls_itself(pool):
    leaves = order_sensitive("float32", 3, 30_000)
    want = reference.reduce(leaves, "avg")
    for rank, (whole, part, stats) in enumerate(pool(3).call(forwarded, PerRank(leaves))):
        assert same_bits(whole, want)
        assert same_bits(part, np.split(want, 3)[rank])
        assert set(stats.values()) == {0}


# --- As on a device: all is issued at the call, and headers are read later.


def on_a_device(comm, cases, leaves, hosts, piece):
    made = as_on_a_device(standing(comm), hosts)
    made.piece = piece
    return [run(made, kind, op, mine) for (kind, _, op, _), mine in zip(cases, leaves, strict=True)]


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(each, id=named(each), marks=() if number % 2 == 0 else pytest.mark.storm)
        for number, each in enumerate(LAYOUTS)
    ],
)
def test_as_on_a_device(pool, hosts):
    cases = list(in_turns(PAIRS[::2], (INLINE, SMALL, MEDIUM, LARGE), size_of(hosts)))
    check(pool, cases, hosts, on_a_device, PIECE)


def by_torch(terms, out, op, recipe, leaves, dtype, finish, check=None, compiles=True):
    """As `reduction.reduce` does on devices without Triton."""
    if len(terms) == 1 and not finish:
        out.copy_(terms[0])
    else:
        plain.reduce(reduction._rows(terms), out, op, recipe, leaves, dtype, finish, check)


def on_a_device_without_triton(comm, *arguments):
    with mock.patch.object(reduction, "reduce", by_torch):
        return on_a_device(comm, *arguments)


@pytest.mark.parametrize("hosts", [apart(3), ((0, 1), (2, 3))], ids=named)
def test_as_on_a_device_without_triton(pool, hosts):
    cases = list(in_turns(PAIRS, (INLINE, SMALL, MEDIUM, LARGE), size_of(hosts)))
    check(pool, cases, hosts, on_a_device_without_triton, PIECE)


def differ_on_a_device(comm, leaves, op):
    """Ranks average what rank 0 adds: what they have then, and what later calls say."""
    made = as_on_a_device(standing(comm), apart(comm.size))
    first = run(made, "all_reduce", op, leaves)
    with mock.patch.object(made._calls, "found", return_value=None):  # it cannot know yet
        second = run(made, "all_reduce", "sum", leaves)
    told = [failing(lambda: run(made, "all_reduce", "sum", leaves))[0] for _ in range(2)]
    return first, second, told


@pytest.mark.parametrize("count", [10, 1_000, 20_000])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "float8_e5m2"])
def test_as_on_a_device_calls_that_differ_give_nan_and_a_later_one_says_so(pool, dtype, count):
    leaves = order_sensitive(dtype, 3, count)
    outcomes = pool(3).call(differ_on_a_device, PerRank(leaves), PerRank(["sum", "avg", "avg"]))
    for first, second, told in outcomes:
        assert np.isnan(first.astype(np.float32)).all()
        assert same_bits(second, reference.reduce(leaves, "sum"))
        for error in told:
            assert isinstance(error, CollectiveMismatch)
            assert re.search(r"rank 0 called .* \(sum\) .*rank 1 .* \(avg\) ", str(error))
            assert "Results that are floats are NaN" in str(error)


def works_on_a_device(comm):
    """Works ask the device, and tensors are kept until it, or a stream, is behind the call."""
    group = standing(comm)
    made = as_on_a_device(group, apart(comm.size))
    made.streams.done = False

    def keeps(tensors):
        newest = made._under_way.newest()
        return {each.data_ptr() for each in tensors} <= {e.data_ptr() for e in newest.tensors}

    tensors = [torch.ones(3), torch.ones(4, 2).t(), torch.ones(5, dtype=torch.int32)]
    with mock.patch.object(calls, "group_of", return_value=made):
        work = ordered.all_reduce(tensors, "sum", group, async_op=True)
        assert keeps(tensors)
        assert not work.is_completed()
        assert not work.is_success()
        with pytest.raises(CollectiveTimeout, match=r"not ended it after 0\.01 s"):
            work.wait(timedelta(seconds=0.01))
        joined = made.streams.joined
        assert work.wait()
        assert made.streams.joined == joined + 1  # the caller's stream waits, and the host does not
        assert made._under_way.newest().tensors == ()
        made.streams.done = True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert len(work.get_future().wait()) == len(tensors)
        assert all(a is b for a, b in zip(work.result(), tensors, strict=True))
        assert made._under_way.newest() is None
        made.streams.done = False
        parts = [torch.empty(1), torch.empty(2)]
        whole = [torch.ones(comm.size), torch.ones(2 * comm.size)]
        ordered.reduce_scatter(parts, whole, "sum", group, async_op=True)  # nobody waits
        assert keeps(parts)
        made.streams.done = True
        assert made._under_way.newest() is None
    assert all((each == comm.size).all() for each in (*tensors, *parts))


def test_as_on_a_device_works_ask_the_device(pool):
    pool(2).call(works_on_a_device)


def test_a_device_without_a_number_is_the_current_one():
    module = mock.Mock(**{"current_device.return_value": 3})
    group = mock.Mock(_device_types=[])
    with (
        mock.patch.object(torch, "get_device_module", return_value=module),
        mock.patch.object(calls, "checked_group", return_value=group),
        mock.patch.object(calls, "streams_of"),
        mock.patch.object(calls, "OrderedGroup") as made,
    ):
        calls.group_of(group, torch.device("cuda"))
        calls.group_of(group, torch.device("cuda", 3))
        assert [each.args[1] for each in made.call_args_list] == [torch.device("cuda", 3)]
        calls.group_of(group, torch.device("cuda", 1))
        assert made.call_args.args[1] == torch.device("cuda", 1)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_stream_runs_behind_the_callers_unless_that_captures(capturing):
    """Also without a tensor."""
    module = mock.MagicMock(**{"is_current_stream_capturing.return_value": capturing})
    with mock.patch.object(torch, "get_device_module", return_value=module):
        streams = Streams(torch.device("cuda", 1), "OneBitState")
    if capturing:
        said = "^OneBitState: a graph cannot capture these calls"
        with pytest.raises(ConfigurationError, match=said), streams.behind_caller():
            pass
        return
    with streams.behind_caller():
        module.current_stream.assert_called_once_with(torch.device("cuda", 1))
    module.Stream.return_value.wait_stream.assert_called_once()


@pytest.mark.parametrize("capturing", [False, True])
def test_a_callers_stream_waits_for_a_call_that_fails_and_not_for_a_refused_capture(capturing):
    module = mock.MagicMock(**{"is_current_stream_capturing.return_value": capturing})
    cpu = torch.device("cpu")  # of the future, which needs a real device
    with mock.patch.object(torch, "get_device_module", return_value=module):
        streams = Streams(torch.device("cuda", 1), "ordered")
    fails = mock.Mock(side_effect=KeyError)
    with pytest.raises(ConfigurationError if capturing else KeyError):
        torch_streams.issue(streams, cpu, fails, None, [])
    assert fails.called is not capturing
    assert module.current_stream.return_value.wait_stream.called is not capturing


def own_messages(comm, backend):
    """The program's own receive waits while ordered calls come and go; its message is the last."""
    group = standing(comm, backend)
    before, behind = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    mine, got = torch.full((256,), comm.rank), torch.zeros(256, dtype=torch.int64)
    with laid_out(group):
        receives = dist.irecv(got, group=group, group_src=before)
        for count in (10, 1_000, 50_000):
            tensor = torch.ones(count)
            ordered.all_reduce(tensor, "sum", group)
            assert (tensor == comm.size).all()
        dist.send(mine, group=group, group_dst=behind)
        receives.wait()
    return got.unique().tolist()


@pytest.mark.parametrize("backend", ["gloo", "counting"])
def test_messages_do_not_mix_with_the_programs_own(pool, backend):
    assert pool(3).call(own_messages, backend) == [[2], [0], [1]]


def first_calls(comm):
    """Of several groups at once, in another order on each rank, while the program makes more."""
    standing_group(comm)
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=15)) for _ in range(5)]
    tensors = [torch.full((2_000,), float(number)) for number in range(len(groups))]
    turned = range(len(groups)) if comm.rank == 0 else reversed(range(len(groups)))
    works = [ordered.all_reduce(tensors[n], "sum", groups[n], async_op=True) for n in turned]
    groups.append(dist.new_group(backend="gloo"))
    for work in works:
        work.wait()
    for group in groups:
        dist.destroy_process_group(group)
    return [tensor.unique().tolist() for tensor in tensors]


def test_first_calls_of_several_groups_do_not_wait_for_each_other(pool):
    assert pool(2).call(first_calls) == [[[0.0], [2.0], [4.0], [6.0], [8.0]]] * 2


def with_settings(comm, name, value):
    os.environ[name] = value
    dist.set_debug_level_from_env()
    join(comm, "gloo")
    tensor = torch.ones(30_000)
    ordered.all_reduce(tensor)
    own = calls.group_of(None, CPU)._messages.eager_bytes > 0  # connections of ordered's own
    return tensor.unique().tolist(), own


@pytest.mark.storm
@pytest.mark.parametrize(
    "setting", [("TORCH_GLOO_LAZY_INIT", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL")], ids=" ".join
)
def test_with_torchs_own_settings(setting):
    assert results(run_ranks(with_settings, 3, *setting)) == [([3.0], True)] * 3
