"""What carries a `LeafSync`'s bytes from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pycollective.agree import Bytes, all_gather_texts
from pycollective.leaves.deal import Deal
from pycollective.torch.leaves.buckets import Bucket
from pycollective.torch.leaves.log import MOST_TEXT_BYTES
from pycollective.torch.leaves.words import StepWords


class Transport(Protocol):
    """The ranks of a LeafSync, for its calls alone; all ranks make the same in one order.

    Every wait ends with a `CollectiveError` after the group's timeout at the latest. What the host
    waits for has the bodies here.

    Attributes:
        rank: this one.
        size: of them all.
        bucket_cap_mb: MiB of a bucket, unless the LeafSync is told otherwise.
        waits: whether the host waits for a step, so that what others tell is known at once.
    """

    rank: int
    size: int
    bucket_cap_mb: float
    waits: bool = True

    def all_gather(self, row: Bytes) -> Bytes:
        """Wait for every rank's row of as many bytes: (n,) in, (size, n) out."""

    def broadcast(self, flat: torch.Tensor) -> None:
        """Make the bytes of a flat tensor those of rank 0."""

    def exchange(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Send each rank its row of bytes, on CPUs, and have theirs: (size, n). Rows are alike."""

    def announce(self, words: StepWords, needed: bool) -> None:
        """Tell all ranks some words of this one, once a step, before its averages.

        Args:
            words: of this rank. All ranks' are read by the end of `finish`, where the host waits.
            needed: whether the divisor may be another than the number of leaves. If not, averages
                begin before others' words have come.
        """

    def average(self, bucket: Bucket, deal: Deal) -> None:
        """Begin to average what ranks have added to a bucket; its averages are there at `finish`.

        Args:
            bucket: whose accumulator holds what `deal` gives this rank.
            deal: the same on all ranks.
        """

    def finish(self) -> None:
        """Wait for the averages of this step; raise what any rank's words or calls have raised.

        On a device the current stream waits, and the host does not: it raises what is known.
        """

    def settle(self) -> None:
        """Wait until all ranks' words of all steps are read, and raise what that raises."""
        return

    def tell(self, text: str) -> Callable[[], list[bytes]]:
        """Tell all ranks a text of this one, once a step, behind its averages.

        Returns:
            What returns every rank's text; on a device it waits for them, and not before.
        """
        texts = all_gather_texts(self.all_gather, text, MOST_TEXT_BYTES)
        return lambda: texts

    def abort(self, reason: str) -> None:
        """Let no rank wait for this one: calls there end with `CollectiveAborted`."""

    def stats(self) -> dict[str, int]:
        """Count what was sent from this rank to others."""

    def close(self) -> None:
        """Let go of what was made for the LeafSync."""
