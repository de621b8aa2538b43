"""What each rank finds in a combination, and how it learns what the others found.

A rank compares its results bit for bit and hashes them. The ranks tell each other by the
all-gather, which is itself under test. So that a wrong one hides nothing, a report carries a digest
of itself, of the combination's number and of its rank: a report that is not the sender's, or of
another combination, is seen to be damaged. A rank's own report comes back to it in the same way. So
a rank that has found something wrong ends with that, whatever it hears from the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pycollective import _core
from pycollective.communicator import Communicator
from pycollective.config import VERSION
from pycollective.errors import named
from pycollective.schedule import OPERATIONS
from pycollective.verify.cases import Array, Case, Check, Selection, counts

_LAYOUT = np.dtype([("elements", "<i8"), ("wrong", "<i8"), ("digest", "u1", 32), ("story", "S240")])
_SEAL = hashlib.sha256().digest_size


class Tally:
    """Compares results with what they must be, bit for bit, and hashes them.

    Attributes:
        elements: compared so far.
        wrong: of them.
        story: of the first call with wrong ones, in words; empty where there is none.
    """

    def __init__(self) -> None:
        self.elements = 0
        self.wrong = 0
        self.story = ""
        self._hash = hashlib.sha256()

    def add(self, check: Check, call: str) -> None:
        """Compare and hash an array of a call, which `describe` has put into words."""
        got, want = _words(check.got), _words(check.want)
        if check.result:
            self._hash.update(got.data)
        self.elements += len(want)
        different = np.flatnonzero(got != want)
        self.wrong += len(different)
        if len(different) and not self.story:
            first = int(different[0])
            self.story = (
                f"{len(different):,} of {len(want):,} elements"
                f"{'' if check.result else ' of the input changed'} in {call}; "
                f"element {first} is {got[first]:#x}, not {want[first]:#x}"
            )

    def digest(self) -> bytes:
        """Return the SHA-256 of all results so far."""
        return self._hash.digest()


def describe(operation: str, case: Case) -> str:
    """Return a call in words, without its operation, algorithm and dtype."""
    what = OPERATIONS[operation]
    parts = [f"{case.reduce_op} of {case.count:,}" if what.reduces else f"{case.count:,} elements"]
    if case.uneven:
        parts.append("uneven shards")
    if what.rooted:
        parts.append(f"root {case.root}")
    if operation != "broadcast":  # which has one array
        parts.append("in place" if case.in_place else "out of place")
    return ", ".join([*parts, "asynchronous" if case.asynchronous else "synchronous"])


def _words(array: Array) -> Array:
    """Return the bits, as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


@dataclass(frozen=True)
class Report:
    """A rank's findings; attributes as in `Tally`."""

    elements: int
    wrong: int
    digest: bytes
    story: str


def gather(communicator: Communicator, number: int, tally: Tally) -> list[Report | None]:
    """Return each rank's report of a combination, in rank order; None where it came damaged.

    Args:
        communicator: all its ranks must call this.
        number: of the combination.
        tally: this rank's.
    """
    row = np.zeros((), _LAYOUT)
    row["elements"], row["wrong"] = tally.elements, tally.wrong
    row["digest"] = np.frombuffer(tally.digest(), np.uint8)
    row["story"] = tally.story.encode()
    own = row.tobytes()
    sent = np.frombuffer(own + _seal(own, number, communicator.rank), np.uint8)
    received = np.zeros((communicator.size, len(sent)), np.uint8)
    communicator.all_gather(received.reshape(-1), sent)
    return [_opened(each.tobytes(), number, rank) for rank, each in enumerate(received)]


def _seal(content: bytes, number: int, rank: int) -> bytes:
    return hashlib.sha256(content + f"combination {number} on rank {rank}".encode()).digest()


def _opened(received: bytes, number: int, rank: int) -> Report | None:
    content = received[:-_SEAL]
    if received[-_SEAL:] != _seal(content, number, rank):
        return None
    row = np.frombuffer(content, _LAYOUT)[0]
    return Report(
        int(row["elements"]), int(row["wrong"]), row["digest"].tobytes(), row["story"].decode()
    )


_DIGITS = 32  # of a digest: half of them are more than enough
_WIDTHS = (-6, -14, -15, -20, 6, 12, 9)  # at least what the longest names take, and a space


@dataclass(frozen=True)
class Line:
    """What the ranks found in a combination.

    Attributes:
        operation: collective.
        algorithm: by which it was done.
        dtype: element type.
        calls: of each rank.
        reports: each rank's; None where it came damaged.
    """

    operation: str
    algorithm: str
    dtype: str
    calls: int
    reports: Sequence[Report | None]

    @property
    def wrong(self) -> int:
        """Wrong elements over all ranks, as far as their reports came through."""
        return sum(report.wrong for report in self.reports if report)

    @property
    def right(self) -> bool:
        """Whether every rank has said that all was right."""
        return all(report is not None and not report.wrong for report in self.reports)


def header(selection: Selection, ranks: int, place: str = "") -> Iterator[str]:
    """Yield what is checked, and where.

    Args:
        selection: what was asked for.
        ranks: how many.
        place: where rank 0's arrays lie; empty for its own memory.
    """
    yield (
        f"# pycollective {VERSION} verify: {_number(ranks, 'rank')}, {_core.simd_level()}, "
        f"{selection.name or 'the whole table'}"
    )
    if ranks == 1:
        yield "#   one rank exchanges nothing: pycollective verify -n 4 starts four"
    if place:
        yield f"#   arrays in GPU memory, each host's GPUs in turn: rank 0 on {place}"
    if selection.left_out:
        yield f"#   for {', '.join(selection.left_out)}: pip install ml_dtypes"


def how_far(done: int, whole: int, what: str) -> str:
    """Return how many of all combinations are done, with a bar, and which one is next."""
    return f"[{'#' * (16 * done // whole):16}] {done}/{whole} {what}"


def columns(selection: Selection, ranks: int) -> Iterator[str]:
    """Yield what each line is about, and what its columns mean."""
    numbers = " ".join(f"{count:,}" for count in counts(ranks, selection.quick))
    yield f"# calls of {numbers} elements, with each reduce op that the dtype has;"
    yield "#   in place and out of place, synchronous and asynchronous, in turn"
    yield "# compared: elements over all ranks; #wrong: those with other bits than the contract's"
    yield "#"
    yield _columns("#", "dtype", "operation", "algorithm", "calls", "compared", "#wrong")


def rows(line: Line) -> Iterator[str]:
    """Yield a combination, and below it what was wrong on which rank."""
    elements = sum(report.elements for report in line.reports if report)
    yield _columns(
        "ok" if line.right else "WRONG",
        line.dtype,
        line.operation,
        line.algorithm,
        f"{line.calls:,}",
        f"{elements:,}",
        f"{line.wrong:,}",
    )
    for rank, report in enumerate(line.reports):
        if report is None:
            yield f"       rank {rank}: its report came damaged through all_gather"
        elif report.wrong:
            yield f"       rank {rank}: {report.wrong:,} wrong; first {report.story}"


def footer(
    selection: Selection,
    ranks: int,
    lines: Sequence[Line],
    digests: Mapping[str, str],
    seconds: float,
) -> Iterator[str]:
    """Yield how it ended, and the digest.

    Args:
        selection: what was asked for.
        ranks: how many.
        lines: all of them.
        digests: of each algorithm of which all is known, in hexadecimal digits.
        seconds: how long it took.
    """
    bad = [line for line in lines if not line.right]
    calls = sum(line.calls for line in lines)
    yield (
        f"# {_number(len(lines), 'combination')}, {_number(calls, 'call')} a rank, "
        f"{seconds:.1f} s: " + (f"{len(bad):,} WRONG" if bad else "all right")
    )
    for line in bad:
        found = []
        if line.wrong:
            where = [rank for rank, report in enumerate(line.reports) if report and report.wrong]
            found.append(f"{_number(line.wrong, 'element')} on {named(where)}")
        if lost := [rank for rank, report in enumerate(line.reports) if report is None]:
            found.append(f"no report from {named(lost)}")
        yield (f"# WRONG: {line.dtype} {line.operation} by {line.algorithm}: {', '.join(found)}")
    covered = f", {selection.name}" if selection.name else ""
    by_digest: dict[str, list[str]] = {}
    for algorithm, digest in digests.items():
        by_digest.setdefault(digest, []).append(algorithm)
    for digest, algorithms in by_digest.items():
        who = ", ".join(algorithms)
        if len(by_digest) == 1 and len(algorithms) > 1:
            who = f"the same for {_number(len(algorithms), 'algorithm')}"
        yield f"digest of {_number(ranks, 'rank')}{covered}: {digest[:_DIGITS]} ({who})"
    if not digests:
        yield f"no digest of {_number(ranks, 'rank')}{covered}: reports are missing"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _columns(*texts: str) -> str:
    """A negative width is one to the left."""
    cells = [
        f"{text:<{-width}}" if width < 0 else f"{text:>{width}}"
        for text, width in zip(texts, _WIDTHS, strict=True)
    ]
    return " ".join(cells).rstrip()
