"""Thousands of ranks join: each makes as many store operations as if there were few.

Simulated: every rank is a thread that goes through the store as a process does, with the library's
own code, but attaches nobody (no shared memory, no sockets) and connects nobody between hosts. The
store counts, and lies in this process's memory.
"""

from __future__ import annotations

import pickle
import threading
import time

import pytest

import pycollective as pc
from pycollective import placement
from pycollective.bootstrap import joining, mpi, rendezvous
from pycollective.bootstrap.joining import Common, host_table, read_host_table
from pycollective.bootstrap.rendezvous import Record
from pycollective.config import VERSION
from tests.joining import CountingStore, Minimal


def record(rank, size):
    """As long as a real one of the second step."""
    return Record(
        size=size,
        host="node-0123.cluster.example",
        token=f"{rank:032x}",
        offset=4096 * rank,
        data_bytes=4 << 20,
        socket_name=f"pycollective-{1_000_000 + rank}-0123456789abcdef",
    )


def join(store, rank, size, timeout=30.0, played=()):
    """What `connect` does with the store; the tokens of this rank's host."""
    where = joining.FirstRendezvous(store, rank, size, timeout, "init1", played, "", "")
    assert where.host_of[rank] == rank * len(set(where.host_of)) // size
    mine = record(rank, size)
    whole = where.of_all()
    assert where.deadline == whole.deadline == where.of_host().deadline
    with whole.sharing_problems():
        host = where.of_host()
        mine.size = host.size
        with host.sharing_problems():
            table = host.exchange(mine, host_table)
            host.confirm()
        common = whole.exchange(Record(size, data_bytes=1, address="here:1"), Common.of_records)
        whole.confirm()
    assert Common.from_text(common, 1).address == "here:1"
    rows = read_host_table(table, mine, host.place, host.ranks)
    return [int(row.token, 16) for row in rows]


def run_all(size, act, per_host, monkeypatch):
    """``act(rank)`` in a thread each, `per_host` ranks a host: the results, or what it raised."""
    monkeypatch.setattr(joining, "host_identity", lambda: str(_rank() // per_host))
    ends = [None] * size

    def one(rank):
        try:
            ends[rank] = act(rank)
        except (pc.CollectiveError, pc.ConfigurationError, KeyboardInterrupt) as error:
            ends[rank] = error

    before = threading.stack_size(256 * 1024)
    try:
        threads = [
            threading.Thread(target=one, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(size)
        ]
        for each in threads:
            each.start()
    finally:
        threading.stack_size(before)
    for each in threads:
        each.join(60)
        assert not each.is_alive(), each.name
    return ends


def _rank():
    return int(threading.current_thread().name.split()[1])


@pytest.mark.parametrize(
    "size",
    [256, *(pytest.param(size, marks=pytest.mark.storm) for size in (512, 1024, 2048, 4096))],
)
def test_operations_and_bytes_grow_with_the_ranks_and_not_with_their_square(size, monkeypatch):
    store, start = CountingStore(), time.monotonic()
    tables = run_all(size, lambda rank: join(store, rank, size), 64, monkeypatch)
    for rank, table in enumerate(tables):
        first = rank // 64 * 64
        assert table == list(range(first, first + 64)), table
    took = time.monotonic() - start
    operations, read = sorted(store.operations.values()), sorted(store.bytes.values())
    print(
        f"{size} ranks: {sum(operations) / size:.1f} operations and {sum(read) / size:.0f} bytes a "
        f"rank, {operations[-1]} and {read[-1]} at most, {took:.1f} s"
    )
    # Of the steps of all, one rank reads all records in each; in those of a host one of each host.
    assert operations[size // 2] <= 24
    assert sum(operations) <= 28 * size
    assert operations[-1] <= 24 + 2 * size + 64
    assert read[size // 2] <= 16_000  # a host's table, most of it
    assert sum(read) <= 18_000 * size
    assert took < 60


def test_a_store_that_cannot_count_is_read_by_one_rank(monkeypatch):
    store, size = CountingStore(), 512
    tables = run_all(size, lambda rank: join(Minimal(store), rank, size), 64, monkeypatch)
    assert all(len(table) == 64 for table in tables), tables[0]
    operations = sorted(store.operations.values())
    assert operations[size // 2] <= 12
    assert operations[-1] <= 12 + 2 * size + 64


@pytest.mark.parametrize("absent", [pytest.param(1, marks=pytest.mark.storm), 300])
def test_absentees_are_looked_for_by_one_rank_and_named_to_all(absent, monkeypatch):
    store, size = CountingStore(), 512
    # The time begins when all others are there: who comes late for it is absent, too.
    monkeypatch.setattr(rendezvous, "_GRACE", 20)
    there = threading.Barrier(size - absent)

    def act(rank):
        if rank >= size - absent:
            return None
        there.wait(60)
        return join(store, rank, size, timeout=2.0)

    ends = run_all(size, act, 64, monkeypatch)
    for error in ends[: size - absent]:
        assert isinstance(error, pc.CollectiveTimeout), error
        assert f"rank(s) {size - absent}" in str(error)
        assert (absent == 1) or "and 268 more of 512 did not come" in str(error)
        assert len(str(error)) < 400
    assert sum(store.operations.values()) <= 16 * size


@pytest.mark.parametrize("known", [False, True])
def test_a_rank_that_ends_once_all_have_come_keeps_nobody_waiting(monkeypatch, known):
    """The others are told where they wait next, which it may have to read itself."""
    store, size = CountingStore(), 128
    await_all = rendezvous.Rendezvous._await_all

    def interrupted(self, step, decide):
        outcome = await_all(self, step, decide)
        first = self.size == size and step == "arrived" and self._prefix.count("/") == 2
        if first and _rank() == 70:
            raise KeyboardInterrupt
        return outcome

    if known:
        take, interrupts = joining.FirstRendezvous._take, []

        def taken(self, packed):
            take(self, packed)
            if self.rank == 70 and not interrupts:
                interrupts.append(self)
                raise KeyboardInterrupt

        monkeypatch.setattr(joining.FirstRendezvous, "_take", taken)
    else:
        monkeypatch.setattr(rendezvous.Rendezvous, "_await_all", interrupted)
    start = time.monotonic()
    ends = run_all(size, lambda rank: join(store, rank, size, timeout=20.0), 64, monkeypatch)
    assert isinstance(ends[70], KeyboardInterrupt)
    for rank, error in enumerate(ends):
        assert rank == 70 or "rank 70: KeyboardInterrupt" in str(error), (rank, error)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("size", "played", "said"),
    [
        (130, (), "host 'node0' has 65 ranks, and at most 64 share one"),
        (67, (0,) * 2 + (1,) * 65, "host 1 of the topology has 65 ranks"),
    ],
)
def test_more_ranks_on_a_host_than_share_memory_are_refused_by_name(
    monkeypatch, size, played, said
):
    store = CountingStore()
    monkeypatch.setattr("socket.gethostname", lambda: f"node{_rank() // 65}")
    for error in run_all(
        size, lambda rank: join(store, rank, size, played=played), 65, monkeypatch
    ):
        assert isinstance(error, pc.ConfigurationError)
        assert said in str(error)


@pytest.mark.parametrize(
    "host_of", [(0,), (0, 1, 0), tuple(r // 64 for r in range(4096)), tuple(range(4096))]
)
def test_hosts_are_told_in_few_bytes(host_of):
    packed = placement.pack(host_of)
    assert placement.unpack(packed, len(host_of)) == host_of
    round_robin = tuple(rank % 64 for rank in range(4096))
    assert len(placement.pack(round_robin)) < 300
    assert len(packed) < 12_000


def wishes(hosts):
    """What the ranks on these hosts say first under mpiexec."""
    return [
        tuple(mpi._Said(VERSION, "any", host, host, f"unix:@store-{rank}", "5ec2e7"))
        for rank, host in enumerate(hosts)
    ]


def test_under_mpiexec_each_of_thousands_is_answered_in_few_bytes():
    hosts = [f"node{rank % 64}" for rank in range(4096)]
    answer = mpi._decide("")(wishes(hosts))
    for rank in range(4096):
        place = mpi._Answer(*answer(rank))
        assert len(pickle.dumps(tuple(place))) < 500
        assert place.address == f"unix:@store-{rank % 64}"
        assert place.on_machine == 64
    assert placement.unpack(place.host_of, 4096) == tuple(rank % 64 for rank in range(4096))


def test_under_mpiexec_a_crowded_host_is_refused_by_name():
    with pytest.raises(pc.ConfigurationError, match="host 'a' has 65 ranks, and at most 64 share"):
        mpi._decide("")(wishes(["b", *["a"] * 65]))
    with pytest.raises(pc.ConfigurationError, match="host 0 of the topology has 65 ranks"):
        mpi._decide("65,1")(wishes(["b", *["a"] * 65]))
