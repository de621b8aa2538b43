"""`LeafSync`: gradients that are the same bits on any number of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
import torch.distributed as dist

from pycollective.agree import agree, refuse_unlike
from pycollective.communicator import Communicator
from pycollective.errors import (
    CollectiveError,
    CollectiveMismatch,
    ConfigurationError,
    in_words,
    named,
)
from pycollective.leaves.deal import Deal
from pycollective.torch.leaves import comparison, conditions
from pycollective.torch.leaves.audit import Audit, audits_of
from pycollective.torch.leaves.balance import Cost
from pycollective.torch.leaves.buckets import Bucket, buckets_of
from pycollective.torch.leaves.checking import Checking, checked
from pycollective.torch.leaves.choosing import transport_of
from pycollective.torch.leaves.elastic import Elastic, elastic_of
from pycollective.torch.leaves.generators import integer, seed_of, seeded
from pycollective.torch.leaves.ledger import LeafLedger, open_ledger
from pycollective.torch.leaves.model import Listener, Model, ddps_of
from pycollective.torch.leaves.place import place_of
from pycollective.torch.leaves.ranks import Ranks
from pycollective.torch.leaves.shards import shards_of
from pycollective.torch.leaves.state import State
from pycollective.torch.leaves.steps import AHEAD, Steps
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.leaves.words import MOST_COUNT, StepWords
from pycollective.torch.norm import clip_gradients
from pycollective.torch.tensor_ledger import folder_of

_MIB = 1 << 20


class LeafSync:
    """Averages the gradients of a step's micro-batches, its *leaves*, in an order of their own.

    The order in which gradients are added follows from the number of leaves alone
    (contract.md), so a training has the same weights, bit for bit, on any number of ranks, if
    each leaf's gradients are (any_number_of_ranks.md says when they are). Each rank computes
    `local_leaves`, a run of leaves; it may be empty where there are more ranks than leaves::

        for step in sync.steps(loader, until=1000):
            for x, y in step:
                loss(model(x), y).backward()
            optimizer.step()

    When a rank's last leaf ends, the ``.grad`` of every parameter is the average over all leaves of
    the step, on every rank; until then it is None. Buckets of gradients are averaged while backward
    goes on. These ``.grad`` are views of memory that the next step's averages overwrite, and
    ``zero_grad`` is not needed. A parameter that a leaf does not use counts as +0 in it. Who loads
    data without a `LeafSampler` computes leaves by `leaf` and `finish`.

    With FSDP2's ``fully_shard``, M is a multiple of the number of ranks n, and rank r has the
    leaves r, n + r, 2n + r, ..., in this order: all ranks compute at the same time, and use the
    same modules. Each ``.grad`` is sharded as its parameter (any_number_of_ranks.md#with-fsdp2).

    Without DistributedDataParallel, parameters and buffers become rank 0's here. With it, around
    the model or inside, its ``no_sync`` holds all the time, so what it was told of buckets does not
    matter. Its options ``static_graph``, ``delay_all_reduce_named_params`` and ``mixed_precision``
    are refused. Collective, as is the last of a rank's leaves; not for several threads. Its calls
    mix with no others of the group. A model has one at a time, and which of its parameters require
    a gradient does not change before `close`. Weights change between steps alone: an optimizer that
    steps in a leaf or in backward is refused.

    Args:
        model: a module with parameters on the CPU, or on one CUDA device, compiled or not, in
            DistributedDataParallel, on CPUs sharded by ``fully_shard``, or neither.
        leaves: M, of a step, over all ranks.
        seed: of what `leaf` seeds, and of `LeafSampler`.
        grad_dtype: of the averages, such as ``torch.float32`` for weights in bfloat16; None for
            each parameter's own dtype.
        bucket_cap_mb: MiB of averages in a bucket, at most, unless one parameter has more. None for
            6 over ``pycollective``, so that gradients are still in a cache when they are added, and
            for DDP's 25 over another backend, whose calls cost more, and on a GPU; also with
            ``fully_shard``, whose modules are the buckets.
        group: a process group of ``pycollective``, Gloo or another backend that carries CPU
            tensors, or a `pycollective.Communicator`; for parameters on a GPU one of NCCL or
            ``pycollective``. None for DDP's or ``fully_shard``'s, the default group, or, where
            there is none, the ranks that `pycollective.init` finds.
        ledger: a folder in which each step's gradients and averages are noted by their digests, for
            ``pycollective diff`` (ledger.md); None for that of PYCOLLECTIVE_LEDGER, or none. On
            CPUs, and without ``fully_shard``.
        check_every: so many steps after which all ranks' weights and last averages are compared,
            as the next step begins; None for never. On CPUs, and without ``fully_shard``.
        audit: so many leaves of each step, drawn by ``seed``, whose gradients another rank computes
            again, in `steps`; None for none. Gradients that differ stop the step
            (any_number_of_ranks.md#when-a-processor-computes-wrongly). On CPUs, and without
            ``fully_shard``.
        elastic: whether the training goes on when ranks die, and lets others join
            (elastic.md). ``group`` is then a `pycollective.Communicator` that the LeafSync takes
            over, or None; the model is bare, on CPUs; and all steps are in one loop of `steps`,
            without `leaf` and `finish`. It needs xxhash.

    Attributes:
        leaves: M.
        local_leaves: this rank's of the step that is under way or comes next, a range.
        seed: as given.
        step: steps that are done.
        in_order: whether leaves must come in the order of `local_leaves`: a `LeafSampler` iterates,
            or the model is sharded.

    Raises:
        ConfigurationError: on all ranks, an argument or the model of one cannot be used so; says
            what.
        CollectiveMismatch: the ranks give other arguments, other parameters or buffers, or compute
            with other numbers of threads, or on GPUs of another kind or with other settings.

    Warns:
        UserWarning: a module keeps what differs from rank to rank, as BatchNorm does; or a setting
            under which a GPU's kernels may not repeat themselves.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        leaves: int,
        *,
        seed: int = 0,
        grad_dtype: torch.dtype | None = None,
        bucket_cap_mb: float | None = None,
        group: dist.ProcessGroup | Communicator | None = None,
        ledger: str | Path | None = None,
        check_every: int | None = None,
        audit: int | None = None,
        elastic: bool = False,
    ) -> None:
        if group is None and (ddps := ddps_of(model)):
            group = ddps[0].process_group
        self._shards = shards_of(model)  # None: each rank has all of each parameter
        if group is None and self._shards is not None:
            group = self._shards.group
        self.leaves, self.seed = leaves, seed
        self.step = 0
        self.in_order = self._shards is not None
        self._place = place_of(model)
        self._ledger: LeafLedger | None = None
        self._check_every, self._audits = check_every, audit
        self._state = State()
        folder = folder_of(ledger)
        with ExitStack() as undo:
            self._undo = undo  # what close() does
            self._ranks = (
                elastic_of(self, model, group, self._place)
                if elastic
                else Ranks(transport_of(group, self._place))
            )
            undo.callback(self._ranks.close)
            if self._shards is not None:
                self._ranks.transport = self._shards.over(self._ranks.transport)
            if bucket_cap_mb is None:
                bucket_cap_mb = self._transport.bucket_cap_mb
            look = partial(self._look_at, model, grad_dtype, bucket_cap_mb, folder is not None)
            joins = self._ranks.joins  # and looks at the others later
            if joins:
                look()
            else:
                self._agree(look)
                self._model.broadcast(self._transport.broadcast)
            if folder is not None:
                self._ledger = open_ledger(
                    None if joins else self._transport,
                    folder,
                    self._model.trained,
                    grad_dtype,
                    self.leaves,
                    self.seed,
                    self._shards is not None,
                )
                undo.callback(self._ledger.writer.close)
            self._begin(grad_dtype, bucket_cap_mb)
            if not joins and self._transport.rank == 0:
                self._model.warn_of_state()
                conditions.warn(self._conditions, stacklevel=2)
            self._undo = undo.pop_all()

    def _begin(self, grad_dtype: torch.dtype | None, bucket_cap_mb: float) -> None:
        """Take the model over, and have no step begun."""
        for ddp in self._model.ddps:
            # Its first forward would send buffers, as its constructor has: in the last leaf of one
            # rank, and not in that of another.
            before, ddp.require_forward_param_sync = ddp.require_forward_param_sync, False
            self._undo.callback(setattr, ddp, "require_forward_param_sync", before)
        trained = self._model.trained
        self._names = {id(parameter): name for name, parameter in trained}
        cap = bucket_cap_mb * _MIB
        self._buckets = (
            buckets_of(trained, self.leaves, grad_dtype, cap, self._place)
            if self._shards is None
            else self._shards.buckets(trained, self.leaves, grad_dtype, self._undo)
        )
        self._checking: Checking | None = None
        if self._check_every is not None:
            weights = self._model.module.named_parameters
            self._checking = Checking(
                self._check_every, self._transport, weights, self._buckets, self._names
            )
        self._audit: Audit | None = None
        if self._audits is not None:
            parameters = [each for bucket in self._buckets for each in bucket.parameters]
            names = [self._names[id(each)] for each in parameters]
            self._audit = Audit(self._audits, self.seed, names)
        self._is_open = False  # a leaf
        self._prepared = False  # the step that is under way: see elastic.py
        self._receive: Callable[[Bucket, int], None] | None = None  # while a leaf is open
        self._given: dict[int, int | None] = {}  # leaves of this step, each with its count
        self._settled = True  # the open leaf's count is known
        self._is_whole: bool | None = None  # the open leaf's backward has ended; None if none began
        self._averaging = 0  # so many of the first buckets
        self._seconds = 0.0  # that this rank's leaves of this step have taken so far
        self._seconds_before = 0.0  # of the last step
        self._complete = False  # the last step, and nobody asked yet
        # The loop that has begun; not held, so that it ends when it is left between steps.
        self._loop_ref: ReferenceType[Steps] | None = None
        self._broken = ""
        self._left = False  # a leaf, which is why it is broken, and nobody was told
        self._listen(grad_dtype)

    @property
    def _loop(self) -> Steps | None:
        return None if self._loop_ref is None else self._loop_ref()

    @property
    def local_leaves(self) -> range:
        return self._run_of(self._deal)

    def leaves_at(self, step: int) -> range:
        """Return this rank's leaves of the step that is under way, or of one that a loader draws.

        Raises:
            ConfigurationError: `steps` has a cost, and these leaves' is no number above 0; or the
                loader draws further ahead than it says.
        """
        return self._run_of(self._deal_of(step))

    def _run_of(self, deal: Deal) -> range:
        rank = self._transport.rank
        if self._shards is not None:
            return self._shards.leaves_of(rank, self.leaves)
        runs = deal.held[rank]
        return range(*runs[0]) if runs else range(0)

    def _deal_of(self, step: int) -> Deal:
        """Who has which leaves in a step, the same on all ranks; each a run of them, or none, or
        every n-th."""
        if self._shards is not None:
            return self._shards.deal(self.leaves)
        if self._loop is not None and self._loop.balance is not None:
            return self._loop.balance.deal_of(step)
        return Deal.contiguous(self._transport.size, self.leaves)

    @property
    def _deal(self) -> Deal:
        """Of the step that is under way, or comes next."""
        try:
            return self._deal_of(self.step)
        except BaseException as error:
            if not self._ranks.joins:  # who has yet to join may ask
                self._break(f"who has which leaves of step {self.step}:", error)
            raise

    def steps(
        self,
        loader: Iterable[Any],
        *,
        until: int | None = None,
        cost: Cost | None = None,
        measure_ranks: bool = False,
    ) -> Steps:
        """Go through a training's steps, with their leaves' batches::

            for step in sync.steps(loader, until=1000):
                for x, y in step:  # a batch for each leaf of this rank
                    loss(model(x), y).backward()
                optimizer.step()

        It begins with the step that this LeafSync is at. Leaf and batch come together, and each
        leaf is computed as in a block of `leaf`. Collective: all ranks call it, and iterate. One
        loop goes on at a time.

        Args:
            loader: has a `LeafSampler` of this LeafSync as its ``batch_sampler``, as
                `torch.utils.data.DataLoader` has. Nothing else iterates it meanwhile.
            until: the number of the step before which it ends, however often the run is resumed;
                None to go on for ever.
            cost: how long a leaf takes, in any unit, of the indices of its samples, such as
                ``lambda samples: sum(lengths[i] ** 2 for i in samples)``. Each step's leaves are
                then dealt in runs that cost alike. All ranks call it for all leaves, and it returns
                the same numbers on all of them. None where all leaves cost the same. No bit of a
                result depends on it.
            measure_ranks: whether a rank that has computed slowly gets less; it needs a cost. The
                times of leaves, without those of loading, are told to all ranks.

        Returns:
            An iterator over the steps, each a `pycollective.torch.leaves.steps.Step`.

        Raises:
            ConfigurationError: on all ranks, the loader of one cannot be used so; says why.
            CollectiveMismatch: ranks are at other steps, or have another ``until`` or LeafSampler.
        """
        self._refuse_broken()
        loops: list[Steps] = []

        def mine() -> dict[str, Any]:
            if self._ranks.is_elastic and self._loop_ref is not None:
                raise ConfigurationError(
                    "steps: with elastic=True there is one loop, which a process that joins later "
                    "can find: go through all steps in it"
                )
            if self._given:
                raise ConfigurationError(f"step {self.step} is under way, and no other begins")
            if measure_ranks and not self._transport.waits:
                raise ConfigurationError(
                    "steps: measure_ranks=True needs parameters on the CPU: a GPU's leaves are not "
                    "timed; leave it out"
                )
            if cost is not None and self._shards is not None:
                raise ConfigurationError(
                    "steps: with fully_shard all ranks compute their leaves at the same time, as "
                    "many each: leave cost out"
                )
            end = None if until is None else integer(until, "until")
            loops.append(Steps(self, loader, end, cost, measure_ranks))
            if not self._ranks.joins:
                loops[0].deal(self._transport.size)
            return loops[0].described()

        def check(said: list[dict[str, Any]]) -> None:
            refuse_unlike("steps", said, but=AHEAD)

        if self._ranks.joins:
            mine()
            self._loop_ref = ref(loops[0])
            self._ranks.enter()
            return loops[0]
        said: list[dict[str, Any]] = []
        with self._ranks.noting_loss():  # which the first step makes good
            said = agree(self._transport.all_gather, "steps", mine, check)
        if not loops:
            mine()  # for its error, which a loss has hidden
        [loop] = loops
        loop.begin(max(each[AHEAD] for each in said or [loop.described()]))
        self._loop_ref = ref(loop)
        return loop

    @contextmanager
    def leaf(self, leaf: int, count: int | None = None) -> Iterator[None]:
        """Compute one leaf: forward and one backward, in this block.

        It is for those who load data without a loader that `steps` takes::

            for step in range(sync.step, steps):
                for leaf in sync.local_leaves:
                    with sync.leaf(leaf):
                        loss(model(x_of(step, leaf)), y_of(step, leaf)).backward()
                sync.finish()
                optimizer.step()

        The generators of torch (of the CPU, and of the model's GPU), NumPy and Python are seeded
        from (`seed`, `step`, `leaf`), so dropout draws the same whatever rank has the leaf, and go
        on afterwards as if nothing had drawn. The last of this rank's leaves averages: at its end
        ``.grad`` is there.

        Args:
            leaf: one of `local_leaves` that this step does not have yet; in any order, or, where
                there is a `LeafSampler`, the next.
            count: of what the loss is a sum over, such as tokens. The gradients are then divided by
                the counts of all leaves together, not by M: a mean over tokens, however many each
                leaf has. All leaves of a step have one, or none; together at most 2**53.

        Raises:
            ConfigurationError: the leaf is not this rank's or not its turn, or was given already;
                `steps` goes on; there is no backward, or more than one; a weight has
                changed in the block; the model is not as it was at the beginning; or a leaf has
                raised before. The other ranks' calls end with `pycollective.CollectiveAborted`.
            CollectiveMismatch: the ranks are not at the same step, or some leaves have a count.
            CollectiveError: as `pycollective.Communicator.all_reduce`; over another backend as
                ordered calls.
        """
        self._refuse_in_loop()
        with self._turn(leaf):
            if count is not None:
                self._count(leaf, count)
            yield

    @contextmanager
    def _turn(self, leaf: int, again: bool = False) -> Iterator[None]:
        """Compute one leaf, whose count may come in this block, before its backward; or compute
        another rank's `again`, to compare it."""
        if not again:
            leaf = self._open(leaf)
        self._is_whole = None
        try:
            computing = self._computing(leaf, partial(self._add, leaf))
            kept = comparison.put_back(self._model.module) if again else nullcontext()
            with kept, self._model.unchanged(leaf), computing:
                begin = perf_counter()
                yield
                self._seconds += 0.0 if again else perf_counter() - begin
            self._refuse_broken()
            if self._is_whole is None:
                raise ConfigurationError(
                    f"leaf {leaf} has no backward: to skip it, as for a NaN, compute the loss of "
                    "other inputs, times 0"
                )
            if not self._is_whole:
                raise ConfigurationError(
                    f"a backward of leaf {leaf} raised, and something has caught that: the leaf's "
                    "gradients are not whole"
                )
            with self._place.adding():
                for bucket in self._buckets:
                    if not (bucket.added or again):
                        bucket.add(leaf)
                if self._ledger is not None and not again:
                    self._ledger.writer.end_leaf()
                if self._all_given and not again:
                    self._end_step()
                else:
                    self._ranks.look()
            self._place.hand_out()
        except GeneratorExit:  # of the loop: Python tells it no more
            self._leave(leaf)
            raise
        except BaseException as error:
            self._break(f"leaf {leaf} of step {self.step} raised", error, leaf)
            raise

    def finish(self) -> None:
        """Make sure that the step is complete, before the optimizer's; takes part without leaves.

        `steps` does it by itself. Only a rank without leaves must call it. Where a rank has some,
        it says what lacks.

        Raises:
            ConfigurationError: a leaf of this step was not given; `steps` goes on; or other
                parameters require a gradient than at the beginning.
            CollectiveError: as `leaf`, on a rank without leaves.
        """
        self._refuse_in_loop()
        self._model.refuse_changed()
        if not (self._complete or self.local_leaves):
            self._check_weights()
            self._take_part()
        elif not self._complete:
            lacking = [leaf for leaf in self.local_leaves if leaf not in self._given]
            raise ConfigurationError(
                f"step {self.step} lacks leaves {lacking} of this rank: "
                "each is computed in `with sync.leaf(...)`"
            )
        self._complete = False

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the averages so that their L2 norm is at most ``max_norm``; the step is complete.

        As `pycollective.torch.ordered.clip_grad_norm_` of the model's parameters, which see: the
        norm has the same bits on any number of ranks. Nothing is sent, but with ``fully_shard``.

        Raises:
            ConfigurationError: a step is under way, or none is complete; or an argument.
            RuntimeError: as ``error_if_nonfinite`` asks.
        """
        self._refuse_broken()
        trained = [each for _, each in self._model.trained]
        if self._given or self._complete or any(each.grad is None for each in trained):
            raise ConfigurationError(
                f"clip_grad_norm_: the gradients of step {self.step} are not there: call it after "
                "finish(), or after the last leaf of a step of sync.steps, and before zero_grad()"
            )
        ids = {id(each) for each in trained}
        gradients = [
            each.grad if id(each) in ids else None for _, each in self._model.named_parameters()
        ]
        return clip_gradients(gradients, max_norm, norm_type, error_if_nonfinite)

    def compare_leaf(self, path: str | Path, leaf: int, compute: Callable[[], None]) -> str | None:
        """Compare one leaf's gradients with those of another launch, and say which differ.

        The first to call it writes the file, and who calls it later compares. So run it under one
        rank and then under four, or on two machines, with the same weights: it tells a kernel that
        depends on the launch from a sum that does. What is found is printed, with both numbers of
        threads. Local; any rank may compute any leaf; nothing is averaged, and every ``.grad`` and
        buffer is afterwards as it was.

        Args:
            path: of the file; remove it to begin anew.
            leaf: 0 to M - 1; ``compute`` runs as in ``with sync.leaf(leaf)``.
            compute: forward and backward of this leaf.

        Returns:
            The name of the first parameter whose gradient differs, in the order in which backward
            made them; None if all bits are the same.

        Raises:
            ConfigurationError: the file is of another model, other weights, another seed, step or
                leaf, or not such a file; ``compute`` has no backward, or more than one; a step is
                under way.
        """
        self._refuse_broken()
        if self._shards is not None:
            raise ConfigurationError(
                "compare_leaf: with fully_shard no rank has a leaf's gradients: compare the model "
                "without it, on one rank"
            )
        leaf = integer(leaf, "leaf")
        if not 0 <= leaf < self.leaves:
            raise ConfigurationError(f"compare_leaf: leaf is {leaf}, not 0 to {self.leaves - 1}")
        if self._given or self._receive is not None:
            raise ConfigurationError("compare_leaf: a step is under way; call it between steps")
        gradients: dict[str, str] = {}

        def receive(bucket: Bucket, place: int) -> None:
            name, gradient = self._gradient_of(bucket, place)
            if name in gradients:
                raise _twice(name, leaf)
            gradients[name] = comparison.digest(gradient)

        weights = sha256()
        for each in self._model.module.parameters():
            weights.update(comparison.digest(each.detach()).encode())
        with comparison.put_back(self._model.module), self._computing(leaf, receive):
            compute()
        self._refuse_broken()
        if not gradients:
            raise ConfigurationError(f"compare_leaf: `compute` of leaf {leaf} has no backward")
        about = [weights.hexdigest(), self.leaves, self.seed, self.step, leaf]
        now = self._place.conditions(self._model.is_compiled)
        return comparison.compare(Path(path), about, gradients, now)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps beside the model's and the optimizer's; the same on all ranks.

        Raises:
            ConfigurationError, CollectiveMismatch: on a GPU, which the host waits for: ranks were
                at other steps, or their counts make no divisor, so gradients were NaN.
        """
        self._settle_words()
        return self._position

    @property
    def _position(self) -> dict[str, int]:
        return {"leaves": self.leaves, "seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint, on any number of ranks.

        Raises:
            ConfigurationError: it is of a run with other leaves or another seed, whose bits these
                would not be, or of no LeafSync; or a step is under way.
        """
        if self._given:
            raise ConfigurationError("load_state_dict: a step is under way")
        if lacking := [name for name in self.state_dict() if name not in state]:
            raise ConfigurationError(f"the checkpoint lacks {lacking}: it is no LeafSync's")
        for name in ("leaves", "seed"):
            if state[name] != getattr(self, name):
                raise ConfigurationError(
                    f"the checkpoint has {name} {state[name]}, and this LeafSync "
                    f"{getattr(self, name)}: the training would have other bits"
                )
        self.step = integer(state["step"], "the checkpoint's step")
        if self._loop is not None:  # and cannot go on
            self._loop.balance = None

    def state(self, **objects: Any) -> None:
        """Say what a training's next step depends on, besides the model; before `steps`::

            sync.state(optimizer=optimizer, scheduler=scheduler)

        With ``elastic=True`` a process that joins gets their state from a rank that is there, and
        `save` and `load` keep it. All ranks register the same names. LeafSync has the model's
        parameters and buffers itself; a `LeafSampler` has no state but the step.

        Args:
            objects: with `state_dict` and `load_state_dict`, as optimizers, schedulers, GradScaler
                and states of compression have. Their tensors are on CPUs.

        Raises:
            ConfigurationError: an object has no such methods, or the name is taken.
        """
        self._state.add(
            {name: each for name, each in objects.items() if each is not self._model.model}
        )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, whole or not at all: the model, what `state` was given, the step.

        Between steps, and after an error that ends the training: it is then of the last step that
        was committed. Any rank may write it, and the ranks have the same; one is enough.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            ConfigurationError: this process has yet to join, and has no state of the training.
            OSError: it cannot be written.
        """
        if self._ranks.joins:
            raise ConfigurationError(
                "save: this process has not joined the ranks that are under way, and has no state "
                "of their training"
            )
        model = self._model.module.state_dict()
        content = {"sync": self._position, "model": model, "state": self._state.gather()}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            torch.save(content, part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def load(self, path: str | Path) -> None:
        """Go on from what `save` wrote, on any number of ranks; before `steps`, on all of them.

        Raises:
            ConfigurationError: as `load_state_dict`; or it is of other objects than `state` has.
        """
        content = torch.load(path, weights_only=True)
        if not isinstance(content, dict) or {*content} != {"sync", "model", "state"}:
            raise ConfigurationError(f"{path} was not written by LeafSync.save")
        self.load_state_dict(content["sync"])
        self._model.module.load_state_dict(content["model"])
        self._state.load(content["state"])

    @property
    def communicator(self) -> Communicator:
        """With ``elastic=True``, the ranks that are there now; another one after each change.

        For calls between steps. If such a call raises because a rank has died, catch it: the next
        step recovers.

        Raises:
            ConfigurationError: without ``elastic=True``; or this process joins only with `steps`.
        """
        if not isinstance(self._ranks, Elastic):
            raise ConfigurationError("LeafSync has a communicator with elastic=True alone")
        return self._ranks.comm

    def stats(self) -> dict[str, int]:
        """Count what this LeafSync has sent from this rank.

        Over ``pycollective`` to other hosts, as `pycollective.Communicator.stats`; over another
        backend to all ranks, as `pycollective.torch.ordered.stats`.
        """
        return self._transport.stats()

    @property
    def nbytes(self) -> int:
        """Bytes of averages and sums that it takes at most, also before the first step.

        A sum is a row of fp32 with a number for each parameter's element: there are log2(m) + 1
        rows for an aligned run of m leaves, and up to twice as many for other runs. With
        ``fully_shard`` they are of this rank's shards, and of all M leaves. They are counted for
        the leaves of the step that is under way or comes next. What calls keep to send and receive
        is not in it.
        """
        added = self.local_leaves if self._shards is None else range(self.leaves)
        rows = sum(each.accumulator.nbytes_for(added) for each in self._buckets)
        return rows + sum(each.averages.nbytes for each in self._buckets)

    def close(self) -> None:
        """Leave the model as it was, but for its ``.grad``.

        A gradient whose dtype is not its parameter's own (``grad_dtype``) is dropped.

        Raises:
            ConfigurationError: a leaf of `steps` was left before its end, and nothing has said so.
        """
        if self._loop is not None:
            self._loop.leave()
        if self._given and not self._broken:
            self._ranks.leave(f"step {self.step} was under way when its LeafSync was closed")
        elif not self._broken:
            self._undo.callback(self._transport.settle)
        self._broken = self._broken or "it was closed"
        self._undo.close()
        if self._left and sys.exc_info()[0] is None:
            self._refuse_broken()

    # --- A leaf.

    def _open(self, leaf: int) -> int:
        """Note a leaf, and return its number; or refuse it, and change nothing."""
        leaf = integer(leaf, "leaf")
        self._refuse_broken()
        self._model.refuse_changed()
        if leaf not in self.local_leaves:
            mine = self.local_leaves
            has = f"{mine[0]} to {mine[-1]}" if mine else "none"
            has += f" in steps of {mine.step}" if mine.step > 1 else ""
            raise ConfigurationError(
                f"leaf {leaf} is not one of rank {self._transport.rank}, which has {has} of "
                f"{self.leaves}"
            )
        if self._receive is not None:
            raise ConfigurationError(f"leaf {leaf} begins inside another leaf")
        if leaf in self._given:
            lacking = [each for each in self.local_leaves if each not in self._given]
            raise ConfigurationError(
                f"leaf {leaf} was given to step {self.step} already, which lacks leaves {lacking}"
            )
        if self.in_order and leaf != (turn := self.local_leaves[len(self._given)]):
            raise ConfigurationError(
                f"leaf {leaf} is out of turn: the LeafSampler's next batch is of leaf {turn}"
                if self._shards is None
                else f"leaf {leaf} is out of turn: with fully_shard leaf {turn} is next"
            )
        self._given[leaf] = None
        self._settled = self._complete = False
        if self._loop is None and len(self._given) == 1:
            self._check_weights()
        return leaf

    def _count(self, leaf: int, count: int) -> None:
        """Say the count of the leaf that is open, before its backward."""
        if self._settled:
            raise ConfigurationError(f"leaf {leaf}: its count comes once, and before its backward")
        number = integer(count, f"leaf {leaf}: count")
        if not 0 <= number <= MOST_COUNT:
            raise ConfigurationError(f"leaf {leaf} has count {count}, not 0 to {MOST_COUNT}")
        self._given[leaf] = number
        self._settle(leaf)

    def _settle(self, leaf: int) -> None:
        """Take a leaf's count for what it is; with the last leaf's, all ranks are told."""
        self._settled = True
        if len({each is None for each in self._given.values()}) > 1:
            raise ConfigurationError(f"leaf {leaf}: all leaves of a step have a count, or none")
        if self._all_given:
            self._announce()

    @contextmanager
    def _computing(self, leaf: int, receive: Callable[[Bucket, int], None]) -> Iterator[None]:
        """Have gradients handed to `receive` as backward makes them."""
        for bucket in self._buckets:
            bucket.begin()
        self._place.begin()
        self._receive, self._is_open = receive, True
        seed = seed_of(self.seed, self.step, leaf)
        try:
            with seeded(seed), self._place.seeded(seed), self._model.no_sync(leaf):
                yield
        finally:
            self._receive, self._is_open = None, False

    def _add(self, leaf: int, bucket: Bucket, place: int) -> None:
        """Take a gradient, and add the bucket once it is full; average it in the last leaf."""
        name, gradient = self._gradient_of(bucket, place)
        if not self._settled:
            self._settle(leaf)
        if self._is_whole is not False:
            self._is_whole = False
            # Runs when this backward has ended, and not if it raises.
            torch.autograd.Variable._execution_engine.queue_callback(self._have_whole)
        if bucket.added or bucket.gradients[place] is not None:
            raise _twice(name, leaf)
        if self._audit is not None:
            self._audit.gradient(leaf, name, gradient)
        if leaf not in self._given:  # another rank's, of which nothing is kept
            bucket.gradients[place] = ()
            return
        if self._ledger is not None:
            self._ledger.gradient(self.step, leaf, bucket.parameters[place], gradient)
        bucket.take(place, gradient)
        if not bucket.missing:
            with self._place.adding():
                bucket.add(leaf)
                if self._all_given:
                    begin = perf_counter()
                    self._average()  # may wait for ranks' counts, which is not this leaf's time
                    self._seconds -= perf_counter() - begin

    def _have_whole(self) -> None:
        self._is_whole = True

    def _gradient_of(self, bucket: Bucket, place: int) -> tuple[str, torch.Tensor]:
        """Take it from the parameter, whose name comes with it."""
        parameter = bucket.parameters[place]
        name, gradient = self._names[id(parameter)], parameter.grad
        if gradient is None:
            raise ConfigurationError(
                f"something else has taken the gradient of {name} in backward; step after the last "
                "leaf"
            )
        parameter.grad = None
        if gradient.is_sparse:
            raise ConfigurationError(
                f"the gradient of {name} is sparse, which LeafSync does not add: make the "
                "embedding with sparse=False"
            )
        return name, gradient

    @property
    def _all_given(self) -> bool:
        """Whether this rank's last leaf of the step is under way, or over."""
        return len(self._given) == len(self.local_leaves)

    def _refuse_in_loop(self) -> None:
        self._refuse_broken()
        if self._loop is not None:
            raise ConfigurationError(
                f"step {self.step} is that of sync.steps, which begins and ends its leaves: "
                "compute them in `for batch in step`, without leaf() and finish()"
            )
        if self._ranks.is_elastic:
            raise ConfigurationError(
                "with elastic=True a step may have to be computed again, which sync.steps does: "
                "give it a loader, in place of leaf() and finish()"
            )
        if self._audit is not None:
            raise ConfigurationError(
                "with audit= a rank computes leaves of others, whose batches sync.steps reads: "
                "give it a loader, in place of leaf() and finish()"
            )

    def _refuse_broken(self) -> None:
        if self._broken:
            self._left = False
            raise ConfigurationError(f"this LeafSync cannot go on: {self._broken}")

    def _break(self, what: str, error: BaseException, leaf: int | None = None) -> None:
        """Note that no step can follow, and let no other rank wait for this one; `leaf` raised."""
        if self._broken:
            return
        self._broken = f"{what} {in_words(error)}"
        # Such an error the others have, or will; not always on a device, or after a change.
        alike = isinstance(error, CollectiveError) and self._transport.waits
        if self._ranks.is_elastic or not alike:
            self._ranks.leave(self._broken, leaf)

    def _leave(self, leaf: int) -> None:
        """Note that the loop was left inside a leaf; Python does not say why."""
        if not self._broken:
            self._left = True
            self._broken = (
                f"leaf {leaf} of step {self.step} was left before its end, by a break, a return or "
                "an exception, and the step has no averages: go through all leaves of a step (a "
                "leaf is skipped by a loss times 0), and end a training between steps"
            )
            self._ranks.leave(self._broken, leaf)

    # --- A step.

    def _announce(self) -> None:
        """Tell all ranks this one's step and counts, by the time that all compute their last."""
        counts = [each for each in self._given.values() if each is not None]
        self._words = StepWords(self.step, self._deal, counts, self._seconds_before)
        self._words.tell_newcomers(self._ranks.see_newcomers())
        # Where this rank's leaves have no counts there are none.
        with self._place.adding(), self._ranks.noting_loss():
            self._transport.announce(self._words, needed=bool(counts) or not self._given)

    def _settle_words(self) -> None:
        """Read what ranks have told of all steps, for its errors."""
        if self._transport.waits:
            return
        self._refuse_broken()
        try:
            self._transport.settle()
        except BaseException as error:
            self._break("what ranks have told of a step:", error)
            raise

    def _check_weights(self) -> None:
        """Compare all ranks' weights as a step without `steps` begins. Collective."""
        if self._checking is not None:
            try:
                self._checking.begin_step(self.step)
            except BaseException as error:
                self._break(f"check_every in step {self.step}:", error)
                raise

    def _take_gradients(self) -> None:
        """Make every ``.grad`` None: an optimizer that steps too early does nothing."""
        for bucket in self._buckets:
            bucket.begin()

    def _take_part(self) -> None:
        """Complete a step in which this rank has no leaves."""
        try:
            self._place.begin()
            self._announce()
            self._end_step()
        except BaseException as error:
            self._break(f"step {self.step} raised", error)
            raise

    def _average(self) -> None:
        """Begin to average the buckets whose turn it is; in one order on all ranks."""
        with self._ranks.noting_loss():
            for bucket in self._buckets[self._averaging :]:
                if self._has_lost or (self.local_leaves and not bucket.added):
                    return
                self._averaging += 1
                self._transport.average(bucket, self._deal)

    def _end_step(self) -> None:
        """Average what has not been yet, wait for all, and hand the averages out."""
        self._average()
        with self._ranks.noting_loss():
            if self._has_lost:
                return
            self._transport.finish()
            if self._loop is not None:
                self._loop.exchange(self._transport, self._words)
            if self._audit is not None and self._audit.compare(self._transport):
                return  # a third rank computes that leaf
            self._prepared = True
            self._ranks.commit(self._words)
            self._hand_out()

    def _hand_out(self) -> None:
        """Hand the averages out, which are there on all ranks: the step is complete."""
        self._prepared = False
        if self._loop is not None:
            self._loop.complete(self._words)
        self._seconds_before, self._seconds = self._seconds, 0.0
        self._averaging = 0
        self._given.clear()
        for bucket in self._buckets:
            bucket.accumulator.reset()
            bucket.hand_out()
        if self._ledger is not None:
            self._ledger.end_step(self.step, self._buckets)
        if self._checking is not None:
            self._checking.averaged = True
        self.step += 1
        self._complete = self._loop is None

    def _begin_audits(self) -> list[int]:
        """Begin a step's audits; return the leaves of others that this rank computes."""
        if self._audit is None:
            return []
        self._audit.begin(self.step, self._deal, self._transport.rank)
        return self._audit.again

    def _judge(self, audit: Audit) -> None:
        """Raise on all ranks who has computed a leaf wrongly, unless a rank is lost. Collective."""
        try:
            with self._ranks.noting_loss():
                audit.judge(self._transport)
        except BaseException as error:
            self._break(f"audit of step {self.step}:", error)
            raise

    # --- Ranks that are lost: see elastic.py.

    @property
    def _transport(self) -> Transport:
        return self._ranks.transport

    @property
    def _has_lost(self) -> bool:
        return self._ranks.loss is not None

    def _begin_step(self) -> None:
        """Begin a step of `steps`, which all ranks do before its first leaf."""
        assert self._loop is not None
        try:
            while True:
                self._ranks.begin_step()
                self._loop.deal(self._transport.size)
                with self._ranks.noting_loss():
                    if self._checking is not None:
                        self._checking.begin_step(self.step)
                    return
        except BaseException as error:
            self._break(f"step {self.step} could not begin:", error)
            raise

    def _end_loop(self) -> None:
        """End the loop after its last step, which all ranks do."""
        self._loop_ref = None
        try:
            self._ranks.end()
        except BaseException as error:
            self._break("the end of sync.steps:", error)
            raise

    def _begins_again(self) -> bool:
        """Once all leaves are given: make good the loss of ranks; whether to compute them anew."""
        if not self._has_lost:
            return False
        try:
            if self._ranks.recover():
                self._hand_out()
                return False
        except BaseException as error:
            self._break(f"step {self.step} lost ranks:", error)
            raise
        self._begin_step()
        return True

    def _begin_anew(self) -> None:
        """Be one of other ranks from here on; a step that is under way has no leaves yet."""
        transport = self._transport
        if self._checking is not None:
            self._checking.transport = transport
        if self._ledger is not None:
            self._ledger.writer.note_ranks(transport.rank, transport.size)
        if self._loop is not None:
            self._loop.begin_anew()
        self._averaging, self._seconds = 0, 0.0
        self._given.clear()
        self._settled = True
        for bucket in self._buckets:
            bucket.accumulator.reset()

    # --- At the beginning.

    def _look_at(
        self,
        model: torch.nn.Module,
        grad_dtype: torch.dtype | None,
        bucket_cap_mb: float,
        ledger: bool,
    ) -> dict[str, Any]:
        """Look at the model; return what the ranks must have been told alike, or refuse it."""
        self.leaves, self.seed = integer(self.leaves, "leaves"), integer(self.seed, "seed")
        if not bucket_cap_mb > 0:
            raise ConfigurationError(f"LeafSync: bucket_cap_mb is {bucket_cap_mb}, not above 0")
        ranks = None
        if self._shards is not None:
            ranks = self._shards.check(self.leaves, bucket_cap_mb, self._place)
        self._model = Model(model, grad_dtype, self._place.device, self._shards)
        self._conditions = self._place.conditions(self._model.is_compiled)
        conditions.refuse(self._conditions)
        described = self._model.described()
        sharded = self._shards is not None
        self._check_every = checked(self._check_every, self._place.device, sharded)
        ranks_now = None if self._ranks.is_elastic else self._transport.size
        self._audits = audits_of(self._audits, self.leaves, ranks_now, self._place.device, sharded)
        self._said = {
            "ranks of fully_shard's mesh": ranks,
            "leaves": self.leaves,
            "seed": self.seed,
            "grad_dtype": str(grad_dtype),
            "bucket_cap_mb": bucket_cap_mb,
            "ledger": ledger,
            "check_every": self._check_every,
            "audit": self._audits,
            "elastic": self._ranks.is_elastic,
            **self._conditions,
            _PARAMETERS: [len(described), sha256(repr(described).encode()).hexdigest()],
        }
        return self._said

    def _agree(self, look: Callable[[], dict[str, Any]]) -> None:
        """Raise on all ranks where one was told otherwise, or refuses the model."""

        def check(said: list[dict[str, Any]]) -> None:
            refuse_unlike("LeafSync", said, but=_PARAMETERS)

        def check_first(said: list[str]) -> None:
            other = next(rank for rank, each in enumerate(said) if each != said[0])
            raise CollectiveMismatch(
                f"LeafSync: {named([other])} have other parameters or buffers than rank 0; the "
                f"first is {said[other]}, not {said[0]}"
            )

        all_gather = self._transport.all_gather
        said = agree(all_gather, "LeafSync", look, check)
        if any(each[_PARAMETERS] != said[0][_PARAMETERS] for each in said):
            # There may be too many to send what each is.
            most = max(each[_PARAMETERS][0] for each in said)
            described = self._model.described()
            described += ["none"] * (most - len(described))
            digests = [blake2b(each.encode(), digest_size=8).digest() for each in described]
            rows = all_gather(np.frombuffer(b"".join(digests), np.uint8))
            first = int(np.flatnonzero((rows != rows[0]).any(axis=0))[0]) // 8
            agree(all_gather, "LeafSync", lambda: described[first], check_first)

    def _listen(self, grad_dtype: torch.dtype | None) -> None:
        """Hook each parameter, and forward."""
        before_forward = _BeforeForward(self)
        for each in {self._model.model, self._model.module}:
            handle = each.register_forward_pre_hook(before_forward, prepend=True)
            self._undo.callback(handle.remove)
        for bucket in self._buckets:
            for place, parameter in enumerate(bucket.parameters):
                if grad_dtype is not None and grad_dtype != parameter.dtype:
                    self._undo.callback(_set_grad_dtype, parameter, parameter.grad_dtype)
                    parameter.grad_dtype = None  # any: backward's own, then ours
                listener = Listener(self._came, bucket, place)
                hook: Any = parameter.register_post_accumulate_grad_hook(listener)
                self._undo.callback(hook.remove)

    def _came(self, bucket: Bucket, place: int) -> None:
        """Take what backward has made; an error stays, even if the caller of backward drops it."""
        try:
            if self._receive is None:
                name = self._names[id(bucket.parameters[place])]
                raise ConfigurationError(f"backward reaches {name} outside a leaf: {_INSIDE}")
            self._receive(bucket, place)
        except BaseException as error:
            self._break(f"in a backward of step {self.step},", error)
            raise


class _BeforeForward:
    """A module's hook that refuses a forward of training outside of a leaf.

    A pickled or copied module gets a hook that does nothing: `{}.get(module, args)` returns `args`.
    It is a builtin, so the file loads without pycollective.
    """

    def __init__(self, sync: LeafSync) -> None:
        self._sync = sync

    def __call__(self, module: torch.nn.Module, _: object) -> None:
        # torch.compile guards on all that this reads, so it reads nothing that changes from leaf to
        # leaf: each would be compiled anew, the ninth not at all.
        if not module.training or not torch.is_grad_enabled() or self._sync._is_open:
            return
        if self._sync._model.may_train():
            raise ConfigurationError(
                f"a forward of training outside a leaf ({_INSIDE}): dropout draws there, and its "
                "gradients would be averaged with nobody's (eval() and no_grad() are free, and "
                "with requires_grad_(False) on all parameters a frozen model is)"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")


_INSIDE = "in `for batch in step` of sync.steps, or `with sync.leaf(...)`, it is inside"
_PARAMETERS = "parameters"


def _twice(name: str, leaf: int) -> ConfigurationError:
    return ConfigurationError(
        f"the gradient of {name} has come twice in leaf {leaf}: a leaf has one backward (of the "
        "sum, if there are several losses), and checkpoints of activations use_reentrant=False"
    )


def _set_grad_dtype(parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> None:
    if parameter.grad is not None and dtype not in (None, parameter.grad.dtype):
        parameter.grad = None  # torch refuses a gradient of another dtype
    parameter.grad_dtype = dtype
