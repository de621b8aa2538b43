"""Writes a process's ledger."""

from __future__ import annotations

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any
from zlib import crc32

from pycollective.errors import ConfigurationError
from pycollective.ledger.digests import digester
from pycollective.ledger.layout import RESULT, SEAL, SEALED_BY, SUFFIX, WHERE, Header


class Writer:
    """A file of its own, to which each step appends a block of records by one write.

    A block is there whole or not at all: readers drop one that its process's end has cut. A leaf
    is in a block once it is whole. For one thread at a time.

    Args:
        folder: made if it is not there; a run's processes share it, also those of later launches.
        header: the same in all of the run's files.
        rank: of this process.
        size: of all ranks.

    Attributes:
        path: of the file.

    Raises:
        ConfigurationError: xxhash lacks, or the file cannot be made or written.
    """

    def __init__(self, folder: str | Path, header: Header, rank: int, size: int) -> None:
        self._digest = digester("a ledger")
        self._rank, self._size = rank, size
        self._block: list[bytes] = []
        self._leaf: list[bytes] = []  # the records of one that may not be whole
        self._open = RESULT  # its number
        self._blocks = 0
        # Any number of processes may have been this rank before.
        self.path = Path(folder) / f"rank{rank}-{os.urandom(8).hex()}{SUFFIX}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self.path, "x")
        except OSError as error:
            raise self._refusal(error) from error
        self._write(header.packed())

    def gradient(self, step: int, leaf: int, parameter: int, data: Any) -> None:
        """Note a leaf's gradient of a parameter: contiguous, its values in C order."""
        if leaf != self._open:
            self._leaf.clear()
            self._open = leaf
        self._leaf.append(WHERE.pack(step, parameter, leaf) + self._digest(data))

    def end_leaf(self) -> None:
        """Note that the leaf whose gradients came last is whole."""
        self._block += self._leaf
        self._leaf.clear()

    def result(self, step: int, parameter: int, data: Any) -> None:
        """Note a parameter's average: contiguous, its values in C order."""
        self._block.append(WHERE.pack(step, parameter, RESULT) + self._digest(data))

    def flush(self) -> None:
        """Write what was noted since the last flush, as a block; nothing if nothing was.

        Raises:
            ConfigurationError: it cannot be written; nor can anything after it.
        """
        if not self._block:
            return
        block = b"".join(self._block) + WHERE.pack(self._blocks, SEAL, len(self._block))
        block += SEALED_BY.pack(self._rank, self._size, 0)
        self._write(block + crc32(block).to_bytes(4, "little"))
        self._block.clear()
        self._blocks += 1

    def note_ranks(self, rank: int, size: int) -> None:
        """Note that this process is another rank, or one of others, from here on.

        What it has noted before it has noted as the rank that it was.

        Raises:
            ConfigurationError: as `flush`.
        """
        self.flush()
        self._rank, self._size = rank, size

    def close(self) -> None:
        """Close the file. What was noted since the last flush is of no whole step, and dropped."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        if self._file.closed:
            raise ConfigurationError(f"the ledger {self.path} is closed, or could not be written")
        try:
            written = self._file.write(data)
            while written < len(data):  # as a disk takes it that is nearly full
                written += self._file.write(data[written:])
        except BaseException as error:
            with suppress(OSError):
                self.close()  # what follows a block that was cut could not be read
            if isinstance(error, OSError):
                raise self._refusal(error) from error
            raise

    def _refusal(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(f"the ledger {self.path} cannot be written: {error.strerror}")
