"""The k-th magnitude of parameters whose pieces are on several ranks of a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycollective.compression.groups import Group
from pycollective.compression.sparse import ROUNDS
from pycollective.torch.compression.devices.exchanges import exchange, gather


def thresholds(
    top_k: Any,
    lefts: Sequence[torch.Tensor],
    wanted: torch.Tensor,
    before: torch.Tensor,
    local: Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `over_shards` on CPUs; collective over `local`.

    Where not all are finite these are some numbers or other.

    Args:
        top_k: the module of the kernels.
        lefts: this rank's piece of each parameter, perhaps empty, fp32.
        wanted: (parameters,) of int64: how many elements of each, the largest.
        before: (ranks, ranks, n) of bool: of the n parameters whose histograms this rank adds up,
            whether a rank's piece lies before another's.
        local: the ranks.

    Returns:
        Of each parameter the k-th magnitude, and how many elements of this piece are taken that
        have it: (parameters,) of int64.
    """
    ranks, count, each = local.size, len(lefts), before.shape[-1]
    prefixes = torch.zeros_like(wanted)
    ties = wanted
    for shift, bits in ROUNDS:
        bins = 1 << bits
        mine = wanted.new_zeros((count, bins))
        for number, left in enumerate(lefts):
            if left.numel():
                prefix = prefixes[number : number + 1]
                top_k.histogram(left, shift, bits, prefix, mine[number])
        rows = torch.zeros(ranks * each, bins, dtype=torch.int32, device=wanted.device)
        rows[:count] = mine
        came = exchange(local, rows.view(torch.uint8).view(ranks, -1))
        histograms = came.view(torch.int32).view(ranks, each, bins).to(torch.int64) & 0xFFFFFFFF
        first = local.rank * each
        want = torch.nn.functional.pad(wanted, (0, ranks * each - count))[first : first + each]
        above = histograms.sum(0).flip(1).cumsum(1)  # as large as this or larger
        back = (above < want[:, None]).sum(1).clamp(max=bins - 1)
        place = bins - 1 - back
        there = histograms.gather(2, place.view(1, -1, 1).expand(ranks, -1, 1)).squeeze(2)
        left_over = want - (above.gather(1, back[:, None]).squeeze(1) - there.sum(0))
        # Of those that are equal the first: what the ranks before one have comes off.
        taken = (left_over - (before * there[:, None]).sum(0)).clamp(min=0)
        told = torch.cat([place[None], left_over[None], taken])
        heard = gather(local, told.view(-1).view(torch.uint8)).view(torch.int64)
        told = heard.view(ranks, 2 + ranks, each).transpose(0, 1).reshape(2 + ranks, -1)
        prefixes = prefixes << bits | told[0, :count]
        wanted, ties = told[1, :count], told[2 + local.rank, :count]
    return prefixes.contiguous(), ties.contiguous()
