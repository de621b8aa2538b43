"""The ranks of a process group of torch.distributed, whatever its backend, for compression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycollective.agree import agree
from pycollective.bootstrap.attach import host_identity
from pycollective.bootstrap.init import simulated_hosts
from pycollective.compression.groups import MISMATCH, Bytes, Group, GroupMaker, Groups
from pycollective.compression.partition import Hosts
from pycollective.errors import ConfigurationError
from pycollective.placement import number_hosts
from pycollective.torch import ordered
from pycollective.torch.ordered.calls import group_of
from pycollective.torch.ordered.hooks import average
from pycollective.torch.ordered.messages import failure
from pycollective.torch.serving import backend_of, is_gloo, own_backend

# By its name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchGroup:
    """A process group over tensors on one device, behind its current stream's work.

    Arrays go by way of it, and then the host waits.

    Args:
        group: of torch's.
        device: where tensors are.
        members: of a group that nobody else uses, its ranks' numbers in errors. Over Gloo its bytes
            then go as those of ordered calls do, which hear at once of a rank that dies.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, members: Sequence[int] = ()
    ) -> None:
        self._group, self._device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._heard = bool(members) and device.type == "cpu" and is_gloo(group)
        if self._heard:
            group_of(group, device).name_ranks(members)

    def all_to_all(self, rows: Any) -> Any:
        if isinstance(rows, np.ndarray):
            return self._back(self.all_to_all(torch.from_numpy(rows).to(self._device)))
        out = torch.empty_like(rows)
        if rows.numel() and self._heard:
            group_of(self._group, self._device).exchange(list(rows), out)
        elif rows.numel():
            with self._named():
                dist.all_to_all_single(out.view(-1), rows.view(-1), group=self._group)
        return out

    def all_gather(self, row: Any) -> Any:
        if isinstance(row, np.ndarray):
            return self._back(self.all_gather(torch.from_numpy(row).to(self._device)))
        out = row.new_empty((self.size, row.numel()))
        if row.numel() and self._heard:
            group_of(self._group, self._device).exchange([row] * self.size, out)
        elif row.numel():
            with self._named():
                _all_gather(out.view(-1), row, group=self._group)
        return out

    @staticmethod
    def _back(found: torch.Tensor) -> Bytes:
        array: Bytes = found.cpu().numpy()
        return array

    def reordered(self, rows: Any, numbers: Sequence[int]) -> Any:
        if isinstance(rows, np.ndarray):
            return rows[list(numbers)]
        # An index would have to come from the host, which would wait.
        return torch.stack([rows[number] for number in numbers])

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise what a backend for CPUs says as a `CollectiveError`."""
        try:
            yield
        except RuntimeError as error:
            if self._device.type != "cpu":
                raise
            raise failure(error, []) from error

    def average(self, parts: Sequence[torch.Tensor]) -> None:
        """Average by the contract, over any backend."""
        ordered.all_reduce(list(parts), "avg", self._group)

    @property
    def ranks(self) -> list[int]:
        """Its ranks' numbers in the default group."""
        return dist.get_process_group_ranks(self._group)

    @property
    def timeout(self) -> float:
        """How long ranks wait for each other: seconds."""
        limit: timedelta = backend_of(self._group, self._device).options._timeout
        return limit.total_seconds()

    def prepare(self) -> None:
        """Let the first average not wait; collective."""
        ordered.prepare(self._group, self._device)

    def average_soon(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin to average one tensor."""
        return average(tensor, self._group)

    def abort(self, reason: str) -> None:
        """Let nobody wait; but over NCCL and others peers wait until this process ends."""
        if (own := own_backend(self._group, self._device)) is not None:
            own.communicator.abort(reason)
        elif self._heard and not reason.startswith(MISMATCH):  # which all ranks see by themselves
            group_of(self._group, self._device).disconnect()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def group_maker(group: dist.ProcessGroup | None, device: torch.device | None) -> GroupMaker:
    """Makes a state's own groups of the ranks of `group`, None for the default one.

    Those have its backend, and meet where it met. Their collectives do not mix with others.

    Ranks whose tensors are on different kinds of devices are told so, also where these go by
    different backends of the group ("cpu:gloo,cuda:nccl"): not all that is sent is alike.

    Args:
        group: of torch's.
        device: where the state's tensors are; None where that is not known.

    Raises:
        ConfigurationError: there is no process group, or this rank is not in it.
    """
    if not dist.is_initialized():
        raise ConfigurationError("a state of compression: call init_process_group first")
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ConfigurationError("a state of compression: this rank is not in the group")
    of = group if group is not None else dist.group.WORLD
    assert of is not None
    kinds, cpu = of._device_types, torch.device("cpu")
    # Ranks compare by one backend, wherever the tensors of each are.
    meets = cpu if cpu in kinds or not kinds else kinds[0]
    where = device or meets
    caller = TorchGroup(of, where if where.type == meets.type else meets)

    def told() -> dict[str, Any]:
        if kinds and torch.device(where.type) not in kinds:
            raise ConfigurationError(
                f"a state of compression: the group's backend, {dist.get_backend(of)}, does not "
                f"take tensors on {where}"
            )
        backend = backend_of(of, where).name()
        hosts = simulated_hosts(dist.get_world_size())
        return {"hosts": hosts, "backend": backend, "device": where.type}

    return GroupMaker(caller, told, lambda between: _groups(of, caller, where, between))


def _groups(
    of: dist.ProcessGroup, caller: TorchGroup, device: torch.device, between: str
) -> Groups:
    """Process groups of a state's own among the ranks of one; collective over those."""
    ranks = dist.get_process_group_ranks(of)
    backend = dist.get_backend(of)
    # Not torch's default: a rank that waits for a dead one's peers is to wait no longer than here.
    timeout = backend_of(of, device).options._timeout

    whole_world = len(ranks) == dist.get_world_size()
    _check_alike(caller, whole_world)

    def part(disjoint: Sequence[Sequence[int]]) -> Group:
        mine: TorchGroup | None = None
        for members in disjoint:
            there = [ranks[member] for member in members]
            # Others than the group's ranks do not call this; those who do make as many groups.
            if whole_world or dist.get_rank() in there:
                made = dist.new_group(
                    there,
                    timeout=timeout,
                    backend=backend,
                    use_local_synchronization=not whole_world,
                )
                if dist.get_rank() in there:
                    mine = TorchGroup(made, device, members)
        assert mine is not None
        return mine

    # By the caller's group: nothing of the state's own is there yet, should this fail.
    hosts = Hosts.of(dist.get_rank(of), _hosts(caller, ranks), between)
    return Groups.make(hosts, part([range(len(ranks))]), part)


def _check_alike(group: Group, whole_world: bool) -> None:
    """Refuse a part of the world whose ranks have made different numbers of groups before.

    torch names the groups that a part makes by itself by that number; they would not meet.
    """
    if whole_world:
        return

    def check(counts: list[int]) -> None:
        if len(set(counts)) > 1:
            raise ConfigurationError(
                "a state of compression over a part of the world: its ranks have made different "
                f"numbers of process groups before ({counts}), and torch cannot bring them "
                "together; make the state before those, or over the whole world"
            )

    agree(
        group.all_gather,
        "a state of compression",
        lambda: len(dist.distributed_c10d._world.pg_names),
        check,
    )


def _hosts(whole: Group, ranks: Sequence[int]) -> tuple[int, ...]:
    """The host of each rank, or as PYCOLLECTIVE_TOPOLOGY says."""
    played = simulated_hosts(dist.get_world_size())
    if played:
        return number_hosts([played[rank] for rank in ranks])
    name = np.zeros(256, np.uint8)
    identity = host_identity().encode()[: name.size]
    name[: len(identity)] = np.frombuffer(identity, np.uint8)
    return number_hosts([row.tobytes() for row in whole.all_gather(name)])
