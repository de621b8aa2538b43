"""FSDP2's reduce-scatter, compressed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pycollective.errors import ConfigurationError
from pycollective.torch.compression.states import State
from pycollective.torch.ordered.fsdp import OwnBuffers


def fsdp_parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What a state of compression is made of for FSDP2: a parameter for each sharded module.

    torch reduces all gradients of a module that ``fully_shard`` was called on as one tensor. Its
    name is the module's in the model ("" of the model itself), or the last one's of several modules
    that are sharded as one, ``fully_shard([a, b])``. Its elements are those of all ranks' shards,
    padding included. It is where the mesh is, also while the parameters are not: on the device
    "meta", or on CPUs by ``CPUOffloadPolicy``.

    Args:
        model: after ``fully_shard``; its parameters are sharded by their first dimension over one
            mesh dimension.

    Returns:
        Names and tensors of the shape (ranks, elements of a rank), which hold no memory.

    Raises:
        ConfigurationError: a parameter is sharded otherwise.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded: dict[torch.nn.Module, Any] = {
        module: module._get_fsdp_state()
        for module in model.modules()
        if isinstance(module, FSDPModule)
    }
    name_of = {sharded[each]: name for name, each in model.named_modules() if each in sharded}
    owner = {
        below: name_of[state]
        for module, state in sharded.items()  # parents first: the last one is the nearest
        for below in module.modules()
    }
    found: dict[str, tuple[int, int, torch.device]] = {}
    seen: set[torch.Tensor] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if module in owner and parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                ranks, count, device = _shard(parameter, owner[module])
                _, before, _ = found.get(owner[module], (ranks, 0, device))
                found[owner[module]] = ranks, before + count, device
    return [
        (name, torch.empty(1, device=device).expand(ranks, count).requires_grad_())
        for name, (ranks, count, device) in found.items()
        if count
    ]


def _shard(parameter: torch.Tensor, name: str) -> tuple[int, int, torch.device]:
    """Over how many ranks a parameter is sharded, how many elements each has, padded, and where its
    gradients are reduced."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
        raise ConfigurationError(
            f"fsdp_parameters: a parameter of the module {name!r} is not sharded by its first "
            "dimension over one mesh dimension; compress the others' by compressed_reduce_scatter"
        )
    mesh = parameter.device_mesh
    ranks, device = mesh.size(), torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return ranks, -(-parameter.shape[0] // ranks) * parameter.shape[1:].numel(), device


class CompressedReduceScatter(OwnBuffers):
    """FSDP2's gradients of one module, averaged by a state of compression::

        state = OneBitState(fsdp_parameters(model), group=mesh.get_group())
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(CompressedReduceScatter(state, name))
        ...
            loss = loss_of(model, batch)
            with state.step():
                loss.backward()

    All gradients of a backward are a step: where any is not finite on any rank, its module's are
    NaN on all ranks, and no residual changes. torch does not call it for a shard group of one rank.

    Args:
        state: made of `fsdp_parameters`, over the ranks among which the module is sharded.
        key: the module's name in the model.
    """

    def __init__(self, state: State, key: str) -> None:
        self._state, self._key = state, key

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Average over the group's ranks; the current stream waits for the result.

        Raises:
            ConfigurationError: torch asks for something else than an average; the state is over
                other ranks; a gradient is missing, since its parameter was not used.
            CollectiveError: as for `State.reduce_scatter`.
        """
        if op != dist.ReduceOp.AVG or async_op:
            raise ConfigurationError(
                f"CompressedReduceScatter averages, and torch asks for {op}: reduce in float32 or "
                "bfloat16, and set neither set_force_sum_reduction_for_comms nor "
                "set_gradient_divide_factor"
            )
        self._state.check_ranks(dist.get_process_group_ranks(group))
        self._state.reduce_scatter(output_tensor, input_tensor, self._key)
