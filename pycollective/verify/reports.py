"""How each rank learns what the others found in a combination.

By the all-gather, which is itself under test. So that a wrong one hides nothing, a report carries
a digest of itself, of the combination's number and of its rank: one that is not the sender's, or of
another combination, is seen to be damaged. A rank's own report comes back to it in the same way,
intact or damaged; so whoever has found something wrong ends with that, whatever the others hear.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from pycollective.communicator import Communicator
from pycollective.verify.tally import Tally

_LAYOUT = np.dtype([("elements", "<i8"), ("wrong", "<i8"), ("digest", "u1", 32), ("story", "S240")])
_SEAL = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Report:
    """What a rank found; attributes as in `Tally`."""

    elements: int
    wrong: int
    digest: bytes
    story: str


def gather(communicator: Communicator, number: int, tally: Tally) -> list[Report | None]:
    """Each rank's report of a combination, in rank order; None where it came damaged.

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
