"""Compression of tensors on devices, whose host never waits within a step.

Within a step all is issued, and nothing is waited for. What a call has found goes to pinned memory
behind the call's work. The host waits for it when the next step begins, and in calls between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from pycollective.compression.groups import Group
from pycollective.compression.message import Found
from pycollective.errors import CollectiveTimeout
from pycollective.torch.compression.groups import TorchGroup
from pycollective.torch.streams import Streams

_LONGEST_SLEEP = 1e-3  # seconds


def wait_for(event: Any, limit: float, what: str) -> None:
    """Let the host wait for an event of a device.

    Args:
        event: of its module's.
        limit: seconds.
        what: is waited for, in the error.

    Raises:
        CollectiveTimeout: the device has not come to it in time. Nothing is lost: wait again.
    """
    began = time.monotonic()
    while not event.query():
        waited = time.monotonic() - began
        if waited > limit:
            raise CollectiveTimeout(
                f"{what}: the device has not ended it after {limit:g} s. A rank has not made the "
                "call or has died, or the device is busy with something else"
            )
        time.sleep(min(waited / 8, _LONGEST_SLEEP))  # an eighth longer than needed, at most


class Later:
    """The host learns what calls have found when the next step begins; it waits as its ranks do.

    Args:
        streams: on which the calls are made.
        name: of the state, in errors.
        whole: the group of all ranks.
    """

    at_once = False

    def __init__(self, streams: Streams, name: str, whole: Group) -> None:
        assert isinstance(whole, TorchGroup)
        self._streams, self._name, self._whole = streams, name, whole

    def send(self, found: torch.Tensor, what: str) -> Callable[[], Found]:
        there = found.to("cpu", non_blocking=True, copy=True)
        event = self._streams.event()

        def wait() -> Found:
            self._wait(event, what)
            array: Found = there.numpy()
            return array

        return wait

    def looking(self) -> AbstractContextManager[None]:
        return self._streams.behind_caller()  # a residual may be freed, or lose a part

    def finish(self, what: str) -> None:
        self._wait(self._streams.event(), what)

    def _wait(self, event: Any, what: str) -> None:
        wait_for(event, self._whole.timeout, f"{self._name}: {what}")
