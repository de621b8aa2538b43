"""The header of a compressed message, which all exchanges share (docs/wire.md).

24 bytes, little-endian: a digest of what ranks must agree on (8), the loss scale (4), flags (4),
the number of parameters (4), zero (4); then a bit a parameter, padded to bytes: 1 where the
sender's part of its gradient is all zero.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pycollective.compression.groups import Bytes
from pycollective.errors import CollectiveMismatch

_FIELDS = struct.Struct("<QfIII")
_NOT_FINITE = 1


def header_bytes(items: int) -> int:
    """Of a message about so many parameters."""
    return _FIELDS.size + -(-items // 8)


@dataclass(frozen=True)
class Header:
    """What a message says of its sender.

    Attributes:
        digest: of what ranks must agree on.
        scale: the loss scale.
        finite: whether all that it has seen was.
        absent: for each parameter, whether the gradient is all zero.
    """

    digest: int
    scale: float
    finite: bool
    absent: NDArray[np.bool_]

    def write(self, row: Bytes) -> None:
        """Put it at a message's start."""
        flags = 0 if self.finite else _NOT_FINITE
        fields = _FIELDS.pack(self.digest, self.scale, flags, self.absent.size, 0)
        row[: _FIELDS.size] = np.frombuffer(fields, np.uint8)
        row[_FIELDS.size : header_bytes(self.absent.size)] = np.packbits(
            self.absent, bitorder="little"
        )

    @staticmethod
    def absent_of(row: Bytes) -> NDArray[np.bool_]:
        """That part of a message that `read` has accepted."""
        count = _FIELDS.unpack_from(row.data)[3]
        bits = row[_FIELDS.size : header_bytes(count)]
        return np.unpackbits(bits, count=count, bitorder="little").astype(bool)

    @classmethod
    def read(cls, row: Bytes, mine: Header, sender: int) -> Header:
        """A message's, of rank `sender`.

        Raises:
            CollectiveMismatch: it is about other parameters, or compressed in another way.
        """
        items = mine.absent.size
        if row.size >= header_bytes(items):
            digest, scale, flags, count, _ = _FIELDS.unpack_from(row.data)
            if (digest, count) == (mine.digest, items) and scale == mine.scale:
                return cls(digest, scale, not flags & _NOT_FINITE, cls.absent_of(row))
            if (digest, count) == (mine.digest, items):
                raise CollectiveMismatch(
                    f"compressed exchange: rank {sender} has the loss scale {scale:g}, this rank "
                    f"{mine.scale:g}"
                )
        raise CollectiveMismatch(
            f"compressed exchange: rank {sender} sends other parameters, or compresses them in "
            "another way; all ranks must make the same calls in the same order"
        )
