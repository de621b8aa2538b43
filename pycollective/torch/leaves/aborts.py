"""Why a rank has given up, as others hear of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    ConfigurationError,
)
from pycollective.system_limits import start_thread
from pycollective.torch.serving import store_of

_ASKING = timedelta(seconds=10)  # at most, of a store


class Aborts:
    """Why a rank has given up, as it tells the others by the group's store.

    Args:
        group: of torch's.
        name: of the part of the store.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._rank = group.rank()
        self._store = store_of(group, f"{name}/aborted", _ASKING)

    def say(self, reason: str) -> None:
        """Tell the others."""
        # Its server may be gone. Ranks see that connections end, or that a call is late.
        with suppress(RuntimeError):
            self._store.set("reason", f"rank {self._rank}: {reason}")

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise what another rank has aborted for, in place of a failure that came of it."""
        try:
            yield
        except CollectiveMismatch:
            raise
        except CollectiveError as error:
            if reason := self._reason():
                raise CollectiveAborted(f"aborted by {reason}", self._rank) from error
            raise

    def _reason(self) -> str:
        """Why a rank has aborted; "" if none has said so, or the store's server does not answer."""
        found: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                if self._store.check(["reason"]):
                    found.append(self._store.get("reason").decode())

        # By a thread: a server that was stopped, or whose host is gone, is waited for without end.
        asking = threading.Thread(target=ask, name="pycollective-asking", daemon=True)
        with suppress(ConfigurationError):  # no more threads
            start_thread(asking)
            asking.join(_ASKING.total_seconds())
        return found[0] if found else ""
