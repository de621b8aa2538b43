"""Triton's kernels, which a machine without a device need not have."""

from __future__ import annotations

import importlib
from typing import Any

from pycollective.errors import ConfigurationError


def load(name: str) -> Any:
    """A module of `pycollective.triton`.

    Raises:
        ConfigurationError: there is no Triton.
    """
    try:
        return importlib.import_module(f"pycollective.triton.{name}")
    except ImportError as error:
        raise ConfigurationError(
            "compression of tensors on devices is done by Triton, which cannot be imported "
            f"({error}); install triton, or keep the gradients on CPUs"
        ) from error
