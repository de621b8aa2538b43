"""The ranks of a process group of torch.distributed, whatever its backend, for compression."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from pycollective import _torch, bootstrap
from pycollective.compression.groups import Bytes, Ends
from pycollective.compression.placing import Places
from pycollective.errors import ConfigurationError
from pycollective.host import host_identity
from pycollective.placement import number_hosts

# By its name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class OfProcessGroup:
    """A process group over CPU tensors; see `pycollective.compression.groups.Group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(self, rows: Bytes) -> Bytes:
        """See `Group`."""
        out = np.empty_like(rows)
        if rows.size:
            dist.all_to_all_single(
                torch.from_numpy(out).view(-1), torch.from_numpy(rows).view(-1), group=self._group
            )
        return out

    def all_gather(self, row: Bytes) -> Bytes:
        """See `Group`."""
        out = np.empty((self.size, row.size), np.uint8)
        if row.size:
            _all_gather(torch.from_numpy(out).view(-1), torch.from_numpy(row), group=self._group)
        return out

    def average(self, part: torch.Tensor) -> None:
        """See `Group`: by the contract over pycollective, as DDP does over other backends."""
        if dist.get_backend(self._group) == "pycollective":
            _torch.average(self._group, part).wait()
            return
        part.div_(self.size)
        dist.all_reduce(part, group=self._group)

    def abort(self, reason: str) -> None:
        """See `Group`: over other backends than ours the others wait until their timeout."""
        if dist.get_backend(self._group) == "pycollective":
            self._group._get_backend(torch.device("cpu")).abort()


def ends_of_group(group: dist.ProcessGroup | None, between: str) -> Ends:
    """Process groups of a state's own among the ranks of `group`; collective over those.

    They have its backend, and meet where it met. Their collectives do not mix with others.

    Raises:
        ConfigurationError: there is no process group, or this rank is not in it.
    """
    if not dist.is_initialized():
        raise ConfigurationError("a state of compression: call init_process_group first")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError("a state of compression: this rank is not in the group")
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    backend = dist.get_backend(group)
    of = group if group is not None else dist.group.WORLD
    assert of is not None
    # Not torch's default: a rank that waits for a dead one's peers is to wait no longer than here.
    timeout = of._get_backend(torch.device("cpu")).options._timeout

    def part(members: Sequence[int], _: int) -> OfProcessGroup | None:
        if not members:
            return None
        made = dist.new_group(
            [ranks[member] for member in members],
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
        )
        return OfProcessGroup(made)

    whole = part(range(len(ranks)), 0)
    assert whole is not None
    places = Places.of(whole.rank, _hosts(whole, ranks), between)
    return Ends.make(places, whole, part)


def _hosts(whole: OfProcessGroup, ranks: Sequence[int]) -> tuple[int, ...]:
    """The host of each rank, or as PYCOLLECTIVE_TOPOLOGY says."""
    played = bootstrap.played_hosts(dist.get_world_size())
    if played:
        return number_hosts([played[rank] for rank in ranks])
    name = np.zeros(256, np.uint8)
    identity = host_identity().encode()[: name.size]
    name[: len(identity)] = np.frombuffer(identity, np.uint8)
    return number_hosts([row.tobytes() for row in whole.all_gather(name)])
