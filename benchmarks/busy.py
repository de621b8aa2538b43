"""How long do calls take beside processes that compute for ever, compared with the MPIs?

Two ranks call all_reduce, all_gather and broadcast back to back, beside 0, 1 and 2 such processes
(hogs), which run where the system puts them. Ranks are pinned to a core each (by `pycollective run
--pin`, and by each mpiexec's own way) or are not. All libraries' ranks start once and block in a
read while others are measured. They take turns of half a second, several rounds for each number of
hogs.

A mean is over all calls of all rounds, a median that of the rounds' medians, and the longest call
is the longest of any round, in time slices of this machine, which are measured first. Each is of
the slowest rank. A call of each library is verified before the first turn of a case and after the
last one. A library that is not installed is left out: MPICH and Open MPI (`python -m
benchmarks.mpi_environments`), Intel MPI (an environment .venv-impi from `requirements-impi.txt`).
Four minutes.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.driver import ROOT, Benchmark, Record, Run
from benchmarks.mpi_environments import PEERS
from pycollective.bench import libraries
from pycollective.bench.group import Group, Launch
from pycollective.bench.operations import Problem, find_operation
from pycollective.bench.ranks.__main__ import RankProcess, main
from pycollective.bench.ranks.case import Case
from pycollective.cores import in_turn, used_by_others

RANKS = 2
HOGS = (0, 1, 2)
OPERATIONS = ("all_reduce", "all_gather", "broadcast")
SIZES = (16 << 10, 1 << 20)
SECONDS = 0.45  # of a turn
SETTLE = 0.2  # seconds that hogs have to begin
OURS = "pycollective"
BOUND = 1.2  # of the best MPI's mean, beside hogs
LONGEST = 3  # time slices
_ANSWER_SECONDS = 60.0
VARIANT = "python"


@dataclass(frozen=True)
class Turn:
    """What the slowest of a group's ranks has measured in one turn: calls, and seconds."""

    calls: int
    total: float
    median: float
    longest: float

    @classmethod
    def of(cls, replies: Sequence[Mapping[str, Any]]) -> Turn:
        """Take the slowest of the ranks' own, which have made equally many calls."""
        (calls,) = {reply["calls"] for reply in replies}
        return cls(
            calls, *(max(each[name] for each in replies) for name in ("total", "median", "longest"))
        )


def summary(turns: Sequence[Turn]) -> dict[str, float]:
    """The mean, median and longest call of all turns, in seconds."""
    return {
        "mean": sum(turn.total for turn in turns) / sum(turn.calls for turn in turns),
        "median": statistics.median(turn.median for turn in turns),
        "longest": max(turn.longest for turn in turns),
        "calls": sum(turn.calls for turn in turns),
    }


class BusyRank(RankProcess):
    """A rank process that can call for some time, too."""

    def cores(self) -> dict[str, Any]:
        """Return where this rank may run."""
        return {"cores": sorted(os.sched_getaffinity(0))}

    def loop(self, path: str, seconds: float) -> dict[str, Any]:
        """Call back to back for so long; return how many calls it were, and their times.

        Rank 0 looks at the clock. It writes the number of the last call before it makes that call,
        and no rank can end an earlier call without rank 0, so all make as many.
        """
        prepared, clock = self._prepared[VARIANT], time.perf_counter
        call = prepared.call
        self._restore()
        descriptor = os.open(path, os.O_RDWR)
        took = []
        with mmap.mmap(descriptor, mmap.PAGESIZE) as shared, memoryview(shared).cast("q") as last:
            self._wait()
            start = now = clock()
            number = 0
            while number != last[0]:
                number += 1
                if self._rank == 0 and now - start >= seconds:
                    last[0] = number
                call()
                before, now = now, clock()
                took.append(now - before)
            prepared.finish()
        os.close(descriptor)
        return {
            "calls": number,
            "total": now - start,
            "median": statistics.median(took),
            "longest": max(took),
        }


def serve(run: Run) -> None:
    """What each rank runs: it obeys the driver until that says close."""
    rank = os.environ.get("PYCOLLECTIVE_RANK", "")  # of an MPI's ranks only the MPI knows
    main([run.options["library"], run.options["address"], rank, str(RANKS)], BusyRank)


def launch(library: str, pinned: bool) -> Launch:
    """How its ranks are started, each bound to a core, or free."""
    environment = libraries.ranks_environment([str(ROOT)])
    environment |= {"PYCOLLECTIVE_WIRE": "raw", "PYCOLLECTIVE_TOPOLOGY": ""}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if library == OURS:
        options = ["--pin"] if pinned else []
        start = [sys.executable, "-m", "pycollective", "run", "--no-tag-output", *options]
        python, settings, group = sys.executable, ["pycollective run", *options], "own"
    else:
        options = {
            "mpich": ["-bind-to", "core" if pinned else "none"],
            "openmpi": ["--bind-to", "core" if pinned else "none"],
            "impi": ["-genv", "I_MPI_PIN", "on" if pinned else "off"],
        }[library]
        programs = ROOT / f".venv-{library}" / "bin"
        environment["PATH"] = f"{programs}{os.pathsep}{environment.get('PATH', '')}"
        start = [str(programs / "mpiexec"), *options]
        python, settings, group = str(programs / "python"), ["mpiexec", *options], "mpi"
    program = ["-m", "benchmarks.busy", "--on-a-rank", "none", "--library", group]
    command = [*start, "-n", str(RANKS), python, *program, "--address", "{address}"]
    return Launch([command], environment, " ".join(settings))


def there() -> list[str]:
    """The libraries that are installed: ours, and MPIs with an environment of their own."""
    peers = [name for name in PEERS if (ROOT / f".venv-{name}/bin/mpiexec").exists()]
    return [OURS, *peers]


def named(library: str, pinned: bool) -> str:
    """The name of its column."""
    return f"{library}, pinned" if pinned else library


_HOG = "import os\nwhile os.getppid() == {}:\n for _ in range(1 << 20): pass"


class Hogs:
    """Processes that compute while they are let; stopped otherwise."""

    def __init__(self, most: int) -> None:
        program = _HOG.format(os.getpid())  # it ends with this process
        self._all = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(most)]
        self._signal(signal.SIGSTOP, most)

    def _signal(self, number: int, count: int) -> None:
        for each in self._all[:count]:
            each.send_signal(number)

    def close(self) -> None:
        """End them."""
        for each in self._all:
            each.kill()
            each.wait()

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        """Let so many compute for the length of the block."""
        self._signal(signal.SIGCONT, count)
        time.sleep(SETTLE)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP, count)


_CLOCK = """
import json, os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
clock, gaps, before = time.perf_counter, [], time.perf_counter()
end = before + float(sys.argv[2])
while before < end:
    now = clock()
    if now - before > 5e-4:
        gaps.append(now - before)
    before = now
print(json.dumps(gaps))
"""


def time_slice(seconds: float = 0.5) -> float:
    """How long one of two processes that compute on a core waits for the other: the median."""
    command = [sys.executable, "-c", _CLOCK, str(in_turn()[0]), str(seconds)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    gaps = [gap for each in both for gap in json.loads(each.communicate()[0])]
    return statistics.median(gaps)


class Stop:
    """The page in which ranks agree on their last call."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("pycollective-busy", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def reset(self) -> None:
        """No call is the last one yet."""
        os.pwrite(self._descriptor, (-1).to_bytes(8, "little", signed=True), 0)


def rows_of(found: Mapping[str, Mapping[str, float]], slice_: float, hogs: int) -> list[Record]:
    """A row for each library of one case: what was measured, and how it stands to the best MPI.

    `ratio` is its mean over the least mean of any MPI, pinned or not; None without one. `slices` is
    its longest call. `met` is whether ours keeps its bound beside hogs, None for all else.
    """
    peers = [each["mean"] for name, each in found.items() if not name.startswith(OURS)]
    rows = []
    for name, each in found.items():
        ratio = each["mean"] / min(peers) if peers else None
        slices = each["longest"] / slice_
        met = None
        if name.startswith(OURS) and hogs and ratio is not None:
            met = ratio <= BOUND
        rows.append({"library": name, **each, "ratio": ratio, "slices": slices, "met": met})
    return rows


def lines(case: Record) -> Iterator[str]:
    """The table of one case, a line a library."""
    size = f"{case['size'] >> 10} KiB"
    for row in case["rows"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:7.2f}x"
        met = {None: "", True: "  met", False: "  MISSED"}[row["met"]]
        if row["slices"] > LONGEST:
            met += f"  a call of more than {LONGEST} slices"
        yield (
            f"{case['hogs']} hogs {case['operation']:10} {size:>8} {row['library']:20} "
            f"{row['mean'] * 1e6:9.1f} us mean {row['median'] * 1e6:9.1f} median "
            f"{row['slices']:6.1f} slices at most {ratio}{met}"
        )


def verdicts(cases: Sequence[Record]) -> Iterator[str]:
    """How often ours kept its bound, pinned and not, and where it was farthest from it."""
    for name in (named(OURS, pinned) for pinned in (False, True)):
        judged = [
            (row["ratio"], f"{case['operation']} of {case['size'] >> 10} KiB, {case['hogs']} hogs")
            for case in cases
            for row in case["rows"]
            if row["library"] == name and row["met"] is not None
        ]
        if judged:
            kept = sum(ratio <= BOUND for ratio, _ in judged)
            worst, where = max(judged)
            yield (
                f"{name}: at most {BOUND} times the best MPI's mean in {kept} of {len(judged)} "
                f"cases beside hogs; worst {worst:.2f}, {where}"
            )


def measure(run: Run) -> Record:
    """Every case, all libraries in turn."""
    others, slice_ = used_by_others(), time_slice()
    cores = in_turn()
    print(f"a time slice takes {slice_ * 1e3:.1f} ms; other processes use {others:.1f} cores")
    if len(cores) < RANKS:
        raise SystemExit(f"{RANKS} ranks need {RANKS} cores, and there are {len(cores)}")
    cases: list[Record] = []
    with ExitStack() as stack:
        groups = {
            named(library, pinned): stack.enter_context(
                Group(named(library, pinned), RANKS, launch(library, pinned))
            )
            for library, pinned in itertools.product(there(), (False, True))
        }
        hogs, stop = Hogs(max(HOGS)), Stop()
        stack.callback(hogs.close)
        record: Record = {
            "time_slice": slice_,
            "used_by_others": others,
            "libraries": {
                name: {
                    **group.versions,
                    "settings": group.settings,
                    "cores": [each["cores"] for each in group.ask({"command": "cores"}, 60)],
                }
                for name, group in groups.items()
            },
        }
        for operation, size in itertools.product(OPERATIONS, SIZES):
            with problem(operation, size) as load:
                wrong = prepare(groups, load)
                for number in HOGS:
                    turns: dict[str, list[Turn]] = {name: [] for name in groups}
                    with hogs.running(number):
                        for _, (name, group) in itertools.product(
                            range(run.rounds), groups.items()
                        ):
                            stop.reset()
                            loop = {"command": "loop", "path": stop.path, "seconds": SECONDS}
                            turns[name].append(Turn.of(group.ask(loop, _ANSWER_SECONDS)))
                    found = {name: summary(each) for name, each in turns.items()}
                    case: Record = {"hogs": number, "operation": operation, "size": size}
                    case["rows"] = rows_of(found, slice_, number)
                    case["turns"] = {name: [*map(asdict, each)] for name, each in turns.items()}
                    cases.append(case)
                    print("\n".join(lines(case)), flush=True)
                for name, count in check(groups).items():
                    wrong[name] += count
            # What MPIs make in another order is no mistake; with two ranks there is none.
            case["wrong"] = sum(count for name, count in wrong.items() if name.startswith(OURS))
            case["differs"] = sum(wrong.values()) - case["wrong"]
    print("\n".join(verdicts(cases)), flush=True)
    return record | {"cases": cases}


@contextmanager
def problem(operation: str, size: int) -> Iterator[Record]:
    """Make the inputs and the answer; yield the message that has ranks take them."""
    what = find_operation(operation)
    op = "sum" if what.reduces else ""
    case = Case(operation, "float32", 4, op, 0, size)
    made = Problem(what, case, RANKS, 0)
    try:
        yield {"command": "load", "case": asdict(case), "path": made.path}
    finally:
        made.close()


def prepare(groups: Mapping[str, Group], load: Record) -> dict[str, int]:
    """Have every group take on the problem and warm up; return the wrong elements of a call."""
    for group in groups.values():
        group.ask(load, _ANSWER_SECONDS)
        group.ask({"command": "prepare", "variant": VARIANT}, _ANSWER_SECONDS)
        check({"": group})
    return check(groups)


def check(groups: Mapping[str, Group]) -> dict[str, int]:
    """The wrong elements that one call of each leaves."""
    message = {"command": "check", "variant": VARIANT}
    return {
        name: sum(each["wrong"] for each in group.ask(message, _ANSWER_SECONDS))
        for name, group in groups.items()
    }


if __name__ == "__main__":
    Benchmark(
        *("busy", __doc__, measure, serve),
        rounds=3,
        hidden={"library": "", "address": ""},
    ).main()
