"""`init`: finds the launch that this process is part of, and joins its ranks.

The launch is given by arguments, or is `pycollective run`'s, torchrun's, mpiexec's, Slurm's, or
none (one rank). Where a launcher's variables speak of ranks that cannot be found, `init` refuses:
nobody trains alone by mistake. `joining.py` takes over once there are a store, a rank and a size.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

from pycollective import device_path as device_paths
from pycollective.bootstrap import mpi, slurm
from pycollective.bootstrap.joining import DEFAULT_TIMEOUT, connect
from pycollective.bootstrap.membership import Membership, enter
from pycollective.bootstrap.mpi_membership import MpiMembership
from pycollective.bootstrap.options import InitOptions
from pycollective.bootstrap.rendezvous import is_full
from pycollective.bootstrap.restarts import RESTARTS, process_identity
from pycollective.bootstrap.store import StoreClient, StoreServer, job_secret, joined_key
from pycollective.communicator import Communicator
from pycollective.config import (
    ENV_ELASTIC,
    ENV_JOINS,
    ENV_RANK,
    ENV_SECRET,
    ENV_SIZE,
    ENV_STORE,
    ENV_TOPOLOGY,
    MAX_RANKS,
    MPI_RANK_VARIABLES,
    environment_number,
    unknown_variables,
)
from pycollective.errors import ConfigurationError
from pycollective.typing import Transport, Wire

_LINGER = 5.0  # seconds that a store stays after a failure, so that others can read why


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    store: Any = None,
    timeout: float = DEFAULT_TIMEOUT,
    topology: str | None = None,
    transport: Transport | None = None,
    tuning: str | os.PathLike[str] | None = None,
    wire: Wire | None = None,
    device: str | int | None = None,
) -> Communicator:
    """Join the job's ranks; every rank must call it, as often as the others.

    Without arguments the launch is found from the environment: ``pycollective run``, torchrun (or
    its variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), mpiexec (through mpi4py), Slurm's
    srun, or none, which gives a communicator of one rank. Where variables say that there are more
    ranks, and they cannot be found, `init` raises; ``init(rank=0, size=1)`` is one rank on purpose.

    Where torch is not installed, the ranks that torchrun's variables name meet in a store of this
    library, at ``tcp://MASTER_ADDR:MASTER_PORT``, and want a secret as any store there does.

    Under srun the ranks of one node need nothing more. Those of several meet at a port of the
    step's first node (PYCOLLECTIVE_PORT names another), and want a secret: once before srun,
    ``export PYCOLLECTIVE_SECRET=$(openssl rand -hex 16)``. Batch scripts and the shells of salloc
    are one rank.

    Args:
        rank: this rank, 0 to ``size - 1``; with ``size`` and ``store``, for programs that bootstrap
            themselves.
        size: number of ranks: at most 64 on a host, 4,096 in all.
        store: where the ranks find each other: ``"tcp://host:port"``, at which rank 0 serves while
            the ranks meet, or an object with ``set(key, bytes)`` and a blocking ``get(key)``, such
            as a `torch.distributed.Store`, which must outlast the call on every rank. A store
            that has no more than those two serves one `init` only. ``tcp://`` wants a secret, the
            same word on all ranks: in the environment variable PYCOLLECTIVE_SECRET (which
            ``pycollective run`` sets), or in a file that its owner alone may read, which
            PYCOLLECTIVE_SECRET_FILE names. An object is trusted, and so is torchrun's store:
            whoever can write to it can keep the ranks from joining, or lead them astray.
        timeout: seconds that joining, and later each operation, may take.
        topology: simulates hosts: ``"2x2"``, hosts x ranks a host, or ``"3,1"``, the ranks of each
            host. Ranks of different hosts exchange nothing through shared memory, even if they
            could. Also the environment variable
            PYCOLLECTIVE_TOPOLOGY; the same on all ranks.
        transport: how messages go between hosts: ``"mpi"`` (what mpiexec's ranks use), ``"gloo"``
            (what all others use) or ``"shm"``, which refuses several hosts.
        tuning: file of measured times (``pycollective bench --tune`` writes it), from which
            ``algorithm="auto"`` chooses; ``""`` for none. Also the environment variable
            PYCOLLECTIVE_TUNING; the same measurements on all ranks.
        wire: how data go to other hosts: ``"raw"``, the default, or ``"exact"`` (packed, the same
            bits arrive), which is faster on links of up to some 10 Gbit/s (wire.md). Also the
            environment variable PYCOLLECTIVE_WIRE; the same on all ranks.
        device: a GPU, ``"cuda"`` (one for each rank of a host, in turn), ``"cuda:1"`` or a number,
            on all ranks or none. Its kernels carry out calls on arrays there if all ranks can map
            each other's memory; `Communicator.device_path` says whether, and why not. Arrays on
            GPUs may be given without it, and go by way of the host.

    Warns:
        RuntimeWarning: on rank 0, of an environment variable ``PYCOLLECTIVE_…`` that is not known.

    Raises:
        ConfigurationError: the launch or the arguments cannot be right, or memory is short.
        CollectiveTimeout: not every rank came; the message names the absentees.
        PeerFailure: a rank died meanwhile, and the store is the library's own.
    """
    _warn_of_unknown_variables(rank)
    if device is not None:
        device_paths.prepare(device)  # before anybody waits for this rank
    explicit = rank is not None or size is not None or store is not None
    if not explicit and _by_mpi(transport):
        bootstrap = mpi.MpiBootstrap(timeout if 0 < timeout < math.inf else DEFAULT_TIMEOUT)
        with bootstrap.sharing_problems():
            options = InitOptions.of(timeout, topology, transport, tuning, wire, device)
            options.check_transport("a launch by mpiexec", by_mpi=True)
            made = options.apply(mpi.start(bootstrap, options))
            made._membership = MpiMembership.of(bootstrap.world, options)
            return made
    options = InitOptions.of(timeout, topology, transport, tuning, wire, device)
    if explicit:
        options.check_transport("a call with rank, size and store", by_mpi=False)
        return options.apply(_init_explicit(rank, size, store, options))
    for launch in _LAUNCHES:
        if launch.detected():
            options.check_transport(f"a launch by {launch.name}", by_mpi=False)
            return options.apply(launch.start(options))
    _refuse_to_be_alone()
    options.check_transport("one rank without a launcher", by_mpi=False)
    simulated_hosts(1, options.topology)
    return options.apply(connect(None, 0, 1, timeout, tuning=options.tuning))


def simulated_hosts(size: int, topology: str | None = None) -> tuple[int, ...]:
    """Return the host of each of `size` ranks by a topology; empty where that is empty.

    Without a topology it reads PYCOLLECTIVE_TOPOLOGY, and warns as `init` does.
    """
    if topology is None:
        _warn_of_unknown_variables(None)
        topology = os.environ.get(ENV_TOPOLOGY, "")
    if not topology:
        return ()
    from pycollective.schedule import Topology

    return Topology.parse(topology, size).host_of


def _warn_of_unknown_variables(rank: int | None) -> None:
    """Warn of misspelt variables, on rank 0 where it is known who is; `warnings` does it once."""
    names = (ENV_RANK, "RANK", *MPI_RANK_VARIABLES, "SLURM_PROCID")
    if rank or any(os.environ.get(name, "0") != "0" for name in names):
        return
    for said in unknown_variables():
        warnings.warn(said, RuntimeWarning, stacklevel=1)


def _by_mpi(transport: str | None) -> bool:
    """Return whether ranks meet through mpiexec: it was asked for, or there is nothing else."""
    others = any(launch.detected() for launch in _LAUNCHES)
    return mpi.detected() and (transport == "mpi" or not others)


def _by_slurm() -> bool:
    """Return whether srun started this process, and not for MPI ranks, which mpi4py joins."""
    return slurm.detected() and not (mpi.detected() and find_spec("mpi4py"))


def _refuse_to_be_alone() -> None:
    if os.environ.get(ENV_SIZE, "1").strip() != "1":
        raise ConfigurationError(
            f"by {ENV_SIZE} `pycollective run` has started more ranks, and without {ENV_STORE} "
            "this one cannot find them. Hand on all variables of PYCOLLECTIVE, or call "
            "init(rank=0, size=1) to be one rank on purpose"
        )
    size = os.environ.get("WORLD_SIZE", "").strip()
    if size in ("", "1"):
        return
    missing = [name for name in _TORCH_VARIABLES if name not in os.environ]
    raise ConfigurationError(
        f"by WORLD_SIZE there are {size} ranks, and without {', '.join(missing)} this one cannot "
        "find the others. Set RANK, WORLD_SIZE, MASTER_ADDR (the host of rank 0) and MASTER_PORT, "
        f"as torchrun does (and, where torch is not installed, {ENV_SECRET}), or call "
        "init(rank=0, size=1) to be one rank on purpose"
    )


def launched() -> bool:
    """Return whether a launcher has started this process, so that `init` finds other ranks."""
    return any(launch.detected() for launch in _LAUNCHES) or mpi.detected()


def join(
    store: Any, rank: int, size: int, timeout: float, simulated: Sequence[int] = ()
) -> Communicator:
    """Join as `init` with rank, size and store; the ranks' hosts may be given, see `connect`."""
    prefix = ""
    if size > 1:
        prefix = RESTARTS.prefix(store, rank, size, timeout) + _next_prefix(store, rank)
    options = InitOptions.of(timeout, None, None, None, None)
    return options.apply(
        connect(store, rank, size, timeout, prefix, simulated, tuning=options.tuning)
    )


def _next_prefix(store: Any, rank: int) -> str:
    """Return a prefix for this process's next `init` through this store, the same on all ranks."""
    if not is_full(store):
        return "init1"
    # Each process counts its own: a second one of the same rank meets the first, and is refused.
    return f"init{store.add(f'pycollective/inits/{rank}/{process_identity()}', 1)}"


def _init_explicit(
    rank: int | None, size: int | None, store: Any, options: InitOptions, listen: str | None = None
) -> Communicator:
    if rank is None or size is None or (store is None and size != 1):
        raise ConfigurationError("init needs rank, size and store together, or none of them")
    hosts = simulated_hosts(size, options.topology)
    if size == 1 or not 0 <= rank < size <= MAX_RANKS:
        # Needs no store, or says what is wrong.
        return connect(store, rank, size, options.timeout, tuning=options.tuning)
    if not isinstance(store, str):
        opened = partial(nullcontext, store) if is_full(store) else None
        return _connect(store, rank, size, _next_prefix(store, rank), hosts, options, opened)
    secret = job_secret()
    server = StoreServer(listen or store, secret, clients=size) if rank == 0 else None
    return _meet_at(store, secret, server, rank, size, hosts, options)


def _connect(
    store: Any,
    rank: int,
    size: int,
    prefix: str,
    hosts: Sequence[int],
    options: InitOptions,
    open_store: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Communicator:
    """Join; `open_store` opens the store for as long as the ranks may become others."""
    timeout, transport, tuning = options.timeout, options.transport, options.tuning
    made = connect(store, rank, size, timeout, prefix, hosts, transport, tuning, options.more)
    if open_store is not None:
        made._membership = Membership(open_store, prefix, options, tuple(hosts))
    return made


def _meet_at(
    address: str,
    secret: str,
    server: StoreServer | None,
    rank: int,
    size: int,
    hosts: Sequence[int],
    options: InitOptions,
) -> Communicator:
    """Join through a store that one rank serves, with `server`, for this one `init`."""
    with _store_at(address, secret, server, size, options.timeout) as client:
        communicator = _connect(client, rank, size, "init", hosts, options)
        if server is not None:
            server.stop_listening()  # who comes from now on comes for the next `init`
        communicator.barrier()  # all have what they need
        return communicator


@contextmanager
def _store_at(
    address: str, secret: str, server: StoreServer | None, size: int, timeout: float
) -> Iterator[StoreClient]:
    """Connect to a store that one rank serves, with `server`, until all have left it."""
    linger = _LINGER  # after a failure, so that the other ranks can read why
    try:
        with closing(StoreClient(address, secret, timeout)) as client:
            yield client
            linger = 0.0
    finally:
        if server is not None:
            server.close(linger, size)


@dataclass(frozen=True)
class _Launch:
    name: str
    detected: Callable[[], bool]
    start: Callable[[InitOptions], Communicator]


def _start_run(options: InitOptions) -> Communicator:
    rank, size = environment_number(ENV_RANK), environment_number(ENV_SIZE)
    hosts = simulated_hosts(size, options.topology)
    elastic = ENV_ELASTIC in os.environ
    if size == 1 and not elastic:
        return connect(None, rank, size, options.timeout, tuning=options.tuning)
    address, secret = os.environ[ENV_STORE], job_secret()

    def open_store() -> AbstractContextManager[StoreClient]:
        return closing(StoreClient(address, secret, options.timeout))

    with open_store() as client:
        if ENV_JOINS in os.environ:
            made = enter(open_store, options)
        else:
            prefix = _next_prefix(client, rank)
            made = _connect(client, rank, size, prefix, hosts, options, open_store)
        if elastic:
            client.set(joined_key(os.getpgrp()), b"")
    return made


def _start_torchrun(options: InitOptions) -> Communicator:
    if find_spec("torch") is None:
        return _start_without_torch(options)
    from torch.distributed import PrefixStore, rendezvous

    limit = timedelta(seconds=options.timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    hosts = simulated_hosts(size, options.topology)
    store = PrefixStore("pycollective", store)
    prefix = RESTARTS.prefix(store, rank, size, options.timeout) + _next_prefix(store, rank)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opened = partial(nullcontext, store) if by_agent else None
    communicator = _connect(store, rank, size, prefix, hosts, options, opened)
    # Rank 0 may serve the store itself. It ends once nobody needs it, and before anyone goes on:
    # whoever joins again must not meet in the old one.
    communicator.barrier()
    del store
    communicator.barrier()
    return communicator


def _start_without_torch(options: InitOptions) -> Communicator:
    """Join by torchrun's variables in a store of our own."""
    rank, size = environment_number("RANK"), environment_number("WORLD_SIZE")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and size > 1:
        raise ConfigurationError(
            "torchrun's ranks meet in its store, and torch is not installed here: install it, or "
            "start the ranks with `pycollective run -n N`"
        )
    port = os.environ["MASTER_PORT"]
    # As torch does: MASTER_ADDR may be a name of no interface here, or of loopback.
    listen = f"tcp://0.0.0.0:{port}"
    return _init_explicit(rank, size, f"tcp://{os.environ['MASTER_ADDR']}:{port}", options, listen)


def _start_slurm(options: InitOptions) -> Communicator:
    step = slurm.find_step()
    hosts = simulated_hosts(step.size, options.topology)
    return _meet_at(step.address, step.secret, step.server(), step.rank, step.size, hosts, options)


_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# In this order: a launcher's own variables before those that others inherit; then mpiexec's. Slurm
# may have started any of them.
_LAUNCHES = (
    _Launch("`pycollective run`", lambda: ENV_STORE in os.environ, _start_run),
    _Launch(
        "torchrun",
        lambda: all(name in os.environ for name in _TORCH_VARIABLES),
        _start_torchrun,
    ),
    _Launch("Slurm's srun", _by_slurm, _start_slurm),
)
