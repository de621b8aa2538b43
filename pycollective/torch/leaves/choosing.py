"""Which transport a `LeafSync` has."""

from __future__ import annotations

import itertools
import weakref

import torch
import torch.distributed as dist

from pycollective.bootstrap.init import init
from pycollective.communicator import Communicator
from pycollective.errors import ConfigurationError
from pycollective.torch.leaves.over_communicator import OverCommunicator
from pycollective.torch.leaves.over_devices import OverDevices
from pycollective.torch.leaves.over_group import OverGroup
from pycollective.torch.leaves.place import OnDevice, Place
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.ordered.calls import checked_group
from pycollective.torch.serving import backend_of, is_gloo, own_backend

_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]
_numbers = weakref.WeakKeyDictionary()


def transport_of(group: dist.ProcessGroup | Communicator | None, place: Place) -> Transport:
    """One of a LeafSync's own, over the ranks of `group`: its calls mix with no others.

    Raises:
        ConfigurationError: the group does not carry tensors of that place.
    """
    if group is None and not dist.is_initialized():
        group = init()
    if isinstance(place, OnDevice):
        return _over_devices(group, place.device)
    if not isinstance(group, Communicator):
        found = checked_group(group)
        if own_backend(found, torch.device("cpu")) is None:
            return OverGroup(found, _next_name(found))
        from pycollective.torch.backend import communicator_of  # compiled for the torch at hand

        group = communicator_of(found, "LeafSync")
    comm = group.split(0)
    assert comm is not None  # as it gave a color
    return OverCommunicator(comm)


def _over_devices(
    group: dist.ProcessGroup | Communicator | None, device: torch.device
) -> Transport:
    if isinstance(group, Communicator):
        if group.size > 1:
            raise ConfigurationError(
                f"LeafSync: parameters on {device} need a process group of torch's, and "
                f"{group.size} ranks have none: torch.distributed.init_process_group('nccl') "
                "before, or group="
            )
        return OverDevices(dist.ProcessGroup(dist.HashStore(), 0, 1), "", device, [0])
    found = checked_group(group)
    gloo = device.type != "cpu" and is_gloo(found, device)  # on CPUs tests let it carry
    if gloo or backend_of(found, device) is None:
        raise ConfigurationError(
            f"LeafSync: parameters are on {device}, and LeafSync does not work there over a "
            f"process group of {dist.get_backend(found)}: make one of nccl"
        )
    return OverDevices(found, _next_name(found), device)


def _next_name(group: dist.ProcessGroup) -> str:
    number = next(_numbers.setdefault(group, itertools.count()))
    return f"pycollective.torch.leaves/{number}"
