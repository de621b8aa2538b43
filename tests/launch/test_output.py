"""`pycollective run`: ranks' output, line by line."""

from __future__ import annotations

import array
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from pycollective.launch.launcher import _python_options
from tests.harness import await_
from tests.launch.test_launcher import (
    COMMAND,
    alive,
    program,
    run,
    run_together,
    started,
    timed,
)

__all__ = ["program"]

# Tagged where its output goes to no terminal.
DEFAULT = [each for each in COMMAND if each != "--no-tag-output"]
# For what expects lines in one piece: a rank that is kept waiting within one does not make it slow.
PATIENT = timed(_SLOW_LINE=60)
IMPATIENT = timed(_LAST_OUTPUT=0.2)

# Each line in three writes, with time for others' in between.
SLOW_WRITER = """
import os, time
for number in range(40):
    for part in (f"line {number} of ", os.environ["RANK"], "\\n"):
        os.write(1, part.encode())
        time.sleep(0.002)
"""


def test_lines_arrive_whole(program):
    done = run("-n", 3, program(SLOW_WRITER), command=PATIENT)
    expected = [f"line {number} of {rank}" for number in range(40) for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


def test_the_beginning_of_a_line_is_not_kept_back():
    """Nor that of a line which never ends, as a progress bar's."""
    scripts = [r"while :; do printf '\rstep'; sleep 0.1; done", "printf begun; exec sleep 600"]
    bar, begun = (("sh", "-c", script) for script in scripts)
    hasty = timed(_SLOW_LINE=0.1)
    with started(*bar, command=hasty) as bar, started(*begun, command=hasty) as begun:
        for each in (bar, begun):
            await_(lambda each=each: unread(each), limit=60)
        assert os.read(bar.stdout.fileno(), 100).startswith(b"\rstep")
        assert os.read(begun.stdout.fileno(), 100) == b"begun"
        for each in (bar, begun):
            each.terminate()
            each.wait(20)


# On what it writes, and whether Python writes a line in one piece there.
ABOUT_STREAMS = """
import sys
from pathlib import Path
said = [f"{each.isatty()} {each.write_through}" for each in (sys.stdout, sys.stderr)]
print("".join(["begun, ", "ended"]))
Path(sys.argv[1]).write_text(", ".join(said))
"""
TERMINAL, COPIED = "True False", "False True"
COPIED_BUT_BUFFERED = "False False"  # stderr: by lines, which come whole and at once
AS_IT_IS = "True True"
UNBUFFERED, BUFFERED = {"PYTHONUNBUFFERED": "1"}, {"PYTHONUNBUFFERED": "0"}


def read_to_the_end(terminal):
    """What has come out of it, once nobody writes to it any more."""
    seen = b""
    with suppress(OSError):
        while more := os.read(terminal, 1000):
            seen += more
    return seen.decode()


@pytest.mark.parametrize(
    ("arguments", "terminals", "changes", "expected"),
    [
        pytest.param([], "both", {}, (TERMINAL, TERMINAL), id="a terminal"),
        pytest.param(["--tag-output"], "both", {}, (COPIED, COPIED), id="tagged"),
        pytest.param([], "both", UNBUFFERED, (COPIED, COPIED), id="a user who buffers nothing"),
        pytest.param([], "both", BUFFERED, (TERMINAL, TERMINAL), id="a user who says 0"),
        pytest.param([sys.executable, "-u"], "both", {}, (COPIED, COPIED), id="an option"),
        pytest.param(
            *([sys.executable, "-E"], "both", UNBUFFERED, (TERMINAL, TERMINAL)),
            id="an option to ignore what the user says",
        ),
        pytest.param(
            *(["env", sys.executable], "both", UNBUFFERED, (AS_IT_IS, AS_IT_IS)),
            id="another program than Python, which may buffer",
        ),
        pytest.param([], "stderr", {}, (COPIED, COPIED), id="stdout into a file"),
        pytest.param(
            *(["--no-tag-output"], "stderr", {}, (COPIED, COPIED)), id="into a file as it is"
        ),
        pytest.param([], "stdout", {}, (TERMINAL, COPIED_BUT_BUFFERED), id="stderr into a file"),
    ],
)
def test_lines_arrive_whole_on_a_terminal(
    program, tmp_path, arguments, terminals, changes, expected
):
    """Ranks have the terminal themselves only where Python writes each line in one piece."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0):
        with os.fdopen(theirs, "wb", buffering=0), open(tmp_path / "output", "w+") as file:
            streams = {
                name: theirs if terminals in (name, "both") else file
                for name in ("stdout", "stderr")
            }
            seen = tmp_path / "seen"
            command = ("-n", 1, *arguments, program(ABOUT_STREAMS), seen)
            assert run(*command, command=DEFAULT, options=streams, **changes).returncode == 0
            assert tuple(seen.read_text().split(", ")) == expected
            file.seek(0)
            said = {"file": file.read()}
        said["terminal"] = read_to_the_end(ours)
    tagged = "--tag-output" in arguments or (
        terminals == "stderr" and "--no-tag-output" not in arguments
    )
    line = "[0] begun, ended" if tagged else "begun, ended"
    if terminals == "stderr":
        assert said == {"file": f"{line}\n", "terminal": ""}
    else:
        assert said == {"file": "", "terminal": f"{line}\r\n"}


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("-u x.py", True),
        ("-Bu x.py", True),
        ("-uc print()", True),
        ("-X dev -W error -u x.py", True),
        ("-Xdev -Werror -um x", True),
        ("--check-hash-based-pycs never -u x.py", True),
        ("x.py -u", False),
        ("-m x -u", False),
        ("-mu", False),
        ("-Bc u -u", False),
        ("-X u x.py", False),
        ("-W -u x.py", False),
        ("-Xu x.py", False),
        ("-- -u", False),
        ("- -u", False),
        ("", False),
    ],
)
def test_options_of_the_interpreter_stand_before_the_program(words, unbuffered):
    assert ("u" in _python_options(words.split())) == unbuffered


def test_tagged_output_that_nobody_reads_ends_the_ranks():
    endless = ("sh", "-c", "while echo on and on; do :; done")
    with started("--tag-output", "-n", 2, *endless) as process:
        assert process.stdout.readline().endswith("] on and on\n")
        process.stdout.close()
        assert process.wait(20) != 0


# A rank leaves something behind that holds its output open, has left its process group, and so
# cannot be ended with it. Its pid is in the file once all that is so.
HELD_OPEN = """
setsid sh -c 'echo $$ >"$0"; exec sleep 40' "$0" &
until [ -s "$0" ]; do sleep 0.01; done
"""


def assert_outlived_by_holder(file):
    pid = int(file.read_text())
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


MUCH = """
import os
for _ in range(300):
    os.write(1, b"x" * 199 + b"\\n")
"""


def children(process):
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def unread(process):
    """Bytes in the pipe of its output."""
    count = array.array("i", [0])
    fcntl.ioctl(process.stdout, termios.FIONREAD, count)
    return count[0]


def test_output_that_is_read_late_is_not_lost(program):
    """More than the launcher's own pipe holds, and no more of a rank than that one's does: the
    ranks have long ended when it is read."""
    path = program(MUCH)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started("-n", 2, path, command=IMPATIENT, changes={"PYTHONUNBUFFERED": unbuffered})
            )
            for unbuffered in ("", "1")
        ]
        for process in processes:
            await_(lambda process=process: unread(process) and not children(process))
        time.sleep(0.5)  # longer than the launcher waits for what nobody writes
        said = [process.communicate(timeout=20) for process in processes]
    for process, (out, wrong) in zip(processes, said, strict=True):
        assert (process.returncode, wrong) == (0, "")
        assert out == ("x" * 199 + "\n") * 600


# On each stream, by turns.
LONG_LINES_ON_BOTH = """
import os
for _ in range(50):
    os.write(1, os.environ["RANK"].encode() * 20_000 + b"\\n")
    os.write(2, os.environ["RANK"].encode() * 20_000 + b"!\\n")
"""


@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
def test_long_lines_of_both_streams_arrive_whole_in_one_pipe(program, tagged):
    arguments = [*(["--tag-output"] if tagged else []), "-n", "3", program(LONG_LINES_ON_BOTH)]
    done = run(*arguments, command=PATIENT, options={"stderr": subprocess.STDOUT})
    expected = [
        (f"[{rank}] " if tagged else "") + str(rank) * 20_000 + end
        for rank in range(3)
        for end in ("", "!")
        for _ in range(50)
    ]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_file_that_is_opened_twice_keeps_what_comes_last(tmp_path):
    """``>log 2>log``: each stream has its place in the file, as without the launcher."""
    log = tmp_path / "log"
    # Streams are copied each by itself: the error waits until the line is there to be written over.
    script = 'echo a line; until [ -s "$0" ]; do sleep 0.01; done; echo an error >&2; exit 3'
    with log.open("wb") as out, log.open("r+b") as errors:
        run("-n", 1, "sh", "-c", script, log, options={"stdout": out, "stderr": errors})
    error, words = log.read_text().splitlines()
    assert error == "an error"
    assert "rank 0" in words  # the launcher's own, behind the rank's


def test_a_stop_ends_the_launcher_whose_output_nobody_reads():
    endless = ("sh", "-c", "while echo on and on; do :; done")
    with started("-n", 2, *endless, command=IMPATIENT) as process:
        await_(lambda: unread(process) >= 1 << 15)
        time.sleep(0.5)  # all pipes are full
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM


def test_a_last_line_without_an_end_goes_out_though_it_is_held_open(tmp_path):
    command = ("-n", 1, "sh", "-c", HELD_OPEN + "printf result")
    held = [tmp_path / "plain", tmp_path / "tagged"]
    commands = (*command, held[0]), ("--tag-output", *command, held[1])
    plain, tagged = run_together(*commands, command=IMPATIENT)
    for each in held:
        assert_outlived_by_holder(each)
    assert (plain.stdout, tagged.stdout) == ("result", "[0] result\n")


def test_output_that_cannot_be_written_is_no_success():
    with open("/dev/full", "w") as full:
        done = run("-n", 2, "echo", "result", options={"stdout": full})
    assert done.returncode == 1
    assert "pycollective run: output is lost: " in done.stderr


@pytest.mark.parametrize(("closed", "said"), [(">&-", ("", "")), ("2>&-", ("has one\n" * 2, ""))])
def test_a_launcher_without_a_stream_runs_ranks_that_have_one(closed, said):
    program = "import os; os.fstat(1); os.fstat(2); os.write(1, b'has one\\n')"
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND]
    done = run("-n", 2, sys.executable, "-c", program, command=shell)
    assert (done.returncode, done.stdout, done.stderr) == (0, *said)
