"""What ranks publish of themselves in a store, and what they read there, checked as it is read.

Whatever a store holds, reading it gives what a rank of this library may have written, or raises
`ConfigurationError`. What passes here can still be wrong: that the shared memory it speaks of is
there, attaching proves (`attach.py`, `Node.has_mailbox`).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import NamedTuple

from pycollective.config import VERSION
from pycollective.errors import ConfigurationError

_MOST_NAME = 107  # bytes of an abstract socket's name, with the NUL that it begins with
_OVER_INT64 = 1 << 63
_SHOWN = 60  # characters of what is wrong


@contextmanager
def understanding(what: str) -> Iterator[None]:
    """Refuse what cannot be read, or is not what it must be: what `what` in the store is."""
    try:
        yield
    except ConfigurationError:
        raise
    except (
        *(ValueError, TypeError, LookupError, RecursionError),
        *(struct.error, zlib.error),
    ) as error:
        raise ConfigurationError(
            f"{what} in the store is nothing that a rank of pycollective {VERSION} writes "
            f"({str(error)[:_SHOWN]}): something else writes to this store, or a rank of another "
            "version does"
        ) from error


def _check(name: str, value: object, kind: str) -> None:
    # By name and exactly: to JSON, true is no number.
    if type(value).__name__ != kind:
        raise TypeError(f"{name} is {repr(value)[:_SHOWN]}")


@dataclass
class Record:
    """What a rank publishes about itself."""

    size: int
    version: str = field(default_factory=lambda: VERSION)
    host: str = ""  # for messages only
    identity: str = ""  # of the host
    wish: str = ""  # what its caller asked for, and all must alike
    token: str = ""  # of its shared memory, hexadecimal
    offset: int = 0  # of its mailbox in there, bytes
    data_bytes: int = 0  # of the data area there
    socket_name: str = ""  # where higher ranks attach
    address: str = ""  # of what it serves to the ranks of other hosts
    problem: str = ""  # why it cannot join

    def as_text(self) -> str:
        """As it lies in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes, number: int) -> Record:
        """The record of rank `number`."""
        with understanding(f"the record of rank {number}"):
            raw = json.loads(text)
            # Another version may say more or less.
            known = {each.name: raw[each.name] for each in fields(cls) if each.name in raw}
            for each in fields(cls):
                if each.name in known:
                    _check(each.name, known[each.name], str(each.type))
            return cls(**known)


class Row(NamedTuple):
    """What the ranks of a host must know of one of them to attach it."""

    token: str
    offset: int
    data_bytes: int
    socket_name: str
    host: str

    @classmethod
    def of(cls, record: Record) -> Row:
        """Of a record."""
        return cls(record.token, record.offset, record.data_bytes, record.socket_name, record.host)

    def check(self) -> None:
        """Raise where this cannot be a rank's."""
        for name, value in self._asdict().items():
            _check(name, value, "int" if name in ("offset", "data_bytes") else "str")
        if len(bytes.fromhex(self.token)) != 16:
            raise ValueError(f"token is {self.token[:_SHOWN]!r}")
        if not 0 <= self.offset < _OVER_INT64:
            raise ValueError(f"offset is {str(self.offset)[:_SHOWN]}")
        if not 0 <= self.data_bytes < _OVER_INT64:
            raise ValueError(f"data_bytes is {str(self.data_bytes)[:_SHOWN]}")
        if not (self.socket_name.isascii() and 0 < len(self.socket_name) < _MOST_NAME):
            raise ValueError(f"socket_name is {self.socket_name[:_SHOWN]!r}")


def host_table(records: Sequence[Record]) -> str:
    """What the ranks of a host must know of each other, as text: a column for each fact."""
    return json.dumps(list(zip(*map(Row.of, records), strict=True)))


def read_host_table(text: str, mine: Record, rank: int, numbers: Sequence[int]) -> list[Row]:
    """What `host_table` gave: each rank's row.

    Args:
        text: that was read.
        mine: what this rank has published.
        rank: whose row that must be.
        numbers: what messages call the ranks.

    Raises:
        ConfigurationError: it is no such table, or this rank's row is another.
    """
    with understanding("the table of this host's ranks"):
        rows = [Row(*each) for each in zip(*json.loads(text), strict=True)]
        if len(rows) != len(numbers):
            raise ValueError(f"it has {len(rows)} rows for {len(numbers)} ranks")
        for number, row in zip(numbers, rows, strict=True):
            try:
                row.check()
            except (TypeError, ValueError) as error:
                raise ValueError(f"of rank {number} the {error}") from error
    for name, here, published in zip(Row._fields, rows[rank], Row.of(mine), strict=True):
        if here != published:
            raise ConfigurationError(
                f"rank {numbers[rank]} has published another {name} than its row in the table of "
                f"this host's ranks has: {published!r}, and {str(here)[:_SHOWN]!r} is there. "
                "Another process claims this rank, or something else writes to the store"
            )
    return rows


class Common(NamedTuple):
    """What ranks of all hosts must know of each other before they connect."""

    data_bytes: int
    address: str

    @classmethod
    def of_records(cls, records: Sequence[Record]) -> str:
        """Of these ranks, as text."""
        data_bytes = min(each.data_bytes for each in records)
        return json.dumps({"data_bytes": data_bytes, "address": records[0].address})

    @classmethod
    def from_text(cls, text: str, most_bytes: int) -> Common:
        """What `of_records` gave; of a rank that has `most_bytes` itself."""
        with understanding("what all hosts have in common"):
            raw = json.loads(text)
            common = cls(raw["data_bytes"], raw["address"])
            _check("data_bytes", common.data_bytes, "int")
            _check("address", common.address, "str")
            if not 0 < common.data_bytes <= most_bytes:
                raise ValueError(f"data_bytes is {str(common.data_bytes)[:_SHOWN]}")
            return common
