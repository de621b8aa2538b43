"""Element types and reduce operations by name, from the tables of the native core."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycollective import _core
from pycollective.errors import ConfigurationError

TRAITS: dict[str, _core.Dtype] = {each.name: each for each in _core.dtypes()}
DTYPES = {name: each.size for name, each in TRAITS.items()}  # bytes of an element
# nccl-tests' names for some of them.
ALIASES = {each.alias: name for name, each in TRAITS.items() if each.alias}
REDUCE_OPS = tuple(_core.reduce_ops())


def numpy_type(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype for a name of `DTYPES`.

    Raises:
        ConfigurationError: a type of ml_dtypes' without that, or an unknown name.
    """
    if name not in DTYPES:
        raise ConfigurationError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    if TRAITS[name].in_numpy:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ConfigurationError(
            f"{name} needs ml_dtypes in NumPy: pip install ml_dtypes"
        ) from error
    return np.dtype(getattr(ml_dtypes, name))
