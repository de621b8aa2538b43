"""Reads ledgers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from pycollective.errors import ConfigurationError
from pycollective.ledger.layout import (
    CHECK,
    LINE,
    MAGIC,
    MOST_HEADER,
    PREFIX,
    RECORD,
    RESULT,
    SEAL,
    SUFFIX,
    VERSION,
    Header,
    Records,
)

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Ledger:
    """What was noted: by one process, or by all of a run.

    Attributes:
        path: of the file or folder.
        header: of it, or of them all.
        records: by `layout.RECORD`, in the order in which each process wrote them.
        ranks: which rank wrote each record, and of how many: ``(records, 2)``.
    """

    path: Path
    header: Header
    records: Records
    ranks: Numbers


def read(path: Path) -> Ledger:
    """Read a file, or all those of a folder.

    Raises:
        ConfigurationError: it is no ledger, or a damaged one, or of another version, or the files
            are of several models; says which, and from which byte on.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        paths = [path]
    elif not (paths := sorted(each for each in path.iterdir() if each.name.endswith(SUFFIX))):
        raise ConfigurationError(f"{path} holds no ledger: there is no file *{SUFFIX} in it")
    found = [each for each in map(_read_file, paths) if each is not None]
    if not found:
        raise ConfigurationError(f"{path}: every ledger ends within its header: nothing was noted")
    for each in found[1:]:
        if other := unlike(found[0].header, each.header):
            raise ConfigurationError(
                f"{found[0].path} and {each.path} are of different trainings ({other}): give each "
                "a folder of its own"
            )
    records = np.concatenate([each.records for each in found])
    return Ledger(path, found[0].header, records, np.concatenate([each.ranks for each in found]))


def unlike(first: Header, second: Header) -> str:
    """What two headers have unlike, in words; nothing if nothing is."""
    for what in ("leaves", "seed"):
        if getattr(first, what) != getattr(second, what):
            return f"{what} {getattr(first, what)}, and {what} {getattr(second, what)}"
    ours, theirs = first.parameters, second.parameters
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return f"parameter {one}, and {other}"
    if len(ours) != len(theirs):
        return f"{len(ours)} parameters, and {len(theirs)}"
    return ""


def _read_file(path: Path) -> Ledger | None:
    """None for one that ends within its header: its process was killed as it began."""

    def refusal(offset: int, what: str) -> ConfigurationError:
        return ConfigurationError(f"{path}, byte {offset}: {what}")

    if not path.is_file():  # a pipe would be waited for without end
        raise ConfigurationError(f"{path} is no file")
    data = path.read_bytes()
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise refusal(0, "this is no ledger")
    if len(data) < LINE:
        return None
    _, version, length, check = PREFIX.unpack_from(data)
    if version != VERSION:
        raise refusal(
            len(MAGIC), f"a ledger of version {version}, and this pycollective reads {VERSION}"
        )
    own = crc32(data[: PREFIX.size])
    if CHECK.unpack_from(data, PREFIX.size) != (own,) or length % LINE or length > MOST_HEADER:
        raise refusal(0, "the ledger is damaged here")
    begin = LINE + length
    if len(data) < begin:
        return None
    text = data[LINE:begin]
    if crc32(text) != check:
        raise refusal(LINE, "the header is damaged")
    try:
        header = Header.unpacked(text)
    except ValueError as error:
        raise refusal(LINE, f"the header is damaged: {error}") from None
    count = (len(data) - begin) // LINE
    records = np.frombuffer(data, RECORD, count, begin)
    seals = np.flatnonzero(records["parameter"] == SEAL)
    view = memoryview(data)
    before = -1
    for block, at in enumerate(seals.tolist()):
        first, end = begin + (before + 1) * LINE, begin + (at + 1) * LINE
        told = int.from_bytes(view[end - 4 : end], "little")
        if crc32(view[first : end - 4]) != told or records["step"][at] != block:
            raise refusal(first, f"block {block} is damaged")
        before = at
    counts = np.diff(seals, prepend=-1) - 1
    ranks = np.repeat(records["digest"][seals, :1].copy().view("<u4"), counts, axis=0)
    whole = np.ones(before + 1, bool)  # what is behind the last seal was cut
    whole[seals] = False
    records = records[: before + 1]
    wrong = records["parameter"] >= len(header.parameters)
    wrong |= (records["leaf"] < RESULT) | (records["leaf"] >= header.leaves)
    wrong &= whole
    if wrong.any():
        at = int(np.argmax(wrong))
        raise refusal(begin + at * LINE, f"{records[at]} is no record of this header")
    return Ledger(path, header, records[whole], ranks)
