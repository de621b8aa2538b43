"""The ledger of a `LeafSync`: its leaves' gradients and its averages (docs/reference/ledger.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pycollective.agree import agree
from pycollective.errors import ConfigurationError
from pycollective.torch.leaves.buckets import Bucket, Named
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.tensor_ledger import TensorLedger


class LeafLedger(TensorLedger):
    """Of tensors, by leaf and step."""

    def end_step(self, step: int, buckets: Sequence[Bucket]) -> None:
        """Note the averages that the buckets have handed out, and write the step."""
        for bucket in buckets:
            for parameter in bucket.parameters:
                assert parameter.grad is not None
                self.result(step, parameter, parameter.grad)
        self.writer.flush()


def open_ledger(
    transport: Transport | None,
    folder: str | Path,
    named: Sequence[Named],
    grad_dtype: torch.dtype | None,
    leaves: int,
    seed: int,
    sharded: bool,
) -> LeafLedger:
    """Open this rank's ledger; all ranks raise if one cannot. Collective.

    Without a transport it is that of a process which has yet to become a rank.
    """
    ranks = (0, 1) if transport is None else (transport.rank, transport.size)
    found: list[LeafLedger] = []

    def mine() -> None:
        if sharded:
            raise ConfigurationError(
                "a ledger is of whole gradients, and with fully_shard no rank has any: leave it out"
            )
        found.append(LeafLedger(folder, named, *ranks, grad_dtype, leaves, seed))

    if transport is None:
        mine()
    else:
        agree(transport.all_gather, "LeafSync", mine)
    return found[0]
