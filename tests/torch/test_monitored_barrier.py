"""The barrier that tells who did not come."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pycollective import CollectiveAborted, CollectiveError, CollectiveTimeout, PeerFailure
from tests.harness import PerRank, await_, run_ranks
from tests.torch.groups import process_group

TIMEOUT = timedelta(seconds=0.5)


def meet(comm, comes: bool, wait_all_ranks: bool, given_up: Path):
    with process_group(comm) as group:
        for _ in range(3):  # it can be used again
            group.monitored_barrier(timedelta(seconds=20), wait_all_ranks)
        begin = time.monotonic()
        try:
            if comes:
                group.monitored_barrier(TIMEOUT, wait_all_ranks)
        except CollectiveError as error:
            took = time.monotonic() - begin
            given_up.touch()
            return type(error), str(error), took
        await_(given_up.exists, 20)  # alive, and elsewhere
        return None, "", 0.0


def results(size, *args):
    return [outcome.result for outcome in run_ranks(meet, size, *args)]


@pytest.mark.parametrize(("wait_all_ranks", "who"), [(False, "Rank 1"), (True, "Ranks 1, 3")])
def test_rank_0_names_who_did_not_come(tmp_path, wait_all_ranks, who):
    comes = PerRank([True, False, True, False])
    first, absent, last, _ = results(4, comes, wait_all_ranks, tmp_path / "given up")
    assert first[0] is CollectiveTimeout
    assert first[1].startswith(f"{who} failed to pass monitoredBarrier in 500 ms")
    assert absent[0] is None
    assert last[0] is CollectiveAborted
    assert last[1].startswith("Rank 2 successfully reached monitoredBarrier, but received errors")
    assert f"{who} failed to pass" in last[1]
    assert 0.4 < first[2] < 5
    assert last[2] < 5


def test_others_wait_for_rank_0_no_longer_than_their_time(tmp_path):
    first, other = results(2, PerRank([False, True]), False, tmp_path / "given up")
    assert first[0] is None
    assert other[0] is CollectiveTimeout
    assert "Rank 1 successfully reached monitoredBarrier" in other[1]
    assert 1.8 < other[2] < 5  # twice its timeout, and a second


def dies(group):
    os.kill(os.getpid(), signal.SIGKILL)


def aborts(group):
    time.sleep(0.5)  # rank 0 waits, as a rule
    group.abort()


def one_late_another_ends(comm, end, wait_all_ranks, known, folder: Path):
    """Rank 1 is only late; rank 2 does not come. `known`: rank 0 knows by another call."""
    begun, told = folder / "begun", folder / "told"
    with process_group(comm) as group:
        group.monitored_barrier(timedelta(seconds=20))
        if comm.rank == 2:
            await_(begun.exists)
            end(group)
        if comm.rank != 0:
            return await_(told.exists)
        begun.touch()  # rank 0 has been answered, so all are through the first
        if known:
            with pytest.raises(PeerFailure):
                dist.barrier()
        with pytest.raises(CollectiveError) as error:
            group.monitored_barrier(timedelta(seconds=20), wait_all_ranks)
        told.touch()
        return error.type, str(error.value)


@pytest.mark.parametrize(
    ("topology", "wait_all_ranks", "known"),
    [("", False, False), ("", True, True), ("2,1", False, True), ("2,1", True, False)],
)
def test_who_died_is_named_and_not_who_is_late(tmp_path, topology, wait_all_ranks, known):
    variables = {"PYCOLLECTIVE_TOPOLOGY": topology} if topology else {}
    arguments = (dies, wait_all_ranks, known, tmp_path)
    kind, text = run_ranks(one_late_another_ends, 3, *arguments, variables=variables)[0].result
    assert kind is PeerFailure
    before = "recv refused: this communicator failed before: " if known else ""
    assert text.startswith(f"Rank 2 failed to pass monitoredBarrier: {before}rank 2 ")
    assert " died" in text
    assert "ank 1" not in text
    assert " in 20000 ms" not in text  # which had not passed


def test_who_is_late_is_not_named_for_anothers_abort(tmp_path):
    arguments = (aborts, True, False, tmp_path)
    kind, text = run_ranks(one_late_another_ends, 3, *arguments)[0].result
    assert kind is CollectiveAborted
    assert text.startswith("Rank 0 successfully reached monitoredBarrier, but received errors")
    assert "rank 2 aborted the communicator" in text
    assert "failed to pass" not in text


def with_its_own_timeout(comm):
    with process_group(comm, timeout=1) as group:
        for timeout in (0, -5):
            with pytest.raises(CollectiveTimeout, match=f"Rank {comm.rank} timed out in"):
                group.monitored_barrier(timedelta(seconds=timeout))  # before anything moves
        if comm.rank == 1:
            time.sleep(2)
        group.monitored_barrier(timedelta(seconds=20))  # longer than the group's


@pytest.mark.storm  # two seconds
def test_its_own_timeout_counts():
    assert [outcome.error for outcome in run_ranks(with_its_own_timeout, 2)] == [None, None]


def beside_messages(comm):
    """Of a byte each, like the barrier's own; more than announcements, or lanes, are there for."""
    with process_group(comm) as group:
        peer = 1 - comm.rank
        tags = range(200)
        sent = [torch.tensor([tag], dtype=torch.uint8) for tag in tags]
        works = [dist.isend(x, peer, tag=tag) for tag, x in enumerate(sent)]
        for _ in range(3):
            group.monitored_barrier(timedelta(seconds=20))
        got = [torch.zeros(1, dtype=torch.uint8) for _ in tags]
        for tag, x in enumerate(got):
            dist.recv(x, peer, tag=tag)
        for work in works:
            work.wait()
        return [x.item() for x in got] == list(tags)


@pytest.mark.parametrize("topology", ["", "1,1"])
def test_users_messages_are_not_its_own(topology):
    variables = {"PYCOLLECTIVE_TOPOLOGY": topology} if topology else {}
    outcomes = run_ranks(beside_messages, 2, variables=variables)
    assert [each.result for each in outcomes] == [True, True]
