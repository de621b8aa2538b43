"""Sums on a device of what is not compressed, in the contract's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycollective import order
from pycollective.compression.bucket import Bucket, header_bytes
from pycollective.compression.groups import Groups
from pycollective.torch.compression.devices.exchanges import exchange
from pycollective.torch.compression.devices.headers import Headers
from pycollective.torch.ordered import reduction


def host_sums(bucket: Bucket, groups: Groups, headers: Headers) -> list[torch.Tensor]:
    """As `Bucket.host_sums`."""
    hosts, local = groups.hosts, groups.local
    if local.size == 1:
        return [
            item.flat.part(*ranges[0])
            for item, ranges in zip(bucket.items, bucket.local_shards, strict=True)
        ]
    widths = [
        sum(ranges[shard][1] - ranges[shard][0] for ranges in bucket.local_shards)
        for shard in range(hosts.shards)
    ]
    first = -(-header_bytes(len(bucket.items)) // 4)  # in fp32 numbers
    head = headers.row()
    rows = head.new_zeros((local.size, 4 * (first + max(widths))))
    rows[:, : headers.bytes] = head
    numbers = rows.view(torch.float32)[:, first:]
    wide, parts = [], []
    for shard in range(hosts.shards):
        for item, (start, stop), row in bucket.along(shard, numbers[shard]):
            if stop > start:
                wide.append(row)
                parts.append(item.flat.part(start, stop))
    copy_all(wide, parts)
    came = exchange(local, rows)
    headers.compare(came, hosts.local)
    if hosts.shard is None:
        return []
    sums = came.view(torch.float32)[:, first : first + widths[hosts.shard]]
    return [row for _, _, row in bucket.along(hosts.shard, _reduced(sums, "sum", 1))]


def uncompressed_mean(payloads: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    """The average over all ranks of uncompressed segments, one after another, in fp32.

    Args:
        payloads: of each segment a row of bytes from each host.
        ranks: how many.
    """
    return _reduced(torch.cat(list(payloads), dim=1).view(torch.float32), "avg", ranks)


def uncompressed_sum(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `uncompressed_mean`, the sum."""
    return _reduced(torch.cat(list(payloads), dim=1).view(torch.float32), "sum", 1)


def are_zero(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `Bucket.is_zero`: (parts,) of bool."""
    return ~torch.stack([part.any() for part in parts])


def put(out: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite a gradient, flat, by fp32 numbers, each rounded once."""
    if out.dtype == torch.float32:
        out.copy_(values)
    elif out.numel():  # not by a cast, which may do otherwise on a device
        reduction.reduce([values], out, "sum", [order.TAKE], 1, out.dtype, finish=True)


def copy_all(to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
    """Copy each of some tensors; a rank may have none."""
    if to:
        torch._foreach_copy_(list(to), list(of))


def _reduced(rows: torch.Tensor, op: str, divisor: int) -> torch.Tensor:
    """Rows of fp32 numbers added up in the contract's order, and divided."""
    count = len(rows)
    out = rows.new_empty(rows.shape[1])
    if out.numel():
        recipe = order.recipe((0, count), [(i, i + 1) for i in range(count)])
        terms = list(rows)
        reduction.reduce(terms, out, op, recipe, divisor, torch.float32, finish=op == "avg")
    return out
