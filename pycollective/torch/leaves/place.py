"""Where a model's parameters are, and what a LeafSync does otherwise there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from pycollective.errors import ConfigurationError
from pycollective.leaves.accumulator import Accumulator
from pycollective.torch.leaves.conditions import conditions
from pycollective.torch.leaves.device_accumulator import DeviceAccumulator

_NUMPY = (torch.float32, torch.float16)
_THREADS = "threads (torch.set_num_threads, OMP_NUM_THREADS)"


class Place(Protocol):
    """Where a model's parameters are.

    Attributes:
        device: of them all.
    """

    device: torch.device

    def accumulator(self, shapes: Sequence[tuple[int, ...]], leaves: int) -> Accumulator:
        """What adds up gradients of such shapes, in rows where each has its place."""

    def begin(self) -> None:
        """Note that a leaf begins here, or this rank's part in a step without leaves."""

    def take(self, gradient: torch.Tensor) -> Any:
        """Take a gradient from the hook that has it, to be added later; contiguous."""

    def adding(self) -> AbstractContextManager[Any]:
        """Within, gradients that were taken may be added and averaged."""

    def hand_out(self) -> None:
        """Let the caller use what was averaged."""

    def seeded(self, seed: int) -> AbstractContextManager[Any]:
        """Within, random numbers of a device follow from the seed; of the CPU see `seeded`."""

    def conditions(self, compiled: bool) -> dict[str, Any]:
        """What the ranks must have alike so that a leaf has the same gradients on each."""


class OnCpu:
    """On CPUs, where what is computed is there at once."""

    device = torch.device("cpu")

    def accumulator(self, shapes: Sequence[tuple[int, ...]], leaves: int) -> Accumulator:
        return Accumulator([*shapes], leaves=leaves)

    def begin(self) -> None:
        pass

    def take(self, gradient: torch.Tensor) -> Any:
        # NumPy's are handed over faster than by DLPack.
        return gradient.numpy() if gradient.dtype in _NUMPY else gradient

    def adding(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def hand_out(self) -> None:
        pass

    def seeded(self, seed: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def conditions(self, compiled: bool) -> dict[str, Any]:
        return {_THREADS: torch.get_num_threads()}


class OnDevice:
    """On a GPU, whose streams work later than the host asks.

    Leaves are added on the stream that was current when the leaf began, behind the streams on which
    backward has made the gradients. The host waits for nothing.

    Args:
        device: with its number.
        module: torch's of such devices, `torch.cuda`.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device, self._module = device, module
        self._stream = module.current_stream(device)  # on which leaves are added

    def accumulator(self, shapes: Sequence[tuple[int, ...]], leaves: int) -> Accumulator:
        counts = [torch.Size(shape).numel() for shape in shapes]
        return DeviceAccumulator(counts, leaves, self.device)

    def begin(self) -> None:
        if getattr(self._module, "is_current_stream_capturing", bool)():
            raise ConfigurationError(
                "LeafSync: a graph cannot capture a leaf, whose reductions are made once; capture "
                "forward and backward within it, as torch.compile does"
            )
        stream = self._module.current_stream(self.device)
        if stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def take(self, gradient: torch.Tensor) -> Any:
        stream = self._module.current_stream(self.device)
        if stream != self._stream:
            self._stream.wait_stream(stream)
            gradient.record_stream(self._stream)
        return gradient

    def adding(self) -> AbstractContextManager[Any]:
        stream = self._module.current_stream(self.device)
        if stream == self._stream:
            return nullcontext()
        found: AbstractContextManager[Any] = self._module.stream(self._stream)
        return found

    def hand_out(self) -> None:
        stream = self._module.current_stream(self.device)
        if stream != self._stream:
            stream.wait_stream(self._stream)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        generator = self._module.default_generators[self.device.index or 0]
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)

    def conditions(self, compiled: bool) -> dict[str, Any]:
        found = conditions(self._module.get_device_properties(self.device), compiled)
        return {_THREADS: torch.get_num_threads(), **found}


def place_of(model: torch.nn.Module) -> Place:
    """Where a model's first parameter is that requires a gradient; `Model` refuses all else."""
    if isinstance(model, torch.nn.Module):
        for each in model.parameters():
            if each.requires_grad and each.device.type == "cuda":
                return OnDevice(each.device, torch.get_device_module(each.device))
            if each.requires_grad:
                break
    return OnCpu()
