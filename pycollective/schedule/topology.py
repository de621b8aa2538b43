"""Which ranks share a host."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pycollective.errors import ConfigurationError
from pycollective.placement import number_hosts


@dataclass(frozen=True)
class Topology:
    """The host of each rank.

    Attributes:
        host_of: host of each rank; hosts are numbered from 0 in the order of their first rank.
    """

    host_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.host_of or number_hosts(self.host_of) != self.host_of:
            raise ConfigurationError(
                f"hosts {self.host_of} are not numbered from 0 in the order of their first ranks"
            )

    @classmethod
    def single_host(cls, ranks: int) -> Topology:
        """All ranks on one host."""
        return cls((0,) * ranks)

    @classmethod
    def of_hosts(cls, hosts: Sequence[Hashable]) -> Topology:
        """From what each rank calls its host."""
        return cls(number_hosts(hosts))

    @classmethod
    def parse(cls, text: str, ranks: int) -> Topology:
        """``2x4``: 2 hosts of 4 ranks each; ``3,1``: a host of 3 and one of 1. In blocks of ranks.

        Raises:
            ConfigurationError: it is neither, or not for this number of ranks.
        """
        equal = re.fullmatch(r"\s*([1-9]\d{0,6})\s*x\s*([1-9]\d{0,6})\s*", text)
        if equal:
            sizes = [int(equal[2])] * int(equal[1])
        elif re.fullmatch(r"\s*[1-9]\d{0,6}\s*(,\s*[1-9]\d{0,6}\s*)*", text):
            sizes = [int(size) for size in text.split(",")]
        else:
            raise ConfigurationError(
                f"topology {text!r} is neither hosts x ranks a host, such as 2x4, nor ranks of "
                "each host, such as 3,1"
            )
        if sum(sizes) != ranks:
            raise ConfigurationError(
                f"topology {text!r} is for {sum(sizes)} ranks, and there are {ranks}"
            )
        return cls(tuple(host for host, size in enumerate(sizes) for _ in range(size)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kept: it is asked for with every shard, and there may be thousands
        return hash(self.host_of)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.host_of)

    @property
    def single(self) -> bool:
        """Whether all ranks share a host."""
        return not any(self.host_of)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, ascending."""
        members: list[list[int]] = [[] for _ in range(max(self.host_of) + 1)]
        for rank, host in enumerate(self.host_of):
            members[host].append(rank)
        return tuple(tuple(each) for each in members)

    @cached_property
    def widest(self) -> int:
        """Ranks of the largest host."""
        return max(map(len, self.hosts))

    @cached_property
    def local_index(self) -> tuple[int, ...]:
        """Each rank's place among the ranks of its host."""
        places = [0] * self.ranks
        for host in self.hosts:
            for place, rank in enumerate(host):
                places[rank] = place
        return tuple(places)

    def __str__(self) -> str:
        sizes = [len(host) for host in self.hosts]
        in_blocks = self.host_of == tuple(sorted(self.host_of))
        if not in_blocks:
            return "hosts " + ",".join(map(str, self.host_of))
        if len(set(sizes)) == 1:
            return f"{len(sizes)}x{sizes[0]}"
        return ",".join(map(str, sizes))
