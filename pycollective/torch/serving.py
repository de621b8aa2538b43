"""Which backend serves a process group's tensors, and whether it is pycollective or Gloo."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycollective.shim import loading

_CPU = torch.device("cpu")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend for tensors on such a device, or None.

    torch wraps it where TORCH_DISTRIBUTED_DEBUG is DETAIL; this is what is in the wrapper.
    """
    kind = torch.device(device.type)
    backend: Any = group._get_backend(kind) if kind in group._device_types else None
    return getattr(backend, "wrapped_pg", backend)


def is_gloo(group: dist.ProcessGroup, device: torch.device = _CPU) -> bool:
    """Whether Gloo serves a group's tensors on such a device."""
    if not dist.is_gloo_available():
        return False
    return isinstance(backend_of(group, device), dist.ProcessGroupGloo)


def own_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend pycollective whose engine serves tensors on such a device, which is the CPU.

    None where another backend does, or where the backend's calls are ordered ones (`device_side`).
    """
    backend = _pycollective(group, device)
    return None if backend is None or _on_devices(backend, device) else backend


def device_side(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The `DeviceSide` of the backend pycollective that serves such a device; None elsewhere."""
    backend = _pycollective(group, device)
    return backend.device_side if backend is not None and _on_devices(backend, device) else None


def _pycollective(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend, shim = backend_of(group, device), loading.loaded()
    return backend if shim is not None and isinstance(backend, shim.Backend) else None


def _on_devices(backend: Any, device: torch.device) -> bool:
    return device.type != "cpu" or backend.device_side.takes_cpu


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a group's ranks wait for each other's tensors on such a device: seconds."""
    options = getattr(backend_of(group, device), "options", None)
    limit = options._timeout if options is not None else dist.constants.default_pg_timeout
    return float(limit.total_seconds())


def store_of(group: dist.ProcessGroup, name: str, timeout: timedelta | None = None) -> dist.Store:
    """The part of a group's store with this name, behind a client of its own where that can be.

    A store that waits lets no other call of the same client through.

    Args:
        group: of torch's.
        name: of the part.
        timeout: of the client, if it is its own; None for the store's.
    """
    store = group.get_group_store()
    with contextlib.suppress(RuntimeError):  # those written in Python cannot be cloned
        store = store.clone()  # type: ignore[attr-defined]
        if timeout is not None:
            store.set_timeout(timeout)
    return dist.PrefixStore(name, store)
