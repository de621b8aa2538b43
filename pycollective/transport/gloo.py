"""Over torch.distributed's Gloo, through the store at which the ranks have met.

Each communicator has a Gloo process group of its own, so that its messages meet no others; Gloo
connects all of its ranks over TCP. The messages are native (`csrc/torch/gloo_link.h`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from pycollective.config import INSTALL_TORCH
from pycollective.errors import CollectiveTimeout, ConfigurationError, named
from pycollective.shim import loading
from pycollective.system_limits import check_for_threads

if TYPE_CHECKING:
    from pycollective._torch import ConnectThread

_LOOPBACK = "127.0.0.1"
_OUTSIDE = "192.0.2.1"  # of no host (RFC 5737): the way there is the way to all that is far
_LOOK_EVERY = 0.05  # seconds between looks for signals and failures while it connects
_POLLS_IN_A_SECOND = 5_000  # of all ranks together, perhaps at one store; see rendezvous.py


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
        host = _LOOPBACK if one_machine else own_address(getattr(store, "host", ""))
        self.device = "" if os.environ.get("GLOO_SOCKET_IFNAME") and not one_machine else host
        self._rank = rank
        if isinstance(store, dist.Store):
            self.torch = store
        elif rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family, backlog=128)
            port = listener.getsockname()[1]
            try:
                self.torch = dist.TCPStore(
                    host,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            except RuntimeError as error:
                check_for_threads(error, "a store")
                raise
            self.address = f"{host}:{port}"

    def reach(self, address: str, timeout: float, poll: Callable[[], None], size: int) -> None:
        """Connect to the store that rank 0 serves, where it does."""
        if self.torch is None:
            from pycollective._torch import ConnectThread

            host, _, port = address.rpartition(":")
            try:
                connecting = ConnectThread.to_store(host, int(port), timeout)
            except (RuntimeError, TypeError, ValueError) as error:
                raise self._not_reached(address, error) from error
            _await(connecting, poll, size)  # whose errors are poll's
            try:
                self.torch = connecting.store
            except RuntimeError as error:
                raise self._not_reached(address, error) from error

    def _not_reached(self, address: str, error: Exception) -> ConfigurationError:
        check_for_threads(error, "messages between hosts")
        return ConfigurationError(
            f"rank {self._rank} cannot reach the store of rank 0 at {address!r}: {error}. "
            "MASTER_ADDR, on rank 0, names a host of the network to use"
        )


def own_address(meets_at: str = "") -> str:
    """Return this host's address for ranks of other hosts.

    It is the one from which packets go to torchrun's master, to `meets_at`, to where this host's
    own name leads, or out of this network. A host's name may lead to 127.0.1.1 (on Debian it does),
    where no other host finds it, so loopback comes last.
    """
    loopback = ""
    # One after the other: to look up a name may take long.
    for target in (os.environ.get("MASTER_ADDR", ""), meets_at, socket.gethostname(), _OUTSIDE):
        address = _towards(target)
        if address and not ipaddress.ip_address(address).is_loopback:
            return address
        loopback = loopback or address
    return loopback or _LOOPBACK


def _towards(target: str) -> str:
    """Return the address from which packets go there; empty where none can. Sends nothing."""
    with suppress(OSError, ValueError):  # of a name that is none, too
        if target:
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def _distributed() -> Any:
    try:
        import torch.distributed as dist

        loading.load()
    except ImportError as error:
        cure = f" ({INSTALL_TORCH})" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigurationError(
            f"between hosts messages go over torch.distributed's Gloo, or over MPI: {error}{cure}. "
            "Or start the ranks with mpiexec"
        ) from error
    return dist


class GlooTransport:
    """A `Transport` over a Gloo process group.

    Args:
        store: where its process group meets.
        prefix: of its keys there.
        rank: this rank of the communicator.
        size: its ranks.
        timeout: seconds that connecting may take.
        poll: called now and then while it connects; what it raises ends that.
        members: of `split`: what its ranks are called on the group that is split, in messages.

    Raises:
        ConfigurationError: torch is not here, or the ranks cannot be connected.
        CollectiveTimeout: names the ranks that did not come.
    """

    name = "gloo"

    def __init__(
        self,
        store: MessageStore,
        prefix: str,
        rank: int,
        size: int,
        timeout: float,
        poll: Callable[[], None],
        members: list[int] | None = None,
    ) -> None:
        self._store, self._prefix, self._timeout = store, prefix, timeout
        self._rank = rank
        self._splits = 0
        op, numbers = ("split", members) if members else ("init", range(size))
        self.link = _connect(store, prefix, rank, numbers, timeout, poll, op)

    def split(
        self, members: list[int] | None, across: bool, poll: Callable[[], None]
    ) -> GlooTransport | None:
        self._splits += 1
        if members is None or not across:
            return None
        prefix = f"{self._prefix}/split{self._splits}/{members[0]}"
        rank = members.index(self._rank)
        return GlooTransport(self._store, prefix, rank, len(members), self._timeout, poll, members)


def _connect(
    store: MessageStore,
    prefix: str,
    rank: int,
    numbers: Sequence[int],
    timeout: float,
    poll: Callable[[], None],
    op: str,
) -> object:
    """Return a link that joins all ranks; errors call them by `numbers`."""
    dist = _distributed()
    size, number = len(numbers), numbers[rank]
    from pycollective._torch import ConnectThread

    keys = dist.PrefixStore(f"pycollective/{prefix}", store.torch)
    try:
        connecting = ConnectThread.to_ranks(_alone(store.device, timeout), keys, rank, size)
    except RuntimeError as error:
        raise _not_connected(number, error) from error
    _await(connecting, poll, size)
    try:
        return connecting.link()
    except RuntimeError as error:
        absent = [numbers[each] for each in connecting.absent]
        if not absent:
            raise _not_connected(number, error) from error
        raise CollectiveTimeout(
            f"{op} timed out on rank {number} after {timeout:g} s: "
            f"{named(absent, counted=False)} did not come to be connected. Look at what those "
            "ranks do instead",
            number,
            op,
        ) from error


def _await(connecting: ConnectThread, poll: Callable[[], None], size: int) -> None:
    """Wait until it has ended; give it up where `poll`, or a signal's handler, raises."""
    between = max(_LOOK_EVERY, size / _POLLS_IN_A_SECOND)
    next_poll = monotonic() + _LOOK_EVERY
    try:
        while not connecting.wait(_LOOK_EVERY):
            if monotonic() >= next_poll:
                poll()
                next_poll = monotonic() + between
    except BaseException:
        connecting.give_up()
        raise


def _alone(device: str, timeout: float) -> Any:
    """Return a Gloo group of one rank, with the devices that the real group is to have."""
    dist = _distributed()
    limit = timedelta(seconds=timeout)
    if not device:
        return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, limit)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=device)]
    options._threads = 1  # of collectives, which nobody calls
    options._timeout = limit
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)


def _not_connected(rank: int, error: RuntimeError) -> ConfigurationError:
    check_for_threads(error, "messages between hosts")
    return ConfigurationError(
        f"rank {rank} cannot be connected with the ranks of other hosts: {error}. "
        "GLOO_SOCKET_IFNAME names the network interface to use"
    )
