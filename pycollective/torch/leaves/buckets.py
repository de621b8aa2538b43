"""Buckets: parameters whose gradients are added and reduced together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from pycollective.leaves.accumulator import Accumulator
from pycollective.torch.leaves.place import Place

Named = tuple[str, torch.nn.Parameter]


class Bucket(ABC):
    """Some parameters, the sum of their gradients in fp32, and the averages.

    Args:
        parameters: their averages have one dtype.
        accumulator: for their gradients.
        averages: flat.
        views: of the averages, what each parameter's gradient becomes.

    Attributes:
        parameters: as given.
        own_dtype: a type smaller than fp32, of which leaves have the values; None if they may have
            others.
        accumulator: holds what this rank's leaves have given.
        averages: as given; they are overwritten step by step.
        views: as given.
        gradients: of the leaf that is under way, flat; None where there is none yet.
        missing: how many of them there are not.
        added: whether the leaf that is under way has been added.
    """

    own_dtype: torch.dtype | None = None

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        accumulator: Accumulator,
        averages: torch.Tensor,
        views: Sequence[torch.Tensor],
    ) -> None:
        self.parameters, self.accumulator = parameters, accumulator
        self.averages, self.views = averages, views
        self.begin()

    def begin(self) -> None:
        """Begin a leaf, which has no gradients yet."""
        self.gradients: list[Any] = [None] * len(self.parameters)
        self.missing = len(self.parameters)
        self.added = False
        for parameter in self.parameters:
            parameter.grad = None

    @abstractmethod
    def take(self, number: int, gradient: torch.Tensor) -> None:
        """Have the gradient of this parameter."""

    @abstractmethod
    def add(self, leaf: int) -> None:
        """Add what there is, and +0 for the rest."""

    def hand_out(self) -> None:
        """Make each parameter's gradient its average, which is a view."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


class WholeBucket(Bucket):
    """Parameters that each rank has whole.

    A gradient lies in memory as its parameter does, so neither is copied to be added or read.

    Args:
        named: the parameters.
        dtype: of the averages.
        leaves: of a step, on all ranks.
        place: where the parameters are.
    """

    def __init__(
        self, named: Sequence[Named], dtype: torch.dtype, leaves: int, place: Place
    ) -> None:
        self._place = place
        parameters = [parameter for _, parameter in named]
        self._strides = [strides_of(each) for each in parameters]
        # Elements are added as they lie: the shape is that of the memory.
        shapes = [
            tuple(each.shape) if _like(each).is_contiguous() else (each.numel(),)
            for each in parameters
        ]
        accumulator = place.accumulator(shapes, leaves)
        averages = torch.zeros(accumulator.size, dtype=dtype, device=place.device)
        parts = zip(accumulator.begins, parameters, self._strides, strict=True)
        views = [averages.as_strided(each.shape, strides, at) for at, each, strides in parts]
        own = {each.dtype for each in parameters}
        wanted = own if dtype == torch.float32 else own & {dtype}
        self.own_dtype = next(iter(own)) if len(own) == 1 and wanted - {torch.float32} else None
        super().__init__(parameters, accumulator, averages, views)

    def take(self, number: int, gradient: torch.Tensor) -> None:
        gradient = gradient.detach()
        strides = self._strides[number]
        if gradient.stride() != strides:
            gradient = gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)
        if not gradient.is_contiguous():
            gradient = gradient.as_strided((gradient.numel(),), (1,))
        self.gradients[number] = self._place.take(gradient)
        self.missing -= 1

    def add(self, leaf: int) -> None:
        self.accumulator.add(leaf, self.gradients)
        self.gradients = [None] * len(self.gradients)  # their memory is free, and warm
        self.added = True


def buckets_of(
    named: Sequence[Named], leaves: int, dtype: torch.dtype | None, cap: float, place: Place
) -> list[Bucket]:
    """Cut the parameters into buckets, the last first, as backward is likely to come to them.

    Args:
        named: in the order in which the model registered them.
        leaves: of a step.
        dtype: of the averages; None for each parameter's own.
        cap: bytes of averages above which a bucket is full; one parameter may exceed it.
        place: where the parameters are.
    """
    open_ones: dict[torch.dtype, list[Named]] = {}
    full: list[Bucket] = []
    for name, parameter in reversed(named):
        wanted = dtype or parameter.dtype
        group = open_ones.setdefault(wanted, [])
        elements = sum(each.numel() for _, each in [*group, (name, parameter)])
        if group and elements * wanted.itemsize > cap:
            full.append(WholeBucket(group, wanted, leaves, place))
            open_ones[wanted] = group = []
        group.append((name, parameter))
    left = [WholeBucket(each, wanted, leaves, place) for wanted, each in open_ones.items()]
    return [*full, *left]


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of its gradients and averages, in elements."""
    return _like(tensor).stride()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """One without memory that lies as the tensor does, or, if that has holes, in C order."""
    return torch.empty_like(tensor, device="meta")
