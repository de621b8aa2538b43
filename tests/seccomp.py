"""Refuses a system call to this process from now on, as a container's seccomp profile does."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # what is loaded at 0 is the number of the call
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

PIDFD_OPEN = 434
PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}.get(platform.machine(), -1)


def refuse(number: int) -> None:
    """Have Linux answer EPERM to the system call `number`, in this thread and what it starts.

    Raises:
        OSError: no filter can be installed here.
    """
    steps = [
        (_LOAD, 0, 0, 0),
        (_IF_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in steps))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    )
    libc, long = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong
    none = long(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, long(1), none, none, none) or libc.prctl(
        _PR_SET_SECCOMP, long(_FILTER), long(ctypes.addressof(program)), none, none
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
