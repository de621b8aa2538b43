"""`LeafSampler`: which samples a leaf has, whatever rank computes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, Sampler

from pycollective.errors import ConfigurationError
from pycollective.torch.leaves.generators import integer, seed_of


class Leaves(Protocol):
    """What a sampler reads of a `LeafSync`, and sets."""

    leaves: int
    seed: int
    step: int
    in_order: bool

    @property
    def local_leaves(self) -> range: ...
    def leaves_at(self, step: int) -> range: ...


class LeafSampler(Sampler[list[int]]):
    """Gives leaf ``i`` of step ``s`` the same samples on any number of ranks.

    It is a ``batch_sampler`` of `torch.utils.data.DataLoader`: a batch is a leaf's micro-batch, and
    a rank gets its leaves' (``sync.local_leaves``, in that order), step after step. Once something
    iterates it, ``sync.leaf`` takes leaves in that order alone. It has no end, so ``for x, y in
    loader`` never ends, and ``len(loader)`` raises: an epoch has `steps_per_epoch` steps, each
    sample is in one of them at most, and every epoch has an order of its own. What is left of the
    samples when no whole step can be made of them waits for another epoch's order.

    An iteration begins with the step that `sync` is at, so a run that is resumed by
    ``sync.load_state_dict`` goes on with the samples that it would have had. What iterates already
    does not notice it. On a rank without leaves an iteration is empty.

    Args:
        sync: whose leaves, seed and step they are.
        samples: how many the dataset has.
        micro_batch: samples of a leaf.

    Attributes:
        sync: as given.
        samples: as given.
        micro_batch: as given.
        steps_per_epoch: steps in which each sample is at most once.
        iterations: so many have begun to draw.

    Raises:
        ConfigurationError: there are too few samples for one step, or `micro_batch` is below 1.
    """

    def __init__(self, sync: Leaves, samples: int, micro_batch: int) -> None:
        samples = integer(samples, "LeafSampler: samples")
        micro_batch = integer(micro_batch, "LeafSampler: micro_batch")
        if micro_batch < 1:
            raise ConfigurationError(f"LeafSampler: micro_batch is {micro_batch}, not 1 or more")
        step = sync.leaves * micro_batch
        if samples < step:
            raise ConfigurationError(
                f"LeafSampler: a step of {sync.leaves} leaves of {micro_batch} takes {step} "
                f"samples, and the dataset has {samples}"
            )
        self.sync = sync
        self.samples = samples
        self.micro_batch = micro_batch
        self.steps_per_epoch = samples // step
        self.iterations = 0
        self._notes: deque[tuple[int, int]] | None = None  # of the next iteration
        self._epoch: tuple[int, torch.Tensor] | None = None  # the last that was asked for

    def __len__(self) -> int:
        raise TypeError(
            "a LeafSampler has no end, and so neither has its DataLoader: an epoch is "
            f"steps_per_epoch ({self.steps_per_epoch}) steps of {len(self.sync.local_leaves)} "
            "batches on this rank"
        )

    def __iter__(self) -> Iterator[list[int]]:
        # Here, as it first draws: a DataLoader with workers makes two of these, and draws from one.
        self.iterations += 1
        self.sync.in_order = True
        notes, self._notes = self._notes, None
        step = self.sync.step
        while leaves := self.sync.leaves_at(step):
            for leaf in leaves:
                if notes is not None:
                    notes.append((step, leaf))
                yield self.indices_of(step, leaf)
            step += 1

    def note_next(self) -> deque[tuple[int, int]]:
        """Return where the next iteration notes the step and leaf of each batch that it draws."""
        self._notes = deque()
        return self._notes

    def indices_of(self, step: int, leaf: int) -> list[int]:
        """Return the samples of a leaf, from 0, which follow from seed, step and leaf alone."""
        epoch, now = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of(self.sync.seed, epoch))
            self._epoch = epoch, torch.randperm(self.samples, generator=generator)
        begin = (now * self.sync.leaves + leaf) * self.micro_batch
        return self._epoch[1][begin : begin + self.micro_batch].tolist()

    def read(self, loader: Any, step: int, leaf: int) -> Any:
        """Return the batch of any leaf of any step, out of turn, on any rank.

        Args:
            loader: whose dataset and ``collate_fn`` make it, in this process.
            step: from 0.
            leaf: 0 to M - 1.

        Raises:
            ConfigurationError: there is no such step or leaf, or the dataset is an IterableDataset.
        """
        step, leaf = integer(step, "read: step"), integer(leaf, "read: leaf")
        if step < 0 or not 0 <= leaf < self.sync.leaves:
            raise ConfigurationError(
                f"read: step {step}, leaf {leaf}: steps are from 0, and leaves 0 to "
                f"{self.sync.leaves - 1}"
            )
        dataset, indices = loader.dataset, self.indices_of(step, leaf)
        refuse_iterable(dataset)
        by_list = getattr(dataset, "__getitems__", None)  # as DataLoader does
        return loader.collate_fn(by_list(indices) if by_list else [dataset[i] for i in indices])


def refuse_iterable(dataset: object) -> None:
    """Refuse an IterableDataset by name."""
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError(
            f"{type(dataset).__name__} is an IterableDataset, whose samples have no numbers by "
            "which a leaf could have the same on any number of ranks: give them numbers "
            "(__getitem__, __len__), or load data yourself and use sync.leaf"
        )
