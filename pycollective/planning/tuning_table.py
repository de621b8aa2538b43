"""Tuning files: measured times, from which ``algorithm="auto"`` chooses (`schedule/select.py`).

A file is JSON: ``format`` and ``version``, the ``machine`` in words, and ``entries``, each with the
time of some algorithms for one ``operation``, ``topology`` (as in ``str(Topology)``), ``dtype`` and
number of ``bytes`` (of a rank's input or output, whichever is larger)::

    {
      "format": "pycollective-tuning",
      "version": 1,
      "machine": {"cpu": "AMD EPYC", "cores": 2},
      "entries": [
        {
          "operation": "all_reduce",
          "topology": "1x4",
          "dtype": "bfloat16",
          "bytes": 65536,
          "seconds": {"direct": 2.1e-5, "tree": 3.4e-5}
        }
      ]
    }
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycollective import _core
from pycollective.errors import ConfigurationError
from pycollective.schedule import Topology, algorithms_for
from pycollective.schedule.cost import Element
from pycollective.schedule.operation import find_operation
from pycollective.schedule.select import Measurement, Table

FORMAT = "pycollective-tuning"
VERSION = 1
_MOST_RANKS = 1_000_000
_MOST_BYTES = 1 << 62
# How large the elements of each type are, by its name, in the core's order.
ELEMENTS: dict[str, Element] = {
    each.name: Element(each.size, each.accumulator) for each in _core.dtypes()
}


def read_table(path: str | os.PathLike[str]) -> Table:
    """The table in a file.

    Every rank of a communicator must read the same one: a rank that chooses another algorithm than
    its peers would wait for what they never send.

    Raises:
        ConfigurationError: the file cannot be read, or is no tuning file, of another version, or
            broken; the message names it and says what is wrong.
    """
    try:
        return table_from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # ConfigurationError is a ValueError, as are what json and UTF-8 raise.
        what = "" if isinstance(error, ConfigurationError) else "is not JSON: "
        raise ConfigurationError(f"{path}: {what}{error}") from error


def write_table(path: str | os.PathLike[str], table: Table) -> None:
    """Write a table for `read_table`.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(table_as_json(table), indent=1, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def table_as_json(table: Table) -> dict[str, Any]:
    """What a tuning file holds, for `json.dump`."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": dict(table.machine),
        "entries": [
            {
                "operation": entry.operation,
                "topology": entry.topology,
                "dtype": entry.dtype,
                "bytes": entry.bytes,
                "seconds": dict(entry.seconds),
            }
            for entry in table.entries
        ],
    }


def table_from_json(data: object) -> Table:
    """A table from what `json.load` gives.

    Raises:
        ConfigurationError: it is no tuning file, one of another version, or broken; the message
            says where.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigurationError(
            f'this is no tuning file: there is no "format": "{FORMAT}" at its top; make one with '
            "`pycollective bench --tune`"
        )
    if data.get("version") != VERSION:
        raise ConfigurationError(
            f"the tuning file has version {data.get('version')!r}, and this pycollective reads "
            f"{VERSION}; make a new one with `pycollective bench --tune`"
        )
    machine, entries = data.get("machine", {}), data.get("entries")
    if not isinstance(machine, dict) or not isinstance(entries, list):
        raise ConfigurationError(
            'the tuning file is broken: "machine" must be an object and "entries" a list'
        )
    found: dict[tuple[str, str, str, int], Measurement] = {}
    for number, entry in enumerate(entries):
        try:
            made = _measurement(entry)
        except ConfigurationError as error:
            raise ConfigurationError(f"entry {number} of the tuning file: {error}") from None
        key = made.operation, made.topology, made.dtype, made.bytes
        if key in found:
            raise ConfigurationError(
                f"entry {number} of the tuning file measures {' '.join(map(str, key))} bytes a "
                "second time; keep one of the two"
            )
        found[key] = made
    return Table(machine, tuple(found.values()))


def _measurement(entry: object) -> Measurement:
    fields = {"operation", "topology", "dtype", "bytes", "seconds"}
    if not isinstance(entry, dict) or entry.keys() != fields:
        has = ", ".join(map(str, entry)) if isinstance(entry, dict) else repr(entry)
        raise ConfigurationError(f"it must have {', '.join(sorted(fields))}, and has {has}")
    operation, dtype = _text(entry, "operation"), _text(entry, "dtype")
    find_operation(operation)
    if dtype not in ELEMENTS:
        raise ConfigurationError(f"unknown dtype {dtype!r}; there are {', '.join(ELEMENTS)}")
    size, seconds = entry["bytes"], entry["seconds"]
    if type(size) is not int or not 0 < size <= _MOST_BYTES:
        raise ConfigurationError(
            f"bytes must be a whole number from 1 to {_MOST_BYTES}, and is {size!r}"
        )
    if not isinstance(seconds, dict) or not seconds:
        raise ConfigurationError(f"seconds must hold a time an algorithm, and is {seconds!r}")
    possible = algorithms_for(operation)
    for name, time in seconds.items():
        if name not in possible:
            raise ConfigurationError(
                f"no algorithm {name!r} for {operation}; there are {', '.join(possible)}"
            )
        if type(time) not in (int, float) or not 0 < time < math.inf:
            raise ConfigurationError(f"{name} took {time!r} seconds; give a number above 0")
    topology = _text(entry, "topology")
    _check_topology(topology)
    return Measurement(operation, topology, dtype, size, seconds, ELEMENTS[dtype])


def _text(entry: Mapping[str, object], field: str) -> str:
    value = entry[field]
    if not isinstance(value, str):
        raise ConfigurationError(f"{field} must be a name, and is {value!r}")
    return value


def _check_topology(text: str) -> None:
    """Show that a topology can write itself so: any other text would match none."""
    equal = re.fullmatch(r"(\d{1,7})x(\d{1,7})", text)
    scattered = re.fullmatch(r"hosts \d{1,7}(,\d{1,7})*", text)
    several = re.fullmatch(r"\d{1,7}(,\d{1,7})*", text)
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    ranks = len(numbers) if scattered else math.prod(numbers) if equal else sum(numbers)
    if (equal or scattered or several) and ranks <= _MOST_RANKS:
        known = Topology(tuple(numbers)) if scattered else Topology.parse(text, ranks)
        if str(known) == text:
            return
        raise ConfigurationError(f"topology {text!r} must be written {str(known)!r}")
    raise ConfigurationError(
        f"topology {text!r} is neither hosts x ranks a host, such as 2x4, nor ranks of each host, "
        f"such as 3,1, nor the host of each rank, such as 'hosts 0,1,0,1', of {_MOST_RANKS:,} "
        "ranks at most"
    )
