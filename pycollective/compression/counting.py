"""What a rank has sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pycollective.compression.arrays import Item
from pycollective.compression.bucket import Outcome
from pycollective.compression.placing import Places

_NAMES = (
    *("steps", "steps_given_up", "compressed_calls", "dense_calls"),
    *("payload_bytes", "dense_bytes"),
)


class Counts(Counter[str]):
    """A state's counters."""

    def call(self, items: Sequence[Item], outcome: Outcome, places: Places) -> None:
        """Count a call."""
        if outcome.sent is None:
            self["dense_calls"] += 1
            return
        self["payload_bytes"] += outcome.sent
        self["compressed_calls"] += any(not item.dense for item in items)
        if places.share is not None:
            elements = sum(item.flat.count for item in items) / places.shares
            phases = 1 if items[0].owner else 2
            self["dense_bytes"] += round(4 * phases * elements * (places.hosts - 1) / places.hosts)

    def all(self) -> dict[str, int]:
        """Every counter."""
        return {name: self[name] for name in _NAMES}
