"""`LeafSync(elastic=True)`: a step is a transaction of the ranks that live.

Weights change between steps alone, and what a leaf has follows from its number. So a step that
loses a rank leaves no trace: the others become fewer (`Communicator.shrink`), and compute the step
again.

**Commit.** A step is *prepared* on a rank when the rank has all averages, and what all leaves have
logged. A barrier follows. Then the rank *commits* it: averages are handed out. So if any rank has
committed a step, each other rank has prepared it. After a loss all ranks tell each other which step
they are at, and whether it is prepared:

- A rank that is a step behind the others has prepared that step: it commits it.
- If some ranks have prepared the last step, one of them sends it to the others. Another barrier,
  and all commit it.
- If none has, all begin it anew.

**Joining.** As a step begins all ranks have the same state. A process that waits is seen by rank 0,
whose words of a step tell all. As the next one begins they let it in (`Communicator.grow`), compare
what it was told, and send it the state; digests prove that it has it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch

from pycollective.agree import MOST_TEXT, agree, all_gather_texts, refuse_unlike
from pycollective.bootstrap.init import init
from pycollective.bootstrap.store import TOO_FEW_KEY
from pycollective.communicator import Communicator
from pycollective.config import ENV_ELASTIC, ENV_JOINS, environment_number
from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    ConfigurationError,
    PeerFailure,
    named,
)
from pycollective.ledger.digests import digester
from pycollective.torch.leaves.buckets import Bucket
from pycollective.torch.leaves.model import Model, ddps_of
from pycollective.torch.leaves.over_communicator import OverCommunicator
from pycollective.torch.leaves.place import OnCpu, Place
from pycollective.torch.leaves.ranks import Ranks
from pycollective.torch.leaves.shards import shards_of
from pycollective.torch.leaves.state import Packed, State, digest, pack, receive, send
from pycollective.torch.leaves.steps import AHEAD, Steps
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.leaves.words import StepWords

_LOOK_EVERY = 0.1  # seconds between rank 0's looks for newcomers
_WAIT = 0.02  # seconds between looks while there are too few ranks
_LOST = PeerFailure, CollectiveAborted  # what a call raises where a rank has gone

_NOT_YET = (
    "this process takes the place of another: it joins, and has a rank and leaves, once sync.steps "
    "is called"
)

_log = logging.getLogger("pycollective")


class Training(Protocol):
    """What it needs of a `LeafSync`.

    Attributes:
        _prepared: whether this rank has prepared the step that is under way.
        _said: what all ranks must have been told alike.
        _state: what a step depends on besides the model.
    """

    step: int
    _model: Model
    _buckets: list[Bucket]
    _prepared: bool
    _said: dict[str, Any]
    _state: State

    @property
    def _loop(self) -> Steps | None: ...
    def _begin_anew(self) -> None: ...


class _NotJoined:
    """In place of a transport, for a process that has yet to join."""

    bucket_cap_mb = OverCommunicator.bucket_cap_mb
    waits = True

    def settle(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise ConfigurationError(_NOT_YET)


class _StateLost(PeerFailure):
    """All ranks that had the state are gone: nothing can be made good."""


class _Refused(Exception):
    """A process that was let in cannot join, on the ranks that were there before."""


class Elastic(Ranks):
    """The ranks of a LeafSync, which become fewer or more.

    Args:
        training: the LeafSync.
        group: of its ranks, which it takes over; None for those that `init` finds.

    Attributes:
        awaits: whether a process waits to join, as all ranks know.
    """

    is_elastic = True

    def __init__(self, training: Training, group: Communicator | None) -> None:
        digester("elastic=True")  # for its error: it is needed when somebody joins
        self._training = training
        self.joins = ENV_JOINS in os.environ if group is None else group._joined_late
        self._comm = group if group is not None or self.joins else init()
        self.transport = cast(Transport, _NotJoined())
        if self._comm is not None:
            self.transport = OverCommunicator(self._comm)
        self._fewest = environment_number(ENV_ELASTIC) if ENV_ELASTIC in os.environ else 1
        self.awaits = False
        self._raised: dict[tuple[int, int], str] = {}  # leaves, with their steps
        self._held = ExitStack()
        self._store: Any = None  # rank 0's connection to it, which is held
        self._next_look = 0.0
        if self._comm is not None and self._comm.size > 1:
            self._comm._members("LeafSync(elastic=True)")  # for its errors

    @property
    def comm(self) -> Communicator:
        """The ranks that are there now.

        Raises:
            ConfigurationError: this process joins only when `LeafSync.steps` is called.
        """
        if self._comm is None:
            raise ConfigurationError(_NOT_YET)
        return self._comm

    def commit(self, words: StepWords) -> None:
        self.comm.barrier()
        self.awaits = words.newcomers

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        try:
            yield
        except _LOST as error:
            self.loss = self.loss or error

    def look(self) -> None:
        with self.noting_loss():
            self.comm._check_peers()

    def see_newcomers(self) -> bool:
        now = time.monotonic()
        if self.comm.rank != 0 or now < self._next_look:  # rank 0 tells the others
            return False
        self._next_look = now + _LOOK_EVERY
        membership = self.comm._membership
        return membership is not None and self._store_has(membership.next_newcomer)

    def begin_step(self) -> None:
        """Let newcomers in, if all know of one or there are too few ranks. Collective."""
        if self.loss is not None:
            self.recover()
        deadline = time.monotonic() + self.comm.timeout
        while self.awaits or self.comm.size < self._fewest:
            self.awaits = ends = False
            try:
                grown = self.comm.grow()
                if grown is not self._comm:
                    self._switch_to(grown)
                    self._agree_on_step()
                elif self.comm.size < self._fewest:
                    ends = self._ends(time.monotonic() > deadline)
            except (*_LOST, _Refused) as error:
                if self.comm.closed:  # nor did the ranks of the next one get together
                    raise
                self._log_refusal(error)
                self.recover()
            if ends:
                raise PeerFailure(
                    f"the training cannot go on: {self.comm.size} rank(s) are left, at least "
                    f"{self._fewest} go on (--min), and no other has joined",
                    self.comm.rank,
                    "steps",
                )

    def _ends(self, late: bool) -> bool:
        """Whether to wait no longer for others to join: rank 0 decides. Collective."""
        time.sleep(_WAIT)
        ends = np.zeros(1, np.uint8)
        if self.comm.rank == 0:
            ends[0] = late or self._store_has(TOO_FEW_KEY)
        self.comm.broadcast(ends)
        return bool(ends[0])

    def _store_has(self, key: str) -> bool:
        """Whether the store has a key; no if it has gone, which is told of when it is needed."""
        membership = self.comm._membership
        if membership is None or membership.open_store is None:
            return False
        try:
            if self._store is None:
                self._store = self._held.enter_context(membership.open_store())
            return bool(self._store.check([key]))
        except (RuntimeError, OSError, ConfigurationError):
            return False

    def recover(self) -> bool:
        """Become fewer; return whether the step that is under way is there, on all ranks.

        Raises:
            ConfigurationError: the store has gone at which the ranks meet.
            CollectiveAborted: a leaf has failed on two ranks.
            CollectiveTimeout: a rank that lives did not come.
            PeerFailure: all ranks are gone that had the state, or have taken this one for dead.
        """
        while True:
            before = self.comm.size
            self._switch_to(fewer := self.comm.shrink())
            self._refuse_again()
            _log.info(
                "rank %d of %d: %d of %d ranks go on with step %d",
                *(fewer.rank, fewer.size, fewer.size, before, self._training.step),
            )
            try:
                return self._agree_on_step()
            except (*_LOST, _Refused) as error:
                self._log_refusal(error)

    def enter(self) -> None:
        if self._comm is None:
            self._comm = init()
        self._switch_to(self._comm)
        while self.joins:
            try:
                self._agree_on_step()
            except _StateLost:
                raise
            except _LOST:
                self._switch_to(self.comm.shrink())
            except BaseException as error:
                self.leave(str(error))
                raise

    def end(self) -> None:
        """End the loop with all ranks. Collective.

        If another rank still recovers the last step, that step is prepared on all ranks. So this
        rank leaves instead of waiting.
        """
        with self.noting_loss():
            self.comm.barrier()
        if self.loss is not None:
            self.leave("all steps are done")

    def leave(self, why: str, leaf: int | None = None) -> None:
        """Let the others go on without this rank; `leaf` of the step has failed, if it is given."""
        if self._comm is None or self._comm.closed:
            return
        self._comm.abort(why)
        with suppress(RuntimeError, OSError, ConfigurationError):  # they see its end
            self._comm.leave(json.dumps([leaf, self._training.step, why[: MOST_TEXT // 2]]))

    def close(self) -> None:
        """Let go of the communicator, and of the store."""
        self._held.close()
        if self._comm is not None:
            self._comm.close()

    def _log_refusal(self, error: Exception) -> None:
        if isinstance(error, _Refused) and self.comm.rank == 0:
            _log.warning("a process could not join: %s", error)

    def _switch_to(self, comm: Communicator) -> None:
        self._comm = comm
        self.loss, self.awaits = None, False
        self.transport = OverCommunicator(comm)
        self._training._begin_anew()

    def _refuse_again(self) -> None:
        """Refuse a leaf that has failed on two ranks: it will on all."""
        for rank, text in self.comm.left.items():
            try:
                leaf, step, why = json.loads(text)
            except ValueError:  # it has not left by `leave`
                continue
            if leaf is None:
                continue
            if (before := self._raised.get((leaf, step))) is not None:
                raise CollectiveAborted(
                    f"the training cannot go on, as leaf {leaf} of step {step} has failed on two "
                    f"ranks: {before}; and on rank {rank}: {why}",
                    self.comm.rank,
                    "steps",
                )
            self._raised[leaf, step] = why

    def _agree_on_step(self) -> bool:
        """Agree with the ranks of a new communicator on the step; see `recover`. Collective."""
        training, comm = self._training, self.comm
        mine = json.dumps([self.joins, training.step, training._prepared])
        said = [json.loads(each) for each in all_gather_texts(comm._all_gather_bytes, mine)]
        members = [rank for rank, (joins, *_) in enumerate(said) if not joins]
        if not members:
            raise _StateLost(
                "the training cannot go on: all ranks that had its state are gone", comm.rank
            )
        last = max(said[rank][1] for rank in members)
        there = [rank for rank in members if said[rank][1] == last and said[rank][2]]
        behind = [rank for rank in members if said[rank][1] < last]
        if (there and behind) or any(said[rank] != [False, last - 1, True] for rank in behind):
            raise CollectiveMismatch(
                f"the ranks are at steps {[step for _, step, _ in said]}", comm.rank, "steps"
            )
        joining = [rank for rank in range(comm.size) if rank not in members]
        if joining:
            self._admit(members[0], joining, last)
        if behind and comm.rank in behind:
            return True
        if not there:
            return False
        for rank in members:
            if rank not in there:
                self._send_step(there[0], rank)
        comm.barrier()
        return True

    def _send_step(self, source: int, rank: int) -> None:
        """Give a rank the step that is there on another."""
        training, comm = self._training, self.comm
        loop = training._loop
        assert loop is not None
        assert loop.step is not None
        if comm.rank == source:
            averages = [each.averages for each in training._buckets]
            send(comm, pack((averages, loop.step.logged)), rank)
        elif comm.rank == rank:
            averages, logged = receive(comm, source)
            for bucket, its in zip(training._buckets, averages, strict=True):
                bucket.averages.copy_(its)
            loop.step.take(logged)
            training._prepared = True

    def _admit(self, source: int, joining: list[int], step: int) -> None:
        """Compare what the ranks were told, and give the newcomers the state. Collective."""
        comm, training, loop = self.comm, self._training, self._training._loop
        assert loop is not None
        packed: Packed = b"", []

        def described() -> dict[str, Any]:
            nonlocal packed
            if comm.rank == source:
                packed = pack((training._state.gather(), self._raised, loop.ahead))
            return self._described()

        try:
            agree(comm._all_gather_bytes, "LeafSync", described, _refuse_unlike)
            model = training._model
            for rank in joining:
                if comm.rank == source:
                    model.broadcast(partial(comm.send, dst=rank))
                    send(comm, packed, rank)
                elif comm.rank == rank:
                    model.broadcast(partial(_receive_into, comm, source))
                    states, self._raised, loop.ahead = receive(comm, source)
            if comm.rank in joining:
                training.step = step

            def proof() -> str:
                if comm.rank in joining:
                    training._state.load(states)
                elif comm.rank != source:
                    return ""
                return digest(model.tensors(), training._state.gather())

            agree(comm._all_gather_bytes, "LeafSync", proof, _refuse_other_state)
        except Exception as error:
            lost = isinstance(error, CollectiveError) and not isinstance(error, CollectiveMismatch)
            if self.joins or lost:
                raise
            raise _Refused(str(error)) from error
        self.joins = False

    def _described(self) -> dict[str, Any]:
        loop = self._training._loop
        assert loop is not None
        said = {**self._training._said, **loop.described()}
        said["names of state()"] = self._training._state.names
        return {what: value for what, value in said.items() if what not in ("step", AHEAD)}


def _receive_into(comm: Communicator, source: int, flat: torch.Tensor) -> None:
    comm.recv(flat, source)


def _refuse_unlike(said: list[dict[str, Any]]) -> None:
    refuse_unlike("LeafSync", said)


def _refuse_other_state(said: list[str]) -> None:
    digests = [each for each in said if each]
    if len({*digests}) > 1:
        others = [rank for rank, each in enumerate(said) if each and each != digests[0]]
        raise CollectiveMismatch(
            f"LeafSync: {named(others)} has been sent the state, and has other bits than rank 0: "
            "what state() was given must be set by load_state_dict() as state_dict() returns it"
        )


def elastic_of(training: Training, model: torch.nn.Module, group: object, place: Place) -> Elastic:
    """Return the ranks of an elastic LeafSync.

    Raises:
        ConfigurationError: its group or its model is not one whose ranks can change.
    """
    what = ""
    if ddps_of(model):
        what = "elastic=True takes a bare model: DistributedDataParallel keeps the number of ranks"
    elif shards_of(model) is not None:
        what = "elastic=True: with fully_shard a rank that dies takes its part of the weights along"
    elif not isinstance(place, OnCpu):
        what = f"elastic=True takes a model on CPUs, and this one is on {place.device}"
    elif group is not None and not isinstance(group, Communicator):
        what = (
            f"with elastic=True group is a Communicator or None, and not a {type(group).__name__}: "
            "a process group of torch's has as many ranks after a death as before"
        )
    if what:
        raise ConfigurationError(f"LeafSync: {what}")
    assert group is None or isinstance(group, Communicator)
    return Elastic(training, group)
