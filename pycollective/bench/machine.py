"""What the machine is, for the record."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pycollective import _core

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe_machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, caches, memory, kernel, SIMD level in force."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "simd": _core.simd_level(),
    }


def describe_versions() -> dict[str, str]:
    """This library and what the driver runs on; each library's ranks tell their own besides."""
    versions = {"python": platform.python_version()}
    for package in ("pycollective", "numpy", "torch", "ml_dtypes"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _field(path: str, name: str) -> str:
    """The first `name: value` of a /proc file; empty where there is none."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _caches() -> dict[str, str]:
    """Size of each cache of the first core, such as ``{"L2": "1024K"}``; empty if unknown."""
    found = {}
    for index in sorted(_CACHES.glob("index*")):
        kind = (index / "type").read_text().strip()
        if kind != "Instruction":
            level, size = ((index / name).read_text().strip() for name in ("level", "size"))
            found[f"L{level}"] = size
    return found
