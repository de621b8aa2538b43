"""Residuals in a device's memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from pycollective.compression.arrays import Floats
from pycollective.compression.bucket import Bucket
from pycollective.compression.groups import Bytes
from pycollective.compression.residuals import Residuals, Scaled
from pycollective.torch.compression.devices.findings import Findings


class ScaledTensor(Scaled):
    """An error on a device, with its loss scale."""

    def to(self, scale: float) -> Any:
        if scale == self.scale:
            return self.values
        values: Any = self.values
        factor = self.factor(scale)
        if 2.0**-126 <= factor < 2.0**128:  # so it is fp32, which rounds the product once, too
            return values * factor
        return (values.to(torch.float64) * factor).to(torch.float32)


class DeviceResiduals(Residuals):
    """`Residuals` whose errors are fp32 tensors on a device."""

    _scaled = ScaledTensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def _empty(self, count: int) -> Any:
        return torch.empty(count, dtype=torch.float32, device=self._device)

    def saved(self, name: str, scale: float) -> Floats | None:
        """A copy for the host, which waits for it."""
        held: Any = self.get(name, scale)
        return None if held is None else held.cpu().numpy()

    def set(self, name: str, held: Any, scale: float) -> None:
        values: Any = torch.tensor(held, dtype=torch.float32, device=self._device)
        self._held[name] = ScaledTensor(values, scale)


def skip_updates(
    residuals: Collection[Residuals], bucket: Bucket, all_zero: torch.Tensor, findings: Findings
) -> None:
    """Leave the residuals as they were of what is all zero on every host; the host learns later.

    Args:
        residuals: of the codec.
        bucket: of the call.
        all_zero: which of its parameters are: (items,) of bool.
        findings: of the call.
    """

    def skip(found: Bytes) -> bool:
        for number in np.flatnonzero(found):
            for each in residuals:
                each.skip_update(bucket.items[number].name)
        return True

    findings.add(all_zero.to(torch.uint8), skip)
