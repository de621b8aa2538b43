"""Torch's face of compression: tensors, DDP's buckets, and a thread that exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from pycollective import _torch
from pycollective.compression.feedback import ErrorFeedback
from pycollective.compression.options import Common, Options, Shape
from pycollective.errors import ConfigurationError
from pycollective.torch.compression.groups import average_soon, group_maker
from pycollective.torch.compression.tensors import (
    OfTensor,
    flat_in_memory,
    has_own_order,
    in_memory,
    in_shape,
)
from pycollective.torch.compression.worker import Worker

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


class State:
    """Error feedback for a model's parameters; collective over the group it was made for.

    What it does is `pycollective.compression`'s. This looks up parameters, makes tensors of arrays,
    and runs all exchanges on one thread, in the order in which they were issued.
    """

    codec: ClassVar[str] = ""

    def __init__(
        self,
        parameters: Parameters,
        group: dist.ProcessGroup | None,
        options: Options,
        common: Common,
    ) -> None:
        def shapes() -> dict[str, Shape]:
            # Looked up when the ranks compare them: what cannot be is told to all.
            self._parameters = named(parameters)
            return {name: tuple(each.shape) for name, each in self._parameters.items()}

        name = type(self).__name__
        self._feedback = ErrorFeedback(name, shapes, group_maker(group), options, common)
        self._names = {id(tensor): name for name, tensor in self._parameters.items()}
        # Exchanges of several buckets run in the buckets' order on every rank, while backward
        # goes on.
        self._worker = Worker(self._feedback.groups.abort)
        self._passes = False
        self._looked_at: set[tuple[Any, ...]] = set()  # buckets that went so

    # DDP.

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of DDP's, in place; see the hooks."""
        feedback = self._feedback
        feedback.check_open()
        number, buffer = bucket.index(), bucket.buffer()
        if number == 0:
            if self._worker.busy:  # with what a backward has issued that was given up
                self._worker.call(lambda: None)
            self._passes = feedback.is_dense_for_good
        like = number, buffer.numel(), buffer.dtype, buffer.device
        if self._passes and like in self._looked_at:  # at the price of a dense hook
            return self._average_soon(bucket, buffer)
        with feedback.groups.telling():  # the other ranks have issued theirs, and wait
            future = self._issue(bucket, buffer)
        if self._passes:
            self._looked_at.add(like)
        return future

    def _issue(
        self, bucket: dist.GradBucket, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        whole = OfTensor(buffer)
        gradients = self._gradients(bucket, buffer)
        if self._passes:
            return self._average_soon(bucket, buffer)
        first, last = bucket.index() == 0, bucket.is_last()
        feedback = self._feedback
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def exchange() -> None:
            try:
                with feedback.groups.telling():
                    if first:
                        feedback.begin(of_backward=True)
                    feedback.reduce(gradients, whole)
                    if last:
                        feedback.end()
            except BaseException as error:
                feedback.give_up()
                _torch.fail(future, error)
            else:
                future.set_result(buffer)

        self._worker.post(exchange)
        return future

    def _gradients(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> dict[str, OfTensor]:
        """The gradients in a bucket, by name."""
        found: dict[str, OfTensor] = {}
        at = 0
        for parameter in bucket.parameters():
            name = self._names.get(id(parameter))
            if name is None:
                raise ConfigurationError(
                    f"{type(self).__name__}: DDP has a parameter of shape "
                    f"{tuple(parameter.shape)} that the state was not given; make it of the model "
                    "that DDP wraps, after parameters were moved or replaced"
                )
            # By place in the bucket, not by its views: those may be strided (channels last).
            found[name] = OfTensor(buffer[at : at + parameter.numel()])
            at += parameter.numel()
        return found

    def _average_soon(
        self, bucket: dist.GradBucket, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Dense for good, and nothing is owed: what DDP's own hooks do, at their price."""
        self._feedback.counts["dense_calls"] += 1
        if bucket.is_last():
            self._feedback.steps += 1
            self._feedback.counts["steps"] += 1
        return average_soon(self._feedback.groups.all, buffer)

    # Without DDP.

    def step(self) -> AbstractContextManager[State]:
        """``with state.step():`` begins and ends one; an exception forgets it."""
        self._worker.refuse_here()
        return self._one_step()

    @contextmanager
    def _one_step(self) -> Iterator[State]:
        self._worker.call(self._feedback.begin)
        try:
            yield self
        except BaseException:
            self._feedback.give_up()
            raise
        self._worker.call(self._feedback.end)

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
            self._feedback.item(name, flat)  # refused here, where no other rank hears of it
        return self._worker.call(lambda: self._feedback.all_reduce(flats))

    def _flat_of(self, name: str, tensor: torch.Tensor) -> OfTensor:
        """A gradient in its parameter's order in memory."""
        parameter = self._parameters.get(name)
        if parameter is None or tensor.numel() != parameter.numel() or not has_own_order(parameter):
            return OfTensor(tensor)
        return OfTensor(flat_in_memory(tensor, parameter, f"{type(self).__name__}: {name!r}"))

    def reduce_scatter(self, out: Any, tensor: Any, key: str) -> bool:
        """Average a tensor over all ranks, each rank's shard of it to that rank.

        As NumPy's: `pycollective.compression.State.reduce_scatter`.
        """
        to, of = OfTensor(out), OfTensor(tensor)
        return self._worker.call(lambda: self._feedback.reduce_scatter(to, of, key))

    def set_loss_scale(self, scale: float | Callable[[], float] | Any) -> None:
        """Say by what the loss is multiplied: a number, a function, or a ``GradScaler``.

        Looked at when a step begins. Residuals are kept in the scale of the step that left them:
        one in another scale adds them times the ratio, which is exact for powers of two. Where
        that is not finite the step is given up, and what is held is what it was.
        """
        self._feedback.set_loss_scale(getattr(scale, "get_scale", scale))

    # What is held.

    def flush(self) -> dict[str, Any]:
        """Give back what is held, and hold exactly nothing; collective, between steps.

        Returns:
            By parameter, in its shape, an fp32 tensor, in the scale of the last step that counted:
            what all ranks' held error adds to the average. Add it to a gradient, or drop it.

        Raises:
            ConfigurationError: a step is under way, or the state was closed.
            CollectiveMismatch: another rank refused it, or called something else.
        """
        feedback = self._feedback
        # Which went in shards is forgotten with what is held.
        sharded, found = self._worker.call(lambda: (feedback.sharded(), feedback.flush()))
        return {
            name: self._in_shape(name, torch.from_numpy(each), sharded)
            for name, each in found.items()
        }

    def _in_shape(self, name: str, flat: torch.Tensor, sharded: Collection[str]) -> torch.Tensor:
        """A parameter's error in its shape; of one that goes in shards, in its order, too."""
        parameter = self._parameters[name]
        return flat.view(parameter.shape) if name in sharded else in_shape(flat, parameter)

    def reset(self) -> None:
        """Hold nothing. Local: call it on all ranks, between steps."""
        self._worker.call(self._feedback.reset)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the same on every rank; collective, between steps.

        Tensors of 4 bytes times parameters times hosts (and once more for the server's residuals);
        torch.save and torch.distributed.checkpoint take it as it is.
        """
        return self._convert(self._worker.call(self._feedback.state_dict), self._saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what `state_dict` gave; as `pycollective.compression.State.load_state_dict`."""
        self._worker.call(
            lambda: self._feedback.load_state_dict(
                state, lambda saved: self._convert(saved, self._loaded)
            )
        )

    @staticmethod
    def _convert(
        state: Mapping[str, Any], convert: Callable[[str, Any, Collection[str]], Any]
    ) -> dict[str, Any]:
        """A checkpoint with each error converted."""

        def every(of: Mapping[str, Any]) -> dict[str, Any]:
            return {name: convert(name, each, state["sharded"]) for name, each in of.items()}

        residuals = {kind: every(of) for kind, of in state["residuals"].items()}
        return {**state, "residuals": residuals, "undelivered": every(state["undelivered"])}

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
        """Leave the groups that the state made; collective. What is held is lost; `flush` first.

        Idempotent; all calls but `stats` and `set_loss_scale` are refused from then on.
        """
        self._worker.refuse_here()
        if self._worker.ended:
            return
        try:
            self._worker.call(self._feedback.close)
        finally:
            self._worker.end()

    def stats(self) -> dict[str, Any]:
        """What this rank has sent and held; as `pycollective.compression.State.stats`."""
        return self._feedback.stats()


def run_hook(
    state: Any, kind: type[State], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket for a hook whose state must be of that kind."""
    if not isinstance(state, kind):
        raise ConfigurationError(
            f"the hook's state is a {kind.__name__}, not a {type(state).__name__}: "
            f"ddp.register_comm_hook({kind.__name__}(ddp), ...)"
        )
    return state._hook(bucket)
