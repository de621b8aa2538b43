"""`LeafSampler`: which samples a leaf has, whatever rank computes it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from pycollective.errors import ConfigurationError
from pycollective.torch.leaves.generators import integer, seed_of
from pycollective.torch.leaves.sync import LeafSync


class LeafSampler(Sampler[list[int]]):
    """Gives leaf `i` of step `s` the same samples on any number of ranks.

    It is a ``batch_sampler`` of `torch.utils.data.DataLoader`: a batch is a leaf's micro-batch, and
    a rank gets its leaves' (``sync.local_leaves``, in that order), step after step. Beside one
    ``sync.leaf`` takes leaves in that order alone. It has no end, so ``for x, y in loader`` never
    ends, and ``len(loader)`` raises: an epoch has `steps_per_epoch` steps, each sample is in one of
    them at most, and every epoch has an order of its own. What is left of the samples when no whole
    step can be made of them waits for another epoch's order.

    An iteration begins with the step that `sync` is at, so a run that is resumed by
    ``sync.load_state_dict`` goes on with the samples that it would have had. What iterates already
    does not notice it. On a rank without leaves an iteration is empty.

    Args:
        sync: whose leaves, seed and step they are.
        samples: how many the dataset has.
        micro_batch: samples of a leaf.

    Attributes:
        steps_per_epoch: steps in which each sample is at most once.

    Raises:
        ConfigurationError: there are too few samples for one step, or `micro_batch` is below 1.
    """

    def __init__(self, sync: LeafSync, samples: int, micro_batch: int) -> None:
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
        self._sync = sync
        self._samples = samples
        self._micro_batch = micro_batch
        self.steps_per_epoch = samples // step
        sync.in_order = True

    def __len__(self) -> int:
        raise TypeError(
            "a LeafSampler has no end, and so neither has its DataLoader: an epoch is "
            f"steps_per_epoch ({self.steps_per_epoch}) steps of {len(self._sync.local_leaves)} "
            "batches on this rank"
        )

    def __iter__(self) -> Iterator[list[int]]:
        if not self._sync.local_leaves:
            return
        size = self._micro_batch
        epoch, step = divmod(self._sync.step, self.steps_per_epoch)
        while True:
            generator = torch.Generator().manual_seed(seed_of(self._sync.seed, epoch))
            order = torch.randperm(self._samples, generator=generator)
            for now in range(step, self.steps_per_epoch):
                for leaf in self._sync.local_leaves:
                    begin = (now * self._sync.leaves + leaf) * size
                    yield order[begin : begin + size].tolist()
            epoch, step = epoch + 1, 0
