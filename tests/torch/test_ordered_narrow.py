"""Leaves that travel in a narrow type, as on a device: what the host waits for, and what it learns
where they do not fit."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo  # so that forks need not import it for fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from pycollective import (
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigurationError,
    reference,
)
from pycollective.torch import ordered
from pycollective.torch.ordered import calls, devices
from pycollective.torch.ordered.device_messages import DeviceMessages
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.layout import Layout
from tests.harness import PerRank, results, run_ranks
from tests.inputs import order_sensitive, same_bits
from tests.joining import failing
from tests.torch.groups import CPU, process_group, to_numpy, to_torch
from tests.torch.on_devices import NoWaits
from tests.torch.ordered_groups import apart, as_on_a_device, named, own_group, size_of, standing
from tests.torch.streams import LateDevice, late_streams
from tests.torch.test_ordered_fsdp import COUNT, gradients_of, loss_of, sharded

BF16, FP32 = torch.bfloat16, torch.float32
OTHER = np.float32(1 + 2.0**-20)  # no value of bfloat16
MISFIT = r'of rank\(s\) {} are not exactly bfloat16.*narrow_check="host".*narrow=None'
KINDS = ("all_reduce", "reduce_scatter")


def leaves_of(ranks, count, others=(), seed=0):
    """Each rank's leaves, of bfloat16's values but for one of these ranks'."""
    leaves = [each.astype(np.float32) for each in order_sensitive("bfloat16", ranks, count, seed)]
    for rank in others:
        leaves[rank][-1 - rank] = OTHER
    return leaves


@contextlib.contextmanager
def through(made):
    """The public calls go over these ordered reductions."""
    with mock.patch.object(calls, "group_of", return_value=made):
        yield


def reduce(group, kind, leaves, check, narrow=BF16):
    tensor = to_torch(leaves).clone()
    out = tensor if kind == "all_reduce" else torch.empty(tensor.numel() // group.size())
    options = {"narrow": narrow, "narrow_check": check}
    if kind == "all_reduce":
        ordered.all_reduce(tensor, "avg", group, **options)
    else:
        ordered.reduce_scatter(out, tensor, "avg", group, **options)
    return out


# --- Calls made by hand.


def by_hand(comm, leaves, kind, hosts, check):
    """The result, how often the host waited, bytes sent, and what the next call raises."""
    group = standing(comm)
    made = as_on_a_device(group, hosts)
    made.piece = 20_000
    refused = NoWaits() if check == "device" else contextlib.nullcontext()
    waits = mock.Mock(wraps=devices.wait_for)
    with through(made), mock.patch.object(devices, "wait_for", waits):
        with refused, mock.patch.object(made._calls, "found", return_value=None):  # not yet known
            out = reduce(group, kind, leaves, check)
        sent = made.stats()["sent_bytes"]
        told, _ = failing(reduce, group, kind, leaves, check)
    return to_numpy(out), waits.call_count, sent, told


@pytest.mark.parametrize("hosts", [apart(3), ((0, 1), (2,))], ids=named)
@pytest.mark.parametrize("kind", KINDS)
def test_where_leaves_fit_results_are_the_contracts(pool, hosts, kind):
    """The host waits once a call, or never; and leaves travel as bfloat16."""
    leaves = leaves_of(3, 30_000)
    sent = {}
    for check in ("host", "device"):
        outcomes = pool(3).call(by_hand, PerRank(leaves), kind, hosts, check)
        want = getattr(reference, kind)(leaves, "avg")
        for (got, waits, _, told), mine in zip(outcomes, want, strict=True):
            assert same_bits(got, mine)
            assert waits == (2 if check == "host" else 0)  # of two calls
            assert told is None
        sent[check] = [each[2] for each in outcomes]
    # A header to each of two others is what "device" does not send.
    assert all(a - b == 2 * 64 for a, b in zip(sent["host"], sent["device"], strict=True))


@pytest.mark.parametrize("others", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("hosts", [apart(3), ((0, 1), (2,))], ids=named)
@pytest.mark.parametrize("kind", KINDS)
def test_where_leaves_do_not_fit_results_are_nan_and_a_later_call_says_so(
    pool, kind, hosts, others
):
    leaves = leaves_of(3, 30_000, others)
    for got, waits, _, told in pool(3).call(by_hand, PerRank(leaves), kind, hosts, "device"):
        assert np.isnan(got).all()
        assert waits == 0
        assert isinstance(told, CollectiveMismatch)
        with pytest.raises(CollectiveMismatch, match=MISFIT.format(", ".join(map(str, others)))):
            raise told


def judged(comm, leaves):
    """What works say of calls, by whether their leaves fit."""
    group = standing(comm)
    works = {}
    with through(as_on_a_device(group, apart(comm.size))):
        for fits, each in zip((True, False), leaves, strict=True):
            tensors = [to_torch(each).clone()]
            if fits:  # a work of two calls
                tensors.append(torch.ones(3, dtype=BF16))
            works[fits] = ordered.all_reduce(
                tensors, "sum", group, True, narrow=BF16, narrow_check="device"
            )
    assert works[True].wait()
    assert isinstance(failing(works[False].wait)[0], CollectiveMismatch)
    return {fits: (work.is_success(), work.exception()) for fits, work in works.items()}


def test_a_work_that_has_ended_well_is_not_told_of_later_calls(pool):
    steps = [leaves_of(2, 20_000), leaves_of(2, 20_000, (1,))]
    of_ranks = [[each[rank] for each in steps] for rank in range(2)]
    for said in pool(2).call(judged, PerRank(of_ranks)):
        assert said[True] == (True, None)
        assert said[False][0] is False
        with pytest.raises(CollectiveMismatch, match=MISFIT.format(1)):
            raise said[False][1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_looks_before_leaves_go(pool, kind):
    leaves = leaves_of(3, 30_000, (1,))
    want = getattr(reference, kind)(leaves, "avg")
    outcomes = pool(3).call(by_hand, PerRank(leaves), kind, apart(3), "host")
    for (got, _, _, told), mine in zip(outcomes, want, strict=True):
        assert same_bits(got, mine)
        assert told is None


def bounded(comm, check):
    """What a rank is told whose device does not come to the end."""
    with own_group(comm) as group:
        made = as_on_a_device(group, apart(comm.size))
        made.streams.done = False
        limit = mock.PropertyMock(return_value=0.05)
        with through(made), mock.patch.object(DeviceMessages, "timeout", limit):
            if check == "host":
                return failing(reduce, group, "all_reduce", np.ones(30_000, "f4"), check)[0]
            return failing(lambda: backward(group, [np.ones(30_000, "f4")]))[0]


@pytest.mark.parametrize("check", ["host", "device"])
def test_the_host_waits_as_long_as_the_group(pool, check):
    for told in pool(2).call(bounded, check):
        assert isinstance(told, CollectiveTimeout), told
        assert "has not ended it after 0.05 s" in str(told)


def finds_while_it_waits(comm, leaves):
    """What is raised, and the exchanges of the call whose host hears of one before it."""
    group = standing(comm)
    made = as_on_a_device(group, apart(comm.size))
    found = made._calls.found
    with through(made), mock.patch.object(made._calls, "found", return_value=None) as known:
        reduce(group, "all_reduce", leaves, "device")
        issued = made._messages.issued
        made.streams.done = False
        known.side_effect = [None, found()]  # when the call begins, and when it has waited
        told, _ = failing(reduce, group, "all_reduce", np.ones(30_000, "f4"), "host")
    return told, made._messages.issued - issued


def test_the_host_reads_no_answer_that_has_not_come(pool):
    for told, exchanges in pool(2).call(finds_while_it_waits, PerRank(leaves_of(2, 20_000, (1,)))):
        assert isinstance(told, CollectiveMismatch), told
        assert exchanges == 1  # no leaves went


def differ(comm, check, count):
    """What a rank is told by its first two calls, of which peers look in another way."""
    leaves = np.ones(count, "f4")
    with (
        own_group(comm, timeout=timedelta(seconds=2)) as group,
        through(as_on_a_device(group, apart(comm.size))),
    ):
        return [failing(reduce, group, "all_reduce", leaves, check)[0] for _ in range(2)]


@pytest.mark.parametrize("count", [40, pytest.param(30_000, marks=pytest.mark.storm)])
def test_ranks_that_look_in_other_ways_are_named(pool, count):
    """Few leaves go as they are; of many the exchanges do not fit each other."""
    said = f"all_reduce of {count} float32 (avg, as bfloat16"
    for first, told in pool(2).call(differ, PerRank(["host", "device"]), count):
        assert isinstance(first or told, CollectiveMismatch)
        assert f"rank 0 called {said} where that is exact)" in str(told)
        assert f'rank 1 {said} by narrow_check="device")' in str(told)


def test_no_other_check_is_known():
    with pytest.raises(ConfigurationError, match="narrow_check='later'"):
        ordered.all_reduce(torch.ones(3), narrow=BF16, narrow_check="later")
    with pytest.raises(ConfigurationError, match="does not go with replicas"):
        ordered.ReduceScatter(mock.Mock(), narrow_check="device")


# --- Within a backward pass.


@contextlib.contextmanager
def known_at_the_end(made):
    """What calls find is not known before the backward pass ends."""
    found, end = made._calls.found, made._end_calls
    with mock.patch.object(made._calls, "found", return_value=None) as told:

        def known_now(what):
            told.side_effect = found
            end(what)

        with mock.patch.object(made, "_end_calls", known_now):
            yield


class Reduced(torch.autograd.Function):
    """In its backward pass it averages leaves, in a narrow type."""

    @staticmethod
    def forward(ctx, x, group, leaves):
        ctx.given = group, leaves
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        group, leaves = ctx.given
        ordered.all_reduce(leaves, "avg", group, narrow=BF16, narrow_check="device")
        return grad, None, None


def backward(group, leaves):
    """One backward pass that averages all of these, the last first."""
    x = torch.ones(1, requires_grad=True)
    y = x
    for each in leaves:
        y = Reduced.apply(y, group, each if isinstance(each, torch.Tensor) else to_torch(each))
    y.sum().backward()


def late(comm, steps, hosts, seed):
    """The averages of steps of backward passes whose device works late, and what each raised."""
    device = LateDevice(seed)
    group = standing(comm)
    made = OrderedGroup(group, CPU, late_streams(device, "ordered"))
    made._layout = Layout(made.rank, hosts)
    tensors = [[to_torch(each).clone() for each in step] for step in steps]
    told = []
    with through(made), device.in_use():
        for step in tensors:
            told.append(failing(backward, group, step)[0])
    device.synchronize()
    return [[to_numpy(each) for each in step] for step in tensors], told


@pytest.mark.parametrize(("hosts", "seed"), [(apart(3), None), (((0, 1), (2,)), 1)])
@pytest.mark.parametrize("module", [0, 1])  # the last of the pass, or the one before
def test_a_backward_pass_raises_what_it_finds(pool, hosts, seed, module):
    """Of any module; and none of the pass before it, whose leaves fit."""
    ranks, count = size_of(hosts), 20_000
    steps = [[leaves_of(ranks, count, seed=number + 2 * s) for number in range(2)] for s in (0, 1)]
    steps[1][module] = leaves_of(ranks, count, (1,), seed=7)
    of_ranks = [[[each[rank] for each in step] for step in steps] for rank in range(ranks)]
    for found, (first, second) in pool(ranks).call(late, PerRank(of_ranks), hosts, seed):
        assert first is None
        for got, inputs in zip(found[0], steps[0], strict=True):
            assert same_bits(got, reference.reduce(inputs, "avg"))
        with pytest.raises(CollectiveMismatch, match=MISFIT.format(1)):
            raise second
        assert np.isnan(found[1][module]).all()


def stuck(comm, leaves):
    """What is raised where the device does not come to the end of the pass."""
    group = standing(comm)
    made = as_on_a_device(group, apart(comm.size))
    made.streams.done = False
    with through(made), known_at_the_end(made):
        return failing(backward, group, [leaves])[0]


def test_a_finding_is_raised_though_calls_behind_it_do_not_end(pool):
    """Peers that have seen it make no more calls."""
    for told in pool(2).call(stuck, PerRank(leaves_of(2, 20_000, (1,)))):
        assert isinstance(told, CollectiveMismatch), told


# --- FSDP2.


def steps_of_fsdp(comm, leaves):
    """Of each step the gradients, and what `backward` raised; and how many calls were made."""
    with process_group(comm, backend="gloo"):
        mesh = init_device_mesh("cpu", (comm.size,))
        group = mesh.get_group()
        made = as_on_a_device(group, apart(comm.size))
        reduce_scatter = ordered.ReduceScatter(narrow_check="device")
        found = []
        with mock.patch.dict(calls._groups, {group: {CPU: made}}):
            for leaf in leaves:
                model = sharded(mesh, reduce_scatter, MixedPrecisionPolicy())
                loss = loss_of(model, leaf)
                with NoWaits(), known_at_the_end(made):
                    told, _ = failing(loss.backward)
                found.append((gradients_of(model), told))
        return found, made.calls


def fsdp(steps):
    ranks = len(steps[0])
    mine = PerRank([[each[rank] for each in steps] for rank in range(ranks)])
    return results(run_ranks(steps_of_fsdp, ranks, mine))


def test_fsdp2_gradients_that_fit_are_the_references():
    steps = [leaves_of(3, COUNT, seed=seed) for seed in range(2)]
    for found, count in fsdp(steps):
        assert count == 2 * 2  # of a step one a layer
        for (grads, told), leaves in zip(found, steps, strict=True):
            assert told is None
            assert same_bits(grads, reference.reduce(leaves, "avg"))


@pytest.mark.parametrize("others", [(1,), (0, 1, 2)])
def test_fsdp2_gradients_that_do_not_fit_are_raised_from_backward(others):
    """By all ranks, before there can be a step; the pass before did not."""
    steps = [leaves_of(3, COUNT), leaves_of(3, COUNT, others)]
    for ((_, first), (grads, told)), _ in fsdp(steps):
        assert first is None
        with pytest.raises(CollectiveMismatch, match=MISFIT.format(", ".join(map(str, others)))):
            raise told
        assert np.isnan(grads[COUNT // 2 :]).all()
