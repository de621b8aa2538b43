"""A LeafSync that goes the way of devices, with tensors of the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pycollective.torch.leaves import over_devices
from pycollective.torch.leaves import sync as leaf_sync
from pycollective.torch.leaves.place import OnDevice
from pycollective.torch.ordered import plain, reduction
from pycollective.torch.serving import store_of, timeout_of
from tests.torch.device_side import GlooInside, gloo
from tests.torch.groups import CPU
from tests.torch.ordered_groups import StandInStreams

PROPERTIES = SimpleNamespace(name="stand-in", multi_processor_count=132)


class StandInModule:
    """What `torch.cuda` would be: one stream, and a generator of the device's own."""

    def __init__(self) -> None:
        self.default_generators = [torch.Generator()]
        self.properties = PROPERTIES

    def current_stream(self, device: torch.device) -> str:
        return "the stream"

    def get_device_properties(self, device: torch.device) -> Any:
        return self.properties


def by_torch(terms, out, op, recipe, divisor, dtype, finish, check=None, compiles=True):
    """As `reduction.reduce` does on devices without Triton."""
    if len(terms) == 1 and not finish:
        out.copy_(terms[0])
    else:
        plain.reduce(reduction._rows(terms), out, op, recipe, divisor, dtype, finish, check)


def gloo_side(group: dist.ProcessGroup, device: torch.device, name: str) -> GlooInside:
    """In place of NCCL's: Gloo of the LeafSync's own."""
    limit = timedelta(seconds=timeout_of(group, device))
    where = store_of(group, f"{name}/gloo"), group.rank(), group.size(), limit
    return GlooInside(*where, dist.get_process_group_ranks(group), gloo)


@contextmanager
def on_device(module: Any = None, streams: Any = None) -> Iterator[OnDevice]:
    """Within, a LeafSync takes the CPU for a device, whose work is done at once."""
    warnings.filterwarnings("ignore", "LeafSync")  # of conditions
    streams = streams or StandInStreams()
    place = OnDevice(CPU, module or StandInModule())
    with (
        mock.patch.object(leaf_sync, "place_of", return_value=place),
        mock.patch.object(over_devices, "own_side", gloo_side),
        mock.patch.object(over_devices, "streams_of", return_value=streams),
        mock.patch.object(GlooInside, "_streams", return_value=streams),
        mock.patch.object(reduction, "reduce", by_torch),
    ):
        yield place
