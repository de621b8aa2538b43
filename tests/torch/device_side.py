"""The backend's side for tensors on devices, of CPU tensors: Gloo carries them in place of NCCL.

`init_process_group("on_device")` is `init_process_group("pycollective")` as tensors of a device
see it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycollective import Communicator
from pycollective.torch import backend
from pycollective.torch.device_side import DeviceSide
from tests.harness import PerRank, results, run_ranks
from tests.torch.groups import join, process_group
from tests.torch.ordered_groups import StandInStreams


class GlooInside(DeviceSide):
    """Serves CPU tensors as if they were on a device."""

    device_type = "cpu"
    backend_type = dist.ProcessGroup.BackendType.GLOO
    takes_cpu = True

    def _streams(self, device: torch.device) -> Any:
        return StandInStreams()


def gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _create(options: Any, pg_options: Any) -> Any:
    where = options.store, options.group_rank, options.group_size, options.timeout
    side = GlooInside(*where, options.global_ranks_in_group, gloo)
    return backend.create(*where, device_side=side)


dist.Backend.register_backend("on_device", _create, extended_api=True, devices=["cpu"])


def standing(comm: Communicator) -> dist.ProcessGroup:
    """The default group that a pool's ranks keep from call to call."""
    if not dist.is_initialized():
        join_on_device(comm)
    assert dist.get_backend() == "on_device"
    return dist.group.WORLD


def _over(comm: Communicator, test: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    with process_group(comm, backend="on_device", **options) as group:
        return test(comm, group, *args)


def run(test: Any, ranks: int, *args: Any, **options: Any) -> list[Any]:
    """What `test` returns on fresh ranks: of the communicator, their default group, arguments."""
    mine = [
        tuple(each.values[rank] if isinstance(each, PerRank) else each for each in args)
        for rank in range(ranks)
    ]
    return results(run_ranks(_over, ranks, test, PerRank(mine), options))


def join_on_device(comm: Communicator) -> dist.ProcessGroup:
    """The default group, which a test ends itself."""
    join(comm, "on_device")
    return dist.group.WORLD
