"""`LeafSync` over Gloo, by ordered calls: the bits and errors that it has over pycollective."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pycollective import CollectiveMismatch, Deal
from pycollective.torch import LeafSync
from pycollective.torch.leaves import aborts as leaf_aborts
from pycollective.torch.leaves.over_group import OverGroup
from tests.harness import Ranks
from tests.inputs import same_bits
from tests.joining import failing
from tests.torch import test_leaf_sync as over_pycollective
from tests.torch.groups import join
from tests.torch.ordered_groups import own_group, standing
from tests.torch.test_leaf_sync import ALIKE, BF16, DDP, FP32, MIXED, wanted


def over_gloo(comm, name, topology, *given):
    """What a function of `test_leaf_sync` returns over a group of Gloo's."""
    torch.set_num_threads(1)
    standing(comm)
    with (
        mock.patch.object(over_pycollective, "standing_group", standing),
        mock.patch.dict(os.environ, {"PYCOLLECTIVE_TOPOLOGY": topology} if topology else {}),
    ):
        return getattr(over_pycollective, name)(comm, *given)


def check(pool, ranks, dtypes, leaves, options=None, counts=None, ddp=None, topology=""):
    options = options or {}
    want = [*wanted(dtypes, leaves, options.get("grad_dtype"), counts and sum(counts))]
    given = "averages", topology, dtypes, leaves, options, counts, ddp
    for steps in pool(ranks).call(over_gloo, *given):
        for step in steps:
            assert all(same_bits(*each) for each in zip(step, want, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_the_references_average(pool, ranks):
    check(pool, ranks, FP32, 24)
    check(pool, ranks, FP32, 7)
    check(pool, ranks, FP32, 2)
    check(pool, ranks, MIXED, 6, {"bucket_cap_mb": 0.003})
    check(pool, ranks, MIXED, ranks)
    check(pool, ranks, FP32, 5, {"bucket_cap_mb": 1e-5})  # two nodes with a header
    check(pool, ranks, BF16, 5, {"grad_dtype": torch.float32})
    check(pool, ranks, FP32, 4, counts=[3, 0, 0, 0])  # as many as some ranks give nodes
    check(pool, ranks, FP32, 4, counts=[1, 1 << 24, 0, 0])  # which fp32 does not hold


def test_ranks_of_hosts_add_up_their_nodes_first(pool):
    check(pool, 4, FP32, 7, topology="2,2")
    check(pool, 4, BF16, 4, {"grad_dtype": torch.float32}, topology="2,2")
    check(pool, 4, MIXED, 3, topology="3,1")


@pytest.mark.parametrize("name", DDP)
def test_under_ddp(pool, name):
    check(pool, 2, FP32, 3, ddp=DDP[name])


def test_two_leaf_syncs_share_a_group(pool):
    alone, both = (pool(ranks).call(over_gloo, "two_models", "", 3) for ranks in (1, 2))
    for found in both:
        assert all(same_bits(*each) for each in zip(found, alone[0], strict=True))


# --- Failures.


def of_own_group(comm, name, *given):
    """What a function of `test_leaf_sync` returns or raises over a Gloo group for it alone."""
    torch.set_num_threads(1)
    with (
        own_group(comm, timeout=datetime.timedelta(seconds=20)) as group,
        mock.patch.object(over_pycollective, "standing_group", return_value=group),
    ):
        return getattr(over_pycollective, name)(comm, *given)


@pytest.mark.parametrize("case", ["count", "step", "leaves", "shape"])
def test_ranks_are_told_what_they_have_unlike(pool, case):
    for said in pool(2).call(of_own_group, "told_apart", case):
        assert ALIKE[case] in said


def test_an_error_in_a_leaf_is_told_to_all_and_another_leaf_sync_can_follow(pool):
    told, own = pool(2).call(of_own_group, "raised_in_a_leaf")
    assert own == "'no sample'"
    assert "rank 1: leaf 1 of step 0 raised KeyError: 'no sample'" in told


def raised_and_not_closed(comm):
    """How long ranks take to raise where one raises in a leaf, and none has closed."""
    with own_group(comm, timeout=datetime.timedelta(seconds=20)) as group:
        model = torch.nn.Linear(300, 200)  # more than travels with a header
        sync = LeafSync(model, 2, group=group)

        def leaf():
            with sync.leaf(comm.rank):
                if comm.rank == 1:
                    raise RuntimeError("no sample")
                model(torch.ones(1, 300)).sum().backward()

        error, seconds = failing(leaf)
        comm.barrier()
        sync.close()
        return str(error), seconds


def test_an_error_in_a_leaf_ends_the_wait_of_others_at_once(pool):
    (told, seconds), _ = pool(2).call(raised_and_not_closed)
    assert "rank 1: leaf 1 of step 0 raised RuntimeError: no sample" in told
    assert seconds < 15, seconds


def test_a_store_that_does_not_answer_is_not_waited_for():
    asked, let_go = threading.Event(), threading.Event()

    def check(keys):
        asked.set()
        let_go.wait(30)
        return True

    aborts = SimpleNamespace(_store=SimpleNamespace(check=check, get=lambda key: b""))
    with mock.patch.object(leaf_aborts, "_ASKING", datetime.timedelta(seconds=0.2)):
        start = time.monotonic()
        assert leaf_aborts.Aborts._reason(aborts) == ""
    assert asked.is_set()
    assert time.monotonic() - start < 20
    let_go.set()


def used_after_close(comm):
    """What a call of a group is told that was closed while it was under way."""
    with own_group(comm, timeout=datetime.timedelta(seconds=20)) as group:
        transport = OverGroup(group, "alone")
        messages = transport._ordered._messages
        comm.barrier()
        transport.close()
        return str(failing(messages.start, 1, [(1 - comm.rank, torch.ones(1))], [])[0])


def test_what_is_closed_does_not_send_over_the_programs_own_connections(pool):
    assert pool(2).call(used_after_close) == ["the connections were closed"] * 2


def dealt_apart(comm):
    """What ranks are told whose deals differ."""
    with own_group(comm) as group:
        model = torch.nn.Linear(3, 2)
        sync = LeafSync(model, 4, group=group)
        halves = ((0, 2),), ((2, 4),)
        deal = Deal(4, halves if comm.rank else halves[::-1])
        with mock.patch.object(sync, "_deal_of", return_value=deal):

            def step():
                for leaf in sync.local_leaves:
                    with sync.leaf(leaf):
                        model(torch.ones(1, 3)).sum().backward()

            return failing(step)[0]


def test_ranks_with_other_deals_are_named(pool):
    for told in pool(2).call(dealt_apart):
        assert type(told) is CollectiveMismatch, told
        assert "step 0: rank(s) 1 deal its leaves otherwise than rank 0" in str(told)


def sent_in_a_step(comm, leaves):
    """Bytes that a rank sends in a step of a model in bfloat16."""
    model = torch.nn.Linear(200, 224, dtype=torch.bfloat16)
    sync = LeafSync(model, leaves, grad_dtype=torch.float32, group=standing(comm))
    before = sync.stats()["sent_bytes"]
    for leaf in sync.local_leaves:
        with sync.leaf(leaf):
            model(torch.ones(1, 200, dtype=torch.bfloat16)).sum().backward()
    sent = sync.stats()["sent_bytes"] - before
    sync.close()
    return sent


def test_a_leaf_travels_in_its_own_type_where_ranks_have_one(pool):
    half = 224 * (200 + 1) // 2  # elements that the other rank reduces, and as many results
    headers = 64 + 64
    assert pool(2).call(sent_in_a_step, 2) == [half * (2 + 4) + headers] * 2
    assert pool(2).call(sent_in_a_step, 4) == [half * (4 + 4) + headers] * 2


def killed_in_its_last_leaf(comm):
    join(comm, "gloo", timeout=20)
    with mock.patch.object(over_pycollective, "standing_group", return_value=dist.group.WORLD):
        return over_pycollective.killed_in_its_last_leaf(comm)


def test_a_rank_that_is_killed_is_named_and_no_average_is_there():
    with Ranks(2, module="tests.torch.programs") as ranks:
        survivor, killed = ranks.call(killed_in_its_last_leaf)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.error is None
    said, gradient = survivor.result
    assert "rank(s) 1" in said
    assert gradient is None
