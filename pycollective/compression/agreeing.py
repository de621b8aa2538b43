"""What ranks must agree on, as a number that they compare."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import numpy as np

from pycollective.compression.groups import Group
from pycollective.errors import ConfigurationError


def digest_of(told: Any) -> int:
    """64 bits of whatever JSON can say."""
    text = json.dumps(told)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def check_alike(group: Group, digest: int, what: str) -> None:
    """Compare a digest; collective.

    Raises:
        ConfigurationError: on every rank, if some have another than rank 0.
    """
    rows = group.all_gather(np.array([digest], np.uint64).view(np.uint8))
    digests = rows.view(np.uint64)[:, 0]
    others = [int(rank) for rank in np.flatnonzero(digests != digests[0])]
    if others:
        raise ConfigurationError(
            f"rank(s) {others} were given other parameters, shapes or options than rank 0; this "
            f"rank makes a {what}"
        )
