"""The stand-in for the driver, for tests of Python code: built once, and what names it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.native_parts import make

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "cuda_driver"
LIBRARY = OUT / "plain" / "libcuda_standin.so"


@functools.cache
def library() -> str:
    """Its path; made where anything that it is made of has changed. Skips without a compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip("there is no C++ compiler")
    make(ROOT / "tests" / "cuda_driver", OUT, f"CXX={compiler}")
    return str(LIBRARY)


def images() -> str:
    """A folder with what it takes for the image of each module: it has the kernels itself."""
    folder = OUT / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for source in (ROOT / "csrc" / "cuda").glob("*.cu"):
        mine = folder / f".{source.stem}.{os.getpid()}"
        mine.write_bytes(b"\x50\xed\x55\xba\0\0\0\0")
        mine.replace(folder / f"{source.stem}.fatbin")
    return str(folder)


def environment(**more: object) -> dict[str, str]:
    """For a child process, so that its GPUs are the stand-in's; `devices=4`: PYCOLLECTIVE_STANDIN_
    DEVICES, and so on."""
    named = {f"PYCOLLECTIVE_STANDIN_{name.upper()}": str(of) for name, of in more.items()}
    return {"PYCOLLECTIVE_CUDA_DRIVER": library(), "PYCOLLECTIVE_CUDA_IMAGES": images(), **named}


@functools.cache
def functions() -> list[str]:
    """The driver's functions that pycollective has, but those that name errors."""
    table = (ROOT / "csrc" / "cuda" / "driver_api.h").read_text()
    return [name for name in re.findall(r"X\((cu\w+)", table) if "GetError" not in name]


def called(_, function, *arguments):
    """What a rank of the harness calls, for a `function` without a communicator."""
    result = function(*arguments)
    gc.collect()
    return result


class Driver:
    """The stand-in itself, as another user of the GPU would call it, in a process that has it."""

    def __init__(self):
        self.library = ctypes.CDLL(os.environ["PYCOLLECTIVE_CUDA_DRIVER"])

    def __call__(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def fail(self, name, n, code):
        """Has the library's n-th call of the function from now on give the error; 0: none.

        CUDA_ERROR_NOT_READY all later ones give, too.
        """
        assert self("standinFail", name.encode(), n, code) == 0

    def calls(self, name):
        """Of the function by the library, so far."""
        self.library.standinCalls.restype = ctypes.c_long
        return self("standinCalls", name.encode())

    def current(self):
        context = ctypes.c_void_p()
        assert self("cuCtxGetCurrent", ctypes.byref(context)) == 0
        return context.value

    @contextlib.contextmanager
    def context(self, device=0):
        context = ctypes.c_void_p()
        assert self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device) == 0
        assert self("cuCtxPushCurrent_v2", context) == 0
        try:
            yield
        finally:
            assert self("cuCtxPopCurrent_v2", ctypes.byref(context)) == 0

    def readable(self, address):
        to = ctypes.create_string_buffer(1)
        here = ctypes.c_uint64(ctypes.addressof(to))
        with self.context():
            return self("cuMemcpyAsync", here, ctypes.c_uint64(address), 1, None) == 0

    def occupy(self, array, times=1000, stream=None):
        """Fill the array so often, last with `times`, that its stream is busy for long.

        `stream`: another's handle.
        """
        handle = array.stream.handle if stream is None else stream
        for word in range(1, times + 1):
            with self.context(array.device):
                assert (
                    self(
                        "cuMemsetD32Async",
                        ctypes.c_uint64(array.address),
                        word,
                        ctypes.c_size_t(array.nbytes // 4),
                        ctypes.c_void_p(handle),
                    )
                    == 0
                )

    def hold(self, device, stream):
        """A function that lets the stream of this handle go on, which stands still until then."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        word, seen = ctypes.c_void_p(), ctypes.c_uint64()
        image = b"\x50\xed\x55\xba\0\0\0\0"
        with self.context(device):
            assert self("cuMemHostAlloc", ctypes.byref(word), ctypes.c_size_t(4), 3) == 0
            self("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), word, 0)
            there = ctypes.c_uint32.from_address(word.value)
            there.value = 0
            assert self("cuModuleLoadDataEx", ctypes.byref(module), image, 0, None, None) == 0
            assert self("cuModuleGetFunction", ctypes.byref(function), module, b"test_wait") == 0
            parameters = (ctypes.c_uint64 * 3)(seen.value, 1, 0)
            all_ = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
            one_block = (1,) * 6
            handle = ctypes.c_void_p(stream)
            assert self("cuLaunchKernel", function, *one_block, 0, handle, all_, None) == 0
        return lambda: setattr(there, "value", 1)

    def free_bytes(self, device):
        """Of the GPU's memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.context(device):
            assert self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value
