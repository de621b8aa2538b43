"""PyTorch's own tests of torch.distributed, with this library standing in for Gloo.

The tests are those of ``torch.testing._internal.distributed.distributed_test``, which is in the
wheel. They ask for the backend "gloo"; `stand_in` has them get pycollective's. To C++ it is what
it is, a backend of the type CUSTOM: DDP takes what is registered as Gloo's for an object of its
class. Ranks are forked from this process, where torch is imported already: that is a second a test
and not four.

Run one by name: ``python -m tests.torch.pytorch_suite.running test_send_recv``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from tests.torch.pytorch_suite import RANKS, is_unskipped

# "pycollective"; "on_device", its side for devices with Gloo inside; or "gloo" to compare with.
ENV_BACKEND = "PYCOLLECTIVE_SUITE_BACKEND"
BACKEND = os.environ.get(ENV_BACKEND, "pycollective")

os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), RANK="0")

import torch  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

import pycollective.torch  # noqa: E402, F401
from tests.torch import device_side  # noqa: E402, F401  registers "on_device"

_make = c10d._new_process_group_helper
_profiled = distributed_test.get_profiling_event


def _made(size: int, rank: int, ranks: list[int], backend: str, *rest: Any, **named: Any) -> Any:
    """A process group of pycollective's, which Python calls "gloo"."""
    group, store = _make(size, rank, ranks, backend.replace("gloo", BACKEND), *rest, **named)
    if store is not None:
        c10d._world.pg_map[group] = (c10d.Backend(backend), store)
    return group, store


def _events(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    """A profiler's events, under Gloo's names."""
    found = _profiled(name.replace("gloo:", "pycollective:"), *args, **kwargs)
    for event in found:
        event.name = event.name.replace("pycollective:", "gloo:")
    return found


def stand_in() -> None:
    """From now on, whoever asks for Gloo gets pycollective."""
    c10d._new_process_group_helper = _made
    distributed_test.get_profiling_event = _events


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """One test a method; each rank is a process."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Unskipped(Suite):
    """With those that `is_unskipped` is about."""


def _unskipped(test: Callable[[Suite], None]) -> Callable[[Suite], None]:
    test = inspect.unwrap(test)  # of what skips it for Gloo with fewer than 8 ranks
    return lambda suite: test(suite)  # without the mark that has unittest skip it


for _name in filter(is_unskipped, dir(Suite)):
    setattr(Unskipped, _name, _unskipped(getattr(Suite, _name)))


if BACKEND != "gloo":
    stand_in()
