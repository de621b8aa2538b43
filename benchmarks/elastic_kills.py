"""Does a training whose ranks are killed end with the weights of one in which nobody was?

`elastic_train.py` on 4 ranks under `pycollective run --elastic`, in which ranks are killed with
SIGKILL at moments that a seeded generator draws; another process takes each one's place. The ranks
tell what they do, so each kind of moment occurs: in a backward, in the exchange, between steps,
while another joins, while ranks become fewer, while the state is sent. One rank that has joined is
always left alive. Then a quarter of it with gradients of 8 bits, whose residual is state.
At last on two hosts (simulated), where nobody takes another's place: three kills a run, without and
with exact packing between the hosts.

All logged losses and the final weights are compared with those of a run in which nobody was killed,
bit for bit. Afterwards it says what processes and sockets of the job are left, and how much more a
process that lived through changes has open at its end than at first, among as many ranks. After an
attempt to join that failed, as another was killed, that is a second segment with its thread and
peers, for a change or more; on rank 0 it is a connection to the store.

A *pause* is from a kill to the next step that all ranks have. It has three parts: until the first
survivor notices, which may be at the end of the leaf that it computes; until leaves are computed
again; and these leaves. A backward sleeps most of its time, as four ranks share two cores. What
computing only the lost leaves would take is calculated from the leaves that each rank had.

Usage: python -m benchmarks.elastic_kills [--kills N] [--steps N] [--cases NAME,...] [--out DIR]
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeAlias

from benchmarks.driver import ROOT, Benchmark, Record, Run

RANKS, LEAVES = 4, 8
LEAF_SECONDS = 0.05
TWO_HOSTS_RUNS, TWO_HOSTS_KILLS, TWO_HOSTS_STEPS = 4, 3, 70
_COMPRESSED_PART = 4  # of kills and steps, one
_SEED = 0
LAST_STEPS = 40  # without a kill, so that all who are about to join can

# As elastic_train.py has them, and how long to wait in each at most before the kill, in seconds.
MOMENTS = {
    "backward": LEAF_SECONDS,
    "exchange": 0.001,
    "between": 0.001,
    "joining": 0.01,
    "shrinking": 0.005,
    "state": 0.003,
}
_OF_ONE = ("backward", "exchange", "between")  # a process; the others are of all
_PARTS = ("pause", "noticed", "change", "leaves", "lost_leaves")
HELD = ("descriptors", "mappings", "threads")
_ALL_MOMENTS = ("forward", *MOMENTS, "waiting")


class JobFailure(Exception):
    """A job has failed, or ended otherwise than it should."""


@dataclass(frozen=True)
class Event:
    """What a process has told.

    Attributes:
        when: seconds of CLOCK_MONOTONIC.
        process: its number.
        moment: that begins then, or "held" or "end".
        more: behind it.
    """

    when: float
    process: int
    moment: str
    more: tuple[str, ...]


@dataclass(frozen=True)
class Training:
    """What a job trains, and where; `elastic_train.py` has the options."""

    steps: int
    leaf_seconds: float = LEAF_SECONDS
    compress: bool = False
    ranks: int = RANKS
    topology: str = ""
    wire: str = ""
    seconds: float = 1800.0  # that it may take

    @property
    def replaced(self) -> bool:
        """Whether others take the places of ranks that are killed."""
        return not self.topology


Show: TypeAlias = Callable[[Event], None]


class Job:
    """A training under `pycollective run --elastic`, and what its processes tell.

    Attributes:
        events: all so far.
        kills: of processes, each with its time.
        members: processes that live and have the state.
        others: processes that live and wait for it.
        doing: the last event of each process.
        step: the last that all ranks have.
    """

    def __init__(self, folder: Path, training: Training, show: Show | None) -> None:
        self.training, self._show = training, show
        pipe = folder / "pipe"
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # so it never ends
        run = [sys.executable, "-m", "pycollective", "run", "--no-tag-output"]
        run += ["-n", str(training.ranks), "--elastic", "--max-restarts", "1000"]
        run += ["-m", "benchmarks.elastic_train", "--steps", str(training.steps)]
        run += ["--leaf-seconds", str(training.leaf_seconds), "--pipe", str(pipe)]
        run += ["--data", str(folder / "digits.pt"), *["--compress"] * training.compress]
        here = {"PYCOLLECTIVE_TOPOLOGY": training.topology, "PYCOLLECTIVE_WIRE": training.wire}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {name: value for name, value in here.items() if value}
        self.launcher = subprocess.Popen(run, env=environment, cwd=ROOT)
        self._deadline = time.monotonic() + training.seconds
        self._text = b""
        self._unread: list[Event] = []
        self.events: list[Event] = []
        self.kills: list[tuple[float, int]] = []
        self.members: set[int] = set()
        self.others: set[int] = set()
        self.doing: dict[int, Event] = {}
        self.step = -1

    def __iter__(self) -> Iterator[Event]:
        """Each event as it comes, until the job has ended."""
        while True:
            ended = self.launcher.poll() is not None
            if not self._unread:
                self.look(0 if ended else 0.1)
            if self._unread:
                event = self._unread.pop(0)
                if self._show is not None:
                    self._show(event)
                yield event
            elif ended:
                return
            elif time.monotonic() > self._deadline:
                raise JobFailure("the job takes too long")

    def look(self, seconds: float = 0.0) -> None:
        """Take what was told, which may come within so many seconds."""
        if not select.select([self._pipe], [], [], seconds)[0]:
            return
        *lines, self._text = (self._text + os.read(self._pipe, 1 << 20)).split(b"\n")
        for line in lines:
            when, process, moment, *more = line.decode().split()
            event = Event(int(when) / 1e9, int(process), moment, tuple(more))
            self._unread.append(event)
            self.events.append(event)
            self.doing[event.process] = event
            self._note(event)

    def _note(self, event: Event) -> None:
        if any(event.process == process for _, process in self.kills):
            return
        if event.moment in ("forward", "between"):
            self.members.add(event.process)
            self.others.discard(event.process)
        elif event.moment == "waiting":
            self.others.add(event.process)
        if event.moment == "between":
            self.step = max(self.step, int(event.more[0]))
        elif event.moment == "end":
            self.members.discard(event.process)

    def kill(self, process: int) -> None:
        """One that lives; another that has the state is left."""
        self.kills.append((time.monotonic(), process))
        os.kill(process, signal.SIGKILL)
        self.members.discard(process)
        self.others.discard(process)
        assert self.members

    def close(self) -> None:
        """End what runs."""
        self.launcher.terminate()
        self.launcher.wait()
        os.close(self._pipe)


@contextmanager
def started(training: Training, show: Show | None = None) -> Iterator[Job]:
    """A job that is ended behind the block."""
    import torch

    from benchmarks.digits import Digits

    digits = Digits.load()
    with tempfile.TemporaryDirectory(prefix="pycollective-kills-") as folder:
        torch.save((digits.train_images, digits.train_labels), Path(folder) / "digits.pt")
        job = Job(Path(folder), training, show)
        try:
            yield job
        finally:
            job.close()


@dataclass(frozen=True)
class End:
    """What a job has learnt: digests of all logged losses and of the weights, of all ranks."""

    losses: str
    weights: frozenset[str]

    @classmethod
    def of(cls, job: Job, training: Training) -> End:
        """Of a job that has ended.

        Raises:
            JobFailure: it has failed, or ranks differ in what a step has logged.
        """
        if status := job.launcher.wait():
            raise JobFailure(f"the job has ended with {status}")
        logged: dict[int, set[str]] = defaultdict(set)
        for event in job.events:
            if event.moment == "between":
                logged[int(event.more[0])].add(event.more[1])
        unlike = [step for step, losses in logged.items() if len(losses) > 1]
        if unlike or len(logged) != training.steps:
            raise JobFailure(f"{len(logged)} steps were logged; ranks differ in {unlike}")
        text = "".join(loss for _, losses in sorted(logged.items()) for loss in losses)
        ends = (event.more[0] for event in job.events if event.moment == "end")
        return cls(hashlib.sha256(text.encode()).hexdigest(), frozenset(ends))


def undisturbed(training: Training) -> End:
    """What a training learns in which nobody is killed."""
    with started(training) as job:
        for _ in job:
            pass
        return End.of(job, training)


def disturbed(
    training: Training, kills: int, seed: int = _SEED, show: Show | None = None
) -> Record:
    """Kill ranks of a training; return what came of it.

    Args:
        training: of the job.
        kills: how many; fewer where ranks have no time to join.
        seed: of what draws ranks and moments.
        show: called with each event.
    """
    rng = random.Random(seed)
    moments = [each for each in MOMENTS if training.replaced or each not in ("joining", "state")]
    plan = [each for _ in range(kills) for each in rng.sample(moments, len(moments))][:kills]
    every = min(training.steps - LAST_STEPS, 0.8 * training.steps) / max(kills, 1)
    with started(training, show) as job:
        for event in job:
            moment, done = event.moment, len(job.kills)
            # What comes because of a kill may come before the next is due.
            due = (done - (moment not in _OF_ONE)) * every
            if done >= kills or job.step < due or job.doing[event.process] is not event:
                continue
            whole = len(job.members) == training.ranks or not training.replaced
            of_one = next((each for each in plan if each in _OF_ONE), _OF_ONE[0] if whole else "")
            if moment not in _OF_ONE:
                if moment not in plan:
                    continue
            elif moment != of_one or event.process != rng.choice(sorted(job.members)):
                continue
            time.sleep(rng.uniform(0, MOMENTS[moment]))
            job.look()
            able = job.others | (job.members if len(job.members) > 1 else set())
            if moment in _OF_ONE:
                able &= {event.process}
            if able:
                plan.remove(moment if moment in plan else plan[0])
                job.kill(rng.choice(sorted(able)))
        end = End.of(job, training)
        return {
            "steps": training.steps,
            "losses": end.losses,
            "weights": sorted(end.weights),
            "left": _left(job),
            **_held(job),
            "rows": [*_pauses(job)],
        }


def _moment_of(job: Job, when: float, victim: int) -> str:
    """What the ranks did at a kill: what is of all ranks before what is of this one."""
    dead = {process for at, process in job.kills if at < when}
    doing = {
        event.process: event.moment
        for event in job.events
        if event.when <= when and event.moment in _ALL_MOMENTS and event.process not in dead
    }
    for moment in ("state", "shrinking", "joining"):
        if moment in doing.values():
            return moment
    return "joining" if doing[victim] == "waiting" else doing[victim]


def _pauses(job: Job) -> Iterator[Record]:
    """Of each kill: its moment, its pause, and what that consists of, in seconds."""
    for when, victim in job.kills:
        before = max((int(e.more[0]) for e in _all(job, "between") if e.when <= when), default=-1)
        ends = (e.when for e in _all(job, "between") if e.when > when and int(e.more[0]) > before)
        end = next(ends)
        moment = _moment_of(job, when, victim)
        row: Record = {"moment": moment, "pause": end - when}
        noticed = next((e.when for e in _all(job, "shrinking") if when < e.when < end), None)
        if noticed is not None:
            begun = next((e.when for e in _all(job, "forward") if noticed < e.when < end), end)
            row |= {"noticed": noticed - when, "change": begun - noticed, "leaves": end - begun}
            if moment in ("forward", "backward", "exchange"):
                dead = {process for at, process in job.kills if at < when}
                ranks = len({e.process for e in _all(job, "forward") if e.when < when} - dead)
                lost = math.ceil(math.ceil(LEAVES / ranks) / (ranks - 1))
                row["lost_leaves"] = row["leaves"] * lost / math.ceil(LEAVES / (ranks - 1))
        yield row


def _all(job: Job, moment: str) -> list[Event]:
    return [event for event in job.events if event.moment == moment]


def _spread(seconds: Sequence[float]) -> Record:
    return {"median": median(seconds), "worst": max(seconds)} if seconds else {}


def _left(job: Job) -> list[str]:
    """What is left of a job that has ended: processes of its ranks' groups, and sockets."""
    ranks = {event.process for event in job.events}
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, _, group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(group) in ranks:
                left.append(f"process {stat.parent.name}")
    own = f"pycollective-run-{job.launcher.pid}-"
    left += [line for line in Path("/proc/net/unix").read_text().splitlines() if own in line]
    return left


def _held(job: Job) -> Record:
    """How much more processes have open at their end than at first among as many ranks."""
    said: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for event in _all(job, "held"):
        said[event.process].append(tuple(map(int, event.more)))
    growth = [0, 0, 0]
    for each in said.values():
        first = {ranks: counts for ranks, *counts in reversed(each)}
        last = {ranks: counts for ranks, *counts in each}
        for ranks in first:
            grown = [now - then for now, then in zip(last[ranks], first[ranks], strict=True)]
            growth = [max(pair) for pair in zip(growth, grown, strict=True)]
    return {
        "processes": len(said),
        "most_changes_of_one": max(map(len, said.values())) - 1,
        "grown": dict(zip(HELD, growth, strict=True)),
    }


CASES: Mapping[str, Training] = {
    "one host": Training(0),
    "8-bit gradients": Training(0, compress=True),
    "two hosts": Training(TWO_HOSTS_STEPS, topology="2x2"),
    "two hosts packed": Training(TWO_HOSTS_STEPS, topology="2x2", wire="exact"),
}


def measure(run: Run) -> Record:
    """The cases that are asked for, each beside an undisturbed run."""
    steps, kills = int(run.options["steps"]), int(run.options["kills"])
    record: Record = {"ranks": RANKS, "leaves": LEAVES, "leaf_seconds": LEAF_SECONDS}
    for name in run.options["cases"].split(","):
        case, runs, many = CASES[name], TWO_HOSTS_RUNS, TWO_HOSTS_KILLS
        if case.replaced:
            part = _COMPRESSED_PART if case.compress else 1
            case, runs, many = replace(case, steps=steps // part), 1, kills // part
        found = [disturbed(case, many, seed) for seed in range(runs)]
        plain = undisturbed(replace(case, leaf_seconds=0.0))
        record[name] = summary(found, plain)
        print(f"{name}: {said(record[name])}", flush=True)
    return record


def summary(runs: Sequence[Record], plain: End) -> Record:
    """Of all runs of one case; `plain` is the end of the one in which nobody was killed."""
    rows = [row for each in runs for row in each["rows"]]
    ends = {(each["losses"], *each["weights"]) for each in runs}
    return {
        "runs": len(runs),
        "steps": runs[0]["steps"],
        "kills": len(rows),
        "processes": sum(each["processes"] for each in runs),
        "weights": sorted(plain.weights),
        "losses": plain.losses,
        "wrong": len(ends - {(plain.losses, *sorted(plain.weights))}),
        "left": [line for each in runs for line in each["left"]],
        "most_changes_of_one": max(each["most_changes_of_one"] for each in runs),
        "grown": {what: max(each["grown"][what] for each in runs) for what in HELD},
        "moments": {
            moment: {"kills": len(its), **_spread(its)}
            for moment in _ALL_MOMENTS
            if (its := [row["pause"] for row in rows if row["moment"] == moment])
        },
        **{part: _spread([row[part] for row in rows if part in row]) for part in _PARTS},
    }


def said(found: Record) -> str:
    """A line on a case."""
    moments = ", ".join(f"{name} {of['kills']}" for name, of in found["moments"].items())
    times = ", ".join(
        f"{part} {found[part]['median'] * 1e3:.0f} (at most {found[part]['worst'] * 1e3:.0f})"
        for part in _PARTS
        if found[part]
    )
    return (
        f"{found['kills']} kills ({moments}), {found['wrong']} other ends, left {found['left']}, "
        f"grown {found['grown']} in a process of {found['most_changes_of_one']} changes; "
        f"ms: {times}"
    )


if __name__ == "__main__":
    options = {"kills": "100", "steps": "1000", "cases": ",".join(CASES)}
    Benchmark("elastic_kills", __doc__, measure, rounds=0, options=options).main()
