"""Compression of tensors on devices, whose host never waits within a step.

Within a step all is issued, and nothing is waited for. What a call has found goes to pinned memory
behind the call's work. The host waits for it when the next step begins, and in calls between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from pycollective.compression.groups import Group
from pycollective.compression.message import Found
from pycollective.torch.compression.groups import TorchGroup
from pycollective.torch.streams import Streams, wait_for


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
