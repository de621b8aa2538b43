"""`Communicator`: what a user holds; ties a group of ranks to shared memory and the native engine.

The collectives themselves are methods of the native base class, so that a call costs no Python
frame; what is here is what a program does once: splitting, leaving, failing.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

import numpy as np

from pycollective import _core, host_memory
from pycollective import device_path as device_paths
from pycollective.agree import agree
from pycollective.dtypes import DTYPES
from pycollective.errors import CollectiveError, ConfigurationError
from pycollective.leaves.deal import Deal, agree_on_deal
from pycollective.leaves.reduction import LeafReductions
from pycollective.placement import number_hosts
from pycollective.planning.world import World
from pycollective.typing import Wire

if TYPE_CHECKING:
    import numpy.typing as npt

_log = logging.getLogger("pycollective")

# In place of a rank, for `recv`: the first message of the tag, from whichever rank.
ANY_SOURCE = None

# How what goes to other hosts may travel (docs/inside/wire.md).
WIRES: tuple[Wire, ...] = tuple(_core.wires())


def _is_integer(value: object, least: int, end: int) -> bool:
    try:
        return least <= operator.index(value) < end  # type: ignore[arg-type]
    except TypeError:
        return False


class Membership(Protocol):
    """How the ranks of a communicator can become others: `pycollective.bootstrap` does it."""

    @property
    def open_store(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """Opens the store at which they met; None where there is none."""

    @property
    def next_newcomer(self) -> str:
        """The key there that is set once a process waits to join."""

    @property
    def left(self) -> dict[int, str]:
        """The ranks, by their numbers before, that left by themselves last, and why."""

    def shrink(self, comm: Communicator) -> Communicator:
        """`Communicator.shrink`."""

    def leave(self, comm: Communicator, why: str) -> None:
        """`Communicator.leave`."""

    def grow(self, comm: Communicator) -> Communicator:
        """`Communicator.grow`."""


class Communicator(_core.Communicator):
    """A group of ranks that exchange arrays by collective calls.

    `pycollective.init` makes one of all ranks of the job, and `split` makes smaller ones of it::

        comm = pycollective.init()
        mean = comm.all_reduce(gradients, op="avg")
        comm.close()  # or: with pycollective.init() as comm: ...

    **Order.** A collective is called by all ranks of the group, and all make their calls in the
    same order, with arguments that go together; else all raise `CollectiveMismatch`. A call blocks
    until its arrays are the caller's again, at most `timeout` seconds. With ``async_op=True`` it
    returns a `Work` at once: `Work.wait` blocks, and the arrays are left alone until then. Calls of
    several threads run in the order in which they were made.

    **Arrays** are NumPy's (ml_dtypes' too), or any with DLPack, such as torch tensors, or with the
    CUDA array interface. A call works on the caller's own memory, without a copy where the array is
    contiguous; one that is not is copied, and what it receives copied back. Read-only arrays, such
    as JAX's, may be read, and are refused as outputs. Any shape will do: ``out`` of `all_reduce`
    and `reduce` has x's; in other calls the number of elements counts alone, in C order.

    **Dtypes**: float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, int8, int16, int32,
    int64, uint8 and bool; the same in all arrays of a call.

    **Results.** A collective returns the very array that holds the result: ``comm.all_reduce(x) is
    x``. Where only the root has one, `reduce` and `gather` return None on the other ranks. `recv`
    returns the rank that sent; `send` and `barrier` return None.

    Arguments that calls have in common:

    - ``op``: ``"sum"``, ``"prod"``, ``"avg"`` (the sum, divided once by the number of ranks),
      ``"min"``, ``"max"``, and bitwise ``"band"``, ``"bor"``, ``"bxor"``. contract.md says
      which dtypes have which, and which bits come out, whatever the algorithm.
    - ``algorithm``: ``"auto"``, which takes what is fastest, or ``"direct"``, ``"ring"``,
      ``"tree"``, ``"halving_doubling"``, ``"recursive_doubling"``, ``"hierarchical"``; the same on
      all ranks.
    - ``wire``: how data go to other hosts: ``"raw"`` or ``"exact"`` (packed; the same bits arrive);
      None for this communicator's `wire`. The same on all ranks.
    - ``stream``: of arrays on a GPU, the CUDA stream that the call follows: a handle, or a stream
      of torch, CuPy or cuda.core. None for the one that the array names, or else the legacy default
      stream. Where `device_path` is ``"peer"`` and the stream has a name, the result comes in that
      stream's order, after the call has returned or its `Work` is done; if it then ends badly, the
      next call, `close` or `failure` tells (docs/reference/gpu_arrays.md).

    **Accumulators.** `all_reduce`, `reduce` and `reduce_scatter` take a `pycollective.Accumulator`
    in place of x, of one size and as many leaves on all ranks. The leaves are micro-batches. Each
    rank's accumulator holds all leaves that the deal gives it, which may be none, and no others;
    the call spends it. ``op`` is ``"sum"`` or ``"avg"``, and there is no ``stream``. ``out`` is a
    host array of a float type up to float32, the same on all ranks: of the accumulator's ``shape``,
    of `reduce_scatter` as for arrays. On ranks other than the root of `reduce` its dtype counts,
    too, and is float32 where it is None. Two more arguments, the same on all ranks:

    - ``divisor``: what ``"avg"`` divides by in place of the number of leaves: a number above 0 that
      fp64 holds, such as an integer up to 2**53.
    - ``deal``: who gives which leaves, a `Deal` of `deal`; None for `pycollective.leaves_of`.

    Every call may raise:

    - `ConfigurationError`: the arguments cannot be right, and nothing has moved; or the
      communicator is closed.
    - `CollectiveError`, by its kinds `CollectiveMismatch`, `CollectiveTimeout`, `PeerFailure` and
      `CollectiveAborted` (errors.md): the group has failed, on all ranks, and makes no more
      calls.
    """

    _node: _core.Node
    _tokens: list[bytes]
    _world: World
    _splits: int
    _device_path: device_paths.DevicePath | None
    _membership: Membership | None = None  # how its ranks can become others
    _joined_late = False  # by this process, which has come to ranks that were under way

    def __init__(self) -> None:
        raise ConfigurationError(
            "a Communicator is made by pycollective.init(), or by split() of another one"
        )

    @classmethod
    def _of(
        cls,
        node: _core.Node,
        rank: int,
        tokens: Sequence[bytes],
        offsets: Sequence[int],
        data_bytes: int,
        timeout: float,
        world: World | None = None,
    ) -> Communicator:
        """Join a group whose members have attached each other (`joining.connect` does it all).

        Args:
            node: this process's end of shared memory; holds the mailbox at ``offsets[rank]``.
            rank: this rank among those of its host.
            tokens: the segment of each rank of this host.
            offsets: where each one's mailbox lies in its segment, bytes.
            data_bytes: of the smallest data area among them; the same on all ranks.
            timeout: seconds an operation may take.
            world: all ranks; None where all are on this host.
        """
        world = world or World.on_one_host(rank, len(tokens))
        self = cls.__new__(cls)
        _core.Communicator.__init__(
            self, node, rank, list(tokens), list(offsets), data_bytes, timeout, world
        )
        self._node = node
        self._tokens = list(tokens)
        self._world = world
        self._splits = 0
        self._device_path = None
        return self

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank, numbered from 0 in the order of their first ranks."""
        return self._world.host_of

    @property
    def left(self) -> dict[int, str]:
        """The ranks that called `leave` as `shrink` or `grow` made this communicator, and why.

        By their numbers in the communicator before.
        """
        return {} if self._membership is None else dict(self._membership.left)

    @property
    def device(self) -> int | None:
        """The GPU that it was made for, as CUDA counts; None if it was made for none."""
        return self._device_path.device if self._device_path else None

    @property
    def device_path(self) -> tuple[str, str]:
        """How calls on arrays on GPUs go, and why.

        ``"peer"``: by kernels over peer memory, where all ranks give arrays of their `device`, and
        no others. ``"host"``: by way of the host.
        """
        if self._device_path is None:
            return device_paths.HOST, "it was made without a device"
        return self._device_path.name, self._device_path.reason

    def use_device(self, device: str | int) -> None:
        """Carry out calls on arrays of this GPU there, where all ranks can; collective.

        Done by ``init(device=...)``; `split` hands it on. Not beside other calls. Where NVRTC has
        to compile the kernels it does so now, the first time in a process, while the others wait;
        `init` has them compiled before it joins.

        Args:
            device: as `init` takes it.

        Raises:
            ConfigurationError: there is no such GPU, the communicator has one already, or
                PYCOLLECTIVE_DEVICE_PATH asks for what cannot be.
        """
        if self._device_path is not None:
            raise ConfigurationError(
                f"this communicator is for GPU {self._device_path.device} already"
            )
        local_rank = self._world.local_ranks.index(self.rank)
        hosts = len(set(self.host_of))
        self._device_path = device_paths.join(self, device, local_rank, hosts)

    def empty(
        self, shape: SupportsIndex | Sequence[int], dtype: npt.DTypeLike = np.float32
    ) -> np.ndarray[Any, Any]:
        """Make an array in memory that the other ranks of this host read in place.

        Where the arrays of all ranks that give data lie in such memory, `all_gather`, `broadcast`,
        `gather`, `scatter` and `all_to_all` copy each element once, and `reduce_scatter` reads the
        inputs where they lie, without a copy. The bits are the same. Other arrays, and parts of
        such an array, may be given in the same calls. Local: ranks need not call it alike. Any
        thread may call it.

        The array is the caller's like any other: its memory goes back to the system with the last
        reference to it, and may outlive the communicator. (To communicators of a later
        `pycollective.init` it is ordinary memory.) The memory of a rank that was killed goes back
        when the others have closed their communicators with it. An array has whole pages, on the
        NUMA node of the calling thread, and takes addresses in each rank of the host that reads it
        (``ulimit -v``). A forked child does not have it, and must not touch it.

        Args:
            shape: as `numpy.empty` takes it.
            dtype: of the array, one of those that collectives take.

        Returns:
            An array in C order whose values are undefined.

        Raises:
            ConfigurationError: the host has not so much memory left, a dimension is negative,
                collectives do not take ``dtype``, this communicator is closed, or this process is a
                fork of the one that made it.
        """
        wanted = np.dtype(dtype)
        if wanted.name not in DTYPES or not wanted.isnative:
            raise ConfigurationError(f"empty: dtype {wanted} is not one of {', '.join(DTYPES)}")
        try:
            sizes: tuple[int, ...] = (operator.index(shape),)  # type: ignore[arg-type]
        except TypeError:
            sizes = tuple(map(operator.index, shape))  # type: ignore[arg-type]
        if any(size < 0 for size in sizes):
            raise ConfigurationError(f"empty: shape {sizes} has a negative dimension")
        memory = self._allocate(min(math.prod(sizes) * wanted.itemsize, 2**62))
        return np.ndarray(sizes, wanted, buffer=memory)

    def deal(self, leaves: int, mine: Iterable[int]) -> Deal:
        """Agree on which rank gives which leaves of a reduction; collective.

        Only for others than the default, which is `pycollective.leaves_of` on each rank and needs
        no call. A deal serves any number of calls: ``comm.all_reduce(acc, out=x, deal=deal)``.

        Args:
            leaves: of all ranks together, M; the same on all ranks.
            mine: the leaves that this rank gives, in any order; there may be none.

        Returns:
            The deal, the same on all ranks.

        Raises:
            CollectiveMismatch: on all ranks: they say different M, or a leaf is given by two ranks
                or by none; the message names leaf and ranks. The communicator stays usable.
            ConfigurationError: on all ranks: a rank named a leaf twice, or one that is not there.
        """
        return agree_on_deal(self._all_gather_bytes, leaves, mine)

    @property
    def _leaf_reductions(self) -> LeafReductions:  # the native collectives hand over to it
        return LeafReductions(self, self._world.planner.of_deal)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make a communicator of the ranks that give the same ``color``; collective over this one.

        Args:
            color: which group this rank joins, 0 to 2**62 - 1; None for no group.
            key: orders the ranks of a group; equal keys keep this communicator's order.

        Returns:
            The new communicator, with this one's timeout, wire and GPU; None where ``color`` is
            None. It fails and is closed apart from this one.

        Raises:
            ConfigurationError: a rank of the group cannot have the memory that it needs.
        """
        if color is not None and not _is_integer(color, 0, 2**62):
            raise ConfigurationError(f"split: color {color!r} is not None or 0 to 2**62 - 1")
        if not _is_integer(key, -(2**62), 2**62):
            raise ConfigurationError(f"split: key {key!r} is not an integer of 62 bits")
        given = np.empty((self.size, 2), dtype=np.int64)  # color and key of each rank
        self.all_gather(given, np.array([-1 if color is None else color, key], dtype=np.int64))
        members = [r for r in range(self.size) if given[r, 0] == given[self.rank, 0]]
        members.sort(key=lambda r: (given[r, 1], r))

        world = self._part_of_world(members, given[:, 0])
        of_host = [r for r in members if r in self._world.local_ranks]
        offset: int | None = None  # of the mailbox in this process's segment

        def allocate() -> tuple[int, int]:
            nonlocal offset
            if color is None:
                return 0, 0
            ranks, internode = len(of_host), world.transport is not None
            host_memory.check(self._node.mailbox_bytes(ranks, internode), ranks)
            offset, data_bytes = self._node.allocate(ranks, internode)
            return offset, data_bytes

        concerns = () if color is None else members
        try:
            mailboxes = agree(self._all_gather_bytes, "split", allocate, concerns=concerns)
        except ConfigurationError:  # of all ranks; after another error a peer may use the mailbox
            if offset is not None:
                self._node.release(offset)
            raise
        if color is None:
            return None
        made = Communicator._of(
            self._node,
            of_host.index(self.rank),
            [self._tokens[self._world.local_ranks.index(r)] for r in of_host],
            [mailboxes[r][0] for r in of_host],
            min(mailboxes[r][1] for r in members),
            self.timeout,
            world,
        )
        made.wire = self.wire
        if self._device_path is not None:
            made._begin_with(self._device_path.device)
        return made

    def shrink(self) -> Communicator:
        """Go on without the ranks that have died; collective over those that live::

            try:
                comm.all_reduce(x)
            except pc.CollectiveError:
                comm = comm.shrink()  # and make the calls again that all agree on

        The ranks that live agree on who they are, and make a communicator of themselves, in the
        order that they have here. This one is closed. A rank whose process has ended is left out,
        and so is one that has closed this communicator, or has called `leave`. A rank that is
        stopped or busy is waited for, at most `timeout` seconds. If another dies meanwhile it is
        left out as well.

        Without a failure it aborts this communicator, so that ranks which wait in a call come too.

        The ranks meet at the store where they joined. So it must still be there: ``pycollective
        run``'s is, and an object that was given to `init` as its store. Over MPI they meet by its
        own ``Shrink``, where that goes on after a death (ULFM, and mpi4py 4.1).

        Returns:
            The new communicator, with this one's timeout and `init`'s other options.

        Raises:
            ConfigurationError: this communicator is closed, is for a GPU, or its ranks cannot meet
                again: it is of `split`, or they met at ``tcp://``, by srun, or at a store that has
                ended.
            CollectiveTimeout: a rank that lives did not call it.
            PeerFailure: the other ranks have taken this one for dead.
        """
        return self._members("shrink").shrink(self)

    def leave(self, why: str = "") -> None:
        """Let the other ranks go on without this one: they call `shrink`. Closes this communicator.

        It waits for nobody, but over MPI, where the others must call `shrink`.

        Args:
            why: what the others read in `left` of their new communicator; 1,000 characters.

        Raises:
            ConfigurationError: as `shrink`.
        """
        self._members("leave").leave(self, why)

    def grow(self) -> Communicator:
        """Take in the processes that wait to join; collective.

        They come behind the ranks that are here, which keep their order. A process waits in `init`
        if ``pycollective run --elastic`` has started it in place of one that died. If none waits,
        this takes one broadcast.

        Returns:
            The new communicator, as from `shrink`, and this one is closed; or this one, if nobody
            has joined.

        Raises:
            ConfigurationError: as `shrink`.
            CollectiveError: a rank has died: call `shrink`.
        """
        return self._members("grow").grow(self)

    def _members(self, call: str) -> Membership:
        if self._membership is None:
            raise ConfigurationError(
                f"{call}: the ranks of this communicator have no store at which they could meet "
                "again, as it is of split(), or they met at tcp://, by srun, at a store that has "
                "ended, or over MPI with an mpi4py before 4.1: start them by `pycollective run "
                "--elastic`, or give init an object as its store"
            )
        return self._membership

    def _all_gather_bytes(self, row: np.ndarray) -> np.ndarray:
        rows = np.empty((self.size, row.size), np.uint8)
        self.all_gather(rows, row)
        return rows

    def _begin_with(self, device: str | int) -> None:
        """`use_device` of a communicator that nobody has been given yet: none, if that fails."""
        try:
            self.use_device(device)
        except ConfigurationError:  # on all ranks, when all have heard: nobody is left waiting
            self.close()
            raise
        except BaseException as error:
            self.abort(f"no communicator for GPUs could be made: {error}")
            self.close()
            raise

    def _part_of_world(self, members: list[int], colors: np.ndarray) -> World:
        """Return the world of `members`, who gave one color of `colors`; all ranks must call it."""
        whole = self._world
        host_of = number_hosts([whole.host_of[r] for r in members])
        transport = None
        if whole.transport is not None:
            groups = {(int(color), whole.host_of[r]) for r, color in enumerate(colors)}
            hosts = Counter(color for color, _ in groups if color >= 0)
            across = any(number > 1 for number in hosts.values())
            alone = colors[self.rank] < 0 or not any(host_of)
            try:
                transport = whole.transport.split(
                    None if alone else members, across, self._check_peers
                )
            except BaseException as error:  # the others wait, here or in what follows
                if self.failure is None:
                    self.abort(f"split was given up: {type(error).__name__}: {error}")
                raise
        self._splits += 1
        number = f"{whole.id}/{self._splits}/{members[0]}".encode()
        number_of_64_bits = int.from_bytes(blake2b(number, digest_size=8).digest(), "little")
        rank = members.index(self.rank)
        return World(rank, host_of, transport, whole.table, whole.on_machine, number_of_64_bits)

    def close(self) -> None:
        """Wait for what was issued, then leave. Harms no rank that needs nothing more from this.

        Receives from any rank that no message has come for are not waited for: they end with
        `CollectiveAborted`, and nothing else fails.

        In a signal handler that interrupts a call of this communicator it aborts and returns at
        once; that call ends, and closes as it does.

        Idempotent. Later calls raise `ConfigurationError`.
        """
        self._close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; after an exception abort first, so that no peer waits for this rank."""
        if error is not None and self.failure is None and not self.closed:
            self.abort(f"{type(error).__name__}: {error}")
        try:
            self.close()
        except CollectiveError as failure:
            if error is None:
                raise
            _log.debug("closing after an exception: %s", failure)

    def __repr__(self) -> str:
        state = " closed" if self.closed else " failed" if self.failure else ""
        return f"<pycollective.Communicator rank {self.rank} of {self.size}{state}>"
