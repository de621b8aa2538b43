"""Finds the launch that this process is part of, and joins its ranks.

The launch is given by arguments, or is `pycollective run`'s, torchrun's, mpiexec's, Slurm's, or
none (one rank). Where a launcher's variables speak of ranks that cannot be found, it is refused:
nobody trains alone by mistake. What follows, with a store, a rank and a size, is in `joining.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from time import monotonic
from typing import Any

from pycollective.bootstrap import mpi as mpi_launch
from pycollective.bootstrap import slurm
from pycollective.bootstrap.address import job_secret
from pycollective.bootstrap.joining import (
    DEFAULT_TIMEOUT,
    Joined,
    connect,
    join_alone,
    join_host,
    shared_memory_alone,
)
from pycollective.bootstrap.mpi_talk import Talk
from pycollective.bootstrap.rendezvous import Meeting, is_full
from pycollective.bootstrap.restarts import ATTEMPT, process_identity
from pycollective.bootstrap.shutdown import END
from pycollective.bootstrap.store import StoreClient, StoreServer
from pycollective.bootstrap.wish import Wish
from pycollective.communicator import Communicator
from pycollective.config import (
    ENV_RANK,
    ENV_SECRET,
    ENV_SIZE,
    ENV_STORE,
    MAX_RANKS,
    environment_number,
)
from pycollective.errors import ConfigurationError
from pycollective.gpu import way as device_ways
from pycollective.planning.world import World
from pycollective.typing import Transport, Wire

# How long a store stays after a failure so that others can read why, seconds. MPI's ranks tell each
# other in another way.
_LINGER = 5.0
_MPI_LINGER = 0.5


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

    Without arguments the launch is found from the environment: `pycollective run`, torchrun (or its
    variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), mpiexec (through mpi4py), Slurm's
    srun, or none, which gives a communicator of one rank. Where variables say that there are more
    ranks, and they cannot be found, it is refused; ``init(rank=0, size=1)`` is one rank on purpose.

    Where torch is not installed, the ranks that torchrun's variables name meet in a store of this
    library, at ``tcp://MASTER_ADDR:MASTER_PORT``, and want a secret as any store there does.

    Under srun the ranks of one node need nothing more. Those of several meet at a port of the
    step's first node (PYCOLLECTIVE_PORT names another), and want a secret: once before srun,
    ``export PYCOLLECTIVE_SECRET=$(openssl rand -hex 16)``. Batch scripts and the shells of salloc
    are one rank.

    Args:
        rank: this rank, 0 to ``size - 1``; with `size` and `store`, for programs that bootstrap
            themselves.
        size: number of ranks: at most 64 on a host, 4,096 in all.
        store: where the ranks find each other: ``"tcp://host:port"``, at which rank 0 serves while
            the ranks meet, or an object with ``set(key, bytes)`` and a blocking ``get(key)``, such
            as a `torch.distributed.Store`, which must outlast the call on every rank. A store
            that has no more than those two serves one `init` only. ``tcp://`` wants a secret, the
            same word on all ranks: in the environment variable PYCOLLECTIVE_SECRET (which
            `pycollective run` sets), or in a file that its owner alone may read, which
            PYCOLLECTIVE_SECRET_FILE names. An object is trusted, and so is torchrun's store:
            whoever can write to it can keep the ranks from joining, or lead them astray.
        timeout: seconds that joining, and later each operation, may take.
        topology: which ranks share a host, instead of what is found: ``"2x2"``, hosts x ranks a
            host, or ``"3,1"``, the ranks of each host. Ranks of different hosts exchange nothing
            through shared memory, even if they could. Also the environment variable
            PYCOLLECTIVE_TOPOLOGY; the same on all ranks.
        transport: how messages go between hosts: ``"mpi"`` (what mpiexec's ranks use), ``"c10d"``
            (Gloo, what all others use) or ``"shm"``, which refuses several hosts.
        tuning: file of measured times (``pycollective bench --tune`` writes it), from which
            ``algorithm="auto"`` chooses; ``""`` for none. Also the environment variable
            PYCOLLECTIVE_TUNING; the same measurements on all ranks.
        wire: how what goes to other hosts travels: ``"raw"``, ``"exact"`` (packed, the same bits)
            or ``"auto"``, whichever took less time in the first calls of a kind. Also the
            environment variable PYCOLLECTIVE_WIRE; the same on all ranks.
        device: a GPU, ``"cuda"`` (one for each rank of a host, in turn), ``"cuda:1"`` or a number,
            on all ranks or none: calls on arrays there are carried out by its kernels where all
            ranks can map each other's memory (`Communicator.way` says whether, and why not).
            Arrays on GPUs may be given without it, and go by way of the host.

    Raises:
        ConfigurationError: the launch or the arguments cannot be right, or memory is short.
        CollectiveTimeout: not every rank came; the message names the absentees.
        PeerFailure: a rank died meanwhile, and the store is the library's own.
    """
    if device is not None:
        device_ways.prepare(device)  # before anybody waits for this rank
    explicit = rank is not None or size is not None or store is not None
    if not explicit and _by_mpi(transport):
        talk = Talk(timeout if 0 < timeout < math.inf else DEFAULT_TIMEOUT)
        with talk.sharing_problems():
            wish = Wish.of(timeout, topology, transport, tuning, wire, device)
            wish.check_transport("a launch by mpiexec", mpi=True)
            return wish.granted(_start_mpiexec(talk, wish))
    wish = Wish.of(timeout, topology, transport, tuning, wire, device)
    if explicit:
        wish.check_transport("a call with rank, size and store", mpi=False)
        return wish.granted(_init_explicit(rank, size, store, wish))
    for launch in _LAUNCHES:
        if launch.detected():
            wish.check_transport(f"a launch by {launch.name}", mpi=False)
            return wish.granted(launch.start(wish))
    _refuse_to_be_alone()
    wish.check_transport("one rank without a launcher", mpi=False)
    wish.hosts(1)
    return wish.granted(connect(None, 0, 1, timeout, tuning=wish.tuning))


def _by_mpi(transport: str | None) -> bool:
    """Whether ranks find each other through mpiexec: where nothing else is, or it was asked for."""
    others = any(launch.detected() for launch in _LAUNCHES)
    return mpi_launch.detected() and (transport == "mpi" or not others)


def _by_slurm() -> bool:
    """Whether srun started this process, and not for MPI ranks, which mpi4py joins."""
    return slurm.detected() and not (mpi_launch.detected() and find_spec("mpi4py"))


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
    """Whether a launcher has started this process, so that `init` finds other ranks."""
    return any(launch.detected() for launch in _LAUNCHES) or mpi_launch.detected()


def join(
    store: Any, rank: int, size: int, timeout: float, played: Sequence[int] = ()
) -> Communicator:
    """As `init` with rank, size and store, for ranks whose hosts may be given; see `connect`."""
    prefix = ""
    if size > 1:
        prefix = ATTEMPT.prefix(store, rank, size, timeout) + _next_prefix(store, rank)
    wish = Wish.of(timeout, None, None, None, None)
    return wish.granted(connect(store, rank, size, timeout, prefix, played, tuning=wish.tuning))


def _next_prefix(store: Any, rank: int) -> str:
    """A prefix for this process's next `init` through this store, the same on all ranks."""
    if not is_full(store):
        return "init1"
    # Each process counts its own: a second one of the same rank meets the first, and is refused.
    return f"init{store.add(f'pycollective/inits/{rank}/{process_identity()}', 1)}"


def _init_explicit(
    rank: int | None, size: int | None, store: Any, wish: Wish, listen: str | None = None
) -> Communicator:
    if rank is None or size is None or (store is None and size != 1):
        raise ConfigurationError("init needs rank, size and store together, or none of them")
    played = wish.hosts(size)
    if size == 1 or not 0 <= rank < size <= MAX_RANKS:
        # Needs no store, or says what is wrong.
        return connect(store, rank, size, wish.timeout, tuning=wish.tuning)
    if not isinstance(store, str):
        prefix = _next_prefix(store, rank)
        return _connect(store, rank, size, prefix, played, wish)
    secret = job_secret()
    server = StoreServer(listen or store, secret, clients=size) if rank == 0 else None
    return _meet_at(store, secret, server, rank, size, played, wish)


def _connect(
    store: Any, rank: int, size: int, prefix: str, played: Sequence[int], wish: Wish
) -> Communicator:
    timeout, transport, tuning = wish.timeout, wish.transport, wish.tuning
    return connect(store, rank, size, timeout, prefix, played, transport, tuning, wish.more)


def _meet_at(
    address: str,
    secret: str,
    server: StoreServer | None,
    rank: int,
    size: int,
    played: Sequence[int],
    wish: Wish,
) -> Communicator:
    """Join through a store that one rank serves for this one `init`."""
    with _store_at(address, secret, server, size, wish.timeout) as client:
        communicator = _connect(client, rank, size, "init", played, wish)
        if server is not None:
            server.stop_listening()  # who comes from now on comes for the next `init`
        communicator.barrier()  # all have what they need
        return communicator


@contextmanager
def _store_at(
    address: str, secret: str, server: StoreServer | None, size: int, timeout: float
) -> Iterator[StoreClient]:
    """A client of a store that one rank serves, with `server`, until all have left it."""
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
    start: Callable[[Wish], Communicator]


def _start_run(wish: Wish) -> Communicator:
    rank, size = environment_number(ENV_RANK), environment_number(ENV_SIZE)
    played = wish.hosts(size)
    address, secret = os.environ[ENV_STORE], job_secret()
    if size == 1:
        return connect(None, rank, size, wish.timeout, tuning=wish.tuning)
    with closing(StoreClient(address, secret, wish.timeout)) as client:
        return _connect(client, rank, size, _next_prefix(client, rank), played, wish)


def _start_torchrun(wish: Wish) -> Communicator:
    if find_spec("torch") is None:
        return _start_without_torch(wish)
    from torch.distributed import PrefixStore, rendezvous

    limit = timedelta(seconds=wish.timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    played = wish.hosts(size)
    store = PrefixStore("pycollective", store)
    prefix = ATTEMPT.prefix(store, rank, size, wish.timeout) + _next_prefix(store, rank)
    communicator = _connect(store, rank, size, prefix, played, wish)
    # Rank 0 may serve the store itself. It ends once nobody needs it, and before anyone goes on:
    # whoever joins again must not meet in the old one.
    communicator.barrier()
    del store
    communicator.barrier()
    return communicator


def _start_without_torch(wish: Wish) -> Communicator:
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
    return _init_explicit(rank, size, f"tcp://{os.environ['MASTER_ADDR']}:{port}", wish, listen)


def _start_slurm(wish: Wish) -> Communicator:
    step = slurm.find_step()
    played = wish.hosts(step.size)
    return _meet_at(step.address, step.secret, step.server(), step.rank, step.size, played, wish)


def _start_mpiexec(talk: Talk, wish: Wish) -> Communicator:
    launch = mpi_launch.agree(talk, wish.topology, wish.transport, wish.tuning, wish.more)
    several = any(launch.host_of)
    if several and wish.transport == "shm":
        _end_server(launch, 0.0)
        raise shared_memory_alone(launch.host_of)
    with _store_of_host(launch) as store:
        joined = _join_host_of(launch, store, several)
        # All have what they need from the stores, and all join or none.
        data_bytes = talk.round(joined.data_bytes, lambda every: lambda rank: min(every))
    joined = joined._replace(data_bytes=data_bytes)
    transport = launch.transport() if several else None
    world = World(
        launch.rank, launch.host_of, transport, launch.table, launch.on_machine, launch.id
    )
    communicator = Communicator._of(*joined, wish.timeout, world)
    END.arrange()
    return communicator


def _join_host_of(launch: mpi_launch.Launch, store: StoreClient | None, far: bool) -> Joined:
    near = World(launch.rank, launch.host_of).near
    if store is None:
        return join_alone(far)
    talk = launch.talk
    meeting = Meeting(
        store,
        near.index(launch.rank),
        len(near),
        talk.timeout,
        "host",
        deadline=talk.deadline,
        numbers=near,
        glance=talk.glance,
    )
    return join_host(meeting, far)


@contextmanager
def _store_of_host(launch: mpi_launch.Launch) -> Iterator[StoreClient | None]:
    """The store of this host's ranks; None where there is but one of them."""
    linger = _MPI_LINGER
    try:
        # Told before the store ends: who finds it closed can hear why.
        with ExitStack() as stack, launch.talk.sharing_problems(), _reason_from(launch.talk):
            store = None
            if launch.host_of.count(launch.host_of[launch.rank]) > 1:
                if launch.server is not None:
                    launch.server.start()
                left = max(0.1, launch.talk.deadline - monotonic())
                glance = launch.talk.glance
                client = StoreClient(launch.address, launch.secret, left, glance)
                store = stack.enter_context(closing(client))
            yield store
            linger = 0.0
    finally:
        _end_server(launch, linger)


@contextmanager
def _reason_from(talk: Talk) -> Iterator[None]:
    """Where a store has ended, what the rank says that ended it."""
    try:
        yield
    except ConfigurationError as error:
        if isinstance(error.__cause__, OSError):
            talk.listen(_MPI_LINGER / 2)
        raise


def _end_server(launch: mpi_launch.Launch, linger: float) -> None:
    if launch.server is not None:
        launch.server.close(linger)


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
