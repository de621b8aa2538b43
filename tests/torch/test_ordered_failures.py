"""Failures of ordered calls: ranks that differ, die, stay away; and what is refused at once."""

from __future__ import annotations

import datetime
import gc
import os
import re
import signal
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycollective import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigurationError,
    PeerFailure,
)
from pycollective.torch import ordered
from pycollective.torch.ordered import calls, messages
from tests.harness import await_, results, run_ranks
from tests.joining import failing
from tests.torch.groups import join, standing_group
from tests.torch.ordered_groups import laid_out, own_group, standing

# --- Ranks that call different things.


def all_reduce(group, count, dtype=torch.float32, op="sum", **options):
    tensor = torch.ones(count, dtype=dtype)
    work = ordered.all_reduce(tensor, op, group, **options)
    return tensor, work


def reduce_scatter(group, count, dtype=torch.float32, op="sum", **options):
    whole, part = torch.ones(count, dtype=dtype), torch.ones(count // group.size(), dtype=dtype)
    work = ordered.reduce_scatter(part, whole, op, group, **options)
    return part, work


# What rank 1 calls where the others add up so many fp32 numbers; what the error says of it.
DIFFERENT = {
    "count": (lambda g, n: all_reduce(g, n + 3), "all_reduce of {more} float32 (sum)"),
    "no elements": (lambda g, _: all_reduce(g, 0), "all_reduce of 0 float32 (sum)"),
    "dtype": (lambda g, n: all_reduce(g, n, torch.int32), "all_reduce of {n} int32 (sum)"),
    "bytes alike": (
        lambda g, n: all_reduce(g, 2 * n, torch.bfloat16),
        "all_reduce of {twice} bfloat16 (sum)",
    ),
    "op": (lambda g, n: all_reduce(g, n, op="avg"), "all_reduce of {n} float32 (avg)"),
    "kind": (reduce_scatter, "reduce_scatter of {n} float32 (sum)"),
    "narrow": (
        lambda g, n: all_reduce(g, n, narrow=torch.bfloat16),
        "all_reduce of {n} float32 (sum, as bfloat16 where that is exact)",
    ),
}


def differ(comm, name, count, async_op):
    """What a rank is told, its tensor, and what it is told of the next calls."""
    with own_group(comm) as group:
        ordered.prepare(group)
        if comm.rank == 1:
            tensor = None
            told, _ = failing(DIFFERENT[name][0], group, count)
        else:
            tensor = torch.full((count,), comm.rank + 2.0)
            work = ordered.all_reduce(tensor, "sum", group, True) if async_op else None
            told, _ = failing(
                work.wait if work else lambda: ordered.all_reduce(tensor, "sum", group)
            )
            if work is not None:
                await_(work.is_completed)
                assert not work.is_success()
                assert type(work.exception()) is type(told)
            assert (tensor == comm.rank + 2).all()
        refused = [
            failing(all_reduce, group, 3)[0],
            failing(lambda: all_reduce(group, 3, async_op=True)[1].wait())[0],
        ]
        # The group's own collectives go on.
        tensor = torch.ones(30_000)
        dist.all_reduce(tensor, group=group)
        assert (tensor == comm.size).all()
    return told, refused


@pytest.mark.parametrize("count", [12, 1_200, 30_000])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_named_with_their_calls(pool, name, count):
    async_op = count == 1_200
    theirs = DIFFERENT[name][1].format(n=count, more=count + 3, twice=2 * count)
    for told, refused in pool(3).call(differ, name, count, async_op):
        for error in (told, *refused):
            assert type(error) is CollectiveMismatch, error
            assert f"rank 0 called all_reduce of {count} float32 (sum) as call 2" in str(error)
            assert f"rank 1 {theirs} as call 2" in str(error)
            assert "No data were used" in str(error)
            assert error.rank in (0, 1, 2)
            assert error.op


def other_order(comm):
    sizes = [700, 12_000] if comm.rank else [12_000, 700]
    with own_group(comm) as group:
        works = [all_reduce(group, count, async_op=True)[1] for count in sizes]
        return [failing(work.wait)[0] for work in works]


def test_another_order_of_calls_is_seen(pool):
    for told in pool(3).call(other_order):
        for error in told:
            assert type(error) is CollectiveMismatch
            assert "of 12000 float32" in str(error)
            assert "of 700 float32" in str(error)


class Differs(torch.nn.Module):
    """Its gradients are of as many elements as the rank likes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(count))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def backward_differs(comm, cause):
    """What loss.backward() raises where rank 1's call differs, or does not come."""
    standing_group(comm)
    limit = datetime.timedelta(seconds=30 if cause == "mismatch" else 4)
    group = dist.new_group(backend="gloo", timeout=limit)
    with laid_out(group):
        ordered.prepare(group)
        model = DistributedDataParallel(Differs(4_000), process_group=group)
        model.register_comm_hook(group, ordered.hook)
        model().backward()
        loss = model()
        told = None
        if comm.rank != 1:
            told, _ = failing(loss.backward)
        elif cause == "mismatch":
            told, _ = failing(all_reduce, group, 4_001)
        dist.barrier()
    del model
    dist.destroy_process_group(group)
    return told


def test_backward_raises_what_the_hook_was_told(pool):
    for told in pool(3).call(backward_differs, "mismatch"):
        assert "CollectiveMismatch" in f"{type(told).__name__}: {told}"
        assert "rank 1 all_reduce of 4001 float32 (sum) as call 3" in str(told)


def test_backward_raises_if_a_peer_does_not_come(pool):
    first, _, third = pool(3).call(backward_differs, "timeout")
    told = [f"{type(each).__name__}: {each}" for each in (first, third)]
    for each in told:  # a rank whose peer has given up may see that instead
        assert "CollectiveTimeout" in each or "PeerFailure" in each
    assert any("CollectiveTimeout" in each and "rank(s) 1 failed" in each for each in told), told


# --- Peers that die or stay away.


def outlives(comm, count, async_op):
    join(comm, "gloo")
    tensor = torch.ones(count)
    ordered.all_reduce(tensor)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def again():
        while True:  # the first may have got what rank 1 had sent
            work = ordered.all_reduce(tensor, async_op=async_op)
            if work is not None:
                work.wait()

    return *failing(again), failing(ordered.all_reduce, tensor)[0]


@pytest.mark.parametrize(("count", "async_op"), [(10, True), (500_000, False)])
def test_a_killed_peer_ends_the_calls_of_all_others(count, async_op):
    outcomes = run_ranks(outlives, 3, count, async_op)
    assert outcomes[1].exit_code == -signal.SIGKILL
    named = []
    for rank in (0, 2):
        told, seconds, refused = results([outcomes[rank]])[0]
        named.append("a message from or to rank(s) 1 failed" in str(told))
        assert isinstance(told, CollectiveError), told
        assert type(told) in (PeerFailure, CollectiveError), told
        assert re.match(r"\S+ number \d+: a message from or to rank\(s\) \d", str(told)), told
        assert type(refused) is type(told)
        assert seconds < 30  # the group's timeout
    assert any(named)  # who comes second may find both others gone


def dies_before_an_exchange(comm):
    """What an exchange says that knows nothing of who has sent."""
    join(comm, "gloo")
    made = messages.Messages(dist.group.WORLD)
    made.connect()
    assert made.eager_bytes
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    data, out = torch.zeros(192, dtype=torch.uint8), torch.empty(192, dtype=torch.uint8)
    return str(failing(made.all_to_all, data, [64] * 3, out, [64] * 3)[0])


def test_an_exchange_names_who_has_died():
    outcomes = run_ranks(dies_before_an_exchange, 3)
    told = results([outcomes[0], outcomes[2]])
    assert any("a message from or to rank(s) 1 failed" in each for each in told), told


def dies_half_way(comm):
    """What an exchange says whose peer has died when messages were half through."""
    join(comm, "gloo")
    made = messages.Messages(dist.group.WORLD)
    made.connect()
    peer, count = 1 - comm.rank, 64 << 20
    data, out = torch.ones(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    exchange = made.start(messages.LEAVES, [(peer, data)], [(peer, out)])
    if comm.rank == 1:
        await_(out[0].item)
        os.kill(os.getpid(), signal.SIGKILL)
    return failing(exchange.wait)


def test_a_death_half_way_through_a_message_is_heard_at_once():
    told, seconds = results([run_ranks(dies_half_way, 2)[0]])[0]
    assert type(told) is PeerFailure, told
    assert "a message from or to rank(s) 1 failed" in str(told)
    assert seconds < 5  # of 30, the group's timeout


def stays_away(comm, count):
    standing_group(comm)
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=1))
    with laid_out(group):
        ordered.prepare(group)
        told, seconds = (None, 0.0) if comm.rank == 1 else failing(all_reduce, group, count)
        refused = failing(all_reduce, group, count)[0] if comm.rank != 1 else None
        dist.barrier()
    dist.destroy_process_group(group)
    return told, seconds, refused


@pytest.mark.parametrize("count", [10, 20_000])
def test_a_peer_that_stays_away_is_waited_for_as_long_as_the_group_says(pool, count):
    first, _, third = pool(3).call(stays_away, count)
    for told, seconds, refused in (first, third):
        # A rank whose peer has given up may see that instead.
        assert type(told) in (CollectiveTimeout, PeerFailure, CollectiveError), told
        assert 0.5 < seconds < 10
        assert isinstance(refused, CollectiveError)
    assert CollectiveTimeout in {type(told) for told, _, _ in (first, third)}


def prepares_alone(comm):
    """What rank 0 is told that prepares alone, and what its next call says."""
    with own_group(comm, timeout=datetime.timedelta(seconds=1)) as group:
        if comm.rank == 1:
            return None
        return failing(ordered.prepare, group)[0], failing(all_reduce, group, 3)[0]


def test_a_group_whose_preparation_failed_makes_no_calls(pool):
    told, refused = pool(2).call(prepares_alone)[0]
    assert type(told) is type(refused) is CollectiveTimeout
    assert str(told).startswith("prepare number 1: the group's ranks cannot connect")
    assert str(refused) == str(told)


def interrupted(comm):
    """Ctrl-C on rank 0 while it waits for rank 1's leaves; then the group's own messages."""
    come, sent = threading.Event(), threading.Event()
    starts = messages.Messages.start

    def start(made, tag, *those):
        if tag == messages.LEAVES and comm.rank == 1:
            come.wait(15)
        exchange = starts(made, tag, *those)
        if tag == messages.LEAVES and comm.rank == 0:
            raise KeyboardInterrupt
        if tag == messages.LEAVES:
            sent.set()
        return exchange

    standing_group(comm)
    group = dist.new_group(backend="counting", timeout=datetime.timedelta(seconds=15))
    ordered.prepare(group)
    with mock.patch.object(messages.Messages, "start", start):
        if comm.rank == 0:
            assert type(failing(all_reduce, group, 300_000)[0]) is KeyboardInterrupt
            assert type(failing(all_reduce, group, 3)[0]) is CollectiveAborted
            gc.collect()
            dist.barrier()
        else:
            all_reduce(group, 300_000, async_op=True)
            dist.barrier()
            come.set()
            assert sent.wait(15)
    tensor = torch.full((30_000,), float(comm.rank))
    if comm.rank == 0:
        group.recv([tensor], 1).wait()
    else:
        group.send([tensor], 0).wait()
    return (tensor == 1).all().item()


def test_messages_for_a_call_that_ctrl_c_has_ended_do_not_block_the_group(pool):
    assert pool(2).call(interrupted) == [True, True]


class Interrupted:
    """A backend whose exchanges go on when Ctrl-C ends the wait for them."""

    def __init__(self, own):
        self._own = own

    def __getattr__(self, name):
        return getattr(self._own, name)

    def alltoall_base(self, *those):
        self.work = self._own.alltoall_base(*those)
        return mock.Mock(**{"wait.side_effect": KeyboardInterrupt})


def interrupted_exchange(comm):
    """Ctrl-C on rank 0 while it waits for rank 1; what rank 1 is told then, and how soon."""
    told, seconds = None, 0.0
    with own_group(comm, timeout=datetime.timedelta(seconds=25)) as group:
        ordered.prepare(group)
        made = calls.group_of(group, torch.device("cpu"))._messages
        if comm.rank == 0:
            with mock.patch.object(made, "_own", Interrupted(made._own)):
                assert type(failing(all_reduce, group, 30_000)[0]) is KeyboardInterrupt
        dist.barrier()
        if comm.rank == 1:
            told, seconds = failing(all_reduce, group, 30_000)
        tensor = torch.ones(30_000)
        dist.all_reduce(tensor, group=group)
        assert (tensor == 2).all()
        del made
        began = time.monotonic()
    return told, seconds + time.monotonic() - began


def test_peers_of_an_exchange_that_ctrl_c_has_ended_hear_of_it(pool):
    for told, seconds in pool(2).call(interrupted_exchange):
        assert seconds < 10
        assert told is None or isinstance(told, CollectiveError)
    assert isinstance(told, PeerFailure)


# --- What is refused at once, without a message.

REFUSED = {
    "a type": (lambda: torch.ones(3, dtype=torch.uint16), "sum", "uint16 cannot be reduced"),
    "a quantized type": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
        *("sum", "cannot be reduced"),
    ),
    "an operation": (lambda: torch.ones(3), "mean", "no operation mean"),
    "torch's operation": (lambda: torch.ones(3), dist.ReduceOp.PREMUL_SUM, "no operation"),
    "bits of floats": (
        lambda: torch.ones(3),
        dist.ReduceOp.BXOR,
        "bxor has no meaning for float32",
    ),
    "a sum of bools": (lambda: torch.ones(3, dtype=torch.bool), "sum", "no meaning for bool"),
    "a complex product": (
        lambda: torch.ones(3, dtype=torch.complex64),
        *("prod", "no meaning for complex64"),
    ),
    "sparse": (lambda: torch.ones(3).to_sparse(), "sum", "give a dense one"),
    "two devices": (
        lambda: [torch.ones(3), torch.ones(3, device="meta")],
        *("sum", "on cpu and meta"),
    ),
    "expanded": (lambda: torch.ones(1).expand(3), "sum", "share memory"),
    "a device": (lambda: torch.ones(0, device="meta"), "sum", "nothing reduces on meta"),
    "nothing": (list, "sum", "a list of at least one"),
    "no tensor": (lambda: [3], "sum", "give a tensor"),
}


def refused(comm):
    group = standing(comm)
    found = {}
    with laid_out(group) as made:
        for name, (make, op, _) in REFUSED.items():
            value = make()
            found[name] = failing(ordered.all_reduce, value, op, group)[0]
            found[f"{name}, async"] = failing(ordered.all_reduce, value, op, group, True)[0]
            found[f"{name}, scattered"] = failing(ordered.reduce_scatter, value, value, op, group)[
                0
            ]
        assert made.stats()["sent_messages"] == 0
        ordered.all_reduce(torch.ones(3), "sum", group)  # nothing of that has failed the group
    return found


def test_what_the_contract_does_not_have_is_refused(pool):
    for found in pool(2).call(refused):
        for name, error in found.items():
            words = REFUSED[name.partition(",")[0]][2]
            assert type(error) is ConfigurationError, (name, error)
            assert words in str(error), (name, error)


def refused_parts(comm):
    group = standing(comm)
    whole = torch.ones(4)
    wrong = [
        (torch.ones(2), torch.ones(5)),
        (torch.ones(2), torch.ones(4, dtype=torch.float64)),
        (torch.ones(4)[::2], torch.ones(4)),
        ([torch.ones(2)], [torch.ones(4), torch.ones(4)]),
        *((whole[at : at + 2], whole) for at in (1, 2 - 2 * comm.rank)),
    ]
    with laid_out(group) as made:
        found = [failing(ordered.reduce_scatter, *each, "sum", group)[0] for each in wrong]
        assert made.stats()["sent_messages"] == 0
    return found


def test_parts_that_do_not_fit_are_refused(pool):
    words = [
        "2 float32 does not go with an input of 5",
        "4 float64",
        "contiguous",
        "1 outputs of 2",
        *["overlaps other ranks' parts"] * 2,
    ]
    for found in pool(2).call(refused_parts):
        for error, said in zip(found, words, strict=True):
            assert type(error) is ConfigurationError
            assert said in str(error)


def test_without_a_process_group_calls_are_refused():
    for call in (
        lambda: ordered.all_reduce(torch.ones(3)),
        lambda: ordered.reduce_scatter(torch.ones(1), torch.ones(3)),
        ordered.prepare,
        ordered.stats,
    ):
        with pytest.raises(ConfigurationError, match="init_process_group"):
            call()


def not_in_it(comm):
    standing_group(comm)
    group = dist.new_group([0], backend="gloo")
    told = failing(ordered.all_reduce, torch.ones(3), "sum", group)[0]
    if comm.rank == 0:
        dist.destroy_process_group(group)
    return told


def test_a_rank_outside_the_group_is_refused(pool):
    first, second = pool(2).call(not_in_it)
    assert first is None
    assert type(second) is ConfigurationError
    assert "not in the group" in str(second)


def from_a_callback(comm, async_op):
    """A callback of a call's future makes another; what that raises."""
    group = standing(comm)
    with laid_out(group):
        told = []
        works = []

        def call(_):
            try:
                works.append(ordered.all_reduce(torch.ones(3), "sum", group, async_op))
            except ConfigurationError as error:
                told.append(str(error))

        gate = threading.Event()
        made = calls.group_of(group, torch.device("cpu"))
        made.worker.post(gate.wait)  # so that the callback comes before its call has ended
        work = ordered.all_reduce(torch.ones(3), "sum", group, async_op=True)
        then = work.get_future().then(call)
        gate.set()
        then.wait()
        for each in works:
            each.wait()
    return told


def test_a_synchronous_call_from_a_callback_is_refused(pool):
    for told in pool(2).call(from_a_callback, False):
        assert len(told) == 1
        assert "cannot be called from a callback" in told[0]
    assert pool(2).call(from_a_callback, True) == [[], []]


# --- The end of groups; of processes: test_process_end.py.


def in_a_fork(comm, async_op):
    """What a fork is told; its parent goes on."""
    group = standing(comm)
    with laid_out(group):
        all_reduce(group, 30_000, async_op=True)[1].wait()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            told = failing(all_reduce, group, 30_000, async_op=async_op)[0]
            os.write(write, f"{type(told).__name__}: {told}".encode())
            os._exit(0)
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
        with os.fdopen(read) as pipe:
            told = pipe.read()
        assert (all_reduce(group, 30_000)[0] == comm.size).all()
    return told


@pytest.mark.parametrize("async_op", [False, True])
def test_a_fork_is_refused_and_harms_nobody(pool, async_op):
    for told in pool(2).call(in_a_fork, async_op):
        assert told.startswith("ConfigurationError"), told
        assert "forked" in told


def destroyed(comm):
    """What calls of destroyed groups raise, used ones, new ones and ones that have failed; then
    the group, the thread and the memory are gone."""
    standing_group(comm)

    def workers():
        return {each for each in threading.enumerate() if each.name == "pycollective-worker"}

    told, before = [], workers()
    for before_that in ("a call", "nothing", "a failure"):
        group = dist.new_group(backend="gloo")
        if before_that != "nothing":
            all_reduce(group, 30_000, async_op=True)[1].wait()
        if before_that == "a failure":
            failed = str(failing(all_reduce, group, 30_000 + comm.rank)[0])
            assert "different operations" in failed
        dist.barrier()
        dist.destroy_process_group(group)
        error, _ = failing(all_reduce, group, 3)
        told.append((type(error), str(error)))
        gone = weakref.ref(group)
        del group, error  # whose traceback's frames hold the group
        gc.collect()
        await_(lambda gone=gone: gone() is None)
        await_(lambda: workers() <= before)
    return told


def test_a_destroyed_group_is_refused_and_freed(pool):
    for told in pool(2).call(destroyed):
        for kind, words in told:
            assert kind is ConfigurationError
            assert "destroyed" in words
