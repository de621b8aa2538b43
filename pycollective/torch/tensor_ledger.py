"""Ledgers of tensors on CPUs: their digests, by parameter."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from pycollective.config import ENV_LEDGER
from pycollective.errors import ConfigurationError
from pycollective.ledger.layout import Header, Parameter
from pycollective.ledger.writer import Writer

Named = tuple[str, torch.nn.Parameter]


def folder_of(given: str | Path | None) -> str | Path | None:
    """The folder of a ledger that is asked for, here or by the environment; None for no ledger."""
    return given or os.environ.get(ENV_LEDGER) or None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its values' bytes in C order, flat: where they lie so already, without a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class TensorLedger:
    """What `Writer` writes, of tensors.

    Args:
        folder: as `Writer`.
        named: the parameters, in an order that is the same in all runs.
        rank: of this process.
        size: of all ranks.
        grad_dtype: of all averages; None for each parameter's own.
        leaves: of a step; 0 where averages alone are noted.
        seed: of what the leaves draw.

    Attributes:
        writer: of the file.

    Raises:
        ConfigurationError: as `Writer`; or a parameter is not on a CPU.
    """

    def __init__(
        self,
        folder: str | Path,
        named: Iterable[Named],
        rank: int,
        size: int,
        grad_dtype: torch.dtype | None = None,
        leaves: int = 0,
        seed: int = 0,
    ) -> None:
        parameters: list[Parameter] = []
        self._places: dict[int, int] = {}
        for name, each in named:
            if each.device.type != "cpu":
                raise ConfigurationError(
                    f"a ledger is of parameters on CPUs, and {name} is on {each.device}: its "
                    "gradients would have to be copied; leave the ledger out"
                )
            dtypes = dict.fromkeys((each.dtype, grad_dtype or each.dtype))
            words = " averaged in ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self._places[id(each)] = len(parameters)
            parameters.append(Parameter(name, words, tuple(each.shape)))
        self.writer = Writer(folder, Header(tuple(parameters), leaves, seed), rank, size)

    def gradient(self, step: int, leaf: int, of: torch.Tensor, value: torch.Tensor) -> None:
        """Note a leaf's gradient of a parameter."""
        self.writer.gradient(step, leaf, self._places[id(of)], bytes_of(value).numpy())

    def result(self, step: int, of: torch.Tensor, value: torch.Tensor) -> None:
        """Note a parameter's average."""
        self.writer.result(step, self._places[id(of)], bytes_of(value).numpy())
