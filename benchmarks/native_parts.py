"""Native code that tests and benchmarks in Python call and the package does not have: the target
`native-parts` of csrc/tests/Makefile. Whoever wants it first makes it."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import _core

Array = NDArray[Any]
ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "native" / "parts"


@functools.cache
def native_part(name: str) -> str:
    """The path of a library or a program; made where anything that it is made of has changed."""
    make(ROOT / "csrc" / "tests", OUT, "native-parts")
    return str(OUT / name)


def make(folder: Path, out: Path, *arguments: str) -> None:
    """Run make in a folder, which writes to `out`; one process at a time.

    Raises:
        RuntimeError: it fails; with what it said.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:  # the workers of pytest-xdist share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-C", str(folder), *arguments]
        # Not the options of the make that tests may run under: -B would make all of it each time.
        env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
        done = subprocess.run(
            command, check=False, env=env, capture_output=True, text=True, timeout=900
        )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


# The codecs of exact packing, one call at a time: csrc/tests/packing_library.cpp.
@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(native_part("libpacking.so"))
    names, array, size = [ctypes.c_char_p] * 2, ctypes.c_void_p, ctypes.c_size_t
    library.has_packing.argtypes = names
    library.pack.argtypes = [*names, array, size, array]
    library.unpack.argtypes = [*names, array, size, array, size]
    library.has_packing.restype = library.unpack.restype = ctypes.c_bool
    library.pack.restype = size
    return library


def _codec(x: Array, packed: Array, simd: str) -> tuple[bytes, bytes]:
    """The names of type and level, for the library; which looks at nothing."""
    assert packed.dtype == np.uint8
    assert x.flags.c_contiguous
    assert packed.flags.c_contiguous
    level = simd or _core.simd_level()
    codec = x.dtype.name.encode(), level.encode()
    if not _library().has_packing(*codec):
        raise ValueError(f"there is no packing of {x.dtype.name} at the level {level}")
    return codec


def pack_into(x: Array, out: Array, simd: str = "") -> int:
    """Pack `x`, as messages to other hosts are packed (wire.md), into an array of uint8 that
    has room for as many bytes; how many it took.

    Raises:
        ValueError: there is no such codec.
    """
    codec = _codec(x, out, simd)
    assert len(out) >= x.nbytes
    assert out.flags.writeable
    return int(_library().pack(*codec, x.ctypes.data, x.size, out.ctypes.data))


def unpack_into(payload: Array, out: Array, simd: str = "") -> None:
    """The inverse, of the exact bytes of a payload.

    Raises:
        ValueError: there is no such codec, or these bytes are no payload of so many elements.
    """
    codec = _codec(out, payload, simd)
    assert out.flags.writeable
    if not _library().unpack(*codec, payload.ctypes.data, len(payload), out.ctypes.data, out.size):
        raise ValueError(f"{len(payload)} bytes that are no payload of {out.size} elements")
