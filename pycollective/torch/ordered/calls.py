"""The calls: their arguments, and what is done with them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pycollective.dtypes import TRAITS
from pycollective.errors import ConfigurationError
from pycollective.shim import loading
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.pieces import Call
from pycollective.torch.ordered.work import Work
from pycollective.torch.serving import device_side, own_backend
from pycollective.torch.streams import streams_of
from pycollective.triton.formats import name_of

Tensors = torch.Tensor | Sequence[torch.Tensor]

# torch's name of each operation of the contract.
_REDUCE_OPS = {
    **{"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "prod": dist.ReduceOp.PRODUCT},
    **{"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND},
    **{"bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR},
}
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, OrderedGroup]]
_groups = weakref.WeakKeyDictionary()
_making = threading.Lock()


def all_reduce(
    tensor: Tensors,
    op: str | dist.ReduceOp.RedOpType = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    narrow: torch.dtype | None = None,
    narrow_check: str = "host",
) -> dist.Work | None:
    """Reduce over a group of any backend, in place, with the contract's bits.

    All ranks of the group make the same calls in the same order, each for tensors of the same
    sizes, dtypes and operation. Over Gloo they have connections of their own, so that other threads
    may use the group meanwhile. On CPUs over other backends messages are the group's sends and
    receives, under tags of their own. On devices exchanges are collectives of the group: where
    other threads use it, give these calls one of their own.

    Args:
        tensor: the input, which becomes the result; on one device, or a list of such tensors. Any
            shape, also empty. Of a type of the contract, or complex for sums and averages. Leave
            it alone until the call has ended.
        op: the contract's name, or torch's ``ReduceOp``.
        group: None for the default group.
        async_op: return a work at once. On devices even the call without it does not wait for the
            result: the current stream does.
        narrow: the type in which leaves travel if all elements of all ranks have exactly its
            values, as fp32 gradients that were bf16. Each rank looks, and all agree; on devices the
            host waits for that. Where all leaves go to all, they travel as they are, and so they do
            over the backend pycollective. The result keeps the tensor's type. For float32 and
            ``sum``, ``avg`` or ``prod``; tensors of the narrow type itself may be in the list.
        narrow_check: "device": the host of a device does not wait; leaves travel as ``narrow``.
            Where any rank's do not fit, results are NaN on all ranks, and the end of the backward
            pass in which the call was made raises CollectiveMismatch; outside of one a later call
            or the work does. CPU tensors go as with "host". All ranks give the same.

    Returns:
        A work, whose future has the tensor, or the list; None without ``async_op``.

    Raises:
        ConfigurationError: the arguments cannot be reduced; nothing was sent.
        CollectiveMismatch: ranks called different things. On CPUs nothing of this call was used.
            On devices results that are floats are NaN, and a later call raises this; where sizes
            differ, once a call is late (``PYCOLLECTIVE_LATE_AFTER``).
        CollectiveTimeout, PeerFailure, CollectiveError: what the backend says of its messages. The
            group makes no more ordered calls. Until it is destroyed, peers may still write results
            into the tensor.
    """
    tensors = _list_of(tensor)
    check(tensors, op, narrow, narrow_check)
    found = checked_group(group)
    ordered = ordered_over(found, tensors[0].device)
    if ordered is None:
        works = [dist.all_reduce(each, _REDUCE_OPS[_name(op)], found, async_op) for each in tensors]
        return _of_all(works, tensor) if async_op else None
    return all_reduce_over(ordered, tensor, _name(op), async_op, narrow, narrow_check)


def reduce_scatter(
    out: Tensors,
    tensor: Tensors,
    op: str | dist.ReduceOp.RedOpType = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    narrow: torch.dtype | None = None,
    narrow_check: str = "host",
) -> dist.Work | None:
    """Reduce over a group of any backend; each rank gets its equal part, in rank order.

    Args:
        out: this rank's part, or a list of parts, contiguous. It may be its part of ``tensor``.
        tensor: the input, of as many elements as all ranks' parts together, or a list of such.
        op: as for `all_reduce`, which see for the rest.
        group: None for the default group.
        async_op: return a work at once.
        narrow, narrow_check: as for `all_reduce`.

    Raises:
        ConfigurationError: the arguments do not fit; nothing was sent.
        CollectiveError: as for `all_reduce`.
    """
    outs, tensors = _list_of(out), _list_of(tensor)
    check([*tensors, *outs], op, narrow, narrow_check)
    found = checked_group(group)
    check_scatter(outs, tensors, dist.get_rank(found), dist.get_world_size(found))
    ordered = ordered_over(found, tensors[0].device)
    if ordered is None:
        works = [
            dist.reduce_scatter_tensor(
                part, whole.contiguous().view(-1), _REDUCE_OPS[_name(op)], found, async_op
            )
            for part, whole in zip(outs, tensors, strict=True)
        ]
        return _of_all(works, out) if async_op else None
    return reduce_scatter_over(ordered, out, tensor, _name(op), async_op, narrow, narrow_check)


def prepare(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
    """Do before the first step what the group's first calls would do in it.

    Collective over the group. It connects, over Gloo, and learns which ranks share a host. On
    devices the host waits for that, and then makes six calls, of sums and averages of bfloat16,
    float16 and float32. They compile the kernels of the group's size, which takes seconds unless
    Triton finds them in its cache, and they let the backend connect. Later sums and averages of
    these types compile nothing, all-reduced or reduce-scattered, of any size, where each tensor
    begins at a multiple of 16 bytes, as torch's own do. Other types and operations are compiled in
    their first calls, and so are tensors that begin elsewhere, and ``narrow``.

    Args:
        group: None for the default group.
        device: where the tensors of later calls are: of the group's backend, so "cuda" for NCCL.

    Raises:
        ConfigurationError, CollectiveError: as for `all_reduce`.
    """
    found = checked_group(group)
    if own_backend(found, torch.device(device)) is None:
        group_of(found, torch.device(device)).prepare()


def stats(group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Count what this rank's ordered calls over a group have sent, and what they keep.

    Returns:
        ``calls``; ``sent_messages`` and ``sent_bytes``, headers among them; ``buffer_bytes``, the
        memory that is kept for later calls. All are 0 for CPU tensors over the backend
        pycollective, which has statistics of its own.
    """
    counts = {"calls": 0, "sent_messages": 0, "sent_bytes": 0, "buffer_bytes": 0}
    for each in _groups.get(checked_group(group), {}).values():
        for name, value in each.stats().items():
            counts[name] += value
    return counts


def group_of(group: dist.ProcessGroup | None, device: torch.device) -> OrderedGroup:
    """The ordered reductions of a group, made when they are first asked for."""
    found = checked_group(group)
    if device.type == "cpu":
        device = torch.device("cpu")  # whatever its number
    elif device.index is None:
        try:
            module = torch.get_device_module(device)
        except RuntimeError as error:
            raise ConfigurationError(f"ordered: nothing reduces on {device.type}") from error
        device = torch.device(device.type, module.current_device())
    with _making:
        of_devices = _groups.setdefault(found, {})
        if device not in of_devices:
            side = device_side(found, device)
            if side is not None:
                of_devices[device] = side.ordered(device)
            else:
                of_devices[device] = OrderedGroup(found, device, streams_of(device, "ordered"))
        return of_devices[device]


def ordered_over(group: dist.ProcessGroup, device: torch.device) -> OrderedGroup | None:
    """The ordered reductions of a checked group; None where its backend has the contract's bits."""
    made = _groups.get(group, {}).get(device)  # the backend is asked once, for that takes a while
    if made is None and own_backend(group, device) is None:
        made = group_of(group, device)
    return made


# --- Issuing what was checked.


def all_reduce_over(
    ordered: OrderedGroup,
    tensor: Tensors,
    op: str,
    async_op: bool,
    narrow: torch.dtype | None = None,
    narrow_check: str = "host",
) -> dist.Work | None:
    """`all_reduce`, of what can be reduced, by the contract's name of the operation."""
    tensors = _list_of(tensor)
    packs = [_pack([tensors[i] for i in numbers]) for numbers in _by_dtype(tensors)]
    calls = [
        Call(
            *("all_reduce", op, flat, flat, narrow if flat.dtype != narrow else None),
            *(narrow_check, unpack),
        )
        for flat, unpack in packs
    ]
    return _issue(ordered, calls, tensor, async_op)


def reduce_scatter_over(
    ordered: OrderedGroup,
    out: Tensors,
    tensor: Tensors,
    op: str,
    async_op: bool,
    narrow: torch.dtype | None = None,
    narrow_check: str = "host",
) -> dist.Work | None:
    """`reduce_scatter`, of what can be reduced, by the contract's name of the operation."""
    outs, tensors = _list_of(out), _list_of(tensor)
    calls = []
    for numbers in _by_dtype(tensors):
        parts = [_flat(_real(outs[i])) for i in numbers]
        wholes = [_flat(_real(tensors[i].contiguous())) for i in numbers]
        if len(numbers) == 1:
            results, leaves, done = parts[0], wholes[0], _nothing
        else:
            results = torch.cat(parts)
            leaves = torch.cat([each.view(ordered.size, -1) for each in wholes], dim=1)
            done = _splitter(results, parts)
        small = narrow if leaves.dtype != narrow else None
        calls.append(Call("reduce_scatter", op, _flat(leaves), results, small, narrow_check, done))
    return _issue(ordered, calls, out, async_op)


def _issue(
    ordered: OrderedGroup, calls: Sequence[Call], value: Tensors, async_op: bool
) -> dist.Work | None:
    if ordered.streams is not None:
        # Among them those into which results are copied.
        tensors = [each for call in calls for each in (call.leaves, call.results)]
        issued = ordered.issue(calls, value, [*tensors, *_list_of(value)])
        if async_op:
            return issued
        issued.wait()
        return None

    def run() -> None:
        for each in calls:
            ordered.run(each)

    if not async_op:
        if ordered.worker.busy:
            ordered.worker.call(run)
        else:
            run()
        return None
    future: torch.futures.Future[Any] = torch.futures.Future()
    work = Work(future)

    group = ordered.group()  # until the call has ended

    def run_and_tell() -> None:
        nonlocal group
        try:
            run()
        except BaseException as error:
            fail(future, error)
        else:
            future.set_result(value)
        group = None

    ordered.worker.post(run_and_tell)
    return work


def fail(future: torch.futures.Future[Any], error: BaseException) -> None:
    """End a future with an error, which DDP's reducer raises too."""
    shim = loading.loaded()
    if shim is not None:
        shim.fail(future, error)
    else:
        future.set_exception(error)


def _of_all(works: Sequence[Any], value: Tensors) -> Work:
    futures = [work.get_future() for work in works]
    return Work(torch.futures.collect_all(futures).then(lambda done: _waited(done, value)))


def _waited(done: Any, value: Tensors) -> Tensors:
    for each in done.value():
        each.wait()
    return value


# --- Arguments.


def _list_of(tensor: Tensors) -> list[torch.Tensor]:
    if isinstance(tensor, torch.Tensor):
        return [tensor]
    tensors = list(tensor)
    if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise ConfigurationError("ordered: give a tensor, or a list of at least one")
    return tensors


def _name(op: Any) -> str:
    """The contract's name of an operation.

    Raises:
        ConfigurationError: it has none.
    """
    if op in _REDUCE_OPS:
        return str(op)
    for name, torchs in _REDUCE_OPS.items():
        if op == torchs:
            return name
    raise ConfigurationError(
        f"ordered: no operation {op}; give {', '.join(_REDUCE_OPS)}, or torch's ReduceOp of such"
    )


def check(
    tensors: Sequence[torch.Tensor],
    op: Any,
    narrow: torch.dtype | None = None,
    narrow_check: str = "host",
) -> None:
    """Refuse what the contract does not have, before anything is sent."""
    name = _name(op)
    if narrow_check not in ("host", "device"):
        raise ConfigurationError(f'ordered: narrow_check={narrow_check!r}; give "host" or "device"')
    for each in tensors:
        if each.layout != torch.strided:
            raise ConfigurationError(f"ordered: a {each.layout} tensor; give a dense one")
        plain = type(each) is torch.Tensor or type(each) is torch.nn.Parameter
        if not plain and is_traceable_wrapper_subclass(each):
            raise ConfigurationError(
                f"ordered: a {type(each).__name__} has no memory of its own; give the tensor in "
                "it, x.to_local() of a DTensor, x.wait() of an AsyncCollectiveTensor"
            )
        if each.device != tensors[0].device:
            raise ConfigurationError(
                f"ordered: tensors on {tensors[0].device} and {each.device}; give those of one "
                "device"
            )
        if each.is_conj() or each.is_neg():
            raise ConfigurationError(
                "ordered: a lazy conjugate or negative, whose memory does not have its signs; "
                "give tensor.resolve_conj().resolve_neg()"
            )
        if not each.is_contiguous() and any(
            each.stride(i) == 0 and each.shape[i] > 1 for i in range(each.dim())
        ):
            raise ConfigurationError(
                "ordered: an expanded tensor, whose elements share memory; give a copy"
            )
        dtype = name_of(_real_dtype(each.dtype))
        if dtype not in TRAITS:
            raise ConfigurationError(
                f"ordered: {each.dtype} cannot be reduced; these can: {', '.join(TRAITS)}"
            )
        allowed = ("sum", "avg") if each.dtype.is_complex else TRAITS[dtype].reduce_ops
        if name not in allowed:
            raise ConfigurationError(f"ordered: {name} has no meaning for {name_of(each.dtype)}")
        if narrow is not None and not _may_travel_as(narrow, each.dtype, name):
            raise ConfigurationError(
                f"ordered: {name} of {name_of(each.dtype)} cannot travel as {name_of(narrow)}; "
                "sum, avg and prod of float32 can, as a float of less than 32 bits"
            )


def check_scatter(
    outs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], rank: int, size: int
) -> None:
    """Refuse what is no reduce-scatter over so many ranks, of what `check` has let pass."""
    if len(outs) != len(tensors):
        raise ConfigurationError(
            f"ordered.reduce_scatter: {len(outs)} outputs of {len(tensors)} inputs"
        )
    for part, whole in zip(outs, tensors, strict=True):
        if part.dtype != whole.dtype or part.numel() * size != whole.numel():
            raise ConfigurationError(
                f"ordered.reduce_scatter over {size} ranks: an output of {part.numel()} "
                f"{name_of(part.dtype)} does not go with an input of {whole.numel()} "
                f"{name_of(whole.dtype)}"
            )
        if not part.is_contiguous():
            raise ConfigurationError("ordered.reduce_scatter: give contiguous outputs")
        ahead = part.data_ptr() - whole.data_ptr()
        overlap = -part.nbytes < ahead < whole.nbytes and whole.is_contiguous()
        if overlap and ahead != rank * part.nbytes:
            raise ConfigurationError(
                "ordered.reduce_scatter: an output overlaps other ranks' parts of its input"
            )


def _may_travel_as(narrow: torch.dtype, dtype: torch.dtype, op: str) -> bool:
    """Whether leaves of the narrow type add up in what `dtype` adds up in, or are of `dtype`."""
    small = narrow.is_floating_point and narrow.itemsize < 4 and name_of(narrow) in TRAITS
    adds = dtype == torch.float32 and op in ("sum", "avg", "prod")
    return small and (adds or dtype == narrow)


def checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default group; refused where this rank cannot call it."""
    if not dist.is_initialized():
        raise ConfigurationError("ordered: call init_process_group first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ConfigurationError("ordered: this rank is not in the group")
    try:
        dist.get_rank(found)
    except ValueError as error:
        raise ConfigurationError("ordered: the process group was destroyed") from error
    return found


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory as real numbers, without autograd."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory; its own strides may be anything where it has one element."""
    is_flat = tensor.dim() == 1 and tensor.stride(0) == 1
    return tensor if is_flat else tensor.as_strided((tensor.numel(),), (1,))


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The indices of the tensors of each dtype; complex ones are with their parts."""
    if len(tensors) == 1:
        return [[0]]
    found: dict[torch.dtype, list[int]] = {}
    for i, each in enumerate(tensors):
        found.setdefault(_real_dtype(each.dtype), []).append(i)
    return list(found.values())


def _pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Tensors of one dtype as one flat tensor, and what brings the results back to them."""
    parts = [_real(each) for each in tensors]
    if len(parts) == 1 and parts[0].is_contiguous():
        return _flat(parts[0]), _nothing
    flat = torch.cat([each.reshape(-1) for each in parts])
    return flat, _splitter(flat, parts)


def _nothing() -> None:
    pass


def _splitter(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> Callable[[], None]:
    def split() -> None:
        pieces = flat.split([each.numel() for each in parts])
        for part, piece in zip(parts, pieces, strict=True):
            with torch.inference_mode(part.is_inference()):  # which is the thread's, not the call's
                part.copy_(piece.view(part.shape))

    return split
