"""`pycollective run --elastic`: who is replaced, when, and how the job ends."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

from pycollective import cores
from pycollective.launch.restart_policy import Fate, Process, Restarts
from tests.launch.test_launcher import (
    COMMAND,
    alive,
    assert_ended,
    program,
    run,
    started,
    timed,
)
from tests.launch.test_logs import logs

__all__ = ["program"]

# For a rank's program: `joins` is what a successful `init()` does for the launcher. Ranks wait for
# each other by keys of the same store.
RANK = """
import os, signal, sys, time
from pathlib import Path
from pycollective.bootstrap.store import StoreClient, job_secret, joined_key

store = StoreClient(os.environ["PYCOLLECTIVE_STORE"], job_secret(), timeout=20)
rank, size = (int(os.environ["PYCOLLECTIVE_" + name]) for name in ("RANK", "SIZE"))
newcomer = os.environ.get("PYCOLLECTIVE_JOINS") == "1"

def tells(key):
    store.set(key, b"")

def awaits(*keys):
    for key in keys:
        store.get(key)

def joins():
    tells(joined_key(os.getpgrp()))
    tells(f"joined {rank} {int(newcomer)}")

def job_forms():
    if not newcomer:
        joins()
        awaits(*(f"joined {each} 0" for each in range(size)))

def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def stays_alone():
    # The launcher has seen the end of what is no longer its child.
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    while children.read_text().split() != [str(os.getpid())]:
        time.sleep(0.005)

def says(text):
    os.write(1, f"{text}\\n".encode())

job_forms()
"""


def elastic(*arguments, command=COMMAND, **changes):
    return run("--elastic", *arguments, command=command, **changes)


def without_pids(text):
    """Its lines without the numbers of processes, and the numbers."""
    lines = re.sub(r"\bpid \d+", "pid P", text).splitlines()
    return lines, [int(pid) for pid in re.findall(r"\bpid (\d+)", text)]


REPLACED = """
says(f"{rank} of {size} {os.environ['RANK']} {sorted(os.sched_getaffinity(0))}")
if rank == 0 and newcomer:
    says(sys.stdin.read())
    joins()
elif rank == 0:
    is_killed()
else:
    awaits("joined 0 1")
    says(f"{os.environ['PYCOLLECTIVE_ELASTIC']} {'PYCOLLECTIVE_JOINS' in os.environ}")
"""


def test_another_process_takes_the_place_of_one_that_was_killed(program, tmp_path):
    turn = cores.in_turn()
    pin, own = (["--pin"], turn[:2]) if len(turn) > 1 else ([], [turn, turn])
    places = [f"{rank} of 2 {rank} {[own[rank]] if pin else own[rank]}\n" for rank in range(2)]
    folder = tmp_path / "logs"
    done = elastic("-n", 2, *pin, "--tag-output", "--log-dir", folder, program(RANK + REPLACED))
    said, pids = without_pids(done.stderr)
    assert said == [
        "pycollective run: rank 0 of 2 (pid P) was ended by SIGKILL; pid P takes its place "
        "(restart 1 of 20)"
    ]
    assert done.returncode == 0
    assert len({*pids}) == 2
    # The replacement has the rest of the standard input.
    rest = "this is not for the other ranks\n\n"
    assert {name: text for name, text in logs(folder).items() if text} == {
        "0/stdout.log": places[0],
        "0/stdout.1.log": places[0] + rest,
        "1/stdout.log": f"{places[1]}1 False\n",
    }
    assert done.stdout.count(f"[0] {places[0]}") == 2


# Rank 0 ends with the process of rank 1 that joins; or without others, after what is named.
FAILS_TO_JOIN = """
if rank == 1 and not newcomer:
    tells("killed")
    is_killed()
elif rank == 1:
    tells("tried")
    if store.add("tries", 1) < 3:
        sys.exit(3)
    joins()
elif len(sys.argv) > 1:
    awaits(sys.argv[1])
    stays_alone()
else:
    awaits("joined 1 1")
"""


def test_a_newcomer_that_fails_is_tried_again_later(program):
    done = elastic("-n", 2, program(RANK + FAILS_TO_JOIN))
    rank, failed = "pycollective run: rank 1 of 2 (pid P)", "ended with status 3"
    then = "pid P takes its place (restart {} of 20)"
    said, _ = without_pids(done.stderr)
    assert said == [
        f"{rank} was ended by SIGKILL; {then.format(1)}",
        f"{rank} {failed} before it had joined; another process starts in 0.1 s",
        f"{rank} {failed}; {then.format(2)}",
        f"{rank} {failed} before it had joined; another process starts in 0.2 s",
        f"{rank} {failed}; {then.format(3)}",
    ]
    assert done.returncode == 0


def test_when_no_restart_is_left_the_others_go_on(program):
    path = program(RANK + FAILS_TO_JOIN)
    done = elastic("-n", 2, "--max-restarts", 1, path, "tried")
    said, _ = without_pids(done.stderr)
    assert said[1:] == [
        "pycollective run: rank 1 of 2 (pid P) ended with status 3; its place stays empty"
    ]
    assert done.returncode == 0


def test_a_failure_before_the_ranks_have_met_ends_the_job():
    script = 'echo $$; [ "$RANK" = 1 ] && exit 7; exec sleep 60'
    done = elastic("-n", 3, "sh", "-c", script, command=timed(_NOTICE=0.1))
    said, _ = without_pids(done.stderr)
    assert said == ["pycollective run: rank 1 of 3 (pid P) ended with status 7; the job has ended"]
    assert done.returncode == 7
    assert_ended(map(int, done.stdout.split()))


FEWER_AND_FEWER = """
if rank == 1:
    sys.exit(5)
if sys.argv[1:] == ["sleeps"]:
    time.sleep(60)
stays_alone()
sys.exit(6)
"""


@pytest.mark.parametrize(
    ("fewest", "arguments", "others", "reason"),
    [
        (2, ["sleeps"], [], "1 of at least 2 ranks are left"),
        (1, [], [(0, 6)], "no rank that has joined is left"),
    ],
)
def test_too_few_ranks_end_the_job(program, fewest, arguments, others, reason):
    options = ["-n", 2, "--min", fewest, "--max-restarts", 0]
    command = timed(_NOTICE=0.1, _SAVING=0.1)
    done = elastic(*options, program(RANK + FEWER_AND_FEWER), *arguments, command=command)
    said, pids = without_pids(done.stderr)
    named = "pycollective run: rank {} of 2 (pid P) ended with status {}; "
    assert said == [
        *(named.format(*each) + "its place stays empty" for each in [(1, 5), *others]),
        f"{named.format(1, 5)}the job has ended: {reason}",
    ]
    assert done.returncode == 5
    assert_ended(pids)


TOO_LATE = """
if newcomer:
    tells("runs")
    time.sleep(20)
elif rank == 1:
    is_killed()
awaits("runs")
"""


def test_who_has_not_joined_when_the_others_end_is_ended(program):
    done = elastic("-n", 3, program(RANK + TOO_LATE))
    said, pids = without_pids(done.stderr)
    assert said[1:] == [
        "pycollective run: rank 1 of 3 (pid P) had not joined when the others ended: it is ended"
    ]
    assert done.returncode == 0
    assert_ended(pids)


STAYS = """
if newcomer:
    joins()
says(os.getpid())
if rank == 1 and not newcomer:
    is_killed()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["told to end", "killed"],
)
def test_nobody_outlives_the_launcher_or_is_replaced_then(program, number, status):
    with started("--elastic", "-n", 2, program(RANK + STAYS)) as process:
        pids = [int(process.stdout.readline()) for _ in range(3)]
        assert "takes its place (restart 1 of 20)" in process.stderr.readline()
        # The launcher sees together that another has ended and that it is to end itself.
        process.send_signal(signal.SIGSTOP)
        another = next(filter(alive, pids))
        os.kill(another, signal.SIGKILL)
        assert_ended([another])
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == status
        assert_ended(pids)
        assert process.communicate() == ("", "")


CANNOT_START = """
if rank == 1 and not newcomer:
    os.rename(sys.argv[0], sys.argv[0] + ".gone")
    is_killed()
elif rank == 1:
    joins()
awaits("joined 1 1")
"""


def test_a_process_that_cannot_be_started_is_tried_again(program):
    path = program(f"#!{sys.executable}\n{RANK}{CANNOT_START}")
    path = path.rename(path.with_suffix(""))
    path.chmod(0o755)
    with started("--elastic", "-n", 2, path) as process:
        (said,), _ = without_pids(process.stderr.readline())
        assert "was ended by SIGKILL; nothing could be started in its place: " in said
        os.rename(f"{path}.gone", path)
        _, said = process.communicate(timeout=40)
        assert "takes its place (restart " in said.splitlines()[-1]
        assert process.returncode == 0


def test_on_several_hosts_nobody_is_replaced_and_it_is_said(program):
    path = program(RANK + FAILS_TO_JOIN)
    done = elastic("-n", 2, path, "killed", PYCOLLECTIVE_TOPOLOGY="2x1")
    said, _ = without_pids(done.stderr)
    assert said == [
        "pycollective run: no process takes the place of another, since PYCOLLECTIVE_TOPOLOGY=2x1 "
        "has several hosts: the ranks that are left go on",
        "pycollective run: rank 1 of 2 (pid P) was ended by SIGKILL; its place stays empty",
    ]
    assert done.returncode == 0


def test_a_launch_within_an_elastic_one_is_one_of_its_own():
    names = ("PYCOLLECTIVE_ELASTIC", "PYCOLLECTIVE_JOINS")
    done = run("env", **dict.fromkeys(names, "1"))
    assert not any(name in done.stdout for name in names)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--min", 2], "--min is for a job that --elastic lets go on: add it"),
        (["--max-restarts", 2], "--max-restarts is for a job that --elastic lets go on: add it"),
        (["--elastic", "--min", 0], "--min 0 is not 1 to 2, the number of ranks"),
        (["--elastic", "--min", 3], "--min 3 is not 1 to 2, the number of ranks"),
        (["--elastic", "--max-restarts", -1], "--max-restarts -1 is not 0 or more"),
    ],
)
def test_options_that_say_nothing_are_refused(pycollective, options, said):
    done = pycollective("run", "-n", 2, *options, "true")
    assert (done.returncode, done.stderr) == (2, f"pycollective run: {said}\n")


class Job:
    """Three ranks of an elastic job, all of which have joined, and what becomes of them."""

    def __init__(self, fewest=1, limit=100):
        self.restarts = Restarts(fewest, limit)
        self.now = 0.0
        self.alive = {rank: Process(rank, rank, True) for rank in range(3)}

    def ends(self, *codes):
        """Each rank of these ends with its code; the fate of the job."""
        ended = []
        for rank, code in codes:
            here = self.alive.pop(rank)
            ended.append(Process(rank, here.pid, here.joined, code))
        self.restarts.settle(ended, list(self.alive.values()), self.now)
        return self.restarts.fate

    def starts(self, rank, joins):
        """The time until the rank has another process, which joins or does not."""
        waited = self.restarts.planned[rank] - self.now
        assert self.restarts.take(self.now + waited - 0.01) is None
        self.now += waited
        assert self.restarts.take(self.now) == rank
        self.alive[rank] = Process(rank, 10 + self.restarts.started.total(), joins)
        return round(waited, 6)


def test_delays_double_up_to_a_limit_until_one_has_joined():
    job = Job()
    for again in range(2):
        job.ends((1, -9))
        waits = [job.starts(1, joins=False)]
        for _ in range(11):
            job.ends((1, 1))
            waits.append(job.starts(1, joins=False))
        assert waits == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30], again
        job.ends((1, 1))
        job.starts(1, joins=True)


def test_the_limit_is_for_all_ranks_together_and_counts_what_is_planned():
    job = Job(limit=2)
    job.ends((0, 1), (1, 1))
    assert job.starts(0, joins=True) == job.starts(1, joins=True) == 0
    assert job.ends((1, 1)) is Fate.GOES_ON
    assert not job.restarts.planned
    job = Job(limit=1)
    job.ends((0, 1), (1, 1))
    assert list(job.restarts.planned) == [0]


def test_who_has_ended_well_or_may_still_join_is_not_missed():
    job = Job(fewest=3, limit=1)
    assert job.ends((0, 0)) is Fate.GOES_ON
    assert job.ends((1, -9)) is Fate.GOES_ON
    assert job.starts(1, joins=False) == 0
    assert job.ends((1, 1)) is Fate.FAILED
    assert job.restarts.reason == "2 of at least 3 ranks are left"


def test_a_death_that_another_process_has_made_good_is_not_blamed():
    job = Job()
    job.ends((1, -9))
    job.starts(1, joins=True)
    job.ends((2, 2))
    job.starts(2, joins=False)
    assert job.ends((0, 4), (1, 5)) is Fate.FAILED
    blamed = [(each.rank, each.code) for each in job.restarts.failures]
    assert blamed == [(2, 2), (0, 4), (1, 5)]
    assert job.ends((2, 7)) is Fate.FAILED
    assert not job.restarts.planned


def test_ranks_that_die_together_are_not_replaced():
    assert Job().ends((0, -9), (1, -9), (2, -9)) is Fate.FAILED


def test_whoever_is_left_decides_how_the_job_ends():
    job = Job()
    job.ends((0, -9), (1, 0))
    job.starts(0, joins=False)
    assert job.ends((2, 0)) is Fate.DONE
    job = Job()
    job.ends((0, 0), (1, 0))
    assert job.ends((2, -11)) is Fate.FAILED
