"""`pycollective run`: signals to the launcher end the ranks."""

from __future__ import annotations

import signal

import pytest

from tests.launch.test_launcher import COMMAND, alive, assert_ended, program, started, timed

__all__ = ["program"]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["Ctrl-C", "SIGTERM", "the terminal's end"],
)
def test_a_signal_to_the_launcher_ends_the_ranks(program, number, status):
    # One write a line: lines that `print` writes in pieces may mix with another rank's.
    path = program("import os, sys, time\nsys.stdout.write(f'{os.getpid()}\\n')\ntime.sleep(60)\n")
    with started("-n", 2, path, command=timed(_GRACE=60)) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        _, said = process.communicate(timeout=30)  # the first grace is longer
    assert process.returncode == status
    assert_ended(pids)
    assert "pycollective run: rank" not in said  # nobody is to blame
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)


def test_a_signal_ends_ranks_that_ignore_it():
    rank = 'trap "" INT TERM; echo $$; exec sleep 60'
    with started("-n", 2, "sh", "-c", rank, command=timed(_GRACE=0.3)) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert_ended(pids)


# No shell: it may have forked for a command that then misses the signal, and would wait for it.
STAYS = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"seen\\n"))
os.write(1, b"%d\\n" % os.getpid())
for _ in range(1200):
    time.sleep(0.05)
"""


def test_a_second_ctrl_c_does_not_wait(program):
    with started("-n", 2, program(STAYS), command=timed(_GRACE=60)) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        # What comes before the launcher has handled the first is one with it.
        assert [process.stdout.readline() for _ in range(2)] == ["seen\n"] * 2
        assert all(map(alive, pids))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130  # the first grace is longer
    assert_ended(pids)


def test_a_signal_that_was_ignored_stays_so():
    script = "trap '' HUP; exec \"$@\""
    ignoring = ["sh", "-c", script, "sh", *COMMAND]
    with started("sh", "-c", "echo up; read line", command=ignoring) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        process.communicate("go on\n", timeout=20)
        assert process.returncode == 0  # as under nohup
