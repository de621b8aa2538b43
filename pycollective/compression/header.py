"""What ranks tell each other about a call, in the headers of its messages (docs/inside/wire.md).

A header has 24 bytes, little-endian: a digest of what ranks must agree on (8), the loss scale (4),
flags (4), the number of parameters (4), zero (4). A bit a parameter follows, padded to bytes: 1
where the sender's part of its gradient is all zero.
"""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycollective.errors import CollectiveMismatch

_FIELDS = struct.Struct("<QfIII")
# Bytes of a header: what must be alike on all ranks, where the flags are, where bits begin.
AGREED = np.array([*range(12), *range(16, 20)])
FLAGS, BITS = 12, _FIELDS.size


def header_bytes(items: int) -> int:
    """How long the header of a message about so many parameters is."""
    return _FIELDS.size + -(-items // 8)


def digest_of(told: Any) -> int:
    """64 bits of whatever JSON can say."""
    text = json.dumps(told)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Agreement(NamedTuple):
    """What all messages of a call say, so that ranks that differ find out.

    Attributes:
        digest: of the parameters and of how they are compressed, 64 bits.
        scale: the loss scale.
        items: how many parameters the messages are about.
    """

    digest: int
    scale: float
    items: int

    def plain(self) -> NDArray[np.uint8]:
        """A header that says nothing but this."""
        head = np.zeros(header_bytes(self.items), np.uint8)
        fields = _FIELDS.pack(self.digest, self.scale, 0, self.items, 0)
        head[: _FIELDS.size] = np.frombuffer(fields, np.uint8)
        return head

    def check(self, head: NDArray[np.uint8], sender: int) -> None:
        """Refuse a header from rank `sender` that says something else.

        Raises:
            CollectiveMismatch: it is about other parameters, or compressed in another way.
        """
        digest, scale, _, items, _ = _FIELDS.unpack_from(head.data)
        if (digest, items) != (self.digest, self.items):
            raise CollectiveMismatch(
                f"compressed exchange: rank {sender} sends other parameters, or compresses them in "
                "another way; all ranks must make the same calls in the same order"
            )
        if scale != self.scale:
            raise CollectiveMismatch(
                f"compressed exchange: rank {sender} has the loss scale {scale:g}, this rank "
                f"{self.scale:g}"
            )
