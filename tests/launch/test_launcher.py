"""`pycollective run`: who is blamed, who is ended, what ranks are given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pycollective import ConfigurationError, cores
from pycollective.launch import launcher
from tests.harness import ROOT

# An option for its opposite may follow.
COMMAND = [sys.executable, "-m", "pycollective", "run", "--no-tag-output"]

TIMED = """
import json, sys
from pycollective.launch import launcher, output
for name, seconds in json.loads(sys.argv.pop(1)).items():
    (where,) = [each for each in (launcher, output) if hasattr(each, name)]
    setattr(where, name, seconds)
from pycollective.cli import main
main()
"""


def timed(command="run", **times):
    """The command, with these times of its launcher and of what copies its ranks' output."""
    untagged = ["--no-tag-output"] if command == "run" else []
    return [sys.executable, "-c", TIMED, json.dumps(times), command, *untagged]


def environment(**changes):
    """The test's own without what a launcher would give: tests may run under one."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    names = (*names, "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "PYTHONPATH": str(ROOT), **changes}


@contextmanager
def started(*arguments, command=COMMAND, changes=(), **options):
    """The command's process, whose output is text from pipes unless the options say otherwise."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment(**dict(changes)),
        **{**pipes, "text": True, **options},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments, command=COMMAND, options=(), **changes):
    return run_together(arguments, command=command, options=options, **changes)[0]


def run_together(*commands, command=COMMAND, options=(), **changes):
    """Each of the commands, at once: they wait more than they work."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(*each, command=command, changes=changes, **dict(options)))
            for each in commands
        ]
        said = [
            each.communicate("this is not for the other ranks\n", timeout=60) for each in processes
        ]
    return [
        subprocess.CompletedProcess(each.args, each.returncode, *texts)
        for each, texts in zip(processes, said, strict=True)
    ]


@pytest.fixture
def program(tmp_path):
    """Writes a program and gives its path."""

    def write(text):
        path = tmp_path / "prog.py"
        path.write_text(text)
        return path

    return write


def alive(pid):
    """Whether the process runs; what has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def assert_ended(pids):
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


def test_a_launcher_whose_parent_blocks_sigchld_sees_its_ranks_end():
    blocks = {"preexec_fn": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})}
    assert run("-n", 2, "true", options=blocks).returncode == 0


def test_the_rank_that_failed_is_named_and_the_others_are_ended():
    ends = [("exit 7", 7, "ended with status 7"), ("kill -9 $$", 137, "was ended by SIGKILL")]
    script = 'echo $$; if [ "$RANK" = 1 ]; then sleep 0.2; {}; fi; exec sleep 60'
    start = time.monotonic()
    programs = (("-n", 3, "sh", "-c", script.format(act)) for act, _, _ in ends)
    ended = run_together(*programs, command=timed(_NOTICE=0.3))
    assert time.monotonic() - start < 50  # else they sleep to their end
    for done, (_, status, how) in zip(ended, ends, strict=True):
        assert done.returncode == status
        pids = [int(line) for line in done.stdout.split()]
        assert len(pids) == 3
        assert_ended(pids)
        (said,) = done.stderr.splitlines()
        assert said.startswith("pycollective run: rank 1 of 3 (pid ")
        assert int(said.partition("(pid ")[2].partition(")")[0]) in pids
        assert f") {how}; " in said


# For a rank's program. The launcher has also seen the end of what is no longer its child.
OUTLIVE = """
import os, time
from pathlib import Path

def outlive_the_others():
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    until = time.monotonic() + 20
    while len(children.read_text().split()) > 1:
        assert time.monotonic() < until, "the others have not ended"
        time.sleep(0.01)
"""

FOLLOWER = """
import atexit
import pycollective as pc
# The culprit ends after the ranks that fail because of it: this runs after pycollective's.
if os.environ["RANK"] == "2":
    atexit.register(outlive_the_others)
comm = pc.init(timeout=20)
comm.barrier()
if comm.rank == 2:
    raise ValueError("the culprit")
comm.barrier()
"""


def test_a_rank_that_fails_because_of_another_is_not_blamed(program):
    done = run("-n", 3, program(OUTLIVE + FOLLOWER), command=timed(_NOTICE=30))
    assert done.returncode == 1
    assert done.stderr.count("CollectiveAborted: ") == 2  # the others fail, and fail first
    assert "pycollective run: rank 2 of 3 (pid " in done.stderr.splitlines()[-1]


HANGING = """
import os, time
import pycollective as pc
comm = pc.init(timeout=20)
comm.timeout = 0.3
if comm.rank == 1:
    time.sleep(60)
comm.barrier()
"""


def test_a_rank_that_the_launcher_had_to_end_is_not_said_to_have_failed(program):
    done = run("-n", 2, program(HANGING), command=timed(_NOTICE=0.3))
    assert done.returncode == 1
    assert "CollectiveTimeout: " in done.stderr
    assert "rank(s) 1 have not called it" in done.stderr
    assert "pycollective run: rank 0 of 2 (pid " in done.stderr.splitlines()[-1]


def test_ranks_that_ignore_sigterm_are_killed(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(launcher, "_NOTICE", 0.2)
    monkeypatch.setattr(launcher, "_GRACE", 0.4)
    script = (
        'trap "" TERM; echo $$; if [ "$RANK" = 0 ]; then touch "$0"; exec sleep 60; fi; '
        'until [ -e "$0" ]; do sleep 0.01; done; exit 5'
    )
    start = time.monotonic()
    assert launcher.launch(["sh", "-c", script, str(tmp_path / "ignores")], 2) == 5
    took = time.monotonic() - start
    said, blamed = capfd.readouterr()
    assert 0.6 < took < 50  # SIGTERM came first, and had its time
    pids = [int(line) for line in said.split()]
    assert len(pids) == 2
    assert_ended(pids)
    assert "rank 1 of 2" in blamed


def test_ranks_have_time_to_say_what_they_saw(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(launcher, "_NOTICE", 20)
    # The launcher has seen the first end once its pid is nobody's; it would end the other then.
    script = """
        if [ "$RANK" = 0 ]; then echo $$ >"$0"; exit 3; fi
        until [ -s "$0" ] && ! kill -0 $(cat "$0") 2>/dev/null; do sleep 0.01; done
        sleep 0.3; echo last words; exit 4
    """
    assert launcher.launch(["sh", "-c", script, str(tmp_path / "pid")], 2) == 3  # the first
    assert capfd.readouterr().out == "last words\n"


def test_grandchildren_are_ended():
    done = run("-n", 2, "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")
    assert done.returncode == 0
    pids = [int(line) for line in done.stdout.split()]
    assert len(pids) == 2
    assert_ended(pids)


def test_arguments_are_the_programs_own(pycollective, program):
    path = program("import sys\nprint(sys.argv[1:])\n")
    run = "run", "--no-tag-output"
    done = pycollective(*run, "-n1", path, "-n", "5", "--tag-output", "--", "--help")
    assert done.stdout == "['-n', '5', '--tag-output', '--', '--help']\n"
    assert pycollective(*run, path, "x").stdout == "['x']\n"  # one rank unless told otherwise
    assert pycollective(*run, "--ranks=1", "--", path, "x").stdout == "['x']\n"


def test_a_module(pycollective, monkeypatch, tmp_path):
    (tmp_path / "a_module.py").write_text(
        "import sys\nsys.stdout.write(f'{__name__} {sys.argv[1:]}\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    done = pycollective("run", "--no-tag-output", "-n", 2, "-m", "a_module", "-n", "3")
    assert done.stdout == "__main__ ['-n', '3']\n" * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-program"], "no-such-program is neither a Python file nor an executable"),
        (["no/such/file.py"], "there is no file no/such/file.py"),
        (["-n", 0, "true"], "0 ranks are not 1 to 64, the most on one host"),
        (["-n", 65, "true"], "65 ranks are not 1 to 64, the most on one host"),
        ([], "no program given"),
        *(
            (
                [*before, *behind],
                f"{behind[0]} stands behind the program, which gets it as its own: put it before "
                f"{before[0]}. If it is meant for the program, put -n 1 before {before[0]}",
            )
            for before in (["true"], ["-m", "train", "--epochs", 3], ["sh", "-c", "true"])
            for behind in (["-n", 2], ["-n2"], ["--ranks", 2], ["--ranks=2"])
        ),
        (
            ["--tag", "true"],
            "unrecognized arguments: --tag; see pycollective run --help",
        ),
        (
            ["-n", "many", "true"],
            "argument -n/--ranks: invalid int value: 'many'; see pycollective run --help",
        ),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line(pycollective, arguments, said):
    done = pycollective("run", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"pycollective run: {said}\n"


def test_a_program_that_cannot_be_executed_is_said_in_one_line(pycollective, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = pycollective("run", "-n", 2, script)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"pycollective run: {script} cannot be started: ")


READER = """
import os, sys
sys.stdout.write(os.environ["RANK"] + repr(sys.stdin.read()) + "\\n")
"""


def test_rank_0_has_the_standard_input_and_the_others_an_empty_one(program):
    path = program(READER)
    said = run("-n", 2, path).stdout
    assert sorted(said.splitlines()) == ["0'this is not for the other ranks\\n'", "1''"]
    closed = run("-n", 2, path, command=["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND])
    assert (sorted(closed.stdout.splitlines()), closed.stderr) == (["0''", "1''"], "")


ENVIRONMENT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
found = {name: os.environ.get(name) for name in (*names, "OMP_NUM_THREADS")}
sys.stdout.write(json.dumps(found) + "\\n")
"""


def test_what_ranks_find_in_their_environment(program):
    path = program(ENVIRONMENT)
    done = run("-n", 2, path)
    found = sorted(map(json.loads, done.stdout.splitlines()), key=lambda each: each["RANK"])
    cores = len(os.sched_getaffinity(0))
    for rank, each in enumerate(found):
        assert each["RANK"] == each["LOCAL_RANK"] == str(rank)
        assert each["WORLD_SIZE"] == each["LOCAL_WORLD_SIZE"] == "2"
        assert each["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(each["MASTER_PORT"]) < 65536
        assert each["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]


PINNED = """
import json, os, subprocess, sys, threading
found = {}
def look(where):
    found[where] = sorted(os.sched_getaffinity(0))
look("main")
thread = threading.Thread(target=look, args=["thread"])
thread.start()
thread.join()
child = "import os; print(*sorted(os.sched_getaffinity(0)))"
out = subprocess.run([sys.executable, "-S", "-c", child], capture_output=True).stdout
found["child"] = list(map(int, out.split()))
found["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
sys.stdout.write(os.environ["RANK"] + json.dumps(found) + "\\n")
"""


def test_pinned_ranks_have_a_core_each(program):
    turn = cores.in_turn()
    path, ranks = program(PINNED), min(2, len(turn))
    done = run("-n", ranks, "--pin", path)
    found = {int(line[0]): json.loads(line[1:]) for line in done.stdout.splitlines()}
    assert sorted(found) == list(range(ranks)), done.stderr
    for rank, each in found.items():
        assert each.pop("OMP_NUM_THREADS") == "1"
        assert each == {name: [turn[rank]] for name in ("main", "thread", "child")}
    assert cores.in_turn() == turn  # the launcher's own cores


def test_more_ranks_than_cores_are_not_pinned(pycollective):
    many = len(cores.in_turn())
    done = pycollective("run", "--pin", "-n", many + 1, "true")
    assert (done.returncode, done.stdout) == (2, "")
    said = f"--pin gives each rank a core of its own, and there are {many} for {many + 1} ranks"
    assert done.stderr.startswith(f"pycollective run: {said}: ")
    assert done.stderr.count("\n") == 1


def test_a_core_that_has_gone_is_said(monkeypatch):
    monkeypatch.setattr(launcher, "one_each", lambda ranks: [1023] * ranks)
    with pytest.raises(ConfigurationError, match="true cannot be started: "):
        launcher.launch(["true"], 1, pin=True)


def test_the_users_own_settings_come_first(pycollective, monkeypatch, program):
    monkeypatch.setenv("OMP_NUM_THREADS", "13")
    monkeypatch.setenv("MASTER_PORT", "1234")
    done = pycollective("run", "--no-tag-output", program(ENVIRONMENT))
    found = json.loads(done.stdout)
    assert found["OMP_NUM_THREADS"] == "13"
    assert found["MASTER_PORT"] == "1234"


def test_a_rank_that_has_just_ended_was_not_stopped():
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert launcher._Rank(0, process).was_stopped_by() == 0
