"""FSDP2's reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pycollective.errors import ConfigurationError
from pycollective.order import TAKE
from pycollective.torch.ordered import reduction
from pycollective.torch.ordered.calls import all_reduce, reduce_scatter
from pycollective.triton.formats import name_of

# torch calls whatever has the interface. To import it would cost every program seconds.
if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as Interface
else:
    Interface = object

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class OwnBuffers(Interface):
    """A reduce-scatter of FSDP2's whose buffers are new in each call: torch keeps some longer."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer for a call's input or output."""
        return torch.empty(size, dtype=dtype, device=device)


class ReduceScatter(OwnBuffers):
    """FSDP2's gradients by the contract, over shard groups of any backend::

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy).set_custom_reduce_scatter(
                ordered.ReduceScatter()
            )

    Gradients in float32 that have bfloat16's values on all ranks travel as bfloat16. They are added
    up, divided once and kept in float32. torch does not call it for a shard group of one rank.

    HSDP is ``fully_shard`` over the shard mesh alone, and a hook for the replicas::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicas", "shards"))
        ...  # fully_shard(module, mesh=mesh["shards"])
            reduce_scatter = ordered.ReduceScatter(mesh.get_group("replicas"))
            module.set_custom_reduce_scatter(reduce_scatter)
            module.set_all_reduce_hook(reduce_scatter.all_reduce_replicas)

    The results have the bits of one average over all ranks if the shard groups have 1, 2, 4, 8, …
    ranks and lie one behind the other in the order of the ranks, as here. Otherwise they are those
    of a sum of sums. Over a mesh of both dimensions torch averages over the replicas itself, by
    their backend, which then decides about the bits.

    torch does not leave every division to this:

    - ``set_gradient_divide_factor`` needs ``set_force_sum_reduction_for_comms(True)``. torch then
      divides the sums: on CPUs once, on GPUs it multiplies by a rounded reciprocal, which is exact
      for powers of two.
    - It divides float64 by a power of two before the sum, and by what is left of the factor after
      it, in the same way. That too gives the average's bits, unless halves are subnormal or the sum
      overflows.
    - It would divide float16 likewise, and subnormals that matter would lose bits. That is refused.

    Args:
        replicas: the group over which `all_reduce_replicas` reduces; None without HSDP.
        narrow: in which type gradients of float32 travel if that is exact for all ranks' (float16
            for a ``param_dtype`` of float16). Each rank looks, and on devices the host waits for
            that. None to send float32 and not to look.
        narrow_check: "device": the host of a device does not wait, and gradients travel as
            ``narrow``. Where any rank's do not fit, they are NaN on all ranks of the shard group,
            and ``backward()`` raises CollectiveMismatch at its end: before the optimizer's step,
            unless that is made by hooks within the backward pass. The group makes no more ordered
            calls. CPU tensors go as with "host", the default. All ranks give the same.

    Raises:
        ConfigurationError: "device" with replicas, of which only those of one shard group would
            learn it before their step.
    """

    def __init__(
        self,
        replicas: dist.ProcessGroup | None = None,
        *,
        narrow: torch.dtype | None = torch.bfloat16,
        narrow_check: str = "host",
    ) -> None:
        if narrow_check == "device" and replicas is not None:
            raise ConfigurationError(
                'ordered.ReduceScatter: narrow_check="device" does not go with replicas, of which '
                "only some would learn in time that gradients do not fit; give "
                'narrow_check="host"'
            )
        self._replicas = replicas
        self._narrow, self._narrow_check = narrow, narrow_check
        self._shards = 0  # ranks whose sum the hook gets next

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce, as `ordered.reduce_scatter`.

        Raises:
            ConfigurationError: torch would round gradients before they are added; names the
                setting that it takes instead.
            CollectiveError: as for `ordered.all_reduce`.
        """
        checked = self._checked(op, input_tensor.dtype)
        narrow = self._narrow_of(input_tensor)
        work = reduce_scatter(
            *(output_tensor, input_tensor, checked, group, async_op),
            narrow=narrow,
            narrow_check=self._narrow_check,
        )
        if self._replicas is not None:
            self._shards = dist.get_world_size(group)
        return work

    def all_reduce_replicas(self, grads: torch.Tensor) -> None:
        """Average over all ranks of all replicas, in place: the hook for ``set_all_reduce_hook``.

        Args:
            grads: sums over a shard group, as this reduce-scatter has left them; of a shard group
                of one rank its gradients.

        Raises:
            ConfigurationError: the replicas' group is not known.
            CollectiveError: as for `all_reduce`.
        """
        if self._replicas is None:
            raise ConfigurationError(
                "all_reduce_replicas: give ordered.ReduceScatter the group of the replicas"
            )
        shards, self._shards = self._shards, 0
        if not shards:
            all_reduce(grads, "avg", self._replicas, narrow=self._narrow_of(grads))
            return
        all_reduce(grads, "sum", self._replicas)
        ranks = shards * dist.get_world_size(self._replicas)
        sums = grads.clone().view(-1)
        reduction.reduce([sums], grads.view(-1), "avg", [TAKE], ranks, grads.dtype, finish=True)

    def _checked(self, op: Any, dtype: torch.dtype) -> Any:
        """Which operation to call; what it leaves undivided the hook divides."""
        if op == dist.ReduceOp.PREMUL_SUM:
            raise ConfigurationError(
                "ordered.ReduceScatter: for set_gradient_divide_factor torch would multiply, and "
                "round, every gradient before they are added (PREMUL_SUM). Call "
                "set_force_sum_reduction_for_comms(True) too: then it divides the sums"
            )
        if dtype not in _DTYPES:
            raise ConfigurationError(
                f"ordered.ReduceScatter: torch divides gradients of {name_of(dtype)} before they "
                "are added, and subnormals lose bits. Reduce in float32: "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        if self._replicas is None:
            return op
        if op != dist.ReduceOp.AVG or dtype != torch.float32:
            raise ConfigurationError(
                "ordered.ReduceScatter with replicas divides once, after it has added all: set "
                "neither set_force_sum_reduction_for_comms nor set_gradient_divide_factor, and "
                "reduce in float32 (MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
        if self._shards:
            raise ConfigurationError(
                "ordered.ReduceScatter with replicas: its last sums were not averaged. Call "
                "set_all_reduce_hook(reduce_scatter.all_reduce_replicas) of the same module"
            )
        return dist.ReduceOp.SUM

    def _narrow_of(self, tensor: torch.Tensor) -> torch.dtype | None:
        return self._narrow if tensor.dtype == torch.float32 else None
