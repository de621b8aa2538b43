"""Over torch.distributed's Gloo, through the store at which the ranks have met.

Each communicator has a Gloo process group of its own, so that its messages meet no others; Gloo
connects all of its ranks over TCP. The messages are native (`csrc/torch/gloo_link.h`).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

from pycollective.errors import ConfigurationError

_LOOPBACK = "127.0.0.1"


class MessageStore:
    """The torch store in which process groups find each other.

    Where the ranks have met in another kind of store, rank 0 serves one of torch's beside it, for
    as long as its communicator lives.

    Args:
        store: where the ranks meet.
        rank: this rank.
        one_machine: whether no network lies between them.

    Attributes:
        address: of rank 0's store, ``host:port``; empty where there is no need.
        torch: the store.
        device: this rank's own address in the network; empty where Gloo is to choose.
    """

    def __init__(self, store: Any, rank: int, one_machine: bool) -> None:
        dist = _distributed()
        self.address = ""
        self.torch: Any = None
        self.device = _LOOPBACK if one_machine else _towards_master()
        self._rank = rank
        if isinstance(store, dist.Store):
            self.torch = store
        elif rank == 0:
            host = _LOOPBACK if one_machine else socket.gethostname()
            listener = socket.create_server((host, 0), backlog=128)
            port = listener.getsockname()[1]
            self.torch = dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            self.address = f"{host}:{port}"

    def reach(self, address: str, timeout: float) -> None:
        """Connect to the store that rank 0 serves, where it does."""
        if self.torch is None:
            host, _, port = address.rpartition(":")
            limit = timedelta(seconds=timeout)
            self.torch = _distributed().TCPStore(host, int(port), is_master=False, timeout=limit)


def _towards_master() -> str:
    """This host's address on the way to torchrun's master, which all ranks can reach."""
    master = os.environ.get("MASTER_ADDR")
    if not master or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def _distributed() -> Any:
    try:
        import torch.distributed as dist

        from pycollective import _torch  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"between hosts messages go over torch.distributed's Gloo, or over MPI: {error}. "
            "Install pycollective beside torch, or start the ranks with mpiexec"
        ) from error
    return dist


class C10dTransport:
    """See `Transport`.

    Args:
        store: where its process group meets.
        prefix: of its keys there.
        rank: this rank of the communicator.
        size: its ranks.
        timeout: seconds that connecting may take.

    Raises:
        ConfigurationError: torch is not here, or the ranks cannot be connected.
    """

    name = "c10d"

    def __init__(
        self, store: MessageStore, prefix: str, rank: int, size: int, timeout: float
    ) -> None:
        self._store, self._prefix, self._timeout = store, prefix, timeout
        self._rank = rank
        self._splits = 0
        group = _gloo(store, prefix, rank, size, timeout)
        from pycollective import _torch

        self.link = _torch.gloo_link(group)

    def split(self, members: list[int] | None, across: bool) -> C10dTransport | None:
        """See `Transport`."""
        self._splits += 1
        if members is None or not across:
            return None
        prefix = f"{self._prefix}/split{self._splits}/{members[0]}"
        return C10dTransport(
            self._store, prefix, members.index(self._rank), len(members), self._timeout
        )


def _gloo(store: MessageStore, prefix: str, rank: int, size: int, timeout: float) -> Any:
    dist = _distributed()
    limit = timedelta(seconds=timeout)
    keys = dist.PrefixStore(f"pycollective/{prefix}", store.torch)
    try:
        if not store.device:
            return dist.ProcessGroupGloo(keys, rank, size, limit)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=store.device)]
        options._threads = 1  # of collectives, which nobody calls
        options._timeout = limit
        return dist.ProcessGroupGloo(keys, rank, size, options)
    except RuntimeError as error:
        raise ConfigurationError(
            f"rank {rank} cannot be connected with the ranks of other hosts: {error}. "
            "GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
