"""The norm of all gradients, and clipping by it: the same bits however gradients are sharded.

Squares are added up by rows of dimension 0, then over a gradient's rows, then over the gradients,
each time in the contract's order (contract.md#norms). A rank that has some rows of a gradient
has some nodes of that order. Ranks gather these, for all gradients at once, and each goes on alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pycollective import _core
from pycollective.agree import Bytes, agree
from pycollective.errors import CollectiveMismatch, ConfigurationError
from pycollective.order import cover, join
from pycollective.torch.ordered.messages import failure

_CALL = "clip_grad_norm_"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients, in place, so that their L2 norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, whose norm has other bits for each number of shards. Here
    they follow from the gradients' elements and shapes alone: for FSDP2, HSDP, DDP and one process
    they are the same, and so are the clipped gradients. Where gradients are sharded it is
    collective over the shards' group, of any backend, which gathers a few numbers a gradient.

    Args:
        parameters: one or several, in an order that is the same on all ranks. A gradient is a dense
            tensor on the CPU of float32, bfloat16, float16 or float64, or a DTensor of such that is
            sharded by dimension 0 over one mesh dimension, as ``fully_shard`` has it. One that is
            None counts as +0, and keeps its place in the order.
        max_norm: 0 or more.
        norm_type: 2.0, the only one.
        error_if_nonfinite: raise if the norm is infinite or NaN, and change nothing.

    Returns:
        The norm before clipping, a float64 tensor of no dimension. Gradients are multiplied by
        ``max_norm / (norm + 1e-6)``, if that is below 1, rounded to float32.

    Raises:
        ConfigurationError: a gradient or an argument cannot be used so, on this rank or another of
            the shards' group; nothing was changed.
        CollectiveMismatch: the ranks have other gradients, or another ``max_norm``.
        CollectiveError: what the backend says of the gathering, after its timeout at the latest.
        RuntimeError: the norm is not finite, as ``error_if_nonfinite`` asks; names the gradient.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = list(parameters)
    gradients = [each.grad for each in parameters]
    # Of parameters without gradients too: a rank that has no gradient takes part.
    given = [p if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return _clip(gradients, _shards_of(given), max_norm, norm_type, error_if_nonfinite)


def clip_gradients(
    gradients: Sequence[torch.Tensor | None],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`clip_grad_norm_`, of gradients that all ranks have, if they are sharded."""
    return _clip(gradients, _shards_of(gradients), max_norm, norm_type, error_if_nonfinite)


@torch.no_grad()
def _clip(
    gradients: Sequence[torch.Tensor | None],
    shards: _Shards | None,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    parts: list[_Part | None] = []

    def check_mine() -> tuple[float, bool]:
        parts.extend(_checked(gradients, shards, max_norm, norm_type))
        return float(max_norm), bool(error_if_nonfinite)

    if shards is None:
        check_mine()
    else:
        _agree(shards, check_mine, parts)
    sums = _sums_of_squares(parts, shards)
    norm = math.sqrt(join(sums, [1] * len(sums)))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"{_CALL}: the norm is {norm}{_first_of(sums, gradients)}")
    factor = float(max_norm) / (norm + 1e-6)
    if not factor >= 1:  # NaN too
        mine = [each.local for each in parts if each is not None]
        torch._foreach_mul_(mine, torch.tensor(factor, dtype=torch.float32))
    return torch.tensor(norm, dtype=torch.float64)


def _chunk(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Which of so many rows a rank has, as torch.chunk cuts them."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


class _Shards(NamedTuple):
    """The ranks over which gradients are sharded."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def all_gather(self, row: Bytes) -> Bytes:
        rows = torch.empty((self.size, row.size), dtype=torch.uint8)
        try:
            dist.all_gather(list(rows), torch.from_numpy(row), self.group)
        except RuntimeError as error:
            raise failure(error, ()) from error
        return rows.numpy()


class _Part(NamedTuple):
    """A gradient, as far as this rank has it."""

    local: torch.Tensor
    shape: tuple[int, ...]  # of the whole
    is_sharded: bool

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def described(self) -> tuple[Any, ...]:
        return self.shape, self.local.dtype, self.is_sharded


def _shards_of(gradients: Sequence[torch.Tensor | None]) -> _Shards | None:
    """The ranks of the first gradient that is sharded; None if none is, or not on CPUs."""
    for each in gradients:
        if each is None or type(each) is torch.Tensor or each.device.type != "cpu":
            continue
        if (group := _group_of(each)) is not None:
            return _Shards(group, dist.get_rank(group), dist.get_world_size(group))
    return None


def _group_of(gradient: torch.Tensor) -> dist.ProcessGroup | None:
    """Over which a DTensor is sharded; None if it is whole, or not sharded as it must be."""
    dimensions = _sharded_dimensions(gradient)
    if len(dimensions) != 1:
        return None
    group: dist.ProcessGroup = gradient.device_mesh.get_group(dimensions[0])  # type: ignore[attr-defined]
    return group


def _sharded_dimensions(gradient: torch.Tensor) -> list[int]:
    """Of its mesh; those over which a DTensor is not replicated."""
    placements = getattr(gradient, "placements", ())  # to import DTensor takes seconds
    return [i for i, each in enumerate(placements) if not each.is_replicate()]


def _checked(
    gradients: Sequence[torch.Tensor | None],
    shards: _Shards | None,
    max_norm: float,
    norm_type: float,
) -> list[_Part | None]:
    if norm_type != 2:
        raise ConfigurationError(f"{_CALL}: norm_type is {norm_type}; only 2.0, the L2 norm, is")
    if not max_norm >= 0:
        raise ConfigurationError(f"{_CALL}: max_norm is {max_norm}, and must be 0 or more")
    return [
        None if each is None else _part(place, each, shards) for place, each in enumerate(gradients)
    ]


def _part(place: int, gradient: torch.Tensor, shards: _Shards | None) -> _Part:
    """The part of a gradient that this rank has.

    Raises:
        ConfigurationError: its squares cannot be added up by rows.
    """
    shape, local, run = tuple(gradient.shape), gradient.detach(), None
    if hasattr(gradient, "placements"):
        if dimensions := _sharded_dimensions(gradient):
            if why := _misplaced(gradient, dimensions, shards):
                raise _refusal(place, gradient, why)
            assert shards is not None
            run = _chunk(shape[0], shards.rank, shards.size)
        local = local.to_local()  # type: ignore[attr-defined]
    if local.device.type != "cpu":
        why = (
            f"is on {local.device}, and must be on a CPU; where each rank has all gradients, "
            "torch.nn.utils.clip_grad_norm_ has the same bits on all GPUs of one kind"
        )
        raise _refusal(place, gradient, why)
    if local.layout != torch.strided:
        raise _refusal(place, gradient, f"is a {local.layout} tensor, and must be dense")
    if local.dtype not in _DTYPES:
        names = ", ".join(map(str, _DTYPES))
        raise _refusal(place, gradient, f"is of {local.dtype}, and must be of {names}")
    if is_traceable_wrapper_subclass(local):
        kind = type(local).__name__
        why = f"is a {kind}, without memory of its own; give plain tensors or DTensors"
        raise _refusal(place, gradient, why)
    if run is not None and local.shape != (run[1] - run[0], *shape[1:]):
        why = (
            f"is sharded unevenly: this rank has {tuple(local.shape)}, and torch.chunk would give "
            f"it {run[1] - run[0]} rows; shard it as fully_shard does"
        )
        raise _refusal(place, gradient, why)
    return _Part(local, shape, run is not None)


def _refusal(place: int, gradient: torch.Tensor, why: str) -> ConfigurationError:
    return ConfigurationError(f"{_CALL}: gradient {place}, of shape {tuple(gradient.shape)}, {why}")


def _misplaced(gradient: Any, dimensions: Sequence[int], shards: _Shards | None) -> str:
    """Why ranks have other things of a DTensor than runs of rows; empty if they have these."""
    from torch.distributed.tensor import Shard

    placement = gradient.placements[dimensions[0]]
    if len(dimensions) != 1 or type(placement) is not Shard or placement.dim != 0:
        return (
            f"has placements {gradient.placements}; only Shard(0) over one mesh dimension can be "
            "added up by rows, Replicate() over the others. Leave out shard_placement_fn and "
            "tensor parallelism, or clip with torch.nn.utils"
        )
    group = _group_of(gradient)
    if shards is None or group is shards.group:
        return ""
    ranks, others = map(dist.get_process_group_ranks, (group, shards.group))
    if ranks == others:
        return ""
    return (
        f"is sharded over ranks {ranks}, and one before it over {others}; shard all over one mesh"
    )


def _agree(
    shards: _Shards, check_mine: Callable[[], tuple[float, bool]], parts: list[_Part | None]
) -> None:
    """Fill `parts` on all ranks, which have gradients alike; or raise on all of them."""

    def mine() -> list[str]:
        about = repr((check_mine(), [each and each.described() for each in parts]))
        given = sum(each is not None for each in parts)
        digest = blake2b(about.encode(), digest_size=16).hexdigest()
        return [digest, f"{given} gradients of {len(parts)}, {about[:200]}"]

    def check(said: list[list[str]]) -> None:
        for rank, (digest, text) in enumerate(said):
            if digest != said[0][0]:
                raise CollectiveMismatch(
                    f"{_CALL}: rank {rank} has {text}..., and rank 0 {said[0][1]}...: all ranks "
                    "must give the same parameters, and the same max_norm"
                )

    agree(shards.all_gather, _CALL, mine, check)


class _Nodes(NamedTuple):
    """The nodes of some gradients, each over its rows, that ranks have."""

    held: list[list[list[int]]]  # of each rank, of each gradient: rows of each node
    most: int  # of a rank, 1 at least: what is gathered is not empty
    places: np.ndarray[Any, np.dtype[np.intp]]  # of each gradient's nodes in what all ranks gather
    joined: list[list[int]]  # of each gradient: all ranks' nodes


@lru_cache(maxsize=16)
def _nodes_of(rows: tuple[int, ...], ranks: int) -> _Nodes:
    """Where so many ranks have a run of rows of each gradient."""
    held = [
        [[hi - lo for lo, hi in cover(*_chunk(count, rank, ranks), count)] for count in rows]
        for rank in range(ranks)
    ]
    sizes = [[len(nodes) for nodes in of_rank] for of_rank in held]
    most = max(1, *map(sum, sizes))
    begins = [rank * most + np.cumsum([0, *of_rank]) for rank, of_rank in enumerate(sizes)]
    places = [
        np.arange(begin[number], begin[number + 1])
        for number in range(len(rows))
        for begin in begins
    ]
    joined = [[n for of_rank in held for n in of_rank[number]] for number in range(len(rows))]
    return _Nodes(held, most, np.concatenate(places), joined)


def _sums_of_squares(parts: Sequence[_Part | None], shards: _Shards | None) -> list[float]:
    """Of each gradient's elements; +0 for None."""
    found = [0.0] * len(parts)
    for is_sharded in (False, True):
        mine = [
            (place, each)
            for place, each in enumerate(parts)
            if each is not None and each.is_sharded == is_sharded
        ]
        if not mine:
            continue
        rank, ranks = (shards.rank, shards.size) if is_sharded and shards is not None else (0, 1)
        nodes = _nodes_of(tuple(each.rows for _, each in mine), ranks)
        sums = np.zeros(nodes.most)
        held = nodes.held[rank]
        # NumPy's are handed over faster than by DLPack. It has no bfloat16.
        arrays = [
            (each.view(torch.int16) if each.dtype == torch.bfloat16 else each).numpy()
            for each in (each.local.contiguous() for _, each in mine)
        ]
        _core.sum_squares(arrays, held, sums[: sum(map(len, held))])
        if is_sharded and shards is not None:
            sums = shards.all_gather(sums.view(np.uint8)).reshape(-1).view(np.float64)[nodes.places]
        ascending = iter(sums.tolist())
        for (place, _), leaves in zip(mine, nodes.joined, strict=True):
            found[place] = join([next(ascending) for _ in leaves], leaves)
    return found


def _first_of(sums: Sequence[float], gradients: Sequence[torch.Tensor | None]) -> str:
    for place, (each, gradient) in enumerate(zip(sums, gradients, strict=True)):
        if gradient is not None and not math.isfinite(each):
            return f", first in gradient {place} of {len(sums)}, of shape {tuple(gradient.shape)}"
    return ""
