"""What ranks agree on when they become others, with a store, and communicators that only say who
has died. Whole ranks that do: tests/test_shrink.py."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import pycollective as pc
from pycollective.bootstrap import membership
from pycollective.bootstrap.membership import Decision, Invitation, Membership, enter
from pycollective.bootstrap.options import InitOptions
from pycollective.bootstrap.rendezvous import Rendezvous
from pycollective.bootstrap.restarts import process_identity
from tests.joining import CountingStore

PLACE = "pycollective/init1//1"
OPTIONS = InitOptions(0.2, "", "", "", "raw")
DEAD, ALIVE = "process 1 on nowhere (started at tick 1) 0f", f"{process_identity()} 0f"


@pytest.fixture
def store():
    return CountingStore()


def ranks_of(store):
    return Membership(lambda: nullcontext(store), "init1", OPTIONS)


class Rank:
    """As much of a communicator as is looked at."""

    device, failure, closed = None, "it has failed", False
    _node = SimpleNamespace(reclaim=lambda: None)

    def __init__(self, rank, size, gone=(), timeout=30.0):
        self.rank, self.size, self.timeout, self._gone = rank, size, timeout, lambda: [*gone]

    def close(self):
        self.closed = True

    def barrier(self):
        pass


def said(value=False):
    return json.dumps(value).encode()


def decide(store, comm, last=None, admits=False):
    last = last or Decision([*range(comm.size)], [], 0, {})
    deadline = time.monotonic() + comm.timeout
    return ranks_of(store)._decide(store, "/1", comm, last, admits, deadline)


@pytest.fixture
def connects(monkeypatch):
    """`connects[rank]`: what `connect` returns or raises there, in turn."""
    turns = {}

    def connect(store, rank, *more):
        outcome = turns[rank].pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(membership, "connect", connect)
    return turns


# Who goes on.


def test_who_has_come_and_lives_goes_on(store):
    store.set(f"{PLACE}/came/1", said())
    store.set(f"{PLACE}/came/2", said())  # and died
    store.set(f"{PLACE}/came/3", said("tired"))
    assert decide(store, Rank(0, 5, gone=[2, 4])) == Decision([0, 1], [], 0, {3: "tired"})


def test_the_first_decision_counts(store):
    store.set(f"{PLACE}/came/1", said())
    assert decide(store, Rank(0, 2)).members == [0, 1]
    assert decide(store, Rank(1, 2, gone=[0])).members == [0, 1]


def test_ranks_that_decide_at_once_read_one_decision(store):
    both = threading.Barrier(2)

    class Checked(CountingStore):
        def compare_set(self, *arguments):
            both.wait()  # each has made its own
            return super().compare_set(*arguments)

    store = Checked()
    for rank in (0, 1):
        store.set(f"{PLACE}/came/{rank}", said())
    with ThreadPoolExecutor(2) as threads:
        comms = Rank(0, 2), Rank(1, 2, gone=[0])
        first, second = threads.map(lambda comm: decide(store, comm), comms)
    assert first == second


def test_a_later_attempt_keeps_what_the_first_has_found_out(store):
    store.set("pycollective/newcomers/1", ALIVE)
    last = Decision([0, 2], [1], 1, {1: "tired"})
    assert decide(store, Rank(0, 3, gone=[2]), last) == Decision([0], [], 1, {1: "tired"})


def test_who_does_not_come_and_lives_is_named(store):
    with pytest.raises(pc.CollectiveTimeout, match=r"rank 0 after 0.05 s: rank\(s\) 2 have not"):
        decide(store, Rank(0, 3, gone=[1], timeout=0.05))


# Newcomers.


@pytest.mark.parametrize("all_admit", [True, False])
def test_newcomers_that_live_are_taken_in_if_all_are_ready(store, all_admit):
    for number, claimant in enumerate(["\xff", DEAD, ALIVE, ALIVE], 1):
        store.set(f"pycollective/newcomers/{number}", claimant)
    store.set("pycollective/newcomers/3/invited", b"")  # it has given up
    store.set(f"{PLACE}/came/1", said(all_admit))
    decision = decide(store, Rank(0, 2), admits=True)
    assert decision == Decision([0, 1], [4] if all_admit else [], 4 if all_admit else 0, {})


def test_a_newcomer_that_nobody_lets_in_says_so_and_is_not_waited_for(store):
    with pytest.raises(pc.CollectiveTimeout, match="did not let it in"):
        enter(lambda: nullcontext(store), OPTIONS)
    decision = decide(store, Rank(0, 1), admits=True)
    assert decision == Decision([0], [], 1, {})


def test_a_newcomer_has_another_number_each_time(store):
    store.set("pycollective/newcomers/1", DEAD)
    assert [membership._enqueue(store), membership._enqueue(store)] == [2, 3]


def test_a_newcomer_may_be_invited_at_once(store, connects):
    """Before it has looked for the first time."""
    claim = store.compare_set

    def claim_and_invite(key, expected, desired):
        if key.startswith("pycollective/newcomers/"):
            store.set(f"{key}/invited", Invitation("init1", "epoch", 0, 2).as_text())
        return claim(key, expected, desired)

    store.compare_set = claim_and_invite
    connects[0] = [made := Rank(0, 2)]
    assert enter(lambda: nullcontext(store), OPTIONS) is made
    assert made._joined_late


# What no rank writes.


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"\xff", b"[]", b"5", b"[[0],[],0,[[0]]]", b"[[1, 0],[],0,[]]", b"[[0, 0],[],0,[]]"),
        *(b"[[2],[],0,[]]", b'["0",[],0,[]]', b"[[0],[1e999],0,[]]", b"[[0],[],true,[]]"),
        b"[" * 9999,
    ],
)
def test_a_decision_that_no_rank_writes_is_refused(store, text):
    store.set(f"{PLACE}/decision", text)
    with pytest.raises(pc.ConfigurationError, match="which ranks go on in the store is nothing"):
        decide(store, Rank(0, 2))


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"5", b"[true]"])
def test_what_no_rank_says_of_itself_is_refused(store, text):
    store.set(f"{PLACE}/came/1", text)
    with pytest.raises(pc.ConfigurationError, match="what rank 1 says of itself"):
        decide(store, Rank(0, 2))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "where this process is to join") for text in [b"{", b"[]", b'["a","b",0]']),
        *((text, "where this process is to join") for text in [b'["a","b",0,1e999]', b"7"]),
        (b'["a","b",2,2]', "rank 2 is not one of 0 to 1"),
        (b'["a","b",0,100000]', "size 100000 is not 1 to"),
    ],
)
def test_an_invitation_that_no_rank_writes_is_refused(store, monkeypatch, text, says):
    monkeypatch.setattr(membership, "_enqueue", lambda store: 1)
    store.set("pycollective/newcomers/1/invited", text)
    with pytest.raises(pc.ConfigurationError, match=says):
        enter(lambda: nullcontext(store), OPTIONS)


# All join, or none.


def join(store, rank):
    return ranks_of(store).join(store, Invitation("init1", "epoch", rank, 2), 30.0)


def test_a_rank_that_fails_behind_one_that_has_joined_is_left_out(store, connects):
    connects.update({0: [Rank(0, 2)], 1: [pc.CollectiveTimeout("late", 1, "init")]})
    assert join(store, 0).rank == 0
    assert join(store, 1) is None


@pytest.mark.parametrize("error", [pc.CollectiveTimeout("late", 1, "init"), KeyboardInterrupt()])
def test_a_rank_that_has_joined_behind_one_that_failed_raises_the_same(store, connects, error):
    made = Rank(0, 2)
    connects.update({0: [made], 1: [error]})
    with pytest.raises(type(error)):
        join(store, 1)
    with pytest.raises(pc.CollectiveError, match=r"rank 1: (late|KeyboardInterrupt)"):
        join(store, 0)
    assert made.closed


def test_an_outcome_that_no_rank_writes_is_refused(store, connects):
    store.set("pycollective/init1/epoch/joined", b"\xff")
    connects[0] = [Rank(0, 2)]
    with pytest.raises(pc.ConfigurationError, match="something else writes to this store"):
        join(store, 0)


def test_who_has_joined_may_go_before_others_have_looked(store):
    """It has what the others wait for, and then its communicator of before is closed."""

    def check_alive():
        store.set("pycollective/p/attached", b"decided ")
        raise pc.PeerFailure("rank 1 has gone", 0, "shrink")

    meeting = Rendezvous(store, 0, 2, 30.0, "p", check_elsewhere=check_alive)
    meeting.confirm()


def shrink(store, comm):
    return ranks_of(store).shrink(comm)


def test_it_tries_again_while_ranks_die_or_are_late(store, connects):
    died, made = pc.PeerFailure("rank 1 died", 0, "init"), Rank(0, 1)
    connects[0] = [died, died, pc.CollectiveTimeout("late", 0, "init"), made]
    comm = Rank(0, 2, gone=[1])
    assert shrink(store, comm) is made
    assert comm.closed
    assert not connects[0]


def test_what_is_wrong_for_good_is_raised_at_the_second_try(store, connects):
    connects[0] = [pc.ConfigurationError("no memory")] * 3
    with pytest.raises(pc.ConfigurationError, match="no memory"):
        shrink(store, Rank(0, 2, gone=[1]))
    assert len(connects[0]) == 1


def test_a_rank_that_others_took_for_dead_is_told(store):
    store.set(f"{PLACE}/decision", b"[[1],[],0,[]]")
    comm = Rank(0, 2)
    with pytest.raises(pc.PeerFailure, match="rank 0 was taken for dead"):
        shrink(store, comm)
    assert comm.closed


def test_without_a_failure_it_aborts_so_that_all_come(store, connects):
    comm = Rank(0, 2, gone=[1])
    comm.failure, reasons = None, []
    comm.abort = reasons.append
    connects[0] = [Rank(0, 1)]
    shrink(store, comm)
    assert reasons == ["its ranks form another one, as shrink() or leave() was called"]


# Refused by name.


@pytest.mark.parametrize("call", ["shrink", "grow"])
def test_what_cannot_change_says_why(store, call):
    alone = pc.init(rank=0, size=1)
    with pytest.raises(pc.ConfigurationError, match=f"^{call}: the ranks of this .* no store"):
        getattr(alone, call)()
    alone._membership = ranks_of(store)
    with alone.split(0) as part, pytest.raises(pc.ConfigurationError, match="it is of split"):
        getattr(part, call)()
    alone.close()
    with pytest.raises(pc.ConfigurationError, match=f"^{call}: this communicator is closed"):
        getattr(alone, call)()
    on_gpu = SimpleNamespace(closed=False, device=1)
    with pytest.raises(pc.ConfigurationError, match=f"^{call}: this communicator is for GPU 1"):
        membership._refuse(call, on_gpu)
