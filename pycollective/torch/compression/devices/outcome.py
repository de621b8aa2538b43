"""The result of a call on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycollective.compression.bucket import Outcome
from pycollective.torch.compression.devices.findings import Findings


@dataclass(frozen=True)
class DeviceOutcome(Outcome):
    """The result of a call on a device.

    Attributes:
        finite: None: the host does not know yet.
        bad: whether something was not finite, or `differs`: () of bool.
        differs: whether this rank has read that ranks called different things, or what no message
            can hold: () of bool.
        findings: what the host is to know.
    """

    finite: None
    bad: torch.Tensor
    differs: torch.Tensor
    findings: Findings
