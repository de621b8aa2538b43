"""The interleaved run: for each size, every library in turn, round after round.

A library's ranks are processes of their own, started once. While they wait for their turn they are
blocked in a read and cost nothing. Machines drift and neighbours come and go. Turns within
milliseconds let every library meet the same conditions, so a ratio of medians means something.

The loop is the same for all libraries. A block is a number of back-to-back calls, in place (but for
all-to-all), timed as one; before it each rank restores its inputs and waits at the start line. From
RESTORE_SIZE up a block is one call. Below, repeated sums grow to infinity within a block, which
changes no time. A block's time is that of the slowest rank. A call of each library is verified
before it is timed, and after the last round what the last one has left; of sums of sums, a block of
one call more.

Ranks are pinned. A turn is between two looks at the machine's phase (phase.py). One whose looks
disagree is repeated, and libraries are compared within each phase in which all have had a turn.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycollective.bench import libraries, machine
from pycollective.bench.group import Group
from pycollective.bench.libraries import OWN, STREAM, Library
from pycollective.bench.operations import Problem, bandwidths
from pycollective.bench.phase import (
    MIXED,
    PHASES,
    Turn,
    by_phase,
    look,
    phase_of,
    within_one,
)
from pycollective.bench.ranks.case import Case
from pycollective.bench.record import Limit, Record, Row, Timing
from pycollective.bench.settings import Settings
from pycollective.communicator import Communicator
from pycollective.cores import cores_of, used_by_others

RESTORE_SIZE = 1 << 20
_BLOCKS = 5  # a turn's blocks, where a block is many calls
_MAX_CALLS = 20_000
# A slow library's block: a call or two would time the start line's end more than the calls.
_MIN_CALLS = 10
_LONGEST_TURN = 0.25  # seconds, unless a block of a single call takes longer
_ANSWER_SECONDS = 300.0
# Of which a call more, in place, makes what is there already; "" where nothing is reduced.
_UNCHANGED_BY_MORE = ("", "min", "max", "band", "bor")

Progress = Callable[[str], None]


def measure(settings: Settings, progress: Progress = lambda line: None) -> Iterator[Record]:
    """Run the benchmark; yields the same, growing record before the first size and after each.

    Raises:
        ConfigurationError: something asked for is not installed, or a rank refuses it.
        RankLost: a rank process failed, died or fell silent.
    """
    others = used_by_others()  # before ranks of its own do
    chosen = [OWN, *settings.peers]
    # All of them first: what is missing should not be found out after minutes.
    launches = {
        library.group: libraries.launch(
            library.group,
            settings.ranks,
            settings.mpi_environments,
            settings.topology,
            settings.wire,
            settings.device,
        )
        for library in chosen
    }
    with ExitStack() as stack:
        groups: dict[str, Group] = {}
        for name, launch in launches.items():
            progress(f"starting {settings.ranks} ranks of {name}")
            groups[name] = stack.enter_context(Group(name, settings.ranks, launch))
        run = _Run(settings, chosen, groups, progress, others)
        yield run.record
        for size in settings.sizes:
            run.measure_size(size)
            yield run.record


def calls_a_block(seconds: float, round_seconds: float) -> int:
    """Return how many calls of `seconds` make a block of a turn of about `round_seconds`."""
    wanted = max(round_seconds / seconds, min(_MIN_CALLS * _BLOCKS, _LONGEST_TURN / seconds))
    return max(1, min(_MAX_CALLS, int(wanted / _BLOCKS)))


class _Turn(NamedTuple):
    """The result of a library's turn.

    Attributes:
        seconds: a call, of each block, of the rank that was slowest in it.
        sent: bytes that all ranks sent to other hosts, and unpacked; NaN where nobody counts.
        between: the cores, measured in the limit's turn.
    """

    seconds: list[float]
    sent: NDArray[np.float64]
    between: machine.CoreToCore | None = None


_Turns = list[Turn[_Turn]]


class _Run:
    def __init__(
        self,
        settings: Settings,
        chosen: list[Library],
        groups: dict[str, Group],
        progress: Progress,
        others: float,
    ) -> None:
        self._settings = settings
        self._libraries = chosen
        # What a host's memory allows says nothing about a GPU's.
        self._limits = [STREAM] if settings.device == "cpu" else []
        self._groups = groups
        self._progress = progress
        self._cores = cores_of(settings.ranks)
        self._between = [machine.measure_core_to_core(self._cores) for _ in range(5)]
        plain = {
            **asdict(settings),
            "sizes": list(settings.sizes),
            "peers": [peer.name for peer in settings.peers],
            "hosts": settings.hosts,
        }
        del plain["mpi_environments"]  # where things lie here means nothing elsewhere
        self.record = Record(
            command=[Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
            settings=plain,
            phases=dict.fromkeys((*PHASES, "repeated", "dropped"), 0),
            machine={
                **machine.describe_machine(),
                "pinned": self._cores,
                "used_by_others": others,
            },
            versions=machine.describe_versions(),
            libraries={
                library.name: {
                    "what": library.what,
                    "settings": groups[library.group].settings,
                    "versions": groups[library.group].versions,
                    "dtype": library.dtype or settings.dtype,
                }
                for library in chosen
            },
        )
        self._describe_cores()

    def measure_size(self, asked: int) -> None:
        """Measure every library on one size, and append the rows."""
        settings, operation = self._settings, self._settings.the_operation
        # The same bytes for all, so whole elements of each type.
        largest_item = max(settings.item_size(library) for library in self._libraries)
        size = operation.whole(asked, largest_item, settings.ranks)
        self._progress(f"{size} bytes: preparing")
        with ExitStack() as stack:
            problems: dict[str, Problem] = {}
            for library in {each.group: each for each in self._libraries}.values():
                case = Case(
                    operation=operation.name,
                    dtype=library.dtype or settings.dtype,
                    item_size=settings.item_size(library),
                    reduce_op=settings.reduce_op if operation.reduces else "",
                    root=settings.root if operation.rooted else 0,
                    size=size,
                    algorithm=settings.algorithm,
                    offsets=settings.offsets,
                )
                if case.dtype not in problems:
                    problem = Problem(operation, case, settings.ranks, settings.seed)
                    stack.callback(problem.close)
                    problems[case.dtype] = problem
                load = {"case": asdict(case), "path": problems[case.dtype].path}
                self._groups[library.group].ask({"command": "load", **load}, _ANSWER_SECONDS)
            self._measure_case(size)

    def _measure_case(self, size: int) -> None:
        settings = self._settings
        notes, wrong = self._prepare_all(size)
        able = [library for library in self._libraries if library.name not in notes]
        plans = {library.name: self._plan(library, size) for library in [*able, *self._limits]}
        turns: dict[str, _Turns] = {name: [] for name in plans}
        for number in range(settings.rounds):
            for library in [*able, *self._limits]:
                self._progress(
                    f"{size} bytes: round {number + 1} of {settings.rounds}, {library.name}"
                )
                run = partial(self._turn, library, *plans[library.name])
                turns[library.name].append(within_one(run, partial(look, self._cores)))
                if number == settings.rounds - 1 and library.name in wrong:
                    calls = plans[library.name][1]
                    wrong[library.name] = max(wrong[library.name], self._left(library, calls))
        limits = turns.pop(STREAM.name, [])
        sent = {
            name: np.mean([turn.result.sent for turn in each], axis=0) / math.prod(plans[name])
            for name, each in turns.items()
        }
        compared = by_phase(turns) or {MIXED: turns}
        for phase, within in compared.items():
            timings = {
                name: Timing.of([turn.result.seconds for turn in each], plans[name][1])
                for name, each in within.items()
            }
            self._append(size, phase, timings, notes, wrong, sent)
            of_limit = [turn.result for turn in limits if phase in (turn.phase, MIXED)]
            if of_limit:
                self._append_limit(size, phase, timings[OWN.name].median, of_limit)
        self._count(turns, compared)
        self._between += [turn.result.between for turn in limits if turn.result.between]
        self._describe_cores()

    def _turn(self, library: Library, blocks: int, calls: int) -> _Turn:
        turn = self._run(library, blocks, calls)
        if library is not STREAM:
            return turn
        return turn._replace(between=machine.measure_core_to_core(self._cores))

    def _count(self, turns: dict[str, _Turns], compared: dict[str, dict[str, _Turns]]) -> None:
        """Add a size's turns to what the record says of phases."""
        every = [turn for each in turns.values() for turn in each]
        kept = sum(len(each) for within in compared.values() for each in within.values())
        counts = self.record.phases
        for turn in every:
            counts[turn.phase] += 1
        counts["repeated"] += sum(turn.repeated for turn in every)
        counts["dropped"] += len(every) - kept

    def _describe_cores(self) -> None:
        """Keep the record's machine up to what was measured so far: virtual cores may move."""
        cores = machine.typical(self._between)
        self.record.machine.update(asdict(cores), phase=phase_of(cores.latency))

    def _prepare_all(self, size: int) -> tuple[dict[str, str], dict[str, int]]:
        """Prepare and verify every library; return why some cannot, and the wrong elements."""
        notes: dict[str, str] = {}
        wrong: dict[str, int] = {}
        for library in [*self._libraries, *self._limits]:
            group = self._groups[library.group]
            replies = group.ask({"command": "prepare", "variant": library.variant}, _ANSWER_SECONDS)
            refusal = next((r["unsupported"] for r in replies if "unsupported" in r), None)
            if refusal is not None:
                notes[library.name] = refusal
            elif library is not STREAM and self._settings.checks:
                self._progress(f"{size} bytes: verifying {library.name}")
                wrong[library.name] = max(
                    self._check(library) for _ in range(self._settings.checks)
                )
        return notes, wrong

    def _check(self, library: Library) -> int:
        """Return the wrong elements of one call, over all ranks."""
        return self._wrong("check", library)

    def _left(self, library: Library, calls: int) -> int:
        """Return the wrong elements that a turn has left; its blocks had `calls` calls."""
        settings = self._settings
        reduce_op = settings.reduce_op if settings.the_operation.reduces else ""
        if calls > 1 and reduce_op not in _UNCHANGED_BY_MORE:
            self._run(library, 1, 1)
        return self._wrong("left", library)

    def _wrong(self, command: str, library: Library) -> int:
        message = {"command": command, "variant": library.variant}
        replies = self._groups[library.group].ask(message, _ANSWER_SECONDS)
        return sum(reply["wrong"] for reply in replies)

    def _plan(self, library: Library, size: int) -> tuple[int, int]:
        """Warm the library up; return (blocks, calls a block) of a turn."""
        settings = self._settings
        one_by_one = size >= RESTORE_SIZE
        if settings.warmup:
            self._run(library, 1, settings.warmup)
        if settings.iterations:
            return (settings.iterations, 1) if one_by_one else (1, settings.iterations)
        # Two estimates: a first call after a pause tells little about the next thousand.
        calls = 1
        for _ in range(2):
            seconds = max(min(self._run(library, 2, calls).seconds), 1e-9)
            calls = calls_a_block(seconds, settings.round_seconds)
        if one_by_one:
            return max(2, min(50, int(settings.round_seconds / seconds))), 1
        return _BLOCKS, calls

    def _run(self, library: Library, blocks: int, calls: int) -> _Turn:
        replies = self._groups[library.group].ask(
            {"command": "run", "variant": library.variant, "blocks": blocks, "calls": calls},
            _ANSWER_SECONDS,
        )
        return _Turn(
            [max(block) for block in zip(*(r["seconds"] for r in replies), strict=True)],
            np.sum([r.get("sent", [math.nan] * 2) for r in replies], axis=0),
        )

    def _append(
        self,
        size: int,
        phase: str,
        timings: dict[str, Timing],
        notes: dict[str, str],
        wrong: dict[str, int],
        sent: dict[str, NDArray[np.float64]],
    ) -> None:
        settings, operation = self._settings, self._settings.the_operation
        own = timings[OWN.name].median
        for library in self._libraries:
            count = operation.count(size, settings.item_size(library), settings.ranks)
            timing = timings.get(library.name)
            if timing is None:
                row = Row(library.name, size, count, None, note=notes[library.name], phase=phase)
            else:
                algbw, busbw = bandwidths(operation, size, timing.median, settings.ranks)
                row = Row(
                    library.name,
                    size,
                    count,
                    timing,
                    algbw,
                    busbw,
                    wrong.get(library.name),
                    timing.median / own,
                    phase=phase,
                )
                packed, raw = map(float, sent[library.name])
                if settings.hosts > 1 and not math.isnan(raw):
                    row = replace(row, sent=packed, sent_raw=raw)
            self.record.rows.append(row)

    def _append_limit(self, size: int, phase: str, own: float, turns: list[_Turn]) -> None:
        """Append the limit in a phase, in which this library's median is `own` seconds."""
        operation, ranks = self._settings.the_operation, self._settings.ranks
        cores = machine.typical([turn.between for turn in turns if turn.between])
        median = statistics.median(statistics.median(turn.seconds) for turn in turns)
        stream = machine.stream_seconds(operation, median, ranks)
        copy = machine.copy_seconds(operation, size, ranks, cores)
        share = max(stream, copy) / own
        self.record.limits.append(Limit(size, stream, copy, share, cores.latency, phase))


def largest(communicator: Communicator, numbers: Sequence[float]) -> list[float]:
    """Return the largest of all ranks for each number; every rank must call it."""
    all_of = np.array(numbers, np.float64)
    communicator.all_reduce(all_of, op="max")
    found: list[float] = all_of.tolist()
    return found


def slowest(communicator: Communicator, number: float) -> float:
    """Return the largest of one number."""
    return largest(communicator, [number])[0]


def alike(communicator: Communicator, number: float) -> bool:
    """Return whether all ranks have the same; every rank must call it."""
    most, least = largest(communicator, [number, -number])
    return most == -least
