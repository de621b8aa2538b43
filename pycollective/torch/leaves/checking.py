"""`check_every` of a LeafSync: do all ranks have the same weights?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from pycollective.agree import let_all_hear
from pycollective.errors import CollectiveMismatch, ConfigurationError, named
from pycollective.ledger.digests import digester
from pycollective.torch.leaves.buckets import Bucket, Named
from pycollective.torch.leaves.generators import integer
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.tensor_ledger import bytes_of

_DIGEST = 16  # bytes


def checked(every: int | None, device: torch.device, sharded: bool) -> int | None:
    """Return `check_every`, or refuse it here.

    Raises:
        ConfigurationError: it is no number above 0, weights are not whole on CPUs, or xxhash lacks.
    """
    if every is None:
        return None
    every = integer(every, "check_every")
    if every < 1:
        raise ConfigurationError(f"LeafSync: check_every is {every}, not 1 or more")
    if device.type != "cpu" or sharded:
        where = "are sharded" if sharded else f"are on {device}"
        raise ConfigurationError(
            f"LeafSync: check_every compares whole weights on CPUs, and these {where}: leave it out"
        )
    digester("check_every")
    return every


class Checking:
    """Compares the ranks' weights and last averages every so many steps.

    Buffers are not compared: BatchNorm's differ from rank to rank.

    Args:
        every: so many steps, from step 0.
        transport: of the ranks.
        weights: returns the model's parameters, also those that do not train.
        buckets: of the averages.

    Attributes:
        transport: of the ranks.
        averaged: whether the averages of the last step are there, which a step that has failed
            overwrites in part.
    """

    def __init__(
        self,
        every: int,
        transport: Transport,
        weights: Callable[[], Iterable[Named]],
        buckets: Sequence[Bucket],
        names: dict[int, str],
    ) -> None:
        self._every, self.transport = every, transport
        self._weights, self._buckets, self._names = weights, buckets, names
        self._digest = digester("check_every")
        self.averaged = False

    def begin_step(self, step: int) -> None:
        """Compare, if it is this step's turn. Collective.

        Raises:
            CollectiveMismatch: on all ranks, weights or averages are unlike; names the ranks and
                the first parameter.
        """
        averaged, self.averaged = self.averaged, False
        if step % self._every:
            return
        all_gather = self.transport.all_gather
        averages = self._averages() if averaged else {}
        weights = {f"the weight {name}": self._of(each) for name, each in self._weights()}
        own = [self._digest(b"".join(each.values())) for each in (averages, weights)]
        row = np.frombuffer(b"".join(own) + bytes([averaged]), np.uint8)
        rows = all_gather(row)
        if not rows[:, -1].all():  # as of a rank that has just joined
            averages = {}
            rows = rows[:, _DIGEST:-1]
        if (rows == rows[0]).all():
            return
        digests = {**averages, **weights}
        row = np.frombuffer(b"".join(digests.values()), np.uint8)
        each = all_gather(row).reshape(self.transport.size, -1, _DIGEST)
        unlike = np.flatnonzero((each != each[0]).any(axis=(0, 2)))
        let_all_hear(all_gather)
        first = [each[rank, unlike[0]].tobytes() for rank in range(self.transport.size)]
        what = [*digests][unlike[0]]
        more = f", as have {len(unlike) - 1} more averages and weights" if unlike[1:].size else ""
        raise CollectiveMismatch(
            f"step {step}: {what} has other bits on {_odd(first)}{more}",
            self.transport.rank,
            "check_every",
        )

    def _averages(self) -> dict[str, bytes]:
        return {
            f"the average of {self._names[id(parameter)]}": self._of(view)
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        }

    def _of(self, tensor: torch.Tensor) -> bytes:
        return self._digest(bytes_of(tensor).numpy())


def _odd(digests: list[bytes]) -> str:
    """The ranks that have other bits than most, in words."""
    [(most, count), *_] = Counter(digests).most_common()
    odd = [rank for rank, digest in enumerate(digests) if digest != most]
    others = [rank for rank, digest in enumerate(digests) if digest == most]
    doubt = "" if 2 * count > len(digests) else "; no majority says which are right"
    return f"{named(odd)} than on {named(others)}{doubt}"
