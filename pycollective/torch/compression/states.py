"""Torch's face of compression: tensors, DDP's buckets, and a state for each codec.

Non-contiguous but dense parameters (channels_last) are flattened in storage order, as DDP does, and
all others in the order of their shape. Residuals are kept in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from pycollective import _core
from pycollective.compression.arrays import WHAT, Window
from pycollective.compression.checkpoint import SavedByStateDict
from pycollective.compression.feedback import ErrorFeedback
from pycollective.compression.options import Common, Compress, Options, Shape
from pycollective.compression.quantized import QuantizedOptions
from pycollective.compression.top_k import TopKOptions
from pycollective.errors import ConfigurationError
from pycollective.segments import DTYPES
from pycollective.torch.compression.devices import Later
from pycollective.torch.compression.groups import TorchGroup, group_maker
from pycollective.torch.compression.kernels import TritonKernels
from pycollective.torch.ordered.calls import fail
from pycollective.torch.streams import issue, streams_of
from pycollective.torch.worker import Worker
from pycollective.typing import Between, By, Exchange, Values

Parameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_CPU = torch.device("cpu")
_T = TypeVar("_T")


class FlatTensor:
    """A dense tensor on a state's device."""

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        if tensor.dtype not in _DTYPES or not _is_on(tensor, device) or not _is_dense(tensor):
            where = "CPU" if device.type == "cpu" else str(device)
            raise ConfigurationError(
                f"a gradient to compress is a dense {where} tensor of float32, float16 or "
                f"bfloat16, as the parameters are there, not {tensor.dtype} on {tensor.device} "
                f"({tensor.layout})"
            )
        if not tensor.is_contiguous():
            raise ConfigurationError("a gradient to compress must be contiguous")
        self.array = tensor.detach().view(-1)
        if device.type == "cpu":
            self.address, self.count, self.dtype = _core.flat_floats(tensor.detach(), WHAT, True)
            return
        if tensor.is_neg() or (tensor.numel() and not tensor.data_ptr()):
            raise ConfigurationError(
                "a gradient to compress must have memory of its own, with its numbers as they are: "
                "give its to_local(), or its resolve_neg()"
            )
        self.address, self.count = tensor.data_ptr(), tensor.numel()
        self.dtype = _DTYPES.index(tensor.dtype)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; CPUs' numbers mean nothing."""
    found = tensor.device
    return found == device or (found.type == "cpu" and device.type == "cpu")


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and length of each side of several elements; the stride of another means nothing."""
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in sides if size != 1]


def _is_permuted_dense(parameter: torch.Tensor) -> bool:
    """Whether a parameter is not contiguous, but has its elements side by side without gaps."""
    if parameter.is_contiguous():
        return False
    step = 1
    for stride, size in sorted(_strides(parameter)):
        if stride != step:
            return False
        step *= size
    return True


def _flat_in_memory(tensor: torch.Tensor, parameter: torch.Tensor, what: str) -> torch.Tensor:
    """The elements of a gradient in its parameter's own order in memory: a view.

    Raises:
        ConfigurationError: they do not lie so.
    """
    if tensor.shape != parameter.shape or _strides(tensor) != _strides(parameter):
        raise ConfigurationError(
            f"{what} is not contiguous, and its gradient not laid out in memory as it is"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _from_storage_order(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's flat error in its shape, laid out in memory as it is kept."""
    if _is_permuted_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def _to_storage_order(shaped: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The inverse: elements in the shape's order, made flat."""
    if not _is_permuted_dense(parameter):
        return shaped
    flat = torch.empty(parameter.numel(), dtype=shaped.dtype)
    flat.as_strided(parameter.shape, parameter.stride()).copy_(shaped.view(parameter.shape))
    return flat


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


def _on_cpu(saved: Any) -> Any:
    """A checkpoint whose tensors are on the CPU; whatever else it has is as it was."""
    if isinstance(saved, torch.Tensor):
        return saved.cpu()
    if isinstance(saved, Mapping):
        return {name: _on_cpu(each) for name, each in saved.items()}
    return saved


def _device_of(parameter: torch.Tensor) -> torch.device:
    """Where a parameter's gradients are compressed; one without memory may get it anywhere."""
    return _CPU if parameter.device.type in ("cpu", "meta") else parameter.device


class State(SavedByStateDict):
    """Error feedback for a model's parameters; collective over the group it was made for.

    What it does is `pycollective.compression`'s. This looks up parameters, makes tensors of arrays,
    and runs all exchanges on one thread, on devices on one stream, in the order in which they were
    issued.
    """

    codec: ClassVar[str] = ""

    def __init__(
        self,
        parameters: Parameters,
        group: dist.ProcessGroup | None,
        options: Options,
        common: Common,
    ) -> None:
        name = type(self).__name__
        refusal: Exception | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        try:
            self._parameters = named(parameters)
        except Exception as error:  # raised when the ranks compare them, and so told to all
            refusal = error
        devices = [_device_of(each) for each in self._parameters.values()]
        self._device = next((each for each in devices if each.type != "cpu"), _CPU)

        def shapes() -> dict[str, Shape]:
            if refusal is not None:
                raise refusal
            if len(found := sorted({str(each) for each in devices})) > 1:
                raise ConfigurationError(
                    f"{name}: the parameters are on {' and '.join(found)}; they must be on one "
                    "device"
                )
            return {name: tuple(each.shape) for name, each in self._parameters.items()}

        self._streams = streams_of(self._device, name)
        maker = group_maker(group, self._device if devices else None)
        given = name, shapes, maker, options, common
        if (streams := self._streams) is None:
            self._feedback = ErrorFeedback(*given)
        else:
            self._feedback = ErrorFeedback(
                *given,
                kernels=lambda: TritonKernels(self._device),
                learning=lambda groups: Later(streams, name, groups.all),
            )
            self._whole.prepare()
        self._names = {id(tensor): name for name, tensor in self._parameters.items()}
        # Exchanges of several buckets run in the buckets' order on every rank, while backward
        # goes on. On devices they run on a stream, and are issued at the call.
        self._exchange_thread = Worker("a state of compression", self._feedback.groups.abort)
        self._skips_compression = False
        self._validated_buckets: set[tuple[Any, ...]] = set()  # by their keys

    @property
    def _whole(self) -> TorchGroup:
        whole = self._feedback.groups.all
        assert isinstance(whole, TorchGroup)
        return whole

    def _call(self, call: Callable[[], _T], *tensors: torch.Tensor) -> _T:
        """Make a call behind those issued before; what it returns or raises.

        On devices it is issued on the state's stream, behind the caller's, which then waits for it.
        `tensors` are those that it uses.
        """
        if self._streams is None:
            return self._exchange_thread.call(call)
        begun = False
        try:
            with self._streams.behind_caller(*tensors):
                begun = True
                return call()
        finally:
            # Also if it fails: it may have begun to write them. Not if a capture was refused.
            if tensors and begun:
                self._streams.join_caller()

    # DDP.

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of DDP's, in place; see the hooks."""
        feedback = self._feedback
        feedback.check_open()
        number, buffer = bucket.index(), bucket.buffer()
        if number == 0:
            if self._exchange_thread.busy:  # with what a backward has issued that was given up
                self._exchange_thread.drain()
            feedback.meet()
            self._skips_compression = feedback.is_dense_for_good
        bucket_key = number, buffer.numel(), buffer.dtype, buffer.device
        # A bucket that was looked at once costs no more than in a dense hook.
        if self._skips_compression and bucket_key in self._validated_buckets:
            return self._average_soon(bucket, buffer)
        with feedback.groups.telling():  # the other ranks have issued theirs, and wait
            future = self._issue(bucket, buffer)
        if self._skips_compression:
            self._validated_buckets.add(bucket_key)
        return future

    def _issue(
        self, bucket: dist.GradBucket, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        whole = FlatTensor(buffer, self._device)
        gradients = self._gradients(bucket, whole)
        if self._skips_compression:
            return self._average_soon(bucket, buffer)
        first, last = bucket.index() == 0, bucket.is_last()
        feedback = self._feedback

        def average() -> None:
            with feedback.groups.telling():
                if first:
                    feedback.begin(of_backward=True)
                feedback.reduce(gradients, whole)
                if last:
                    feedback.end()

        if self._streams is not None:
            try:
                return issue(self._streams, self._device, average, buffer, [buffer])
            except BaseException:
                feedback.give_up()
                raise
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def exchange() -> None:
            try:
                average()
            except BaseException as error:
                feedback.give_up()
                fail(future, error)
            else:
                future.set_result(buffer)

        self._exchange_thread.post(exchange)
        return future

    def _gradients(self, bucket: dist.GradBucket, whole: FlatTensor) -> dict[str, Window]:
        """The gradients in a bucket, by name."""
        found: dict[str, Window] = {}
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
            found[name] = Window(whole, at, at + parameter.numel())
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
        return self._whole.average_soon(buffer)

    # Without DDP.

    def step(self) -> AbstractContextManager[State]:
        """``with state.step():`` begins and ends one; an exception discards the step."""
        self._exchange_thread.refuse_here()
        return self._one_step()

    @contextmanager
    def _one_step(self) -> Iterator[State]:
        self._call(self._feedback.begin)
        try:
            yield self
        except BaseException:
            self._feedback.give_up()
            raise
        self._call(self._feedback.end)

    def all_reduce(self, gradients: Mapping[str, Any]) -> bool | None:
        """Replace tensors by their average (not their sum) over all ranks, in place.

        Outside of `step` a call is a step by itself; inside it is a part of that step. On devices
        the caller's current stream waits for the result, and the host does not.

        Args:
            gradients: by parameter name, dense contiguous tensors of fp32, fp16 or bf16, on the
                parameters' device.

        Returns:
            Whether all were finite on all ranks; if not, all are NaN now. On devices None, for the
            host does not know yet. `stats` waits, and counts the steps that were given up.

        Raises:
            ConfigurationError: an unknown name, another size or type; nothing has moved.
            CollectiveMismatch: ranks passed different parameters. On devices all results are NaN,
                and the next step, or the next call between steps, raises this on every rank.
        """
        flats = {name: self._flat_of(name, tensor) for name, tensor in gradients.items()}
        for name, flat in flats.items():
            self._feedback.item(name, flat)  # refused here, where no other rank hears of it
        tensors = [flat.array for flat in flats.values()]
        return self._call(lambda: self._feedback.all_reduce(flats), *tensors)

    def _flat_of(self, name: str, tensor: torch.Tensor) -> FlatTensor:
        """A gradient in its parameter's order in memory."""
        parameter = self._parameters.get(name)
        if (
            parameter is None
            or tensor.numel() != parameter.numel()
            or not _is_permuted_dense(parameter)
            or not _is_dense(tensor)
        ):
            return FlatTensor(tensor, self._device)
        flat = _flat_in_memory(tensor, parameter, f"{type(self).__name__}: {name!r}")
        return FlatTensor(flat, self._device)

    def reduce_scatter(self, out: Any, tensor: Any, key: str) -> bool | None:
        """Give each rank its shard of the average (not the sum) of a tensor over all ranks.

        As NumPy's: `pycollective.compression.State.reduce_scatter`. On devices it returns None, as
        `all_reduce` does.
        """
        to, of = FlatTensor(out, self._device), FlatTensor(tensor, self._device)
        return self._call(lambda: self._feedback.reduce_scatter(to, of, key), out, tensor)

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Refuse other ranks, of the default group, than those over which the state averages."""
        if list(ranks) != self._whole.ranks:
            raise ConfigurationError(
                f"{type(self).__name__}: made over ranks {self._whole.ranks}, and asked to average "
                f"over {list(ranks)}"
            )

    def set_loss_scale(self, scale: float | Callable[[], float] | Any) -> None:
        """Say by what the loss is multiplied: a number, a function, or a ``GradScaler``.

        As NumPy's: `pycollective.compression.State.set_loss_scale`.
        """
        self._feedback.set_loss_scale(getattr(scale, "get_scale", scale))

    # What is held.

    def flush(self) -> dict[str, Any]:
        """Give back what is held, and hold exactly nothing; collective, between steps.

        As `pycollective.compression.State.flush`; the errors are tensors.
        """
        feedback = self._feedback
        # Which went in shards is forgotten with what is held.
        sharded, found = self._call(lambda: (feedback.sharded(), feedback.flush()))
        return {
            name: self._shaped_error(name, torch.from_numpy(each), sharded)
            for name, each in found.items()
        }

    def _shaped_error(
        self, name: str, flat: torch.Tensor, sharded: Collection[str]
    ) -> torch.Tensor:
        """A parameter's error in its shape; of one that goes in shards, in its order, too."""
        parameter = self._parameters[name]
        return (
            flat.view(parameter.shape) if name in sharded else _from_storage_order(flat, parameter)
        )

    def reset(self) -> None:
        """Hold nothing. Local: call it on all ranks, between steps."""
        self._call(self._feedback.reset)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the same on every rank; collective, between steps.

        It has tensors, as large as NumPy's arrays (`pycollective.compression.State.state_dict`);
        torch.save and torch.distributed.checkpoint take it as it is.
        """
        return self._convert(self._call(self._feedback.state_dict), self._saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what `state_dict` gave; as `pycollective.compression.State.load_state_dict`.

        Its tensors may be on any device.
        """
        here = _on_cpu(state)
        self._call(
            lambda: self._feedback.load_state_dict(
                here, lambda saved: self._convert(saved, self._loaded)
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
        shaped = [self._shaped_error(name, row, sharded).reshape(-1) for row in rows]
        return torch.stack(shaped).view(array.shape)

    def _loaded(self, name: str, saved: Any, sharded: Collection[str]) -> Any:
        """The inverse; as it is where it fits no parameter, which is refused later."""
        parameter = self._parameters.get(name)
        if parameter is None or name in sharded or tuple(saved.shape[-1:]) != (parameter.numel(),):
            return np.asarray(saved)
        if 0 in saved.shape:
            return np.asarray(saved)
        rows = torch.as_tensor(saved).view(-1, parameter.numel())
        return (
            torch.stack([_to_storage_order(row, parameter) for row in rows])
            .view(saved.shape)
            .numpy()
        )

    def close(self) -> None:
        """Leave the groups that the state made; collective. What is held is lost; `flush` first.

        Idempotent; all calls but `stats` and `set_loss_scale` are refused from then on.
        """
        self._exchange_thread.refuse_here()
        if self._exchange_thread.ended:
            return
        try:
            self._call(self._feedback.close)
        finally:
            self._exchange_thread.end()

    def stats(self) -> dict[str, Any]:
        """What this rank has sent and held; as `pycollective.compression.State.stats`."""
        return self._feedback.stats()


class OneBitState(State):
    """A sign an element and a scale a chunk; as `pycollective.compression.OneBitState`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "one_bit"

    def __init__(
        self,
        parameters: Parameters,
        *,
        group: dist.ProcessGroup | None = None,
        chunk: int = 1024,
        between: Between = "hosts",
        compress: Compress | None = None,
        dense_steps: int = 0,
    ) -> None:
        """Collective over the group.

        Args:
            parameters: the model, DDP's or the one in it, or its ``named_parameters()``; on CPUs or
                on one device, which then has Triton do the work.
            group: whose ranks average, of any backend that takes tensors where the parameters are;
                None for the default one.
            chunk: this and the others as NumPy's: `pycollective.compression.OneBitState`.
            between: see there.
            compress: see there.
            dense_steps: see there.

        Raises:
            ConfigurationError: a parameter or an option cannot be; there is no such group.
            CollectiveMismatch: ranks differ in parameters or options, or one refused its own.
        """
        options = QuantizedOptions(self.codec, chunk)
        super().__init__(parameters, group, options, Common(between, compress, dense_steps))


class Int8State(State):
    """8 bits an element; as `pycollective.compression.Int8State`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "int8"

    def __init__(
        self,
        parameters: Parameters,
        *,
        group: dist.ProcessGroup | None = None,
        chunk: int = 256,
        between: Between = "hosts",
        compress: Compress | None = None,
        dense_steps: int = 0,
    ) -> None:
        """Collective over the group; the arguments are those of `OneBitState`."""
        options = QuantizedOptions(self.codec, chunk)
        super().__init__(parameters, group, options, Common(between, compress, dense_steps))


class TopKState(State):
    """The largest elements; as `pycollective.compression.TopKState`.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "top_k"

    def __init__(
        self,
        parameters: Parameters,
        *,
        density: float,
        group: dist.ProcessGroup | None = None,
        by: By = "tensor",
        chunk: int = 4096,
        values: Values = "bfloat16",
        exchange: Exchange = "auto",
        warm_up: int = 0,
        decay: float = 1.0,
        between: Between = "hosts",
        compress: Compress | None = None,
        dense_steps: int = 0,
    ) -> None:
        """Collective over the group; ``parameters`` and ``group`` are those of `OneBitState`.

        The other arguments are those of `pycollective.compression.TopKState`.
        """
        self._options = TopKOptions(density, by, chunk, values, exchange, warm_up, decay)
        common = Common(between, compress, dense_steps)
        super().__init__(parameters, group, self._options, common)

    @property
    def density(self) -> float:
        """The density of the step under way, or of the next.

        On devices it waits until the last step has ended.
        """
        return self._options.density_after(self._feedback.steps_since_start)


def compressed_all_reduce(tensor: torch.Tensor, state: State, key: str) -> bool | None:
    """Average one tensor over all ranks, compressed: ``state.all_reduce({key: tensor})``."""
    return state.all_reduce({key: tensor})


def compressed_reduce_scatter(
    out: torch.Tensor, tensor: torch.Tensor, state: State, key: str
) -> bool | None:
    """The rank's shard of the average, compressed: ``state.reduce_scatter(out, tensor, key)``."""
    return state.reduce_scatter(out, tensor, key)
