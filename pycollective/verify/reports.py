"""What each rank finds in a combination, and how it learns what the others found.

A rank compares its results bit for bit and hashes them. The ranks tell each other by the
all-gather, which is itself under test. So that a wrong one hides nothing, a report carries a digest
of itself, of the combination's number and of its rank: a report that is not the sender's, or of
another combination, is seen to be damaged. A rank's own report comes back to it in the same way. So
a rank that has found something wrong ends with that, whatever it hears from the others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from pycollective.communicator import Communicator
from pycollective.schedule import OPERATIONS
from pycollective.verify.calls import Array, Check
from pycollective.verify.cases import Case

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
