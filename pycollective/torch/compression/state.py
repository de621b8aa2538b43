"""What makes a state of compression one of torch's: tensors, DDP's buckets, a thread."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycollective import _torch
from pycollective.compression.options import Shape
from pycollective.compression.state import State
from pycollective.errors import ConfigurationError
from pycollective.torch.compression.exchanging import Exchanger
from pycollective.torch.compression.groups import among_group, average_soon
from pycollective.torch.compression.layouts import (
    flat_in_memory,
    has_own_order,
    in_memory,
    in_shape,
)
from pycollective.torch.compression.tensors import OfTensor

Parameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


def named(parameters: Parameters) -> dict[str, torch.Tensor]:
    """The parameters that need a gradient, by their names in the model that DDP wraps."""
    if isinstance(parameters, torch.nn.parallel.DistributedDataParallel):
        parameters = parameters.module
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.named_parameters()
    pairs = list(parameters)
    if any(not isinstance(each, tuple) or len(each) != 2 for each in pairs):
        raise ConfigurationError(
            "a state of compression wants a model, or pairs of a name and a parameter "
            "(model.named_parameters()): residuals are kept by name"
        )
    found = {name: tensor for name, tensor in pairs if tensor.requires_grad}
    if len(found) != sum(tensor.requires_grad for _, tensor in pairs):
        raise ConfigurationError("a state of compression: two parameters have the same name")
    return found


class Named:
    """The parameters of a state, looked up when the ranks compare them.

    Attributes:
        tensors: by name, then.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def __call__(self) -> dict[str, Shape]:
        """The shape of each."""
        self.tensors = named(self._parameters)
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


class OfTorch(State):
    """What makes a state one of torch's: tensors, DDP's buckets, a thread that exchanges."""

    def __init__(
        self, parameters: Parameters, group: dist.ProcessGroup | None, **options: Any
    ) -> None:
        """`options`: of NumPy's state of the codec, which comes behind this one."""
        of = Named(parameters)
        super().__init__(of, among_group(group), **options)
        self._names = {id(tensor): name for name, tensor in of.tensors.items()}
        self._parameters = dict(of.tensors)  # so that no other object takes an id
        # Exchanges of several buckets run in the buckets' order on every rank, while backward
        # goes on.
        self._exchanger = Exchanger(self._ends.abort)
        self._by_hooks = False  # the step under way is a backward of DDP's
        self._passes = False
        self._looked_at: set[tuple[Any, ...]] = set()  # buckets that went so

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of DDP's, in place; see the hooks."""
        self._check_not_closed()
        number, buffer = bucket.index(), bucket.buffer()
        if number == 0:
            if self._exchanger.busy:  # with what a backward has issued that was given up
                self._exchanger.call(lambda: None)
            self._passes = self._dense_for_good
        like = number, buffer.numel(), buffer.dtype, buffer.device
        if self._passes and like in self._looked_at:  # at the price of a dense hook
            return self._average_soon(bucket, buffer)
        with self._ends.telling():  # the other ranks have issued theirs, and wait
            future = self._issue(bucket, buffer)
        if self._passes:
            self._looked_at.add(like)
        return future

    def _issue(
        self, bucket: dist.GradBucket, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        parameters = bucket.parameters()
        whole = OfTensor(buffer)
        for parameter in parameters:
            if id(parameter) not in self._names:
                raise ConfigurationError(
                    f"{type(self).__name__}: DDP has a parameter of shape "
                    f"{tuple(parameter.shape)} that the state was not given; make it of the model "
                    "that DDP wraps, after parameters were moved or replaced"
                )
        if self._passes:
            return self._average_soon(bucket, buffer)
        first, last = bucket.index() == 0, bucket.is_last()
        gradients: dict[str, OfTensor] = {}
        at = 0
        for parameter in parameters:
            # By place in the bucket, not by its views: those may be strided (channels last).
            flat = buffer[at : at + parameter.numel()]
            gradients[self._names[id(parameter)]] = OfTensor(flat)
            at += parameter.numel()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def exchange() -> None:
            try:
                with self._ends.telling():
                    if first:
                        self._begin()
                        self._by_hooks = True
                    self._reduce(gradients, whole)
                    if last:
                        self._end()
            except BaseException as error:
                self._open = False
                _torch.fail(future, error)
            else:
                future.set_result(buffer)

        self._exchanger.post(exchange)
        return future

    def _average_soon(
        self, bucket: dist.GradBucket, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Dense for good, and nothing is owed: what DDP's own hooks do, at their price."""
        self._counts["dense_calls"] += 1
        if bucket.is_last():
            self._steps += 1
            self._counts["steps"] += 1
        return average_soon(self._ends.all, buffer)

    def step(self) -> AbstractContextManager[State]:
        """See `pycollective.compression.State.step`."""
        self._exchanger.refuse_here()
        return super().step()

    def _begin(self) -> None:
        self._exchanger.behind(self._begin_here)

    def _begin_here(self) -> None:
        self._by_hooks = False
        super()._begin()

    def _end(self) -> bool:
        return self._exchanger.behind(super()._end)

    def _in_step(self) -> bool:
        if self._by_hooks:  # of a backward that was not finished
            self._open = False
        return super()._in_step()

    def _flat_of(self, name: str, tensor: torch.Tensor) -> OfTensor:
        """A gradient in its parameter's order in memory."""
        parameter = self._parameters.get(name)
        if parameter is None or tensor.numel() != parameter.numel() or not has_own_order(parameter):
            return OfTensor(tensor)
        return OfTensor(flat_in_memory(tensor, parameter, f"{type(self).__name__}: {name!r}"))

    def _in_shape(self, name: str, flat: torch.Tensor, sharded: Collection[str]) -> torch.Tensor:
        """What is kept of a parameter, in its shape; of one that goes in shards in its order."""
        parameter = self._parameters[name]
        return flat.view(parameter.shape) if name in sharded else in_shape(flat, parameter)

    def all_reduce(self, gradients: Mapping[str, Any]) -> bool:
        """Average tensors over all ranks, in place; by itself a whole step, in one a part.

        Args:
            gradients: by parameter name, dense contiguous CPU tensors of fp32, fp16 or bf16.

        Returns:
            Whether all were finite on all ranks; if not, all are NaN now.

        Raises:
            ConfigurationError: an unknown name, another size or type; nothing has moved.
            CollectiveMismatch: ranks passed different parameters.
        """
        flats = {name: self._flat_of(name, tensor) for name, tensor in gradients.items()}
        for name, flat in flats.items():
            self._item(name, flat)
        return self._exchanger.call(lambda: self._as_step(lambda: self._reduce(flats)))

    def reduce_scatter(self, out: Any, tensor: Any, key: str) -> bool:
        """Average a tensor over all ranks, each rank's shard of it to that rank.

        See `pycollective.compression.State.reduce_scatter`.
        """
        to, of = OfTensor(out), OfTensor(tensor)
        reduce = self._reduce_shard
        return self._exchanger.call(lambda: self._as_step(lambda: reduce(to, of, key)))

    def set_loss_scale(self, scale: Any) -> None:
        """Say by what the loss is multiplied: a number, a function, or a ``GradScaler``.

        Looked at when a step begins. Residuals are kept in the scale of the step that left them:
        one in another scale adds them times the ratio, which is exact for powers of two. Where
        that is not finite the step is given up, and what is held is what it was.
        """
        super().set_loss_scale(getattr(scale, "get_scale", scale))

    def flush(self) -> dict[str, Any]:
        """Give back what is held, and hold exactly nothing; collective, between steps.

        Returns:
            By parameter, in its shape, an fp32 tensor, in the scale of the last step that counted:
            what all ranks' held error adds to the average. Add it to a gradient, or drop it.

        Raises:
            ConfigurationError: a step is under way, or the state was closed.
            CollectiveMismatch: another rank refused it, or called something else.
        """
        flush = super().flush
        # Which went in shards is forgotten with what is held.
        sharded, found = self._exchanger.call(lambda: (self._sharded(), flush()))
        return {
            name: self._in_shape(name, torch.from_numpy(each).view(-1), sharded)
            for name, each in found.items()
        }

    def reset(self) -> None:
        """Hold nothing; see `pycollective.compression.State.reset`."""
        self._exchanger.call(super().reset)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the same on every rank; collective, between steps.

        Tensors of 4 bytes times parameters times hosts (and once more for the server's residuals);
        torch.save and torch.distributed.checkpoint take it as it is.
        """
        state = self._exchanger.call(super().state_dict)
        state["residuals"] = {
            kind: {name: self._saved(name, each, state["sharded"]) for name, each in of.items()}
            for kind, of in state["residuals"].items()
        }
        state["undelivered"] = {
            name: self._saved(name, each, state["sharded"])
            for name, each in state["undelivered"].items()
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what `state_dict` gave; see `pycollective.compression.State.load_state_dict`."""
        load = super().load_state_dict
        self._exchanger.call(lambda: load(state))

    def _in_arrays(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        def loaded(of: Mapping[str, Any]) -> dict[str, Any]:
            return {name: self._loaded(name, each, state["sharded"]) for name, each in of.items()}

        return {
            **state,
            "residuals": {kind: loaded(of) for kind, of in state["residuals"].items()},
            "undelivered": loaded(state["undelivered"]),
        }

    def _saved(self, name: str, array: Any, sharded: Collection[str]) -> torch.Tensor:
        """Rows of elements, each in the shape's order."""
        rows = torch.from_numpy(array).view(-1, array.shape[-1])
        shaped = [self._in_shape(name, row, sharded).reshape(-1) for row in rows]
        return torch.stack(shaped).view(array.shape)

    def _loaded(self, name: str, saved: Any, sharded: Collection[str]) -> Any:
        """The inverse; as it is where it fits no parameter, which is refused later."""
        parameter = self._parameters.get(name)
        if parameter is None or name in sharded or tuple(saved.shape[-1:]) != (parameter.numel(),):
            return np.asarray(saved)
        if 0 in saved.shape:
            return np.asarray(saved)
        rows = torch.as_tensor(saved).view(-1, parameter.numel())
        return torch.stack([in_memory(row, parameter) for row in rows]).view(saved.shape).numpy()

    def close(self) -> None:
        """Leave the groups that the state made; collective. What is held is lost; flush first.

        Idempotent; see `pycollective.compression.State.close`.
        """
        self._exchanger.refuse_here()
        if self._exchanger.ended:
            return
        try:
            self._exchanger.call(super().close)
        finally:
            self._exchanger.end()


def run_hook(
    state: Any, kind: type[OfTorch], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """What every hook does, whose state is of that kind; see `one_bit_hook`."""
    if not isinstance(state, kind):
        raise ConfigurationError(
            f"the hook's state is a {kind.__name__}, not a {type(state).__name__}: "
            f"ddp.register_comm_hook({kind.__name__}(ddp), ...)"
        )
    return state._hook(bucket)
