"""The digest of an array: 128 bits of xxHash's XXH3, which depend on the order of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective.config import INSTALL_XXHASH
from pycollective.errors import ConfigurationError


def digester(asked_by: str) -> Callable[[Any], bytes]:
    """Return what makes the 16 bytes of a contiguous buffer.

    Args:
        asked_by: the option that needs it, for the error.

    Raises:
        ConfigurationError: xxhash is not installed.
    """
    try:
        from xxhash import xxh3_128_digest
    except ImportError:
        raise ConfigurationError(f"{asked_by} needs xxhash: {INSTALL_XXHASH}") from None
    return xxh3_128_digest
