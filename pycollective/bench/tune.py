"""Measures every algorithm for `pycollective bench --tune`: a table for ``algorithm="auto"``.

Runs in the ranks themselves, inside any launch. For each size the algorithms take turns, round
after round, so that all meet the same conditions. A turn is a number of back-to-back calls; its
time is that of the slowest rank, and the median of the turns in one phase of the machine counts
(phase.py): of near, where each algorithm had a turn in it. Each turn begins with the same numbers.
They look like data, since they decide how well messages pack between hosts, and all algorithms must
make the same bits of them, the first the reference's. The last call of a turn begins with these
numbers again, so that its result can be compared.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import reference
from pycollective.bench.machine import describe_machine, describe_versions
from pycollective.bench.measurement import slowest
from pycollective.bench.operations import PERIOD, find_operation
from pycollective.bench.phase import MIXED, Turn, by_phase, look_together, within_one
from pycollective.bench.settings import format_size
from pycollective.bootstrap import init as bootstrap
from pycollective.communicator import Communicator
from pycollective.cores import cores_together
from pycollective.dtypes import TRAITS, numpy_type
from pycollective.errors import ConfigurationError
from pycollective.planning.tuning_table import ELEMENTS, read_table, write_table
from pycollective.schedule import ALGORITHMS, Topology, algorithms_for
from pycollective.schedule.select import Measurement, Table

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
ROUNDS = 11
_TURN_SECONDS = 0.02
_MOST_CALLS = 1000
# Elements of all ranks' inputs that each rank makes to compare with: all, up to 8 ranks.
_MOST_COMPARED = 8 * PERIOD


@dataclass(frozen=True)
class Plan:
    """What to measure. Raises `ConfigurationError` if that is impossible.

    Attributes:
        operations: names, of `OPERATIONS`.
        sizes: bytes of a rank's input or output, whichever is larger; rounded down to equal shards.
        dtype: name of the element type.
        rounds: turns of each algorithm at each size.
    """

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    rounds: int = ROUNDS

    @classmethod
    def of(cls, operation: str, sizes: Iterable[int], dtype: str, rounds: int) -> Plan:
        """Return a plan for one operation, or for ``all``."""
        if operation not in ("all", *OPERATIONS):
            raise ConfigurationError(
                f"no tuning for {operation!r}; there are all, {', '.join(OPERATIONS)}"
            )
        chosen = OPERATIONS if operation == "all" else (operation,)
        return cls(chosen, tuple(sizes), dtype, rounds)

    def __post_init__(self) -> None:
        numpy_type(self.dtype)
        if self.rounds < 1:
            raise ConfigurationError("--rounds must be at least 1")

    def sizes_of(self, operation: str, ranks: int) -> list[int]:
        """Return the sizes for so many ranks, ascending.

        Raises:
            ConfigurationError: one is no whole elements, or too little for so many.
        """
        item = numpy_type(self.dtype).itemsize
        what = find_operation(operation)
        return sorted({what.whole(size, item, ranks) for size in self.sizes})

    def check(self, ranks: int) -> None:
        """Raise `ConfigurationError` for what so many ranks cannot do."""
        for operation in self.operations:
            self.sizes_of(operation, ranks)


def check_file(path: str | os.PathLike[str]) -> None:
    """Refuse, before minutes are spent, what no table could be added to.

    Raises:
        ConfigurationError: the file is there and is no tuning table, or has no folder to be in.
    """
    if not Path(path).absolute().parent.is_dir():
        raise ConfigurationError(f"{path}: its folder is not there")
    _entries(path)


def _entries(path: str | os.PathLike[str]) -> tuple[Measurement, ...]:
    return read_table(path).entries if Path(path).exists() else ()


def _add_to(path: str | os.PathLike[str], made: list[Measurement]) -> None:
    """Write a table of what the file holds and what was made; the same cases are replaced."""
    entries = {_key(entry): entry for entry in (*_entries(path), *made)}
    machine = {**describe_machine(), **describe_versions()}
    try:
        write_table(path, Table(machine, tuple(entries.values())))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from error


def _key(entry: Measurement) -> tuple[str, str, str, int]:
    return entry.operation, entry.topology, entry.dtype, entry.bytes


def tune(
    plan: Plan, path: str | os.PathLike[str], topology: str, show: Callable[[str], None]
) -> None:
    """Join the launch, measure, and write the table on rank 0; every rank must call it.

    Args:
        plan: the same on all ranks.
        path: of the file, which rank 0 writes; it keeps what it holds for other cases.
        topology: as in `pycollective.init`; empty for the hosts there are.
        show: called on rank 0, with each line as soon as it is known.

    Raises:
        ConfigurationError: the launch cannot be joined, or the file not be read or written.
        CollectiveError: a rank was lost.
    """
    check_file(path)
    made: list[Measurement] = []
    with bootstrap.init(topology=topology or None, tuning="") as communicator:
        show_here = show if communicator.rank == 0 else (lambda line: None)
        for text in _header(communicator, plan):
            show_here(text)
        for operation in plan.operations:
            for size in plan.sizes_of(operation, communicator.size):
                phase, entry = measure(communicator, operation, size, plan.dtype, plan.rounds)
                made.append(entry)
                show_here(f"{_row(entry)} {phase}")
        if communicator.rank == 0:
            _add_to(path, made)
        show_here(f"# {len(made)} sizes measured, in {path}: pycollective.init(tuning=) reads it")
        communicator.barrier()  # the file is there on return, for all that share the folder


def measure(
    communicator: Communicator,
    operation: str,
    size: int,
    dtype: str,
    rounds: int,
) -> tuple[str, Measurement]:
    """Return a phase, and the medians of `turns` in it, for a table; every rank must call it.

    It is the first, near before far, in which every algorithm had a turn; mixed, of all turns, if
    there is none.
    """
    took = turns(communicator, operation, size, dtype, rounds)
    phase, within = next(iter((by_phase(took) or {MIXED: took}).items()))
    medians = {
        name: statistics.median(turn.result for turn in each) for name, each in within.items()
    }
    where = str(Topology(communicator.host_of))
    return phase, Measurement(operation, where, dtype, size, medians, ELEMENTS[dtype])


def turns(
    communicator: Communicator,
    operation: str,
    size: int,
    dtype: str,
    rounds: int,
) -> dict[str, list[Turn[float]]]:
    """Time an operation by every algorithm that can do it; every rank must call it.

    What the last call of a turn leaves is looked at, so it has the inputs again, and its time
    begins as that of the calls before: when all ranks are there.

    Args:
        communicator: of the ranks to measure.
        operation: one of `OPERATIONS`.
        size: bytes of a rank's input or output, whichever is larger.
        dtype: name of the element type.
        rounds: turns of each algorithm.

    Returns:
        Seconds a call of each turn, by algorithm, of the rank that was slowest in it.

    Raises:
        AssertionError: two algorithms made different bits of the same inputs, or the first made
            others than the reference, in a first call or in the last one of a turn.
    """
    names = algorithms_for(operation)
    whole, calls = _calls(communicator, operation, size, dtype, names)
    inputs = whole.copy()
    repeats = {}
    made: NDArray[Any] | None = None

    def as_the_first(name: str) -> None:
        assert made is not None
        if not np.array_equal(whole.view("u1"), made.view("u1")):
            raise AssertionError(f"{operation} of {size} bytes: {name} makes other bits")

    for name, call in calls.items():
        whole[:] = inputs
        call()  # makes the program
        if made is None:
            made = whole.copy()
            _as_the_reference(communicator, operation, whole, dtype, name)
        as_the_first(name)
        communicator.barrier()
        once = max(1e-9, slowest(communicator, _timed(call, 2) / 2))
        repeats[name] = max(1, min(_MOST_CALLS, int(_TURN_SECONDS / once)))

    def turn(name: str) -> float:
        took = 0.0
        for count in (repeats[name] - 1, 1):
            whole[:] = inputs
            communicator.barrier()
            took += _timed(calls[name], count)
        as_the_first(name)
        return max(1e-9, slowest(communicator, took / repeats[name]))

    looks = partial(look_together, communicator, cores_together(communicator))
    taken: dict[str, list[Turn[float]]] = {name: [] for name in names}
    for number in range(rounds):
        # Each begins in turn: who follows a slow one always has the cold cache.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken[name].append(within_one(partial(turn, name), looks))
    return taken


def _timed(call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of so many calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - start


def _calls(
    communicator: Communicator, operation: str, size: int, dtype: str, names: Sequence[str]
) -> tuple[NDArray[Any], dict[str, Callable[[], Any]]]:
    """Return the buffer with this rank's inputs, and the calls, in place."""
    element = numpy_type(dtype)
    count = size // element.itemsize
    whole: NDArray[Any] = np.resize(_numbers(communicator.rank, min(count, PERIOD), dtype), count)
    length = len(whole) // communicator.size
    own = whole[communicator.rank * length : (communicator.rank + 1) * length]
    arguments = {
        "all_reduce": (whole,),
        "reduce_scatter": (own, whole),
        "all_gather": (whole, own),
    }[operation]
    method = getattr(communicator, operation)
    if find_operation(operation).reduces:
        method = partial(method, op=_reduce_op(dtype))
    return whole, {name: partial(method, *arguments, algorithm=name) for name in names}


def _numbers(rank: int, count: int, dtype: str) -> NDArray[Any]:
    """Return a rank's first inputs."""
    numbers: NDArray[Any] = np.random.default_rng(rank).standard_normal(count)
    return numbers.astype(numpy_type(dtype))


def _reduce_op(dtype: str) -> str:
    """Return avg if the type has it: sums of sums of sums would end in infinities."""
    return "avg" if "avg" in TRAITS[dtype].reduce_ops else "sum"


def _as_the_reference(
    communicator: Communicator, operation: str, whole: NDArray[Any], dtype: str, name: str
) -> None:
    """Raise unless a first call's result is the reference's; with many ranks, of some elements."""
    ranks, count = communicator.size, len(whole)
    period, length = min(count, PERIOD), len(whole) // communicator.size
    known = min(period, _MOST_COMPARED // ranks)
    leaves = [_numbers(rank, known, dtype) for rank in range(ranks)]
    if operation == "all_gather":
        parts = [(rank * length, length, leaf) for rank, leaf in enumerate(leaves)]
    else:
        answer = reference.reduce(leaves, _reduce_op(dtype))
        own = (communicator.rank * length, length)
        parts = [(*((0, count) if operation == "all_reduce" else own), answer)]
    for begin, size, wanted in parts:
        for at, place, run in _runs(begin, begin + size, period, known):
            if whole[at : at + run].tobytes() != wanted[place : place + run].tobytes():
                raise AssertionError(
                    f"{operation} of {whole.nbytes} bytes: {name} makes other bits than the "
                    "reference"
                )


def _runs(at: int, end: int, period: int, known: int) -> Iterator[tuple[int, int, int]]:
    """Yield the stretches of [at, end) whose place in the period is below `known`.

    No array of indices: of 64 MiB of bytes that were half a gigabyte a rank.
    """
    while at < end:
        place = at % period
        if place < known:
            run = min(known - place, end - at)
            yield at, place, run
            at += run
        else:
            at += period - place


def _header(communicator: Communicator, plan: Plan) -> list[str]:
    where = Topology(communicator.host_of)
    return [
        f"# {communicator.size} ranks, topology {where}, {plan.dtype}: microseconds, the median of "
        f"{plan.rounds} rounds of the slowest rank; * the choice",
        f"{'operation':14} {'size':>9} "
        + " ".join(f"{name:>18}" for name in (*ALGORITHMS, "phase")),
    ]


def _row(entry: Measurement) -> str:
    cells = [
        f"{entry.seconds[name] * 1e6:.1f}{'*' if name == entry.fastest else ' '}"
        if name in entry.seconds
        else "- "
        for name in ALGORITHMS
    ]
    return f"{entry.operation:14} {format_size(entry.bytes):>9} " + " ".join(
        f"{cell:>18}" for cell in cells
    )
