"""How ranks meet: any launch, any order of arrival, and every way in which it can go wrong."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

import pycollective as pc
from pycollective import _core
from pycollective.bootstrap import attach, joining, rendezvous
from pycollective.bootstrap.init import simulated_hosts
from pycollective.bootstrap.store import StoreClient, StoreServer
from tests.harness import PerRank, Ranks, counts, results, run_ranks
from tests.joining import (
    CountingStore,
    Minimal,
    NodeOfThread,
    await_listeners_of,
    clear_launch,
    failing,
    free_unix,
    works,
)


def join_late(comm, delay):
    time.sleep(delay)
    with pc.init(timeout=30) as joined:
        return (joined.rank, joined.size, works(joined))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_ranks_meet_in_any_order_and_again(size):
    orders = [range(size), range(size)[::-1], random.Random(size).sample(range(size), size)]
    with Ranks(size, join=False, module=__name__) as ranks:
        for order in orders:  # in the first they attach each other, in the others they have
            delays = [0.1 * order[rank] / size for rank in range(size)]
            for rank, joined in enumerate(results(ranks.call(join_late, PerRank(delays)))):
                assert joined == (rank, size, True)


@pytest.mark.parametrize("call", [lambda: pc.init().close(), lambda: simulated_hosts(4)])
@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("PYCOLLECTIVE_WIER", "did you mean PYCOLLECTIVE_WIRE?"),
        ("PYCOLECTIVE_TOPOLOGY", "did you mean PYCOLLECTIVE_TOPOLOGY?"),
        ("pycollective_simd", "did you mean PYCOLLECTIVE_SIMD?"),
        ("PYCOLLECTIVE_OF_MINE", "docs/reference/variables.md lists those it has"),
    ],
)
def test_a_misspelt_variable_is_warned_of_once_on_rank_0(monkeypatch, call, name, cure):
    kept = dict(os.environ)
    clear_launch(kept)
    for launched in os.environ.keys() - kept:
        monkeypatch.delenv(launched)
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYCOLLECTIVE_REQUIRE_MPI", "0")  # of tests
    monkeypatch.setenv("PYCOLMAP_PATH", "1")  # another program's
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        call()
        call()
    assert [str(each.message) for each in said] == [
        f"pycollective has no environment variable {name}: {cure}"
    ]
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulated_hosts(4)


def try_late(comm, delay, timeout):
    time.sleep(delay)
    return failing(pc.init, timeout=timeout)


@pytest.mark.alone
def test_ranks_that_never_come_are_named_and_later_all_can_join():
    with Ranks(4, join=False, module=__name__) as ranks:
        answers = results(ranks.call(try_late, PerRank([0, 1.5, 0, 1.5]), 1.0))
        for rank, (error, took) in enumerate(answers):
            assert isinstance(error, pc.CollectiveTimeout)
            assert "rank(s) 1, 3 of 4 did not come" in str(error)
            # Who comes after all have given up is told at once.
            assert took < (1.4 if rank in (0, 2) else 0.5)
        assert all(joined[2] for joined in results(ranks.call(join_late, 0)))


def never_attach(comm, address, rank, absent, told):
    """The absent one comes back when the others have given up, or too late for them."""
    if rank == absent:

        def stay_away(*args):
            until = time.monotonic() + 6
            while len(list(told.iterdir())) < 2 and time.monotonic() < until:
                time.sleep(0.01)

        joining.attach_peers = stay_away
    client = StoreClient(address, timeout=20)
    answer = failing(pc.init, rank=rank, size=3, store=client, timeout=2.0)
    client.close()
    if rank != absent:
        (told / str(rank)).touch()
    return answer


def test_ranks_that_come_and_do_not_attach_are_named(addresses, tmp_path):
    """Three launches beside each other, in each of which another one is absent."""
    folders = [tmp_path / str(absent) for absent in range(3)]
    for each in folders:
        each.mkdir()
    launches = [launch for launch in range(3) for _ in range(3)]
    answers = results(
        run_ranks(
            never_attach,
            9,
            PerRank([addresses[launch] for launch in launches]),
            PerRank([*range(3)] * 3),
            PerRank(launches),
            PerRank([folders[launch] for launch in launches]),
            join=False,
        )
    )
    for place, (error, took) in enumerate(answers):
        absent, rank = divmod(place, 3)
        if rank != absent:
            assert isinstance(error, pc.CollectiveTimeout), error
            said = str(error).replace(" of 3", "")  # whoever notices first tells the others
            assert f"rank(s) {absent} have come but did not attach" in said
            assert took < 4


def come_late(comm, rank):
    from pycollective.bootstrap import rendezvous

    # The last waits a little, too, for what others do then.
    rendezvous._WARN_AFTER = 15 if rank == 1 else 0.2
    if rank == 1:
        time.sleep(1.2)
    pc.init(timeout=20).close()


def test_a_long_wait_for_ranks_names_them():
    outcomes = run_ranks(come_late, 3, PerRank([0, 1, 2]), join=False)
    results(outcomes)
    for rank in (0, 2):
        assert f"init on rank {rank} still waits: " in outcomes[rank].stderr
        assert "1" in outcomes[rank].stderr.partition("still waits: ")[2]
    assert outcomes[1].stderr == ""


def fail_at_the_very_end(comm, rank):
    """Rank 2 breaks off when all others have attached all ranks, and it has not."""
    if rank == 2:
        attach._receive, original = break_off, attach._receive
        answer = failing(pc.init, timeout=20)
        attach._receive = original
    else:
        answer = failing(pc.init, timeout=20)
    with pc.init(timeout=20) as again:
        return answer, works(again)


def break_off(*args):
    with closing(StoreClient(os.environ["PYCOLLECTIVE_STORE"], timeout=20)) as client:
        for other in range(2):
            client.get(f"pycollective/init1/host/attached/{other}")
    raise pc.ConfigurationError("a late fault")


def test_all_join_or_none_and_a_failure_leaves_nothing_half_attached():
    answers = results(run_ranks(fail_at_the_very_end, 3, PerRank([0, 1, 2]), join=False))
    for rank, ((error, took), again) in enumerate(answers):
        assert isinstance(error, pc.ConfigurationError)
        assert str(error) == ("" if rank == 2 else "rank 2: ") + "a late fault"
        assert took < 5
        assert again


@pytest.fixture
def addresses():
    """Of a store for each of three launches."""
    with ExitStack() as stack:
        names = [free_unix() for _ in range(3)]
        for each in names:
            stack.enter_context(StoreServer(each))
        yield names


def join_explicitly(comm, address, rank, size, minimal=False, change=None):
    if change is not None:
        change()
    with closing(StoreClient(address, timeout=20)) as client:
        store = Minimal(client) if minimal else client
        return failing(
            lambda: works(pc.init(rank=rank, size=size, store=store, timeout=20)) or 1 / 0
        )


@pytest.fixture
def address():
    with StoreServer(name := free_unix()):
        yield name


@pytest.mark.parametrize("minimal", [False, True])
def test_explicit_arguments_with_a_store(address, minimal):
    for error, _ in results(
        run_ranks(join_explicitly, 3, address, PerRank([2, 0, 1]), 3, minimal, join=False)
    ):
        assert error is None


class Overwritten:
    """A minimal store into which another process has written under the same rank."""

    def __init__(self):
        self._values = {}

    def set(self, key, value):
        self._values[key] = value.replace(b'"offset": 0', b'"offset": 4096')

    def get(self, key):
        return self._values[key]


def test_some_ranks_of_a_job_are_named_by_rank_not_by_place():
    alone = rendezvous.Rendezvous(Overwritten(), 0, 1, 5.0, "", ranks=[5])
    with pytest.raises(pc.ConfigurationError, match="another process claims rank 5, too"):
        alone.exchange(rendezvous.Record(1), str)
    store = Overwritten()
    store.set("pycollective//arrived/1", rendezvous.Record(3).as_text().encode())
    said = "rank 4 was given size 2 and rank 6 size 3"
    with pytest.raises(pc.ConfigurationError, match=said):
        rendezvous.Rendezvous(store, 0, 2, 5.0, "", ranks=[4, 6]).exchange(
            rendezvous.Record(2), str
        )
    early = rendezvous.Rendezvous(CountingStore(), 0, 2, 0.1, "", ranks=[4, 6])
    with pytest.raises(pc.CollectiveTimeout, match=r"rank 4 .*: rank\(s\) 6 of 2 did not come"):
        early.exchange(rendezvous.Record(2), str)


def test_a_store_that_fails_is_no_rank_that_is_late():
    class Failing(CountingStore):
        def wait(self, keys, timeout):
            raise RuntimeError("the store has gone")

    with pytest.raises(RuntimeError, match="the store has gone"):
        rendezvous.Rendezvous(Failing(), 0, 2, 20.0, "").exchange(rendezvous.Record(2), str)


def test_ranks_with_areas_of_different_sizes_use_the_smallest(monkeypatch):
    monkeypatch.setattr(joining, "NODE", NodeOfThread())
    store = CountingStore()

    def join(place):
        if place == 1:  # it has other groups, and less is left for one more
            for _ in range(20):
                joining.NODE.get().allocate(2, False)
        return joining.join_host(rendezvous.Rendezvous(store, place, 2, 20.0, "")).data_bytes

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(join, range(2))
    assert one == other < _core.Node().mailbox_bytes(2, False)


def test_an_argument_beats_the_variable(monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_TOPOLOGY", "no topology")
    monkeypatch.setenv("PYCOLLECTIVE_WIRE", "no wire")
    with pc.init(rank=0, size=1, topology="1x1", wire="exact") as comm:
        assert comm.wire == "exact"


def be_older():
    rendezvous.VERSION = "0.0.1"


@pytest.mark.parametrize(
    ("ranks", "sizes", "minimal", "changes", "said"),
    [
        ([0, 1, 1], [3, 3, 3], False, [None] * 3, "both claim rank 1"),
        ([0, 2, 1], [3, 3, 2], False, [None] * 3, "was given size"),
        ([0, 1], [2, 3], True, [None] * 2, "was given size"),
        *(
            ([0, 1, 2], [3, 3, 3], minimal, [None, be_older, None], "0.0.1 and rank 0")
            for minimal in (False, True)
        ),
    ],
    ids=["a rank twice", "sizes", "sizes, minimal store", "versions", "versions, minimal store"],
)
def test_what_does_not_go_together_is_told_to_all(address, ranks, sizes, minimal, changes, said):
    outcomes = run_ranks(
        *(join_explicitly, len(ranks), address, PerRank(ranks), PerRank(sizes), minimal),
        PerRank(changes),
        join=False,
    )
    for error, took in results(outcomes):
        assert isinstance(error, pc.ConfigurationError)
        assert said in str(error)
        if "claim" in said:
            assert all(f"process {each.pid} on " in str(error) for each in outcomes[1:])
        assert took < 5


def wait_briefly():
    """That who refuses has not attached by another thread is known after this time."""
    attach._ANSWERED_WITHIN = 0.2


def be_elsewhere():
    """What a rank on another host, or in another network namespace, looks like."""
    wait_briefly()
    original = attach.Listener.__init__

    def listen(self):
        original(self)
        self.name = "pycollective-not-here"

    attach.Listener.__init__ = listen
    socket.gethostname = lambda: "elsewhere"


def test_ranks_on_another_host_are_said_to_all(addresses):
    """Two launches beside each other."""
    changes = [wait_briefly] * 6
    changes[0] = changes[4] = be_elsewhere  # rank 0 of one and rank 1 of the other
    here = socket.gethostname()
    answers = results(
        run_ranks(
            join_explicitly,
            6,
            PerRank([each for each in addresses[:2] for _ in range(3)]),
            PerRank([*range(3)] * 2),
            3,
            False,
            PerRank(changes),
            join=False,
        )
    )
    for place, (error, took) in enumerate(answers):
        away = place // 3
        assert isinstance(error, pc.ConfigurationError)
        assert f"rank {away} on host 'elsewhere' cannot be reached from host '{here}'" in str(error)
        assert "must be on one host, in one container" in str(error)
        assert took < 5


def once_others_listen(act):
    """Have `init` do something when all know where all are, before this rank listens itself."""
    attach_as_ever = joining._meet_and_attach

    def attach_later(*args):
        act()
        return attach_as_ever(*args)

    joining._meet_and_attach = attach_later


def join_or_interrupt(comm, rank, pids):
    def interrupt():
        await_listeners_of(pids[:2])
        os.kill(pids[0], signal.SIGINT)

    if rank == 2:
        once_others_listen(interrupt)
    return failing(pc.init, timeout=20)


def test_ctrl_c_while_joining_reaches_the_others():
    with Ranks(3, join=False, module=__name__) as ranks:
        first, *others = results(ranks.call(join_or_interrupt, PerRank([0, 1, 2]), ranks.pids))
    assert isinstance(first[0], KeyboardInterrupt)
    for error, _ in others:
        assert isinstance(error, pc.CollectiveAborted)
        assert "rank 0: KeyboardInterrupt" in str(error)


def knock_as_a_stranger(pids):
    """Connect to every listener of these processes: silent, rude, and nearly right."""
    knocking = []
    for name in await_listeners_of(pids):
        for number in range(200):  # more than the queue holds
            each = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            each.setblocking(False)
            knocking.append(each)
            try:
                each.connect("\0" + name[1:])
            except BlockingIOError:
                break
            if number == 0:
                each.send(b"x" * 4000)
            elif number == 1:
                socket.send_fds(each, [os.urandom(32)], [0, 1, 2])
            elif number == 2:
                each.send(os.urandom(31))
            elif number == 3:
                each.close()
    assert len(knocking) > 100
    return knocking


def join_among_strangers(comm, rank, pids):
    knocking = []
    if rank == len(pids) - 1:
        once_others_listen(lambda: knocking.extend(knock_as_a_stranger(pids[:-1])))
    before = len(os.listdir("/proc/self/fd"))
    joined = pc.init(timeout=20)
    answer = works(joined), len(os.listdir("/proc/self/fd")) - before - len(knocking)
    for each in knocking:
        each.close()
    return answer


def test_strangers_keep_nobody_from_joining():
    with Ranks(4, join=False, module=__name__) as ranks:
        place = PerRank(list(range(4))), ranks.pids
        for joined, files in results(ranks.call(join_among_strangers, *place)):
            assert joined
            assert files < 20  # none of the strangers' is kept


def connect_often(comm, address, groups):
    client = StoreClient(address, timeout=20)
    before = counts()
    made = [joining.connect(client, comm.rank, comm.size, 20.0, f"group{i}") for i in range(groups)]
    assert all(works(each) for each in made)
    after = counts()
    client.close()
    return before, after


@pytest.mark.storm
def test_groups_that_meet_one_by_one_share_one_segment(address):
    for before, (threads, files, maps) in results(run_ranks(connect_often, 3, address, 200)):
        assert threads <= before[0] + 1
        assert files == before[1]
        assert maps == before[2]


def meet_twice_under_one_prefix(comm, address):
    with closing(StoreClient(address, timeout=20)) as client:
        joining.connect(client, comm.rank, comm.size, 20.0, "same")
        comm.barrier()
        return failing(joining.connect, client, comm.rank, comm.size, 20.0, "same")


def test_a_prefix_serves_once(address):
    for error, took in results(run_ranks(meet_twice_under_one_prefix, 2, address)):
        assert isinstance(error, pc.ConfigurationError)
        assert "both claim rank" in str(error)
        assert took < 5


RANKS, THREADS = 3, 4


def join_at_once(_, addresses, seed):
    """All communicators at once, in any order; what each of them gives."""
    rank = int(os.environ["PYCOLLECTIVE_RANK"])
    came = {}

    def join(number):
        try:
            with closing(StoreClient(addresses[number], timeout=20)) as store:
                comm = pc.init(rank=rank, size=RANKS, store=store, timeout=10)
            x = np.full(3, 1.0 + number, np.float32)
            comm.all_reduce(x)
            came[number] = x.tolist()
            comm.close()
        except Exception as error:  # the test says which
            came[number] = repr(error)

    order = random.Random(seed * RANKS + rank).sample(range(THREADS), THREADS)
    threads = [threading.Thread(target=join, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return came


def test_threads_join_with_the_same_peers_at_once():
    for seed in range(8):  # each with processes that have attached nobody yet
        with ExitStack() as stack:
            addresses = [free_unix() for _ in range(THREADS)]
            for address in addresses:
                stack.enter_context(StoreServer(address))
            ranks = stack.enter_context(Ranks(RANKS, module=__name__, join=False, timeout=40))
            for came in results(ranks.call(join_at_once, addresses, seed)):
                assert came == {n: [RANKS * (1.0 + n)] * 3 for n in range(THREADS)}


MOST = 12


def limit_for(more):
    """The limit under which this process can open so many files more."""
    free = (number for number in itertools.count() if not is_open(number))
    return next(itertools.islice(free, more, None))


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def join_with_few_files(comm, rank, address):
    """How each `init` ends in which rank 0 may open a few files, one more each time."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends = []
    with closing(StoreClient(address, timeout=20)) as store:
        for more in range(1, MOST):
            if rank == 0:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(more), usual[1]))
            ends.append(
                failing(lambda: works(pc.init(rank=rank, size=2, store=store, timeout=20)) or 1 / 0)
            )
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    return ends


def test_a_rank_without_a_descriptor_left_says_so_to_all(address):
    first, second = results(run_ranks(join_with_few_files, 2, PerRank([0, 1]), address, join=False))
    for (here, took), (there, also_took) in zip(first, second, strict=True):
        assert (here is None) == (there is None)
        if here is not None:
            assert isinstance(here, pc.ConfigurationError), here
            assert isinstance(there, pc.ConfigurationError), there
            assert "Too many open files" in str(here)
            assert "raise its limit (ulimit -n)" in str(here)
            assert "rank 0" in str(there)
            assert str(here) in str(there)
        assert max(took, also_took) < 10  # half of the timeout
    said = [str(error) for error, _ in first if error is not None]
    # The kernel has dropped it from the message, which is no error there.
    assert any("for rank 1's memory" in each for each in said), said
    assert first[-1][0] is None  # enough
