"""A host program that flushes subnormals to zero, as some do. x86-64 and glibc alone."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_BYTES, _MXCSR = 32, 28  # of fenv_t
_FLUSH = 0x8040  # FTZ, DAZ

needs_flushing = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="the test can flush with glibc on x86-64 only",
)


def _get() -> tuple[ctypes.Array[ctypes.c_char], ctypes.c_uint32]:
    state = ctypes.create_string_buffer(_BYTES)
    assert ctypes.CDLL(None).fegetenv(state) == 0
    return state, ctypes.c_uint32.from_buffer(state, _MXCSR)


def flushes() -> bool:
    """Whether this thread flushes subnormals now."""
    return _get()[1].value & _FLUSH == _FLUSH


@contextmanager
def flushing(flush: bool = True) -> Iterator[None]:
    """Have this thread flush subnormals, or keep them; as before afterwards."""
    before, _ = _get()
    state, control = _get()
    control.value = control.value | _FLUSH if flush else control.value & ~_FLUSH
    assert ctypes.CDLL(None).fesetenv(state) == 0
    try:
        yield
    finally:
        assert ctypes.CDLL(None).fesetenv(before) == 0
