"""Residuals in a device's memory."""

from __future__ import annotations

from typing import Any

import torch

from pycollective.compression.arrays import Floats
from pycollective.compression.residuals import Residuals, Scaled


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
