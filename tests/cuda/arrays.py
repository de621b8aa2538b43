"""Arrays of ranks on the stand-in's GPUs."""

from __future__ import annotations

from pycollective import _core
from pycollective.device_array import DeviceArray

DEVICES = 2  # the stand-in's


def on_gpu(comm, x, stream="own", offset=0):
    """A copy of `x` on the rank's GPU: on a stream of its own, or on the legacy one."""
    device = comm.rank % DEVICES
    on = _core.DeviceStream(device) if stream == "own" else None
    return DeviceArray.from_numpy(x, device, on, offset=offset)
