"""`pycollective run` on a terminal: a rank can read from it, and Ctrl-C ends all ranks."""

from __future__ import annotations

import os
import pty
import select
import shlex
import signal
import sys
import termios
import time
from contextlib import suppress

import pytest

from tests.launch.test_launcher import assert_ended, environment, program

__all__ = ["program"]


class OnTerminal:
    """A command that has a terminal of its own, and whoever sits there.

    Args:
        command: leads the terminal's session.
    """

    def __init__(self, *command: object) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            words = [*map(str, command)]
            os.execvpe(words[0], words, {**environment(), "TERM": "dumb", "PS1": "$ "})
        self.said = ""

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)

    def until(self, text: str, *others: str) -> str:
        """What is shown up to and with this text, once the others are there too."""
        deadline = time.monotonic() + 20
        while not all(self.said.count(each) for each in (text, *others)):
            left = deadline - time.monotonic()
            assert select.select([self.terminal], [], [], max(0, left))[0], self.said
            self.said += os.read(self.terminal, 4096).decode()
        before, _, self.said = self.said.partition(text)
        return before + text

    def types(self, text: str) -> None:
        """Press these keys."""
        os.write(self.terminal, text.encode())

    def status(self) -> int:
        """How it ends."""
        deadline = time.monotonic() + 20
        while True:  # what it still says must be read: it waits for that
            if select.select([self.terminal], [], [], 0.05)[0]:
                with suppress(OSError):  # nobody has the terminal any more
                    self.said += os.read(self.terminal, 4096).decode()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, self.said


def launched(*words: object) -> list[object]:
    """`pycollective run` of a program on two ranks."""
    return [sys.executable, "-m", "pycollective", "run", "-n", 2, *words]


DEBUGGED = """
import os, sys
if os.environ["RANK"] == "0":
    breakpoint()
    print("isatty", sys.stdin.isatty(), flush=True)
else:
    assert not sys.stdin.read()
"""


def test_breakpoint_has_the_terminal(program):
    with OnTerminal(*launched(program(DEBUGGED))) as user:
        user.until("(Pdb) ")
        user.types("p 6 * 7\n")
        user.until("42\r\n")
        user.until("(Pdb) ")
        user.types("c\n")
        user.until("isatty True")
        assert user.status() == 0


# Echo is off while rank 0 reads, as in readline.
READS = """
import os, sys, termios, time
if os.environ["RANK"] == "0" and len(sys.argv) > 1:
    modes = termios.tcgetattr(0)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSANOW, modes)
    assert sys.stdin.readline() == "a line\\n"
os.write(1, b"rank %d\\n" % os.getpid())
time.sleep(60)
"""


@pytest.mark.parametrize("reads", [[], ["reads"]], ids=["nobody has read", "rank 0 has read"])
def test_ctrl_c_ends_all_ranks(program, reads):
    with OnTerminal(*launched(program(READS), *reads)) as user:
        if reads:
            user.types("a line\n")
        pids = []
        for _ in range(2):
            user.until("rank ")
            pids.append(int(user.until("\n")))
        user.types("\x03")
        assert user.status() == 130
        assert "pycollective run: rank" not in user.said  # nobody is to blame
        assert termios.tcgetattr(user.terminal)[3] & termios.ECHO
    assert_ended(pids)


WAITS = """
import os, sys
if os.environ["RANK"] == "0":
    for line in sys.stdin:
        print("read", line, flush=True)
"""
ASKS = """
import os
os.write(1, b"rank %s asks\\n" % os.environ["RANK"].encode())
line = open("/dev/tty").readline()
os.write(1, b"read " + line.encode())
"""


def test_a_job_in_the_background_waits_for_the_foreground(program, tmp_path):
    (tmp_path / "quiet.py").write_text("print('quiet')")
    (tmp_path / "asks.py").write_text(ASKS)
    with OnTerminal("sh", "-i") as user:
        user.until("$ ")
        programs = tmp_path / "quiet.py", tmp_path / "asks.py", program(WAITS)
        quiet, asks, waits = (shlex.join(map(str, launched(each))) for each in programs)
        user.types(f"{quiet} & wait\n")
        user.until("\nquiet")
        user.until("\nquiet")
        user.until("$ ")
        user.types(f"{waits} &\n")
        user.until("a rank reads from the terminal, and waits until")
        user.types("fg\n")
        user.until("run -n 2")
        user.types("a line\n")
        user.until("read a line")
        user.types("\x1a")  # Ctrl-Z
        user.until("Stopped")
        user.until("$ ")
        user.types("fg\n")
        user.types("another\n")
        user.until("read another")
        user.types("\x04")  # Ctrl-D
        user.until("$ ")
        user.types(f"{asks} &\n")  # both ranks
        user.until("rank 1 asks", "rank 0 asks", "a rank reads from the terminal")
        user.types("fg\n")
        user.until("run -n 2")
        for line in ("one", "two"):
            user.types(f"{line}\n")
            user.until(f"read {line}")
        user.until("$ ")
        user.types("exit 7\n")
        assert user.status() == 7
