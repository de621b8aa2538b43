"""Messages with tags, and from any rank, as a program has them; on one host and between hosts."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import pycollective as pc
from pycollective import host_memory
from tests.harness import await_, results, run_ranks
from tests.launchers import launcher

PROGRAM = """
import sys
import numpy as np
import pycollective as pc

def message(source, tag, turn, count):
    return np.arange(count) + 1000.0 * source + 100 * tag + 10 * turn

comm = pc.init(timeout=30)
rank, size = comm.rank, comm.size
draw = np.random.default_rng(5)  # the same on all ranks
plan = [
    (int(tag), turn, int(count))
    for turn in range(3)
    for tag, count in zip(draw.permutation(6), draw.choice([0, 1, 700, 9000, 70_000], 6))
]
others = [other for other in range(size) if other != rank]
# To all, tag by tag as drawn; each takes the tags in an order of its own.
sent = [message(rank, *each) for each in plan]
works = [
    comm.send(x, other, tag=tag, async_op=True)
    for x, (tag, _, _) in zip(sent, plan)
    for other in others
]
for tag in np.random.default_rng(rank).permutation(6):
    for turn, count in [(turn, count) for at, turn, count in plan if at == tag]:
        for other in others[:: 1 if tag % 2 else -1]:
            got = np.empty(count)
            assert comm.recv(got, other, tag=int(tag)) == other
            assert got.tobytes() == message(other, tag, turn, count).tobytes(), (tag, turn, other)
for work in works:
    work.wait(timeout=30)
    assert work.source is None
# From any rank: as many of each as it sends.
sending = [
    comm.send(message(rank, 9, turn, 5), other, tag=9, async_op=True)
    for turn in range(4)
    for other in others
]
turns = dict.fromkeys(others, 0)
for _ in range(4 * len(others)):
    got = np.empty(5)
    source = comm.recv(got, tag=9)
    assert got.tobytes() == message(source, 9, turns[source], 5).tobytes()
    turns[source] += 1
assert set(turns.values()) == {4}
got = [np.empty(5) for _ in others]
works = [comm.recv(x, pc.ANY_SOURCE, tag=1, async_op=True) for x in got]
assert all(work.source is None for work in works)
comm.barrier()
for other in others:
    comm.send(message(rank, 1, 0, 5), other, tag=1, async_op=True)
for x, work in zip(got, works):
    work.wait(timeout=30)
    assert x.tobytes() == message(work.source, 1, 0, 5).tobytes()
assert sorted(work.source for work in works) == others
for work in sending:
    work.wait(timeout=30)
comm.barrier()
comm.close()
sys.stdout.write(f"RANK {rank} done\\n")
"""


@pytest.mark.parametrize(
    ("launch", "topology"),
    [("run", ""), ("forks", "1,2"), ("mpich", "2,1"), ("openmpi", "1,1,1")],
)
def test_tags_and_any_source(launch, topology, tmp_path):
    place = {"PYCOLLECTIVE_TOPOLOGY": topology} if topology else {}
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launcher(launch).run(3, str(tmp_path / "program.py"), timeout=120, **place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 3


def mismatched(comm, tag, source):
    x = np.ones(10 + comm.rank, np.float32)
    try:
        if comm.rank == 0:
            comm.send(x, 1, tag=tag)
        else:
            comm.recv(x, source, tag=tag)
    except pc.CollectiveMismatch as error:
        return str(error), bool((x == 1).all())
    return "no mismatch", False


@pytest.mark.parametrize("source", [0, pc.ANY_SOURCE])
def test_a_mismatch_names_the_tag_on_both_sides(source):
    for text, untouched in results(run_ranks(mismatched, 2, 7, source)):
        assert "send(float32, count 10, tag 7)" in text
        assert "recv(float32, count 11, tag 7)" in text
        assert untouched


def wait_for_nobody(comm):
    comm.timeout = 0.5
    try:
        if comm.rank == 0:
            comm.send(np.ones(3), 1, tag=3)
        else:
            comm.recv(np.ones(3), tag=4)
    except pc.CollectiveTimeout as error:
        return str(error)
    return "no timeout"


def test_a_timeout_names_who_has_not_called():
    told = results(run_ranks(wait_for_nobody, 2))
    for text in told:  # of whoever gave up first
        first = int(text.split("timed out on rank ")[1][0])
        assert f"rank(s) {1 - first} have not called it" in text


def take_from_any(comm, folder):
    comm.barrier()
    if comm.rank == 2:
        await_((folder / "waits").exists)
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "waits").touch()
    try:
        comm.recv(np.ones(3)) if comm.rank == 0 else comm.barrier()
    except pc.PeerFailure as error:
        return str(error)
    return "no failure"


def test_a_death_ends_a_receive_from_any_rank(tmp_path):
    told = run_ranks(take_from_any, 3, tmp_path)
    assert told[2].exit_code == -signal.SIGKILL
    assert "rank 2 (pid" in told[0].result
    assert "died" in told[0].result


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c, x: c.send(x, 0, tag=-1), "tag -1 is not one of 0 to 2147483647"),
        (lambda c, x: c.recv(x, 0, tag=2**40), "tag 1099511627776 is not one of"),
        (lambda c, x: c.recv(x), "no other rank"),
        (lambda c, x: c.recv(x, -1), "rank -1 is not one of"),
    ],
)
def test_what_cannot_be_is_refused(call, said):
    with pc.init() as comm:
        with pytest.raises(pc.ConfigurationError, match=said):
            call(comm, np.zeros(3))
        assert comm.failure is None


def send_without_room(comm):
    x = np.arange(5000.0)
    if comm.rank == 0:
        said = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_memory, "headroom", lambda: host_memory.Headroom(9, "a limit"))
            for call in (lambda: comm.send(x, 1), lambda: comm.send(x, 1, async_op=True)):
                with pytest.raises(pc.ConfigurationError) as refused:
                    call()
                said.append(str(refused.value))
        comm.send(x, 1)  # there is room again
        return said
    got = np.empty_like(x)
    comm.recv(got, 0)
    return got.tobytes() == x.tobytes()


def test_the_first_message_asks_whether_there_is_room_for_its_buffer():
    said, received = results(run_ranks(send_without_room, 2))
    for text in said:
        assert text.startswith("send: 2 ranks need 0.1 MiB of shared memory together, and a limit")
    assert received
