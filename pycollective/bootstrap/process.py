"""The one segment of shared memory that all communicators of a process lie in."""

from __future__ import annotations

import os
import threading
import weakref

from pycollective import _core


class ProcessNode:
    """Finds this process's node: made when first asked for, and found again while it lives.

    All communicators share it, and torch makes each process group separately: were it not found
    again here, hundreds of groups would cost hundreds of segments and threads. The communicators
    own it; this only finds it.
    """

    def __init__(self) -> None:
        self._found: weakref.ref[_core.Node] | None = None
        self._lock = threading.Lock()
        # A fork may come while another thread has it.
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()

    def get(self) -> _core.Node:
        """The node. A fork of a process needs one of its own."""
        with self._lock:  # threads may join at once
            node = self._found() if self._found is not None else None
            if node is None or node.forked:
                node = _core.Node()
                self._found = weakref.ref(node)
            return node

    def forget(self) -> None:
        """Begin with a new one; who has the old one keeps it."""
        self._found = None


NODE = ProcessNode()
