"""The machine, and the limits that it sets: no all-reduce over shared memory can be faster.

Two limits, and the slower one counts:

- streaming: every rank reads and writes its own buffer in place, all at once. The ranks themselves
  measure it, as one more library (`libraries.STREAM`). It is scaled where an operation has to touch
  less of the buffer.
- copying: the one-way latency between two cores, and the bytes that have to reach a rank (size x
  busbw factor), copied from a core that has just written them. Measured between two cores. (With
  more ranks than cores it is an estimate: the receiving ranks share the cores, and what two ranks
  on one core give each other need not cross.)
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pycollective import _core
from pycollective.bench.operations import Operation
from pycollective.bench.phase import look

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_TRIES = 5
# Small enough to be still in the cache of the core that wrote it, as a transport's slots are.
_CHUNK = 128 << 10
_COPIED = 4 << 20


@dataclass(frozen=True)
class CoreToCore:
    """Between two cores: one-way latency (s), and bytes a second that each copies at once."""

    latency: float
    copy_rate: float


def measure_core_to_core(cores: Sequence[int]) -> CoreToCore:
    """Measure between `cores`, those of the ranks (some 5 ms); copies, between first and last.

    The best of a few tries: other load can only make a crossing look slower than it is. On one
    core there is nothing between cores: latency 0, and an infinite rate.
    """
    first, last = min(cores), max(cores)
    if first == last:
        return CoreToCore(0.0, float("inf"))
    copies = [_core.core_to_core_copy(first, last, _COPIED, _CHUNK) for _ in range(_TRIES)]
    return CoreToCore(look(cores), _COPIED / min(copies))


def typical(samples: list[CoreToCore]) -> CoreToCore:
    """Return the medians of what was measured in the course of a run."""
    return CoreToCore(
        statistics.median(sample.latency for sample in samples),
        statistics.median(sample.copy_rate for sample in samples),
    )


def copy_seconds(operation: Operation, size: int, ranks: int, cores: CoreToCore) -> float:
    """Return the limit of copying: one latency, and what has to reach ranks at a copy's rate."""
    copied, receivers = operation.copied(ranks)
    at_once = max(1, min(receivers, len(os.sched_getaffinity(0))))
    return cores.latency + size * copied / at_once / cores.copy_rate


def stream_seconds(operation: Operation, seconds: float, ranks: int) -> float:
    """Return the limit of streaming, if reading and writing the whole buffer takes `seconds`."""
    return seconds * operation.touched(ranks) / 2


def describe_machine() -> dict[str, Any]:
    """Return the CPU, the cores this process may use, caches, memory, kernel and SIMD level."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "simd": _core.simd_level(),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of this library and of what the driver runs on."""
    versions = {"python": platform.python_version()}
    for package in ("pycollective", "numpy", "torch", "ml_dtypes"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _field(path: str, name: str) -> str:
    """Return the first `name: value` of a /proc file; empty where there is none."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _caches() -> dict[str, str]:
    """Return each cache of the first core, such as ``{"L2": "1024K"}``; empty if unknown."""
    found = {}
    for index in sorted(_CACHES.glob("index*")):
        kind = (index / "type").read_text().strip()
        if kind != "Instruction":
            level, size = ((index / name).read_text().strip() for name in ("level", "size"))
            found[f"L{level}"] = size
    return found
