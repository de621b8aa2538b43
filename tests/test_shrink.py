"""The ranks of a communicator become fewer and more: who goes on, how soon, and what is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
from contextlib import closing, contextmanager, suppress
from itertools import count

import numpy as np
import pytest

import pycollective as pc
from pycollective.bootstrap import membership
from pycollective.bootstrap.store import StoreClient
from tests.harness import Ranks, await_, committed, counts, results
from tests.joining import works
from tests.launchers import find, parts

pytestmark = pytest.mark.alone  # how soon is part of it

MIB = 1 << 20
FAR = "tests.torch.programs"  # ranks that have torch, for Gloo


def store_of_job():
    return StoreClient(os.environ["PYCOLLECTIVE_STORE"])


def all_work(comm, name):
    """Whether they do; all have seen it before anyone goes on and, perhaps, aborts."""
    assert works(comm)
    with closing(store_of_job()) as store:
        if store.add(name, 1) == comm.size:
            store.set(name, b"")
        store.get(name)


@contextmanager
def ending_at(step, number=signal.SIGKILL, begins=""):
    """Signal this process at the `step`th thing that it asks the store for, from `begins` on."""
    ask, asked = StoreClient._ask, set()

    def ask_or_end(self, verb, key, *more, **options):
        if asked or begins in key:
            asked.add((verb, key))  # it asks for one thing many times while it waits
        if len(asked) == step:
            StoreClient._ask = ask
            os.kill(os.getpid(), number)
        return ask(self, verb, key, *more, **options)

    StoreClient._ask = ask_or_end
    yield
    StoreClient._ask = ask


# Deaths.


def go_on(comm, dead, folder):
    """Die, or go on without the dead: when, how soon, and as which rank of how many."""
    if comm.rank in dead:
        (folder / f"{comm.rank}").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(pc.CollectiveError):
        while True:
            works(comm)
    comm = comm.shrink()
    assert works(comm)
    done = time.monotonic()
    with comm:
        return done, comm.rank, comm.size, comm.host_of


def survivors_of(folder, size, dead, **options):
    with Ranks(size, **options) as ranks:
        ranks.joined()
        outcomes = ranks.call(go_on, dead, folder)
    alive = [each for each in outcomes if each.rank not in dead]
    killed = max(float(each.read_text()) for each in folder.iterdir())
    said = results(alive)
    late = max(done for done, *_ in said) - killed
    return late, [rest for _, *rest in said]


@pytest.mark.parametrize("dead", [[0], [1], [3], [0, 2], [0, 1, 2]], ids=str)
def test_the_living_of_one_host_go_on_within_half_a_second(tmp_path, dead):
    left = 4 - len(dead)
    late, said = survivors_of(tmp_path, 4, dead, module=__name__)
    assert said == [[rank, left, (0,) * left] for rank in range(left)]
    assert late < 0.5, late


@pytest.mark.parametrize(
    ("topology", "dead", "hosts"),
    [
        ("2x2", [0], (0, 1, 1)),
        ("2x2", [3], (0, 0, 1)),
        ("2x2", [0, 1], (0, 0)),
        ("3,1", [3], (0, 0, 0)),
        ("1,3", [0], (0, 0, 0)),
    ],
)
def test_the_living_of_several_hosts_go_on_within_two_seconds(tmp_path, topology, dead, hosts):
    pytest.importorskip("torch")
    variables = {"PYCOLLECTIVE_TOPOLOGY": topology}
    late, said = survivors_of(tmp_path, 4, dead, module=FAR, variables=variables)
    assert said == [[rank, len(hosts), hosts] for rank in range(len(hosts))]
    assert late < 2, late


def go_on_without_two(comm, first, second):
    """One rank dies, and another as it shrinks."""
    if comm.rank == first:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(pc.CollectiveError):
        while True:
            works(comm)
    if comm.rank == second:
        time.sleep(0.3)  # until the others wait for it, and no message is under way
    with ending_at(1 if comm.rank == second else 0):
        comm = comm.shrink()
    assert works(comm)
    with comm:
        return comm.rank, comm.host_of


# Nobody sees both deaths as that of a neighbour; or neither, and there is no message under way.
@pytest.mark.parametrize(("first", "second", "hosts"), [(2, 0, (0, 1)), (3, 2, (0, 0))])
def test_a_death_on_another_host_is_seen_while_ranks_shrink(first, second, hosts):
    pytest.importorskip("torch")
    variables = {"PYCOLLECTIVE_TOPOLOGY": "2x2"}
    with Ranks(4, module=FAR, variables=variables) as ranks:
        outcomes = ranks.joined().call(go_on_without_two, first, second)
    said = results([each for each in outcomes if each.rank not in (first, second)])
    assert said == [(0, hosts), (1, hosts)]


def dwindle(comm, place):
    """Shrink again and again; the nth time a rank dies at the nth step, until it gets through."""
    late, held = [], []
    for step in count(1):
        size, doomed = comm.size, [0, comm.size // 2, comm.size - 1][place]
        start = time.monotonic()
        with ending_at(step if comm.rank == doomed else 0):
            comm = comm.shrink()
        late.append(time.monotonic() - start)
        all_work(comm, f"round {step}")
        gc.collect()  # errors of failed attempts hold frames, and these nodes
        held.append((*counts(), committed(comm)))
        if comm.size == size:
            comm.close()
            return step, max(late), held
        assert comm.size == size - 1


def dwindled(size, place, **options):
    with Ranks(size, **options) as ranks:
        outcomes = ranks.joined().call(dwindle, place)
    alive = [each for each in outcomes if each.exit_code is None]
    steps, late, held = zip(*results(alive), strict=True)
    assert len({*steps}) == 1
    return steps[0], max(late), held


STORM = pytest.mark.storm
PLACES = [pytest.param(0, marks=STORM), 1, pytest.param(2, marks=STORM)]


@pytest.mark.parametrize("place", PLACES)
def test_a_death_at_any_step_of_shrinking_shrinks_again(place):
    steps, late, held = dwindled(28, place, module=__name__)
    assert steps > 15
    assert late < 1
    for each in held:  # of the dead nothing stays
        *early, _ = each[3]
        *now, memory = each[-1]
        assert all(map(int.__le__, now, early)), (early, now)
        assert memory <= 12 * MIB, memory  # of two groups or three: few ranks have larger areas


@pytest.mark.storm
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_death_at_any_step_of_shrinking_between_hosts_shrinks_again(place):
    pytest.importorskip("torch")
    variables = {"PYCOLLECTIVE_TOPOLOGY": "12,20"}
    steps, late, _ = dwindled(32, place, module=FAR, variables=variables)
    assert steps > 20
    assert late < 4  # of two cores for 32 ranks that connect


def die_at_torchs_store(comm):
    """As `dwindle`, once, at a store that tells nobody of a death."""
    from torch.distributed import TCPStore

    rank = int(os.environ["PYCOLLECTIVE_RANK"])
    with closing(store_of_job()) as own:
        if rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            own.set("port", str(store.port).encode())
        else:
            store = TCPStore("127.0.0.1", int(own.get("port")), wait_for_workers=False)
    comm = pc.init(rank=rank, size=4, store=store, timeout=30)
    if rank == 2:
        connect = membership.connect

        def die(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
            connect(*arguments)

        membership.connect = die
    start = time.monotonic()
    comm = comm.shrink()
    took = time.monotonic() - start
    all_work(comm, "all")  # rank 0 serves the store
    comm.close()
    return comm.rank, comm.size, took


def test_a_death_that_the_store_does_not_tell_of_is_seen():
    pytest.importorskip("torch")
    with Ranks(4, module=FAR, join=False) as ranks:
        outcomes = ranks.call(die_at_torchs_store)
    said = results([each for each in outcomes if each.rank != 2])
    assert [each[:2] for each in said] == [(0, 3), (1, 3), (2, 3)]
    assert max(each[2] for each in said) < 2


# Without a death.


def leave(comm):
    if comm.rank == 1:
        return comm.leave("its GPU is too hot"), comm.closed
    made = comm.shrink()
    all_work(made, "all")
    with made:
        return made.left, made.rank, made.size, comm.closed


def test_a_rank_may_leave_and_the_others_hear_why():
    with Ranks(3, module=__name__) as ranks:
        said = results(ranks.joined().call(leave))
    left = {1: "its GPU is too hot"}
    assert said == [(left, 0, 2, True), (None, True), (left, 1, 2, True)]


def close_or_wait(comm):
    """One closes; one waits in a call; one shrinks."""
    if comm.rank == 0:
        comm.close()
        return None
    with closing(store_of_job()) as store:
        if comm.rank == 1:
            work = comm.recv(np.zeros(1), 2, async_op=True)
            store.set("waits", b"")
            with pytest.raises(pc.CollectiveAborted, match=r"another one, as shrink"):
                work.wait()
        else:
            store.get("waits")
    with comm.shrink() as made:
        return made.size, works(made)


def test_who_has_closed_is_left_out_and_who_waits_in_a_call_comes():
    with Ranks(3, module=__name__) as ranks:
        assert results(ranks.joined().call(close_or_wait)) == [None, (2, True), (2, True)]


def stop_on_the_way(comm, step, pids):
    """A rank is stopped while it shrinks, and goes on when another waits for it."""
    membership._JOIN_WITHIN = 0.2  # seconds
    if comm.rank == 0:

        def resume():
            with closing(store_of_job()) as store:
                # The second attempt, if it was stopped while it joined.
                attempt = 2 if step > 5 else 1
                store.get(f"pycollective/init1//{attempt}/came/0")
                await_(lambda: state_of(pids[1]) == "T")
                time.sleep(0.1)  # in which nothing must be decided
                decided = store.check([f"pycollective/init1//{attempt}/decision"])
            os.kill(pids[1], signal.SIGCONT)
            return decided

        decided = []
        thread = threading.Thread(target=lambda: decided.append(resume()))
        thread.start()
    with ending_at(step if comm.rank == 1 else 0, signal.SIGSTOP):
        made = comm.shrink()
    if comm.rank == 0:
        thread.join()
        assert decided == [False]
    all_work(made, "all")
    with made:
        return made.rank, made.size


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("step", [1, 14], ids=["before it comes", "while it joins"])
def test_a_stopped_rank_is_waited_for(step):
    with Ranks(3, module=__name__) as ranks:
        said = results(ranks.joined().call(stop_on_the_way, step, ranks.pids))
    assert said == [(0, 3), (1, 3), (2, 3)]


# Newcomers.


def enter(comm, members, play, *arguments):
    """`play`, as one of the first ranks with their communicator or, with None, as a newcomer."""
    os.environ["PYCOLLECTIVE_SIZE"] = str(members)
    rank = int(os.environ["PYCOLLECTIVE_RANK"])
    if rank < members:
        return play(pc.init(timeout=30), rank, members, *arguments)
    os.environ["PYCOLLECTIVE_JOINS"] = "1"
    return play(None, rank, members, *arguments)


def enter_together(comm, rank, members, size):
    late = comm is None
    if late:
        comm = pc.init(timeout=30)
    assert comm._joined_late == late
    while comm.size < size:  # one may have come before the other
        comm = comm.grow()
    all_work(comm, "all")
    with comm:
        return comm.rank >= members if late else comm.rank == rank


@pytest.mark.parametrize("members", [1, 2])
def test_newcomers_come_behind_the_ranks_that_are_there(members):
    variables = {"PYCOLLECTIVE_ELASTIC": "1"}  # a rank that is alone meets others, too
    options = {"module": __name__, "join": False, "variables": variables}
    with Ranks(members + 2, **options) as ranks:
        assert all(results(ranks.call(enter, members, enter_together, members + 2)))


def die_as_newcomers(comm, rank, members):
    """One newcomer after the other dies, each a step later, until one gets through."""
    with closing(store_of_job()) as store:
        if comm is None:
            step = rank - members + 1
            if store.get(f"turn {step}") == b"over":
                return None
            with ending_at(step, begins="/invited"):
                comm = pc.init(timeout=30)
            all_work(comm, "all")
            with comm:
                return step
        late = []
        for step in count(1):
            store.set(f"turn {step}", b"")
            while comm._membership.seen < step:
                start = time.monotonic()
                comm = comm.grow()
            late.append(time.monotonic() - start)
            if comm.size > members:
                break
            assert works(comm)
        all_work(comm, "all")
        for other in range(step + 1, 40):
            store.set(f"turn {other}", b"over")
        with comm:
            return step, max(late)


def test_a_newcomer_that_dies_at_any_step_keeps_nobody_out():
    with Ranks(32, module=__name__, join=False) as ranks:
        outcomes = ranks.call(enter, 2, die_as_newcomers)
    first, second, *others = results([each for each in outcomes if each.exit_code is None])
    step, late = first
    assert second[0] == step > 10
    assert late < 2
    assert [each for each in others if each] == [step]
    assert sum(each.exit_code == -signal.SIGKILL for each in outcomes) == step - 1


OTHERS = {  # variables of a newcomer, and what its error says
    "PYCOLLECTIVE_TUNING": ("tests/no_such_table", "tests/no_such_table"),
    "PYCOLLECTIVE_WIRE": ("exact", "wire exact, no device"),
    "PYCOLLECTIVE_TOPOLOGY": ("2x1", "unset PYCOLLECTIVE_TOPOLOGY"),
}


def come_with_other_options(comm, rank, members):
    with closing(store_of_job()) as store:
        if comm is None:
            store.get(f"turn {rank}")
            if rank - members < len(OTHERS):
                name = [*OTHERS][rank - members]
                os.environ[name] = OTHERS[name][0]
            try:
                comm = pc.init(timeout=30)
            except pc.ConfigurationError as error:
                store.set(f"turn {rank + 1}", b"")
                return str(error)
        elif rank == 0:
            store.set(f"turn {members}", b"")
        while comm.size == members:
            assert works(comm)
            comm = comm.grow()
        all_work(comm, "all")
        with comm:
            return comm.size


def test_a_newcomer_with_other_options_is_refused_and_the_others_go_on():
    with Ranks(3 + len(OTHERS), module=__name__, join=False) as ranks:
        first, second, *said, last = results(ranks.call(enter, 2, come_with_other_options))
    assert first == second == last == 3
    for (_, says), error in zip(OTHERS.values(), said, strict=True):
        assert says in error


def come_and_go(comm, rank, members, rounds):
    """The last rank leaves and comes again, round by round: what this process holds, then."""
    held = []
    os.environ["PYCOLLECTIVE_JOINS"] = "1"
    for _ in range(rounds):
        last = comm.rank == comm.size - 1
        if last:
            comm.leave()
            comm = pc.init(timeout=30)
        else:
            comm = comm.shrink()
        while comm.size < members:
            comm = comm.grow()
        all_work(comm, f"round {len(held)}")
        held.append((*counts(), committed(comm)))
    comm.close()
    return held


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=STORM)])
def test_nothing_stays_of_ranks_that_left(rounds):
    with Ranks(3, module=__name__, join=False) as ranks:
        for held in results(ranks.call(enter, 3, come_and_go, rounds)):
            assert all(now <= early for now, early in zip(held[-1], held[5], strict=True)), held


# Over MPI, where it goes on after a death (ULFM).

ON_MPI = """
import faulthandler, os, signal, sys, time
import pycollective as pc
from pycollective.bootstrap import mpi, mpi_membership
from tests.joining import works

# Each time the last rank dies at another of these, until it gets through.
STEPS = (
    *((mpi_membership, "_within"), (mpi.MpiBootstrap, "exchange"), (mpi.Launch, "transport")),
    *((mpi, "join_host"), (mpi, "join_alone")),
)

def dying_at(step):
    left = [step]
    for owner, name in STEPS:
        def die(*arguments, call=getattr(owner, name)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)
        setattr(owner, name, die)

faulthandler.dump_traceback_later(60, exit=True)
comm = pc.init(timeout=30)
as_it_is = [getattr(*step) for step in STEPS]
late = 0
for step in *range(1, int(sys.argv[1])), 99:
    size, last = comm.size, comm.rank == comm.size - 1
    if last:
        dying_at(step)
    start = time.monotonic()
    comm = comm.shrink()
    late = max(late, time.monotonic() - start)
    for (owner, name), each in zip(STEPS, as_it_is):
        setattr(owner, name, each)
    try:
        assert works(comm)
    except pc.CollectiveAborted:  # by a rank that was faster, which shrinks
        pass
    if comm.size == size:
        break
    assert comm.size == size - 1
if last:
    made = comm.leave("tired")
    assert made is None
else:
    comm = comm.shrink()
    assert works(comm) and comm.left == {size - 1: "tired"}
sys.stdout.write(f"RANK {comm.rank} {size} {step} {late} {comm.host_of}\\n")
sys.stdout.flush()
os._exit(0)  # MPI's own end may wait for the dead
"""


@pytest.mark.parametrize(
    ("size", "steps", "topology"),
    [
        (3, 2, "3x1"),
        pytest.param(12, 10, "12x1", marks=STORM),
        pytest.param(12, 10, "12", marks=STORM),
    ],
)
def test_over_mpi_a_death_at_any_step_shrinks_again(size, steps, topology):
    openmpi = find("openmpi")
    mpiexec, *more = openmpi.command(size, "-c", ON_MPI, str(steps))
    done = subprocess.run(
        [mpiexec, "--with-ft", "ulfm", *more],
        env=openmpi.environment(PYCOLLECTIVE_TOPOLOGY=topology),
        capture_output=True,
        text=True,
        timeout=90,
    )
    said = [part.split(maxsplit=4) for part in parts(done.stdout)]
    left = int(said[0][1]) if said else 0
    assert 1 < left == len(said) < size, done.stdout + done.stderr
    for rank, (place, _, _, late, hosts) in enumerate(said):
        assert int(place) == rank
        assert float(late) < 2 * size  # MPI spins, and ranks share cores
        there = left if rank == left - 1 else left - 1  # who has left has what it had
        assert hosts == str((0,) * there if topology == "12" else tuple(range(there)))
