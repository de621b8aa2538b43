"""The bytes of a ledger's file (ledger.md#the-file): what is written and read alike."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

SUFFIX = ".ledger"
MAGIC, VERSION = b"pcledger", 1
LINE = 32  # bytes of the prefix and of a record; the header is a multiple
PREFIX = struct.Struct("<8sIII")  # magic, version, bytes of the header, its CRC-32
CHECK = struct.Struct("<I8x")  # behind it: the prefix's own
MOST_HEADER = 1 << 28  # bytes

RECORD = np.dtype([("step", "<u8"), ("parameter", "<u4"), ("leaf", "<i4"), ("digest", "<u8", (2,))])
WHERE = struct.Struct("<QIi")  # step, parameter, leaf; the digest is behind it
RESULT = -1  # in place of a leaf: the average
# In place of a parameter: this record ends a block. Its step is the block's number, its leaf the
# number of records before it; then rank, size, 0, and the CRC-32 of all of the block before that.
SEAL = 0xFFFFFFFF
SEALED_BY = struct.Struct("<III")

Records: TypeAlias = np.ndarray[Any, np.dtype[np.void]]


@dataclass(frozen=True)
class Parameter:
    """A parameter whose gradients are noted: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} of {self.dtype}, shape {self.shape}"


@dataclass(frozen=True)
class Header:
    """What all files of a run have alike.

    Attributes:
        parameters: records name them by their place here.
        leaves: of a step; 0 where averages alone are noted.
        seed: of the `LeafSync`; 0 where there are no leaves.
    """

    parameters: tuple[Parameter, ...]
    leaves: int
    seed: int

    def packed(self) -> bytes:
        """Return it with its prefix, as a file begins."""
        parameters = [[each.name, each.dtype, each.shape] for each in self.parameters]
        said = {"leaves": self.leaves, "seed": self.seed, "parameters": parameters}
        text = json.dumps(said).encode()
        text += b" " * (-len(text) % LINE)
        prefix = PREFIX.pack(MAGIC, VERSION, len(text), crc32(text))
        return prefix + CHECK.pack(crc32(prefix)) + text

    @classmethod
    def unpacked(cls, text: bytes) -> Header:
        """Return what `packed` has packed, without its prefix.

        Raises:
            ValueError: it is none.
        """
        try:
            said = json.loads(text)
            rows = [(name, dtype, tuple(shape)) for name, dtype, shape in said["parameters"]]
            header = cls(tuple(Parameter(*each) for each in rows), said["leaves"], said["seed"])
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it lacks {error}") from None
        sizes = [size for each in header.parameters for size in each.shape]
        words = [word for each in header.parameters for word in (each.name, each.dtype)]
        numbers = [header.leaves, header.seed, *sizes]
        if not all(type(each) is int for each in numbers) or not 0 <= header.leaves < 1 << 31:
            raise ValueError("it has no number where one belongs")
        if not words or not all(isinstance(each, str) for each in words):
            raise ValueError("it names no parameters")
        return header
