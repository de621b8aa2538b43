"""What ranks that mpiexec started tell each other, by way of rank 0, until they have joined.

A talk goes in rounds: each rank says something, rank 0 decides what follows from all of it, and
answers each. A rank that cannot go on says so at any time, and rank 0 passes it on, so that all
raise at once. Nothing here waits without a deadline, and no receive is left behind: a message is
looked for first, and received when it is there.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pycollective.bootstrap.rendezvous import raise_reported, report_of
from pycollective.config import INSTALL_MPI4PY
from pycollective.errors import CollectiveTimeout, ConfigurationError, named

# Which rank mpiexec has started this process as, and of how many.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_EAGER = 0.002  # seconds of looking without a pause
_POLL = 0.0005  # seconds between looks after that
_GRACE = 1.0  # seconds longer than rank 0, so that it can say who did not come
_TAG_BELOW_LAST = 7  # far from those that programs choose


class _Word(NamedTuple):
    source: int
    talk: int  # which of the process's talks it belongs to
    report: str  # of what ends the talk; empty where it goes on
    value: Any


class Talks:
    """What a process keeps from one talk to the next, of those that have failed too."""

    def __init__(self) -> None:
        # The ranks count their talks alike: a word of an earlier one comes too late.
        self._numbers = itertools.count(1)
        self._early: list[_Word] = []  # of talks that this rank has not come to
        self._unsent: list[Any] = []  # sends that nobody took: their memory is MPI's until the end
        self._duplicate: tuple[Any, Any] | None = None

    def begin(self) -> int:
        """The number of a new one."""
        return next(self._numbers)

    def put_off(self, word: _Word) -> None:
        """Keep a word of a talk that is still to come."""
        self._early.append(word)

    def take_up(self, number: int) -> _Word | None:
        """A word that was put off, of the talk of that number or an earlier one."""
        for index, word in enumerate(self._early):
            if word.talk <= number:
                return self._early.pop(index)
        return None

    def sent(self, request: Any) -> None:
        """Keep a send, with its memory, for as long as it goes on."""
        self._unsent.append(request)

    def forget_sent(self) -> None:
        """Forget the sends that have ended."""
        self._unsent = [request for request in self._unsent if not request.test()[0]]

    def duplicate(self, world: Any) -> tuple[Any, Any]:
        """A duplicate of MPI's world, and the request that makes it: begun unless one has begun.

        MPI matches duplicates by their order on each rank, so one that was begun in an `init` that
        failed is gone on with by the next.
        """
        if self._duplicate is None:
            self._duplicate = world.Idup()
        return self._duplicate

    def part_with_duplicate(self) -> None:
        """Who asked for it has it, as all ranks have: the next is another."""
        self._duplicate = None


TALKS = Talks()


class Talk:
    """One talk of all ranks of ``MPI.COMM_WORLD``; each must begin as many as the others.

    Initialises MPI where the program has not.

    Args:
        timeout: seconds that it may take in all.

    Raises:
        ConfigurationError: mpi4py is missing, or belongs to another MPI than mpiexec.
    """

    def __init__(self, timeout: float) -> None:
        self.world = _world()
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self._number = TALKS.begin()
        self._tag = _tag(self.world)
        self._ended = False  # by a report that has gone out
        self._heard = ""  # the report of another
        self._gone: set[int] = set()  # ranks that have reported, and listen no more
        self._ahead: list[_Word] = []  # said for the next round

    def round(self, mine: Any, decide: Callable[[list[Any]], Callable[[int], Any]]) -> Any:
        """Say `mine`; the answer, once all have said theirs.

        Args:
            mine: anything small that can be pickled.
            decide: asked on rank 0: from what all have said, in order of rank, to what each is
                answered.

        Raises:
            CollectiveTimeout: names the ranks that did not come.
            CollectiveError, ConfigurationError: what another rank has reported.
        """
        if self.rank != 0:
            self._send(0, mine)
            absent = "rank 0 did not come, or has not heard of all others"
            return self.until(self._receive, lambda: absent, _GRACE).value
        said: dict[int, Any] = {0: mine, **{word.source: word.value for word in self._ahead}}
        self._ahead.clear()

        def all_have_come() -> bool:
            while (word := self._receive()) is not None:
                said[word.source] = word.value
            return len(said) == self.size

        self.until(all_have_come, lambda: self._absent(said))
        answer = decide([said[rank] for rank in range(self.size)])
        sends = [self._send(other, answer(other)) for other in range(1, self.size)]
        _await_sent(sends, _GRACE)  # perhaps this rank calls MPI no more, and nothing moves then
        return answer(0)

    def until(
        self, done: Callable[[], Any], what_is_missing: Callable[[], str], grace: float = 0.0
    ) -> Any:
        """Ask `done` until it says something true, which is returned; or until the deadline."""
        eager = time.monotonic() + _EAGER
        while not (result := done()):
            now = time.monotonic()
            if now > self.deadline + grace:
                raise CollectiveTimeout(
                    f"init timed out on rank {self.rank} after {self.timeout:g} s: "
                    f"{what_is_missing()}",
                    self.rank,
                    "init",
                )
            time.sleep(0 if now < eager else _POLL)
        return result

    def glance(self) -> None:
        """Raise what another rank has reported, now or before; does not wait."""
        if self._heard:
            raise_reported(self._heard, self.rank)
        while (word := self._receive()) is not None:
            self._ahead.append(word)

    def listen(self, seconds: float) -> None:
        """Raise what another rank reports within this time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.glance()
            time.sleep(_POLL)

    @contextmanager
    def sharing_problems(self) -> Iterator[None]:
        """Tell all other ranks of whatever ends the block. Blocks may stand in each other."""
        try:
            yield
        except BaseException as error:
            self._report(error)
            raise

    def _report(self, error: BaseException) -> None:
        if self._ended:
            return
        self._ended = True
        text = report_of(error, self.rank)
        others = range(1, self.size) if self.rank == 0 else [0]
        listening = [other for other in others if other not in self._gone]
        _await_sent([self._send(other, None, text) for other in listening], _GRACE)

    def _send(self, other: int, value: Any, report: str = "") -> Any:
        request = self.world.isend((self._number, report, value), other, self._tag)
        TALKS.sent(request)
        return request

    def _receive(self) -> _Word | None:
        """A word of this talk, if one has come; raises a report."""
        while (word := self._take()) is not None:
            if word.talk < self._number:
                continue
            if word.talk > self._number:
                TALKS.put_off(word)
                self._gone.add(word.source)
                raise ConfigurationError(
                    f"rank {word.source} has begun another init than rank {self.rank}: all must "
                    "call it as often"
                )
            if word.report:
                self._gone.add(word.source)
                self._heard = word.report
                raise_reported(word.report, self.rank)
            return word
        return None

    def _take(self) -> _Word | None:
        word = TALKS.take_up(self._number)
        if word is not None:
            return word
        from mpi4py import MPI

        status = MPI.Status()
        source = MPI.ANY_SOURCE if self.rank == 0 else 0
        found = self.world.improbe(source, self._tag, status)
        if found is None:
            return None
        request = found.irecv()
        done, told = request.test()
        while not done:  # its end is on the way
            if time.monotonic() > self.deadline + _GRACE:
                raise CollectiveTimeout(
                    f"init timed out on rank {self.rank}: a message did not arrive whole",
                    self.rank,
                    "init",
                )
            done, told = request.test()
        return _Word(status.Get_source(), *told)

    def _absent(self, said: dict[int, Any]) -> str:
        absent = [rank for rank in range(self.size) if rank not in said]
        return f"{named(absent)} of {self.size} did not come"


def _await_sent(sends: list[Any], seconds: float) -> None:
    """Let sends go on until all have been taken, or for so long."""
    end = time.monotonic() + seconds
    while not all(request.test()[0] for request in sends) and time.monotonic() < end:
        time.sleep(_POLL)
    TALKS.forget_sent()


def _tag(world: Any) -> int:
    from mpi4py import MPI

    return int(world.Get_attr(MPI.TAG_UB)) - _TAG_BELOW_LAST


def _world() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigurationError(
            f"this is a launch by mpiexec, which is joined through mpi4py: {error}. "
            f"{INSTALL_MPI4PY}, or start the ranks with `pycollective run -n N` or torchrun"
        ) from error
    if MPI.Is_finalized():
        raise ConfigurationError("MPI has been finalized: call init before that")
    world = MPI.COMM_WORLD
    sizes = [("mpiexec", os.environ[name]) for name in SIZE_VARIABLES if name in os.environ]
    if not sizes and world.Get_size() == 1:  # srun --mpi=pmix says no other
        sizes = [("srun", os.environ.get("SLURM_STEP_NUM_TASKS", ""))]
    for launcher, size in sizes:
        if size.isdigit() and int(size) != world.Get_size():
            way = "mpiexec" if launcher == "mpiexec" else "way of `srun --mpi`"
            raise ConfigurationError(
                f"{launcher} has started {size} ranks, and mpi4py sees {world.Get_size()}: it "
                f"belongs to another MPI ({MPI.Get_library_version().split(',')[0].strip()}). Use "
                f"that one's {way}, or the mpi4py of this one; under Slurm, `srun --mpi=none` "
                "starts ranks that need none"
            )
    return world
