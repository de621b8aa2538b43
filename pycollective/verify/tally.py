"""What one rank finds in a combination: how many elements are wrong, and the digest of all."""

from __future__ import annotations

import hashlib

import numpy as np

from pycollective.schedule import OPERATIONS
from pycollective.verify.calls import Array, Check
from pycollective.verify.cases import Case


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
        """Take in an array of a call, which `describe` has put into words."""
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
        """SHA-256 of all results so far."""
        return self._hash.digest()


def describe(operation: str, case: Case) -> str:
    """A call in words, without its operation, algorithm and dtype."""
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
    """The bits, as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
