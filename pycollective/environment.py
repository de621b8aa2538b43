"""By which names a launch and its ranks reach each other: environment variables, a store's key."""

from __future__ import annotations

import os

from pycollective.errors import ConfigurationError

# What `pycollective run` tells its ranks.
ENV_RANK, ENV_SIZE = "PYCOLLECTIVE_RANK", "PYCOLLECTIVE_SIZE"
ENV_STORE, ENV_SECRET = "PYCOLLECTIVE_STORE", "PYCOLLECTIVE_SECRET"
# In place of the secret itself, which a user may give without a launcher too: a file with it.
ENV_SECRET_FILE = "PYCOLLECTIVE_SECRET_FILE"
# What a user may say under any launcher.
ENV_TOPOLOGY, ENV_TUNING = "PYCOLLECTIVE_TOPOLOGY", "PYCOLLECTIVE_TUNING"
ENV_WIRE = "PYCOLLECTIVE_WIRE"
ENV_PORT = "PYCOLLECTIVE_PORT"
ENV_CUDA_WAY = "PYCOLLECTIVE_CUDA_WAY"


def followed_key(rank: int) -> str:
    """Of the store: where a rank tells `pycollective run` that it ends because of another."""
    return f"pycollective/followed/{rank}"


def environment_number(name: str) -> int:
    """The number that the variable holds.

    Raises:
        ConfigurationError: it holds none.
    """
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ConfigurationError(f"the environment variable {name} is {value!r}, not a number")
    return int(value)
