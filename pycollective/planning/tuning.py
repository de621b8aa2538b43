"""The table of measured times that a rank was given, and how ranks tell each other which."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

from pycollective.config import ENV_TUNING

if TYPE_CHECKING:
    from pycollective.schedule.select import Table


def tuning_path(given: str | os.PathLike[str] | None) -> str:
    """The file to read: what was given, else PYCOLLECTIVE_TUNING; empty for none."""
    return os.environ.get(ENV_TUNING, "") if given is None else os.fspath(given)


def load(path: str) -> Table | None:
    """The table in a file; None without a path.

    Raises:
        ConfigurationError: the file cannot be read, or is broken; the message names it.
    """
    if not path:
        return None
    # Here, not at the top: who has no table need not wait for the import.
    from pycollective.planning.tuning_table import read_table

    return read_table(path)


def describe(table: Table | None) -> str:
    """Which table it is, in a few words: the same for the same measurements, in whatever order."""
    if table is None:
        return "no tuning table"
    from pycollective.planning.tuning_table import table_as_json

    entries = sorted(json.dumps(each, sort_keys=True) for each in table_as_json(table)["entries"])
    digest = hashlib.sha256("\n".join(entries).encode()).hexdigest()
    return f"the tuning table {digest[:12]}"
