"""The headers of a call's messages, written and compared on the device (docs/wire.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pycollective.compression.bucket import NOT_FINITE, Agreement, header_bytes, read_headers
from pycollective.compression.groups import Bytes
from pycollective.errors import CollectiveMismatch
from pycollective.torch.compression.devices.findings import Findings

# Bytes of a header.
_DIGEST, _SCALE, _FLAGS, _COUNT = slice(0, 8), slice(8, 12), slice(12, 16), slice(16, 20)
_BITS = header_bytes(0)


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device, behind the current stream's work; the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


class Headers:
    """The headers of one call. What its messages have told so far goes on with the next ones.

    A rank that has read what does not fit sends damaged digests from then on. So all ranks find
    out, though no host looks before the step has ended.

    Attributes:
        bytes: how long one is.
        bad: whether something was not finite, or `differs`; a bool on the device.
        differs: whether headers differed, or a message was damaged; a bool on the device.
        findings: what the host is to know: it raises where headers differ.
    """

    def __init__(self, agreement: Agreement, items: int, device: torch.device) -> None:
        self._mine = agreement.header(True, [False] * items)
        self._items, self.bytes = items, header_bytes(items)
        row = np.zeros(self.bytes, np.uint8)
        self._mine.write(row)
        self._fields = upload(row, device)[:_BITS]
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self._none = torch.zeros(items, dtype=torch.bool, device=device)
        self.differs = torch.zeros((), dtype=torch.bool, device=device)
        self.bad = self.differs
        self.findings = Findings()

    def row(
        self, not_finite: torch.Tensor | None = None, zero: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A header, as bytes.

        Args:
            not_finite: () of bool, whether something that the sender has seen was not finite.
            zero: (items,) of bool, where the sender's part of the gradient is all zero.
        """
        fields = self._fields
        flags = fields[_FLAGS]
        if not_finite is not None:
            flags = torch.cat([not_finite.view(1).to(torch.uint8) * NOT_FINITE, flags[1:]])
        digest = fields[_DIGEST] ^ (self.differs.to(torch.uint8) * 0xFF)
        padded = torch.nn.functional.pad(
            self._none if zero is None else zero, (0, -self._items % 8)
        ).to(torch.uint8)
        bits = (padded.view(-1, 8) << self._shifts).sum(1, dtype=torch.uint8)
        return torch.cat([digest, fields[_SCALE], flags, fields[_COUNT.start :], bits])

    def compare(self, rows: torch.Tensor, senders: Sequence[int]) -> None:
        """Compare messages' headers with this rank's.

        Args:
            rows: (ranks, bytes), which begin with headers.
            senders: whose they are.
        """
        heads = rows[:, : self.bytes]
        agreed = slice(_DIGEST.start, _SCALE.stop)
        differs = (heads[:, agreed] != self._fields[agreed]).any()
        differs |= (heads[:, _COUNT] != self._fields[_COUNT]).any()
        self.differs = self.differs | differs
        not_finite = (heads[:, _FLAGS.start] & NOT_FINITE).bool().any()
        self.bad = self.bad | self.differs | not_finite

        def read(found: Bytes) -> bool:
            return all(each.finite for each in read_headers(list(found), self._mine, senders))

        self.findings.add(heads, read)

    def refuse(self, malformed: torch.Tensor) -> None:
        """Note whether messages hold what they cannot: (1,) of bool."""
        self.differs = self.differs | malformed.any()
        self.bad = self.bad | self.differs

        def read(found: Bytes) -> bool:
            if found.any():
                raise CollectiveMismatch("compressed exchange: a damaged message")
            return True

        self.findings.add(malformed.to(torch.uint8), read)

    def all_zero(self, rows: torch.Tensor) -> torch.Tensor:
        """(items,) of bool: which gradients are all zero, as all messages say."""
        bits = (rows[:, _BITS : self.bytes, None] >> self._shifts) & 1
        return bits.view(len(rows), -1)[:, : self._items].bool().all(0)
