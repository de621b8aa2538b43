"""The model that a `LeafSync` trains: what it must be, and what must not change meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pycollective.errors import ConfigurationError
from pycollective.torch.leaves.buckets import Named, strides_of
from pycollective.torch.leaves.shards import Shards

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_NORMS = torch.nn.modules.batchnorm._NormBase


class Listener:
    """The hook on a parameter that takes its gradient; it tells which a LeafSync has."""

    def __init__(self, came: Callable[..., None], *arguments: Any) -> None:
        self._came, self._arguments = came, arguments

    def __call__(self, _: torch.Tensor) -> None:
        self._came(*self._arguments)


class Model:
    """A model that can be trained by leaves.

    Args:
        model: a module, with DistributedDataParallel or torch.compile around it or inside, or not.
        grad_dtype: of the averages; None for each parameter's own dtype.
        device: on which its parameters must be; buffers may be on the CPU, too.
        shards: what `fully_shard` has sharded of it; None for nothing.

    Attributes:
        model: as given.
        module: the same without torch.compile and DistributedDataParallel around it.
        trained: name and parameter of each that requires a gradient, in the order of registration.
        ddps: every DistributedDataParallel of the model.

    Raises:
        ConfigurationError: it cannot; names the parameter, buffer or option.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        grad_dtype: torch.dtype | None,
        device: torch.device,
        shards: Shards | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(f"LeafSync: model is a {type(model).__name__}, and no module")
        self.model = model
        self.module = _unwrapped(model)
        self.ddps = ddps_of(model)
        self._shards = shards
        self.trained: list[Named] = [
            (name, each) for name, each in self.named_parameters() if each.requires_grad
        ]
        if not self.trained:
            raise ConfigurationError(
                "LeafSync: the model has no parameter that requires a gradient"
            )
        for ddp in self.ddps:
            _refuse_options(ddp)
            if shards is not None:
                raise ConfigurationError(
                    "LeafSync: a model has DistributedDataParallel and fully_shard: use one of them"
                )
        for name, parameter in self.trained:
            memory = parameter if shards is None else shards.local(name, parameter)
            _refuse_parameter(name, parameter, memory, grad_dtype, device)
        if other := _foreign_hook(self.trained):
            raise ConfigurationError(f"LeafSync: {other}")
        # What DistributedDataParallel has, it has sent already.
        sent = {id(each) for ddp in self.ddps for _, each in _tensors(ddp.module)}
        # What is sharded no rank has whole.
        sent |= {id(each) for each in self.module.parameters() if shards and each in shards}
        self._begins = [each for each in _tensors(self.module) if id(each[1]) not in sent]
        for name, each in self._begins:
            _refuse_kind(name, each, "which LeafSync cannot send to the other ranks", device)
        self._names = {id(each): name for name, each in self.trained}
        self._kinds = [_kind(each) for _, each in self.trained]
        self._renormed = {
            id(each.weight) for _, each in self._with_max_norm() if id(each.weight) in self._names
        }

    @property
    def is_compiled(self) -> bool:
        """Whether `torch.compile` was used on it or on a part of it."""
        return any(
            hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None
            for each in (self.model, *self.model.modules())
        )

    def named_parameters(self) -> Iterable[Named]:
        """Those of the module, as an optimizer has them."""
        if self._shards is None:
            return self.module.named_parameters()
        return self._shards.named_parameters(self.module)

    def described(self) -> list[str]:
        """What the ranks must have alike, in words."""
        lies = strides_of if self._shards is None else self._shards.described
        trained = [
            f"{name} of {each.dtype}, shape {tuple(each.shape)}, strides {lies(each)}"
            for name, each in self.trained
        ]
        others = [
            f"{name} (no gradient) of {each.dtype}, shape {tuple(each.shape)}{_quantizer(each)}"
            for name, each in self._begins
            if id(each) not in self._names
        ]
        return trained + others

    def broadcast(self, send: Callable[[torch.Tensor], None]) -> None:
        """Give all ranks rank 0's parameters and buffers, of any dtype, but those that DDP sent,
        and those that are sharded.

        Args:
            send: makes the bytes of a flat tensor those of rank 0.
        """
        for _, each in self._begins:
            _broadcast(send, each.detach())

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What `broadcast` makes alike: parameters and buffers, by name."""
        return self._begins

    @contextmanager
    def no_sync(self, leaf: int) -> Iterator[None]:
        """While a leaf is computed, keep DistributedDataParallel and fully_shard from averaging."""
        with ExitStack() as stack:
            if self._shards is not None:
                stack.enter_context(self._shards.computing(leaf))
            for ddp in self.ddps:
                stack.enter_context(ddp.no_sync())
            yield

    def warn_of_state(self) -> None:
        """Warn of modules whose state depends on the leaves that this rank has seen."""
        norms = [
            name or type(each).__name__
            for name, each in self.module.named_modules()
            if isinstance(each, _NORMS) and each.training and each.track_running_stats
        ]
        embeddings = [f"{name} (max_norm)" for name, _ in self._with_max_norm()]
        for found, what, cure in (
            (
                norms,
                "keeps running statistics of the leaves that its rank has seen",
                "use a norm without them, or compute them anew before you evaluate",
            ),
            (
                embeddings,
                "changes its weights in forward, on its rank alone",
                "renormalize between steps",
            ),
        ):
            if found:
                others = f" (and {len(found) - 1} more)" if found[1:] else ""
                warnings.warn(
                    f"LeafSync: {found[0]}{others} {what}: these differ from rank to rank and with "
                    f"the number of ranks; {cure} (docs/reference/any_number_of_ranks.md)",
                    stacklevel=3,
                )

    def refuse_changed(self) -> None:
        """Refuse a model that is not as it was when the LeafSync was made.

        Raises:
            ConfigurationError: other parameters require a gradient, whose gradients would be this
                rank's alone; one has become of another kind; or something else takes gradients.
        """
        parameters = [each for _, each in self.named_parameters() if each.requires_grad]
        if [id(each) for each in parameters] != [*self._names]:
            raise ConfigurationError(
                f"{self._what_changed()}: close() this LeafSync, and make another with its "
                "state_dict()"
            )
        for (name, each), kind in zip(self.trained, self._kinds, strict=True):
            if _kind(each) != kind:
                before, now = (
                    f"{dtype} {tuple(shape)} on {on}" for dtype, shape, on in (kind, _kind(each))
                )
                raise ConfigurationError(
                    f"{name} is {now}, and was {before} when this LeafSync was made: change it "
                    "before, or close() it and make another with its state_dict()"
                )
        if other := _foreign_hook(self.trained):
            raise ConfigurationError(other)

    def _what_changed(self) -> str:
        now = {id(each): name for name, each in self.named_parameters() if each.requires_grad}
        more = [name for key, name in now.items() if key not in self._names]
        less = [name for key, name in self._names.items() if key not in now]
        if both := [name for name in more if name in less]:
            return (
                f"{both[0]} is another Parameter than when this LeafSync was made "
                "(load_state_dict(assign=True) replaces it, as a new layer does)"
            )
        which = f"{more[0]} does, and did not" if more else f"{less[0]} did, and does not"
        if not more and not less:
            which = "they have another order"
        return f"other parameters require a gradient than when this LeafSync was made: {which}"

    @contextmanager
    def unchanged(self, leaf: int) -> Iterator[None]:
        """Refuse whatever changes weights while a leaf is computed.

        Raises:
            ConfigurationError: an optimizer steps, or a weight has been written to.
        """

        def refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if id(each) in self._names:
                        raise ConfigurationError(
                            f"{type(optimizer).__name__} steps inside leaf {leaf}, where "
                            f"{self._names[id(each)]} has no average yet: step after the last leaf"
                        )

        before = [each._version for _, each in self.trained]
        handle = register_optimizer_step_pre_hook(refuse_step)
        try:
            yield
        finally:
            handle.remove()
        for (name, each), version in zip(self.trained, before, strict=True):
            if each._version != version and id(each) not in self._renormed:
                raise ConfigurationError(
                    f"{name} was changed inside leaf {leaf}, by a forward that writes to it or a "
                    "hook of backward, so weights would differ between ranks: change them between "
                    "steps"
                )

    def may_train(self) -> bool:
        """Whether some parameter requires a gradient now."""
        return any(each.requires_grad for _, each in self.trained)

    def _with_max_norm(self) -> Iterable[tuple[str, Any]]:
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        for name, each in self.module.named_modules():
            if isinstance(each, kinds) and each.max_norm is not None:
                yield name, each


def ddps_of(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel of a model, itself among them; of what is no module none."""
    if not isinstance(model, torch.nn.Module):
        return []
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner  # of torch.compile
        else:
            return model


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return tensor.dtype, tensor.shape, tensor.device


def _foreign_hook(trained: Iterable[Named]) -> str:
    """What takes gradients of a leaf besides LeafSync, in words; nothing if nothing does."""
    for name, each in trained:
        hooks = getattr(each, "_post_accumulate_grad_hooks", None) or {}
        others = [hook for hook in hooks.values() if not isinstance(hook, Listener)]
        others += getattr(each, "_in_backward_optimizers", [])
        for other in others:
            who = getattr(other, "__qualname__", type(other).__name__)
            return (
                f"{who} runs in backward on {name}, whose gradient there is one leaf's and no "
                "average: remove that hook or optimizer, and step after the last leaf"
            )
    return ""


def _refuse_options(ddp: DistributedDataParallel) -> None:
    reasons = {
        "static_graph": (ddp.static_graph, "torch's no_sync fails with it"),
        "mixed_precision": (
            getattr(ddp, "mixed_precision", None) is not None,
            "use autocast, or grad_dtype= with half weights",
        ),
        "delay_all_reduce_named_params": (
            bool(getattr(ddp, "_delay_all_reduce_params", [])),
            "LeafSync has buckets of its own",
        ),
    }
    for name, (given, why) in reasons.items():
        if given:
            raise ConfigurationError(
                f"LeafSync does not work with DistributedDataParallel({name}=...): {why}"
            )
    for name, each in ddp.module.named_parameters():
        if each.requires_grad and name in ddp.parameters_to_ignore:
            raise ConfigurationError(
                f"LeafSync: DistributedDataParallel was told to ignore {name}, whose weights would "
                "differ from rank to rank: freeze it (requires_grad_(False)), or do not ignore it"
            )


def _refuse_parameter(
    name: str,
    parameter: torch.nn.Parameter,
    memory: torch.Tensor,
    grad_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if any(isinstance(hook, Listener) for hook in hooks.values()):
        raise ConfigurationError(
            f"LeafSync: {name} is another LeafSync's already; close() that one first"
        )
    _refuse_kind(name, memory, "whose gradients LeafSync does not add", device)
    if parameter.device != device:
        raise ConfigurationError(
            f"LeafSync: {name} is on {parameter.device}, and another parameter on {device}: a "
            "model is on one device"
        )
    wanted = grad_dtype or parameter.dtype
    if wanted not in _DTYPES or parameter.dtype not in _DTYPES:
        raise ConfigurationError(
            f"LeafSync: {name} has dtype {parameter.dtype} and gradients of {wanted}, and "
            f"leaves are added in fp32: {', '.join(map(str, _DTYPES))}"
        )
    if wanted != parameter.dtype and not hasattr(parameter, "grad_dtype"):
        raise ConfigurationError(
            f"LeafSync: {name} has dtype {parameter.dtype}, and torch {torch.__version__} has "
            f"no Tensor.grad_dtype, so its gradient cannot be {wanted}: leave grad_dtype out"
        )


def _refuse_kind(name: str, tensor: torch.Tensor, why: str, device: torch.device) -> None:
    """Refuse tensors that are no plain memory of the CPU or the model's device."""
    if is_lazy(tensor):
        raise ConfigurationError(
            f"LeafSync: {name} has no shape yet, as its module is lazy: run a forward first"
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ConfigurationError(
            f"LeafSync: {name} is a {type(tensor).__name__}, {why}; it takes plain tensors, "
            "and what fully_shard makes of them (tensor parallelism makes others)"
        )
    if tensor.device.type != "cpu" and tensor.device != device:
        raise ConfigurationError(
            f"LeafSync: {name} is on {tensor.device}; a model is on CPUs or on one CUDA device"
        )
    if tensor.layout != torch.strided:
        raise ConfigurationError(f"LeafSync: {name} is {tensor.layout}, {why}: make it dense")


def _quantizer(tensor: torch.Tensor) -> str:
    """Of a quantized tensor its memory, and its scales, which are none that could be sent."""
    if not tensor.is_quantized:
        return ""
    storage = f", storage of {tensor.untyped_storage().nbytes()} bytes"
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{storage}, scale {tensor.q_scale()}, zero point {tensor.q_zero_point()}"
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return f"{storage}, scales {scales.tolist()}, zero points {points.tolist()}"


def _broadcast(send: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
    """Make a tensor's elements rank 0's: bytes move, so its dtype does not matter."""
    if not tensor.numel():
        return
    if tensor.is_quantized:
        memory = tensor.untyped_storage()
        send(torch.empty(0, dtype=torch.uint8).set_(memory))
        return
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    each_once = [size if stride else 1 for size, stride in sizes]  # of an expanded tensor, too
    elements = tensor.as_strided(each_once, tensor.stride())
    sent = elements.resolve_conj().resolve_neg().contiguous()
    flat = sent.as_strided((sent.numel(),), (1,))  # also where one element has an odd stride
    send(flat.view(torch.uint8))
    if sent.data_ptr() != elements.data_ptr():
        elements.copy_(sent)
