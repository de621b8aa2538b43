"""Exchanges of bytes that lie on a device, in a state's groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pycollective.compression.groups import Alone, Group, Groups, InOrder
from pycollective.torch.compression.groups import TorchGroup


def exchange(group: Group, rows: torch.Tensor) -> torch.Tensor:
    """Row r of (size, n) bytes goes to rank r; row r of the result came from it."""
    if isinstance(group, Alone):
        return rows
    if isinstance(group, InOrder):
        at = [group.numbers.index(rank) for rank in range(group.size)]
        return _picked(exchange(group.group, _picked(rows, at)), group.numbers)
    assert isinstance(group, TorchGroup)
    return group.exchange(rows)


def gather(group: Group, row: torch.Tensor) -> torch.Tensor:
    """Every rank's row of n bytes: (size, n)."""
    if isinstance(group, Alone):
        return row.view(1, -1)
    if isinstance(group, InOrder):
        return _picked(gather(group.group, row), group.numbers)
    assert isinstance(group, TorchGroup)
    return group.gather(row)


def where_calls_begin(groups: Groups) -> Iterator[tuple[Sequence[int], Group]]:
    """The groups in which `Groups.gather` gathers, in its order, with their ranks."""
    if groups.local.size > 1:
        yield groups.hosts.local, groups.local
    if groups.across is not None and groups.across.size > 1:
        assert groups.hosts.shard is not None
        yield groups.hosts.across(groups.hosts.shard), groups.across


def _picked(rows: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """Rows in another order; an index would have to come from the host, which would wait."""
    return torch.stack([rows[number] for number in numbers])
