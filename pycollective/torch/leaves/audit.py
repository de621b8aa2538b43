"""`audit` of a LeafSync: does another rank make the same gradients of a leaf?"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from pycollective.agree import let_all_hear
from pycollective.errors import CollectiveMismatch, ConfigurationError
from pycollective.leaves.deal import Deal
from pycollective.ledger.digests import digester
from pycollective.torch.leaves.generators import integer, seed_of
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.tensor_ledger import bytes_of

_DIGEST = 16  # bytes


class Audited(NamedTuple):
    """A leaf that two ranks compute; where they differ, a third; None if there is none."""

    leaf: int
    owner: int
    auditor: int
    third: int | None


def deal_audits(count: int, seed: int, step: int, deal: Deal) -> list[Audited]:
    """Draw which leaves of a step are audited, and by whom: the same on all ranks.

    The ranks audit as many leaves each, or one more. One rank audits nothing.
    """
    if deal.size < 2:
        return []
    draw = Random(seed_of(seed, step)).random
    runs = [(rank, run) for rank, held in enumerate(deal.held) for run in held]
    owners = {leaf: rank for rank, run in runs for leaf in range(*run)}
    audits = [0] * deal.size
    dealt: list[Audited] = []
    for leaf in sorted(range(deal.leaves), key=lambda _: draw())[:count]:
        others = [rank for rank in range(deal.size) if rank != owners[leaf]]
        auditor, *more = sorted(others, key=lambda rank: (audits[rank], draw()))
        audits[auditor] += 1
        dealt.append(Audited(leaf, owners[leaf], auditor, more[0] if more else None))
    return sorted(dealt)


def audits_of(
    count: int | None, leaves: int, ranks: int | None, device: torch.device, sharded: bool
) -> int | None:
    """Return `audit`, or refuse it here; `ranks` is None where their number changes.

    Raises:
        ConfigurationError: it is not 1 to M, gradients are not whole on CPUs, there is one rank, or
            xxhash lacks.
    """
    if count is None:
        return None
    count = integer(count, "audit")
    if not 1 <= count <= leaves:
        raise ConfigurationError(f"LeafSync: audit is {count}, not 1 to {leaves}, the leaves")
    if device.type != "cpu" or sharded:
        where = "are sharded" if sharded else f"are on {device}"
        raise ConfigurationError(
            f"LeafSync: audit compares whole gradients on CPUs, and these {where}: leave it out"
        )
    if ranks == 1:
        raise ConfigurationError(
            "LeafSync: audit has a leaf computed again by another rank, and there is one rank: "
            "leave it out, or start more"
        )
    digester("audit")
    return count


class Audit:
    """Compares digests of the gradients that two ranks have made of a leaf.

    Args:
        count: leaves of a step, at most.
        seed: by which they are drawn.
        names: of all parameters that train, in the order in which backward is likely to come to
            them.

    Attributes:
        disputed: a leaf of this step whose digests differ.
        again: leaves of others that this rank computes next, first as auditor and then as third.
    """

    def __init__(self, count: int, seed: int, names: Iterable[str]) -> None:
        self._count, self._seed, self._names = count, seed, [*names]
        self._digest = digester("audit")
        self.disputed: Audited | None = None
        self.again: list[int] = []

    def begin(self, step: int, deal: Deal, rank: int) -> None:
        """Begin a step, or begin it anew among other ranks."""
        self._step, self._rank, self.disputed = step, rank, None
        self._dealt = deal_audits(self._count, self._seed, step, deal)
        self.again = [each.leaf for each in self._dealt if each.auditor == rank]
        mine = [each.leaf for each in self._dealt if rank in (each.owner, each.auditor)]
        self._digests: dict[int, dict[str, bytes]] = {leaf: {} for leaf in mine}

    def gradient(self, leaf: int, name: str, value: torch.Tensor) -> None:
        """Take a gradient, if its leaf is audited."""
        if leaf in self._digests:
            self._digests[leaf][name] = self._digest(bytes_of(value).numpy())

    def compare(self, transport: Transport) -> bool:
        """Whether two ranks differ in a leaf of this step. Collective."""
        if not self._dealt:
            return False
        own = [self._row(each.leaf) for each in self._dealt]
        row = b"".join(self._digest(each) if each else bytes(_DIGEST) for each in own)
        rows = self._gather(transport, row)
        for place, each in enumerate(self._dealt):
            if rows[each.owner, place] != rows[each.auditor, place]:
                self.disputed = each
                self.again = [each.leaf] if self._rank == each.third else []
                self._digests.update({leaf: {} for leaf in self.again})
                return True
        return False

    def judge(self, transport: Transport) -> None:
        """Say who is wrong about the disputed leaf, once the third has computed it. Collective.

        Raises:
            CollectiveMismatch: on all ranks.
        """
        assert self.disputed is not None
        leaf, *ranks = (each for each in self.disputed if each is not None)
        row = self._row(leaf) or bytes(_DIGEST * len(self._names))
        rows = self._gather(transport, row)
        place = int(np.flatnonzero(rows[ranks[0]] != rows[ranks[1]])[0])
        let_all_hear(transport.all_gather)
        said = [rows[rank, place] for rank in ranks]
        odd = [rank for rank, each in zip(ranks, said, strict=True) if said.count(each) == 1]
        a, b, *others = sorted(ranks, key=lambda rank: (odd == [rank], rank))
        name, who, doubt = self._names[place], f"ranks {a} and {b} gave other bits", ""
        if odd == others:
            who = f"rank {odd[0]} gave other bits than ranks {a} and {b}"
        elif others:
            who = f"ranks {a}, {b} and {others[0]} gave other bits each"
        else:
            doubt = "; a third rank would say which"
        raise CollectiveMismatch(
            f"step {self._step}, leaf {leaf}: {who} for {name}{doubt}", self._rank, "audit"
        )

    def _row(self, leaf: int) -> bytes:
        """The digests of a leaf that this rank has computed, or none; a zero for what it lacks."""
        found = self._digests.get(leaf)
        return b"" if found is None else b"".join(found.get(n, bytes(_DIGEST)) for n in self._names)

    def _gather(self, transport: Transport, row: bytes) -> np.ndarray[Any, Any]:
        """Every rank's digests: (ranks, digests)."""
        rows = transport.all_gather(np.frombuffer(row, np.uint8))
        return np.ascontiguousarray(rows).view(f"V{_DIGEST}")
