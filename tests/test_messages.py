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

# In orders that seeds draw, csrc/tests/test_messages.cpp has them.
PROGRAM = """
import sys
import numpy as np
import pycollective as pc

def message(source, tag):
    return np.arange(9000) + 1000.0 * source + 100 * tag

comm = pc.init(timeout=30)
rank, size = comm.rank, comm.size
others = [other for other in range(size) if other != rank]
works = [
    comm.send(message(rank, tag), other, tag=tag, async_op=True)
    for tag in range(4)
    for other in others
]
for tag in (2, 0):  # the later first
    for other in others:
        got = np.empty(9000)
        assert comm.recv(got, other, tag=tag) == other
        assert (got == message(other, tag)).all(), (tag, other)
seen = []
for _ in others:
    got = np.empty(9000)
    seen.append(comm.recv(got, tag=1))
    assert (got == message(seen[-1], 1)).all()
assert sorted(seen) == others
got = [np.empty(9000) for _ in others]
receives = [comm.recv(x, pc.ANY_SOURCE, tag=3, async_op=True) for x in got]
for x, work in zip(got, receives):
    work.wait(timeout=30)
    assert (x == message(work.source, 3)).all()
assert sorted(work.source for work in receives) == others
for work in works:
    work.wait(timeout=30)
    assert work.source is None
comm.barrier()
comm.close()
sys.stdout.write(f"RANK {rank} done\\n")
"""


@pytest.mark.parametrize(
    ("launch", "topology"),
    [
        ("run", ""),
        ("forks", "1,2"),
        pytest.param("mpich", "2,1", marks=pytest.mark.storm),
        pytest.param("openmpi", "1,1,1", marks=pytest.mark.storm),
    ],
)
def test_tags_and_any_source(launch, topology, tmp_path):
    place = {"PYCOLLECTIVE_TOPOLOGY": topology} if topology else {}
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launcher(launch).run(3, str(tmp_path / "program.py"), timeout=120, **place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 3


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
