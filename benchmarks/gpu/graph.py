"""A CUDA graph of what is put on a stream, by the driver itself: no library of arrays is needed."""

from __future__ import annotations

import ctypes
import os
from types import TracebackType
from typing import Any

_GLOBAL = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL


class Graph:
    """Captures on a stream of GPU `device`, in a `with` block; then it can be launched there.

    It stays as long as the process does.
    """

    def __init__(self, device: int, stream: int) -> None:
        # The one that the core opened.
        library = os.environ.get("PYCOLLECTIVE_CUDA_DRIVER") or "libcuda.so.1"
        self._driver = ctypes.CDLL(library)
        self._stream = ctypes.c_void_p(stream)
        self._context = ctypes.c_void_p()
        self._executable = ctypes.c_void_p()
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def __enter__(self) -> Graph:
        self._in_context("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_GLOBAL))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        graph = ctypes.c_void_p()
        self._in_context("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        if error is not None:
            return
        flags = ctypes.c_ulonglong(0)
        made = ctypes.byref(self._executable)
        self._in_context("cuGraphInstantiateWithFlags", made, graph, flags)
        self._in_context("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Put all of it on the stream."""
        self._in_context("cuGraphLaunch", self._executable, self._stream)

    def _in_context(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name}: CUDA error {result}")
