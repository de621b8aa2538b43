"""A training's loop: its steps, and in each the leaves of this rank with their batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import ReferenceType, ref

from pycollective.agree import let_all_hear
from pycollective.errors import CollectiveError, CollectiveMismatch, ConfigurationError
from pycollective.torch.leaves.audit import Audit
from pycollective.torch.leaves.balance import Balance, Cost
from pycollective.torch.leaves.log import Log
from pycollective.torch.leaves.sampler import LeafSampler, Leaves, refuse_iterable
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.leaves.words import StepWords


class Sync(Leaves, Protocol):
    """What a loop needs of a `LeafSync`.

    Attributes:
        _loop_ref: the loop that has begun.
        _audit: of its leaves, if it was asked for.
    """

    _loop_ref: ReferenceType[Steps] | None
    _audit: Audit | None

    @property
    def _loop(self) -> Steps | None: ...
    @property
    def _has_lost(self) -> bool: ...
    def _begin_step(self) -> None: ...
    def _end_loop(self) -> None: ...
    def _begins_again(self) -> bool: ...
    def _take_gradients(self) -> None: ...
    def _turn(self, leaf: int, again: bool = False) -> AbstractContextManager[None]: ...
    def _begin_audits(self) -> list[int]: ...
    def _judge(self, audit: Audit) -> None: ...
    def _take_part(self) -> None: ...
    def _count(self, leaf: int, count: int) -> None: ...
    def _break(self, what: str, error: BaseException, leaf: int | None = None) -> None: ...
    def _refuse_broken(self) -> None: ...


AHEAD = "batches drawn ahead"  # by a loader, at most


class Steps:
    """What `pycollective.torch.LeafSync.steps` returns: iterates over `Step`.

    ``len()`` is the number of steps that are left; without an end it raises. Each step's ``.grad``
    is None from here until the step is complete, so an optimizer that steps too early does nothing.

    Attributes:
        balance: deals the leaves; None if all cost the same.
        step: that was handed out, until it is complete.
        ahead: batches that any rank's loader draws ahead, at most.
    """

    def __init__(
        self,
        sync: Sync,
        loader: Iterable[Any],
        until: int | None,
        cost: Cost | None,
        measure_ranks: bool,
    ) -> None:
        if measure_ranks and cost is None:
            raise ConfigurationError("steps: measure_ranks=True needs a cost")
        self._sync, self._loader, self._until = sync, loader, until
        self._sampler = sampler_of(loader, sync)
        self._batches = _Batches(sync, loader, self._sampler)
        self._cost, self._measures_ranks = cost, bool(measure_ranks)
        self.step: Step | None = None
        self.balance: Balance | None = None
        self.ahead: int | None = None  # until all ranks know

    def described(self) -> dict[str, Any]:
        """What must be alike on all ranks, and `AHEAD`."""
        return {
            "step": self._sync.step,
            "until": self._until,
            "samples of a LeafSampler": self._sampler.samples,
            "micro_batch": self._sampler.micro_batch,
            "cost": "none" if self._cost is None else "one",
            "measure_ranks": self._measures_ranks,
            AHEAD: draws_ahead(self._loader),
        }

    def deal(self, ranks: int) -> None:
        """Deal the leaves by their cost among so many ranks, if asked and not done yet.

        Raises:
            ConfigurationError: `cost` returns no number above 0.
        """
        if self._cost is None or self.balance is not None:
            return
        self.balance = Balance(self._sampler, self._cost, ranks)
        self.balance.deal_of(self._sync.step)  # for its errors
        if self.ahead is not None:
            self.begin(self.ahead)

    def begin(self, ahead: int) -> None:
        """Measure ranks from here on, if asked; a loader draws so many batches ahead."""
        self.ahead = ahead
        if self.balance is not None and self._measures_ranks:
            self.balance.measure(ahead)

    def begin_anew(self) -> None:
        """Go on among other ranks, with what leaves they deal."""
        self._batches.end()
        self.balance = None
        if self.step is not None:
            self.step.begin_anew()

    def exchange(self, transport: Transport, words: StepWords) -> None:
        """Exchange what leaves have logged in the step whose averages are there. Collective.

        Args:
            transport: of the ranks.
            words: of the step, as all ranks were told them.
        """
        assert self.step is not None
        self.step.exchange(transport, words)

    def complete(self, words: StepWords) -> None:
        """End the step that is handed out."""
        assert self.step is not None
        self.step.complete()
        self.step = None
        if self.balance is not None:
            self.balance.completed(self._sync.step, words.seconds_before)

    def leave(self) -> None:
        """Let go of the loader's iterator, and of the step that is under way; its leaf ends."""
        self._batches.end()
        if self.step is not None:
            self.step.end()
            self.step = None

    def __len__(self) -> int:
        if self._until is None:
            raise TypeError("sync.steps(loader) has no end: give it one by until=")
        return max(0, self._until - self._sync.step)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """Hand out the next step.

        Raises:
            ConfigurationError: the one before is not complete, or another loop has begun.
        """
        sync = self._sync
        if sync._loop is self and self.step is not None:
            number = self.step.number
            self.leave()
            error = ConfigurationError(
                f"step {number} was not gone through: iterate over its leaves, on a rank without "
                "leaves, too"
            )
            sync._break(f"sync.steps: step {number}:", error)
        sync._refuse_broken()
        if self._until is not None and sync.step >= self._until:
            if sync._loop is self:
                sync._end_loop()
            raise StopIteration
        if sync._loop is not self:
            raise ConfigurationError(
                "another sync.steps(...) has begun, and a LeafSync has one loop at a time: end "
                "this one before"
            )
        sync._begin_step()
        sync._take_gradients()
        self.step = Step(sync, self, self._batches)
        return self.step


class Step:
    """One step of a training: iterates over this rank's batches, one a leaf, once.

    A leaf begins when its batch is handed out, and ends when the next batch is asked for: forward
    and one backward go between. With the last, the step is complete. On a rank without leaves there
    are no batches, and to iterate takes part in the averages. With ``audit`` there are batches of
    other ranks' leaves, too.

    Attributes:
        number: of the step, from 0.
        leaf: the number of the leaf that is under way; None between leaves.
    """

    def __init__(self, sync: Sync, loop: Steps, batches: _Batches) -> None:
        self.number = sync.step
        self.leaf: int | None = None
        self._again = False  # the leaf is another rank's
        self._sync, self._batches = sync, batches
        self._loop: Steps | None = loop  # until the step is complete
        # Not held: a loop that is left lets go of it, which ends the leaf that is under way.
        self._turns: ReferenceType[Generator[Any, None, None]] | None = None
        self._log = Log(self.number)
        self._logged: dict[str, float] | None = None
        self._means: Callable[[], dict[str, float]] | None = None  # once the step is complete

    def __iter__(self) -> Iterator[Any]:
        """Begin the step.

        Raises:
            ConfigurationError: it has begun already, or is over.
        """
        if self._turns is not None or self._loop is None or self._sync._loop is not self._loop:
            over = "was iterated already" if self._turns is not None else "is over"
            raise ConfigurationError(
                f"step {self.number} {over}: a step is iterated once, before the next is asked for"
            )
        turns = self._compute()
        self._turns = ref(turns)
        return turns

    def _compute(self) -> Generator[Any, None, None]:
        sync = self._sync
        sync._refuse_broken()
        audit = sync._audit
        while True:
            yield from self._each(sync._begin_audits(), again=True)
            yield from self._each(leaves := sync.local_leaves)
            if not leaves:
                sync._take_part()
            if audit is not None and audit.disputed is not None:
                yield from self._each(audit.again, again=True)
                sync._judge(audit)
            if not sync._begins_again():
                return

    def _each(self, leaves: Iterable[int], again: bool = False) -> Generator[Any, None, None]:
        """Compute these leaves, unless a rank is lost; `again` if they are others'."""
        sync = self._sync
        read = self._batches.read_again if again else self._batches.read
        for leaf in leaves:
            if sync._has_lost:
                return
            try:
                batch = read(leaf)
            except BaseException as error:
                sync._break(f"the batch of leaf {leaf} of step {self.number}:", error, leaf)
                raise
            with sync._turn(leaf, again):
                self.leaf, self._again = leaf, again
                try:
                    yield batch
                finally:
                    self.leaf = None

    def count(self, count: int) -> None:
        """Say what this leaf's loss is a sum over, before its backward.

        It is the count of `pycollective.torch.LeafSync.leaf`.

        Raises:
            ConfigurationError: there is no leaf under way, its count comes twice or after its
                backward, or other leaves of the step have none.
        """
        leaf = self._open("count")
        if not self._again:
            self._sync._count(leaf, count)

    def log(self, **values: Any) -> None:
        """Have the mean of each of these over all leaves in `logged`, once the step is complete.

        All leaves of a step log the same names. Where leaves have a `count`, it is the sum of the
        values over the sum of the counts, as gradients are divided: log sums then.

        Args:
            values: numbers of this leaf, or tensors of one element. They are read at once.

        Raises:
            ConfigurationError: there is no leaf under way, it has logged a name already, or a value
                is no number.
        """
        leaf = self._open("log")
        if not self._again:
            self._log.add(leaf, values)

    @property
    def logged(self) -> dict[str, float]:
        """The means of what was logged, in fp64, with the same bits on any number of ranks.

        On a GPU the host waits for the step, and for what all ranks have told of it.

        Raises:
            ConfigurationError: the step is not complete.
            CollectiveMismatch: leaves have logged other names.
        """
        if self._logged is None:
            if self._means is None:
                raise ConfigurationError(
                    f"step {self.number} is not complete: read `logged` after the loop over its "
                    "leaves"
                )
            try:
                self._logged = self._means()
            except CollectiveError as error:
                self._sync._break(f"what step {self.number} has logged:", error)
                raise
        return self._logged

    def exchange(self, transport: Transport, words: StepWords) -> None:
        """Exchange what ranks tell each other of a step's leaves, behind its averages.

        Args:
            transport: of the ranks.
            words: of the step.
        """
        log = self._log
        texts = transport.tell(log.text)

        def means() -> dict[str, float]:  # does not hold this step, and so the loader's workers
            transport.settle()
            return log.means(texts(), words.leaves, words.divisor)

        self._means = means
        if transport.waits:
            try:
                self._logged = means()
            except CollectiveMismatch:
                let_all_hear(transport.all_gather)
                raise

    def take(self, logged: dict[str, float]) -> None:
        """Have what another rank has from `exchange`."""
        self._logged = logged

    def begin_anew(self) -> None:
        """Forget what leaves have logged, unless it was exchanged."""
        self._log = Log(self.number)

    def complete(self) -> None:
        """Be over, as the averages are handed out."""
        self._loop = None

    def end(self) -> None:
        """End the leaf that is under way, if there is one."""
        self._loop = None
        if self._turns is not None and (turns := self._turns()) is not None:
            turns.close()

    def _open(self, what: str) -> int:
        """The number of the leaf that is under way."""
        if self.leaf is None:
            raise ConfigurationError(
                f"step.{what}() outside a leaf of step {self.number}: call it in the loop over its "
                "batches"
            )
        return self.leaf


class _Batches:
    """Reads a loader, and sees that a batch is that of the leaf whose turn it is."""

    def __init__(self, sync: Sync, loader: Iterable[Any], sampler: LeafSampler) -> None:
        self._sync, self._loader, self._sampler = sync, loader, sampler
        self._batches: Iterator[Any] | None = None
        self._ahead = 0  # batches that are drawn before they are read

    def read_again(self, leaf: int) -> Any:
        """Return the batch of another rank's leaf of the step that is under way."""
        return self._sampler.read(self._loader, self._sync.step, leaf)

    def end(self) -> None:
        """Let go of the loader's iterator, and so of its workers."""
        self._batches = None

    def read(self, leaf: int) -> Any:
        """Return the batch of this leaf of the step that is under way."""
        if first := self._batches is None:
            self._drawn = self._sampler.note_next()
            self._iteration = self._sampler.iterations + 1
            self._batches = iter(self._loader)
        wanted = f"leaf {leaf} of step {self._sync.step}"
        try:
            batch = next(self._batches)
        except StopIteration:
            raise ConfigurationError(
                f"the loader ended before {wanted}: a LeafSampler has no end, so what wraps the "
                "DataLoader must have none"
            ) from None
        # A loader that keeps its workers has one iterator for all, which begins anew.
        if self._sampler.iterations != self._iteration or not self._drawn:
            raise ConfigurationError(
                f"the loader's batch is not known to be of {wanted}: something else iterates the "
                "loader or its LeafSampler; make both anew for sync.steps"
            )
        if (drawn := self._drawn.popleft()) != (self._sync.step, leaf):
            raise ConfigurationError(
                f"the loader's batch is of leaf {drawn[1]} of step {drawn[0]}, and not of "
                f"{wanted}: after load_state_dict begin sync.steps anew"
            )
        if first:
            self._ahead = len(self._drawn)
        if len(self._drawn) != self._ahead:  # as many are drawn as are read
            raise ConfigurationError(
                f"the loader's batch is not known to be of {wanted}: batches were drawn that have "
                "not come; what wraps the DataLoader must not drop any, nor hand any to others"
            )
        return batch


def draws_ahead(loader: Any) -> int:
    """Return how many batches a DataLoader draws before they are asked for, at most."""
    return getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0)


def sampler_of(loader: Any, sync: Sync) -> LeafSampler:
    """Return the LeafSampler of a loader.

    Raises:
        ConfigurationError: it has none of this LeafSync, or does not hand batches out in its order.
    """
    kind = type(loader).__name__
    make = "DataLoader(dataset, batch_sampler=LeafSampler(sync, len(dataset), micro_batch=...))"
    refuse_iterable(getattr(loader, "dataset", None))
    if isinstance(loader, Iterator):
        raise ConfigurationError(
            f"steps takes a loader that it iterates itself, and {kind} is an iterator: give it the "
            "loader"
        )
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, LeafSampler):
        has = f"of this {kind} is {type(sampler).__name__}" if sampler else f"lacks in this {kind}"
        raise ConfigurationError(
            f"steps: the batch_sampler {has}, and must be a LeafSampler: {make} (what wraps "
            "loaders must keep it, as Fabric does with use_distributed_sampler=False)"
        )
    if sampler.sync is not sync:
        raise ConfigurationError(
            f"steps: the loader's LeafSampler is of another LeafSync: {make} of this one"
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise ConfigurationError(
            f"steps: this {kind} has in_order=False, so batches come in any order: leave it out"
        )
    return sampler
