"""Graphs that are captured and replayed by their owner, through the driver."""

from __future__ import annotations

import ctypes

from tests.cuda import standin


class Capture:
    """A graph of what is called within it, on one stream, which the replays are on.

    Others of the capture are forked from that stream, and joined to it at the end.
    """

    def __init__(self, device, *streams):
        self.driver, self.device = standin.Driver(), device
        self.handles = [ctypes.c_void_p(each.handle) for each in streams]
        self.made = ctypes.c_void_p()

    def _do(self, name, *arguments):
        with self.driver.context(self.device):
            result = self.driver(name, *arguments)
        assert result == 0, f"{name}: {result}"

    def __enter__(self):
        self._do("cuStreamBeginCapture_v2", self.handles[0], 0)
        for other in self.handles[1:]:
            self._order(self.handles[0], other)
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            return  # which tells more than what follows from it
        for other in self.handles[1:]:
            self._order(other, self.handles[0])
        graph, flags = ctypes.c_void_p(), ctypes.c_ulonglong(0)
        self._do("cuStreamEndCapture", self.handles[0], ctypes.byref(graph))
        self._do("cuGraphInstantiateWithFlags", ctypes.byref(self.made), graph, flags)

    def _order(self, first, then):
        event = ctypes.c_void_p()
        self._do("cuEventCreate", ctypes.byref(event), 2)
        self._do("cuEventRecord", event, first)
        self._do("cuStreamWaitEvent", then, event, 0)
        self._do("cuEventDestroy_v2", event)

    def replay(self):
        self._do("cuGraphLaunch", self.made, self.handles[0])
