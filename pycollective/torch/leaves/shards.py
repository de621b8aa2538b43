"""A model whose parameters `fully_shard` has sharded: what a LeafSync does otherwise for it.

Rank r of n has leaves r, n + r, 2n + r, ... All ranks compute a leaf at the same time, a *round*: n
leaves in a row. Where torch would reduce a module's gradients, each rank gets its shard of all n
leaves' and adds them, leaf by leaf, in the contract's order over all M. So a rank has the whole sum
of its shard when a step ends, and nothing is reduced any more.

torch adds nothing up: LeafSync takes each ``.grad`` as it comes, and hands averages out at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycollective.agree import let_all_hear
from pycollective.errors import CollectiveMismatch, ConfigurationError
from pycollective.leaves.accumulator import Accumulator
from pycollective.leaves.deal import Deal
from pycollective.order import TAKE
from pycollective.torch.leaves.buckets import Bucket, Named
from pycollective.torch.leaves.place import Place
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.leaves.words import StepWords
from pycollective.torch.ordered import reduction
from pycollective.torch.ordered.fsdp import OwnBuffers

_WEIGHTS, _GRADIENTS = range(2)  # of a module: what ranks exchange
_STEP_ENDS = -1
_NO_SYNC = (
    "set_requires_gradient_sync(False), and LeafSync takes each leaf's gradients: leave it True"
)
_OWN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that leaves may have


class OverShards:
    """A transport of a sharded model: another's, with exchanges that are compared.

    Before each exchange all ranks tell each other what it is, so ranks whose leaves use other
    modules hear of it, and none takes bytes for what they are not. Nothing is left to average at a
    step's end but each rank's own shard; by then words are gathered.

    Args:
        by: what carries it all.
        names: of the modules, by number, for errors.

    Attributes:
        leaf: of this rank, that is under way; None between leaves.
    """

    bucket_cap_mb = math.inf  # a bucket is what a call of fully_shard has sharded

    def __init__(self, by: Transport, names: Sequence[str]) -> None:
        self._names = names
        self.rank, self.size, self.waits = by.rank, by.size, by.waits
        self.all_gather, self.exchange, self.broadcast = by.all_gather, by.exchange, by.broadcast
        self.tell = by.tell
        self.settle, self.abort, self.stats, self.close = by.settle, by.abort, by.stats, by.close
        self.leaf: int | None = None
        self._averages: list[ShardBucket] = []
        self._words: StepWords | None = None

    def announce(self, words: StepWords, needed: bool) -> None:
        self._words = words

    def average(self, bucket: Bucket, deal: Deal) -> None:
        assert isinstance(bucket, ShardBucket)
        self._averages.append(bucket)

    def finish(self) -> None:
        averages, self._averages = self._averages, []
        words = self._words
        assert words is not None
        self.meet(_STEP_ENDS)
        rows = self.all_gather(words.block.view(np.uint8)).view(np.int64)
        try:
            divisor = words.read(rows)
        except Exception:  # on all ranks; an abort of this one may not come before they have read
            let_all_hear(self.all_gather)
            raise
        for bucket in averages:
            bucket.average(divisor)

    def meet(self, module: int, what: int = 0) -> None:
        """Make sure that all ranks come to the same exchange. Collective.

        Args:
            module: its number; or that the step ends.
            what: of it is exchanged.

        Raises:
            CollectiveMismatch: they come to others; says which.
        """
        now = -1 if self.leaf is None else self.leaf // self.size
        mine = np.array([now, module, what], np.int64)
        said = self.all_gather(mine.view(np.uint8)).view(np.int64)
        for rank, each in enumerate(said):
            if (each != said[0]).any():
                let_all_hear(self.all_gather)
                raise CollectiveMismatch(
                    f"LeafSync: rank {rank} {self._described(*each.tolist())}, and rank 0 "
                    f"{self._described(*said[0].tolist())}: the leaves that ranks compute at the "
                    "same time must use the same modules of fully_shard, in one order; shard what "
                    "only some leaves use together with what all use"
                )

    def _described(self, number: int, module: int, what: int) -> str:
        where = "between leaves" if number < 0 else f"in round {number}"
        if module == _STEP_ENDS:
            return f"ends its step {where}"
        verb = "gathers weights" if what == _WEIGHTS else "reduces gradients"
        return f"{verb} of {self._names[module]} {where}"


class Shards:
    """The modules of a model that `fully_shard` has sharded, over one mesh of one dimension.

    Args:
        modules: each with its name; the first of those that share parameters.

    Attributes:
        group: of the ranks, as the first module's mesh has it.
    """

    def __init__(self, modules: Sequence[tuple[str, Any]]) -> None:
        self._modules = modules
        self._groups: list[tuple[str, Any]] = []  # torch's FSDPParamGroup of each, if it has one
        for name, module in modules:
            found = module._get_fsdp_state()._fsdp_param_groups
            self._groups += [(name or type(module).__name__, each) for each in found]
        infos = (each.mesh_info for _, each in self._groups)
        self.group: dist.ProcessGroup | None = next(
            (getattr(each, "shard_process_group", None) for each in infos), None
        )
        for _, group in self._groups:
            group.reshard()
            if not group._reset_sharded_params:  # as torch's first forward will
                for each in group.fsdp_params:
                    each.reset_sharded_param()
        self._parts = {  # and in which group
            id(each.sharded_param): (number, each)
            for number, (_, group) in enumerate(self._groups)
            for each in group.fsdp_params
        }
        self._deal: Deal | None = None
        self.transport: OverShards  # as `over` makes it

    def over(self, transport: Transport) -> OverShards:
        """The transport of the LeafSync, by another one."""
        self.transport = OverShards(transport, [name for name, _ in self._groups])
        return self.transport

    def check(self, leaves: int, bucket_cap_mb: float, place: Place) -> list[int]:
        """Which ranks share the parameters, as all of them must say.

        Raises:
            ConfigurationError: the model was sharded in a way in which it cannot be trained so.
        """
        rank, size = self.transport.rank, self.transport.size
        if leaves % size:
            raise ConfigurationError(
                f"LeafSync: leaves is {leaves}, and {size} ranks compute fully_shard's modules at "
                f"the same time: give a multiple of {size}"
            )
        if bucket_cap_mb != OverShards.bucket_cap_mb:
            raise ConfigurationError(
                "LeafSync: with fully_shard a bucket is what one call of it has sharded: leave "
                "bucket_cap_mb out"
            )
        for name, module in self._modules:
            if (count := len(module._get_fsdp_state()._fsdp_param_groups)) > 1:
                raise _refusal(name, f"{count} groups of parameters, by several meshes: give one")
        ranks: list[int] = []
        for name, group in self._groups:
            _refuse_group(name, group, place)
            info = group.mesh_info
            ranks = ranks or dist.get_process_group_ranks(info.shard_process_group)
            if ranks != dist.get_process_group_ranks(info.shard_process_group):
                raise _refusal(name, "another mesh than a module before it: shard all over one")
            if (info.shard_mesh_rank, info.shard_mesh_size) != (rank, size):
                raise _refusal(
                    name,
                    f"a mesh of {info.shard_mesh_size} ranks, and the LeafSync has {size}, or in "
                    "another order: give it group=mesh.get_group()",
                )
        return ranks

    def leaves_of(self, rank: int, leaves: int) -> range:
        """A rank's leaf of each round."""
        return range(rank, leaves, self.transport.size)

    def deal(self, leaves: int) -> Deal:
        """Who has which leaves."""
        if self._deal is None or self._deal.leaves != leaves:
            ranks = range(self.transport.size)
            self._deal = Deal.of(leaves, [self.leaves_of(rank, leaves) for rank in ranks])
        return self._deal

    def named_parameters(self, module: torch.nn.Module) -> Iterator[Named]:
        """A module's parameters, sharded also where the module has them whole at the moment."""
        parts = [part for _, part in self._parts.values()]
        whole = {id(getattr(each, "_unsharded_param", None)): each.sharded_param for each in parts}
        for name, parameter in module.named_parameters():
            yield name, whole.get(id(parameter), parameter)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._parts

    def local(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's shard of a parameter that requires a gradient.

        Raises:
            ConfigurationError: it has none, or gradients do not come as they were made.
        """
        if parameter not in self:
            raise ConfigurationError(
                f"LeafSync: {name} requires a gradient, and fully_shard has not sharded it, as the "
                "rest of the model: shard the module around it too, or freeze it"
            )
        policy = self._groups[self._parts[id(parameter)][0]][1].mp_policy
        own = policy.param_dtype or parameter.dtype
        if own not in _OWN_DTYPES or policy.reduce_dtype not in (None, own, torch.float32):
            raise ConfigurationError(
                f"LeafSync: gradients of {name} are {own}, and reduced in {policy.reduce_dtype}: "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32) holds all that leaves have, and "
                f"they are of {', '.join(map(str, _OWN_DTYPES))}"
            )
        local: torch.Tensor = parameter._local_tensor  # type: ignore[attr-defined]
        return local

    def described(self, parameter: Any) -> str:
        """How a parameter is sharded, in words."""
        number, _ = self._parts[id(parameter)]
        name, _ = self._groups[number]
        return f"{parameter.stride()}, {parameter.placements} in fully_shard's module {name}"

    def buckets(
        self, trained: Sequence[Named], leaves: int, dtype: torch.dtype | None, undo: ExitStack
    ) -> list[Bucket]:
        """Take over what torch exchanges and reduces; one bucket a module that has what to train.

        Args:
            trained: what requires a gradient.
            leaves: of a step.
            dtype: of the averages; None for each parameter's own.
            undo: gives back what was taken.
        """
        undo.callback(self._reset)
        names = {id(parameter): name for name, parameter in trained}
        found: list[Bucket] = []
        self._taken: list[tuple[str, Any, dict[str, Any]]] = []
        for number, (name, group) in enumerate(self._groups):
            taken: dict[str, Any] = {
                "_all_gather_comm": _Exchange(partial(self._gather, number)),
                "reduce_grads": True,
            }
            parts = [each for each in group.fsdp_params if id(each.sharded_param) in names]
            if parts:
                named = [(names[id(each.sharded_param)], each.sharded_param) for each in parts]
                bucket = ShardBucket(named, parts, group, number, leaves, dtype, self)
                taken |= {
                    "_reduce_scatter_comm": _Exchange(bucket.reduce_scatter),
                    "_all_reduce_hook": bucket.reduced,
                    # With the next: sums, divided by 1.
                    "gradient_divide_factor": 1.0,
                    "force_sum_reduction_for_comms": True,
                    "reduce_scatter_unused_params": True,
                }
                found.append(bucket)
                undo.callback(bucket.forget)
            for attribute, value in taken.items():
                undo.callback(setattr, group, attribute, getattr(group, attribute))
                setattr(group, attribute, value)
            self._taken.append((name, group, taken))
        return found[::-1]

    @contextmanager
    def computing(self, leaf: int) -> Iterator[None]:
        """Within, a leaf is computed.

        Raises:
            ConfigurationError: something else has changed what was taken over.
        """
        if leaf < self.transport.size:
            # A forward between steps may have left weights whole, or on their way, which the
            # optimizer then changed.
            self._reset()
        self.refuse_changed()
        self.transport.leaf = leaf
        try:
            yield
        finally:
            self.transport.leaf = None

    def refuse_changed(self) -> None:
        """Refuse modules that do not exchange or reduce as LeafSync has set them."""
        for name, group, taken in self._taken:
            for attribute, value in taken.items():
                now = getattr(group, attribute)
                if attribute == "reduce_grads" and not now:
                    raise _refusal(name, _NO_SYNC)
                if now != value:
                    raise _refusal(
                        name,
                        f"{attribute} {now} now, which LeafSync has set: leave it until close()",
                    )

    def round_of(self, leaf: int) -> range:
        """The leaves that ranks compute at the same time as this rank this one."""
        first = leaf - self.transport.rank
        return range(first, first + self.transport.size)

    def _gather(self, number: int, out: torch.Tensor, mine: torch.Tensor) -> None:
        """Gather a module's weights, in the place of torch's all-gather."""
        size = self.transport.size
        self.transport.meet(number, _WEIGHTS)
        rows = out.view(torch.uint8).view(size, mine.nbytes)
        self.transport.exchange([mine.view(torch.uint8)] * size, rows)

    def _reset(self) -> None:
        """Let forward begin anew after an error."""
        for _, module in self._modules:
            if module._get_fsdp_state()._is_root:
                module.reset_iter_state()


class ShardBucket(Bucket):
    """What one call of `fully_shard` has sharded, of which this rank adds its shard.

    Args:
        named: the parameters that require a gradient, sharded.
        parts: torch's FSDPParam of each.
        group: torch's FSDPParamGroup of them.
        number: of the module.
        leaves: of a step, on all ranks.
        dtype: of the averages; None for the parameters' own.
        shards: of the model.
    """

    def __init__(
        self,
        named: Sequence[Named],
        parts: Sequence[Any],
        group: Any,
        number: int,
        leaves: int,
        dtype: torch.dtype | None,
        shards: Shards,
    ) -> None:
        self._names = [name for name, _ in named]
        parameters = [parameter for _, parameter in named]
        self._parts, self._group, self._number, self._shards = parts, group, number, shards
        own = parameters[0].dtype
        self._dtype = group.mp_policy.param_dtype or own  # of a leaf's gradients
        counts = [each.padded_sharded_param_size.numel() for each in parts]
        accumulator = Accumulator([(sum(counts),)], leaves=leaves)
        averages = torch.zeros(sum(counts), dtype=dtype or own)
        views = [
            each.to_sharded_dtensor(
                flat.as_strided(each.sharded_size, each.contiguous_sharded_stride)
            )
            for each, flat in zip(parts, averages.split(counts), strict=True)
        ]
        super().__init__(parameters, accumulator, averages, views)

    def begin(self) -> None:
        super().begin()
        self._came = False
        self.forget()

    def forget(self) -> None:
        """Drop what torch has kept of a backward that raised, or did not reduce."""
        for each in self._parts:
            each.unsharded_accumulated_grad = None
            if (whole := getattr(each, "_unsharded_param", None)) is not None:
                whole.grad = None

    def reduce_scatter(self, _: torch.Tensor, gradients: torch.Tensor) -> None:
        """Give each rank its shard of this leaf's gradients, and add what ranks give this one.

        In the place of torch's reduce-scatter, which there is on several ranks.
        """
        transport = self._shards.transport
        transport.meet(self._number, _GRADIENTS)
        # They are as autograd has made them, so this loses no bit.
        sent = gradients.to(self._dtype).view(torch.uint8).view(transport.size, -1)
        rows = torch.empty_like(sent)
        transport.exchange([*sent], rows)
        self._take_rows(rows.view(self._dtype))

    def reduced(self, gradients: torch.Tensor) -> None:
        """Add one rank's leaf: torch calls this behind the reduce-scatter, or in its place."""
        if self._shards.transport.size == 1:
            self._take_rows(gradients[None])

    def _take_rows(self, rows: torch.Tensor) -> None:
        now = self._shards.transport.leaf
        if now is None:  # which is refused as soon as `.grad` is there
            return
        if self._came:
            raise ConfigurationError(
                f"the gradient of {self._names[0]} has come twice in leaf {now}: "
                "fully_shard reduces at each use of a module; use it once, or shard it together "
                "with what uses it, and have one backward a leaf"
            )
        self._came = True
        for leaf, row in zip(self._shards.round_of(now), rows, strict=True):
            self.accumulator.add(leaf, [row])

    def take(self, number: int, gradient: torch.Tensor) -> None:
        if not self._came:
            raise ConfigurationError(
                f"a gradient of {self._names[number]} has come past fully_shard: the loss uses the "
                "sharded parameter itself, outside of its module's forward. Use it within; and to "
                "skip a leaf compute the loss of other inputs, times 0"
            )
        self.gradients[number] = gradient.shape  # its rows were added
        self.missing -= 1

    def add(self, leaf: int) -> None:
        if not self._came:  # no rank has used the module in this round
            self._shards.refuse_changed()
            for each in self._shards.round_of(leaf):
                self.accumulator.add(each, None)
        self.added = True

    def average(self, divisor: int) -> None:
        """Compute the averages of this rank's shard."""
        [row] = self.accumulator._spend()
        out = self.averages
        reduction.reduce([torch.from_numpy(row)], out, "avg", [TAKE], divisor, out.dtype, True)

    def hand_out(self) -> None:
        self._group.reshard()  # weights change now
        super().hand_out()


class _Exchange(OwnBuffers):
    """A collective of FSDP2's, of which torch tells more than is needed."""

    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._call = call

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        self._call(output_tensor, input_tensor)


def shards_of(model: torch.nn.Module) -> Shards | None:
    """What `fully_shard` has sharded of a model; None where it has sharded nothing."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # to import it takes seconds
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None or not isinstance(model, torch.nn.Module):
        return None
    states: dict[int, tuple[str, Any]] = {}
    for name, each in model.named_modules():
        if isinstance(each, kind):
            if not hasattr(each, "reset_iter_state"):
                raise _refusal(name, f"no reset_iter_state (torch {torch.__version__}): take 2.13")
            states.setdefault(id(each._get_fsdp_state()), (name, each))
    return Shards([*states.values()]) if states else None


def _refusal(name: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"LeafSync: fully_shard's module {name} has {what}")


def _refuse_group(name: str, group: Any, place: Place) -> None:
    """Refuse what a call of fully_shard was told."""
    info, after = group.mesh_info, group.post_forward_mesh_info
    meshes = [info.mesh, *(each.sharded_param.device_mesh for each in group.fsdp_params)]
    if type(info).__name__ != "FSDPMeshInfo" or any(each.ndim != 1 for each in meshes):
        raise _refusal(
            name,
            f"the mesh {info.mesh}: LeafSync takes one dimension, over which parameters are "
            "sharded, without replicas (HSDP) and tensor parallelism",
        )
    if place.device.type != "cpu":
        raise _refusal(name, f"parameters on {place.device}: LeafSync takes sharded ones on CPUs")
    if any(each.offload_to_cpu for each in group.fsdp_params):
        raise _refusal(name, "a CPUOffloadPolicy, which is for GPUs: leave it out")
    if after is not None and after.shard_mesh_size != info.shard_mesh_size:
        raise _refusal(
            name,
            f"reshard_after_forward={after.shard_mesh_size}, by which some ranks gather weights: "
            "give True or False",
        )
    if not group.reduce_grads:
        raise _refusal(name, _NO_SYNC)
    if group._all_reduce_hook is not None:
        raise _refusal(name, "an all-reduce hook, as HSDP has, which LeafSync would not call")
