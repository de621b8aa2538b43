"""Elastic trainings whose processes die, for tests: ranks as forks, and others in their places.

A `Fault` says at which call of the protocol a rank dies or hears of a death. It counts the calls by
which ranks tell each other something, the store's, and what a step does with gradients and state.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # which an optimizer imports, in each fork
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

import pycollective as pc
from pycollective import Communicator, PeerFailure
from pycollective.bootstrap import membership
from pycollective.bootstrap.membership import Membership
from pycollective.bootstrap.store import StoreClient, job_secret
from pycollective.leaves.accumulator import Accumulator
from pycollective.torch import LeafSampler, LeafSync
from pycollective.torch.leaves import elastic
from pycollective.torch.leaves.buckets import WholeBucket
from pycollective.torch.leaves.over_communicator import OverCommunicator
from pycollective.torch.leaves.state import State
from pycollective.torch.leaves.steps import Step
from tests.harness import Outcome, Ranks, _Rank

SAMPLES = 96

# --- Processes.


class Job(Ranks):
    """Ranks of an elastic job: whoever is killed gets another process in its place.

    Args:
        replace: so many of those that are killed.
        fewest: ranks that go on, as `pycollective run --min`.
    """

    def __init__(
        self, size: int, replace: int = 100, fewest: int = 1, timeout: float = 60, **variables: str
    ) -> None:
        variables = {"PYCOLLECTIVE_ELASTIC": str(fewest), **variables}
        super().__init__(size, timeout, {}, False, module=__name__, variables=variables)
        self.replace = replace

    def run(
        self, function: Callable[..., Any], first: Sequence[tuple], later: Sequence[tuple] = ()
    ) -> list[Outcome]:
        """How all processes ended; one that came too late to join is left out.

        Args:
            function: called as ``function(None, *arguments)``.
            first: arguments for each of the first ranks.
            later: for each that takes the place of another, in the order of deaths; then ``()``.
        """
        deadline = time.monotonic() + self.timeout
        later = [*later]
        self.variables["PYCOLLECTIVE_JOINS"] = "1"  # for those to come
        for each, arguments in zip(self._ranks, first, strict=True):
            each.pipe.send_bytes(pickle.dumps((function, arguments)))
        running = [*self._ranks]
        late: list[_Rank] = []
        while running:
            if all(each in late and not self._has_joined(each) for each in running):
                for each in running:
                    each.process.kill()
                break
            for each in self._answers(running, deadline):
                running.remove(each)
                if each.outcome.exit_code is not None and self.replace:
                    self.replace -= 1
                    made = self._start(each.outcome.rank)
                    arguments = later.pop(0) if later else ()
                    made.pipe.send_bytes(pickle.dumps((function, arguments)))
                    self._ranks.append(made)
                    late.append(made)
                    running.append(made)
        return [each.outcome for each in self._ranks if each not in running]

    def _has_joined(self, rank: _Rank) -> bool:
        return self._store.has(f"joined {rank.outcome.pid}")


# --- Faults.

# What a rank calls, in words of the protocol.
CALLS: list[tuple[Any, str]] = [
    *((Communicator, each) for each in ("all_gather", "all_reduce", "broadcast", "barrier")),
    *((Communicator, each) for each in ("send", "recv", "shrink", "grow", "abort")),
    *((StoreClient, each) for each in ("set", "get", "compare_set")),
    (Membership, "join"),
    (OverCommunicator, "finish"),
    (Accumulator, "add"),
    (WholeBucket, "hand_out"),
    (State, "gather"),
    (State, "load"),
    (torch.amp.GradScaler, "step"),
]
HEARS = ("all_gather", "all_reduce", "broadcast", "barrier", "send", "recv", "finish")


@dataclass(frozen=True)
class Fault:
    """What happens to a rank as it makes a call.

    Args:
        call: which; "" for any of `CALLS`.
        number: it is the n-th, from 1.
        does: "dies" as the call begins; or "hears", as it ends, of a death that there was not.
        after: calls count once this one has begun.
        again: also at each n-th after it.
    """

    call: str
    number: int
    does: str = "dies"
    after: str = ""
    again: bool = False


class Faults:
    """Those of this process, from here on.

    Attributes:
        calls: the names of all calls so far.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.calls: list[str] = []
        self._left = {fault: fault.number for fault in faults}
        self._called: set[str] = set()
        for owner, name in CALLS:
            setattr(owner, name, self._counting(name, getattr(owner, name)))

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            due = [each for each in [*self._left] if self._is_due(each, name)]
            self._called.add(name)
            if any(each.does == "dies" for each in due):
                os.kill(os.getpid(), signal.SIGKILL)
            value = original(*arguments, **options)
            if due and name in HEARS:
                raise PeerFailure("a rank has died, says the test")
            return value

        return call

    def _is_due(self, fault: Fault, name: str) -> bool:
        if fault.call not in ("", name) or (fault.after and fault.after not in self._called):
            return False
        if fault.does == "hears" and name not in HEARS:
            return False
        self._left[fault] -= 1
        if self._left[fault]:
            return False
        del self._left[fault]
        if fault.again:
            self._left[fault] = fault.number
        return True


# --- Trainings.


class Losses:
    """Part of a training's state: what each step has logged."""

    def __init__(self) -> None:
        self.each: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"each": [*self.each]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.each = [*state["each"]]


class Network(torch.nn.Module):
    """Drops out, and has a buffer that its training changes between steps."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1)
        )
        self.register_buffer("done", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) / (1 + self.done)


@dataclass(frozen=True)
class Training:
    """One that has the same bits on any ranks.

    Args:
        leaves: of a step.
        until: so many steps.
        counted: whether leaves have counts.
        cost: whether leaves have one, and ranks are measured.
        workers: of the loader, which stay if they are to.
        dtype: of the model.
        options: of LeafSync.
        ranks: so many there should be; while there are fewer, one waits for newcomers between
            steps.
        awaits: for so many of them at most.
        width: of the model.
        losses: a class like `Losses`.
        more: whether another object has a state.
        own: whether LeafSync calls `init`.
    """

    leaves: int = 4
    until: int = 6
    counted: bool = False
    cost: bool = False
    workers: int = 0
    persistent: bool = False
    dtype: torch.dtype = torch.float32
    options: tuple[tuple[str, Any], ...] = ()
    ranks: int = 3
    awaits: int = 100
    width: int = 8
    losses: type[Losses] = Losses
    more: bool = False
    own: bool = False

    def run(
        self,
        group: Communicator | None,
        between: Callable[[LeafSync, int], None] = lambda sync, step: None,
        began: Callable[[LeafSync], None] = lambda sync: None,
        made: Callable[[LeafSync], None] = lambda sync: None,
        in_leaf: Callable[[Step], None] = lambda step: None,
        ended: Callable[[LeafSync], None] = lambda sync: None,
        **options: Any,
    ) -> tuple[int, str]:
        """Train; return how many steps are done, and a digest of all that they have made.

        Args:
            group: of the ranks.
            between: called with the number of each step, once it is done.
            began: called once `steps` has returned.
            made: called before.
            in_leaf: called in each leaf.
            ended: called once the loop is over.
            options: of LeafSync, besides.
        """
        torch.set_num_threads(1)
        torch.manual_seed(0)
        x = torch.randn(SAMPLES, 6)
        torch.manual_seed(os.getpid() if "PYCOLLECTIVE_JOINS" in os.environ else 1)
        model = Network(self.width).to(self.dtype)
        sync = LeafSync(model, self.leaves, group=group, **dict(self.options), **options)
        kind = torch.optim.Adam if self.dtype == torch.float32 else torch.optim.SGD
        optimizer = kind(model.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        losses = self.losses()
        sync.state(optimizer=optimizer, scheduler=scheduler, scaler=scaler, losses=losses)
        loader = DataLoader(
            TensorDataset(x),
            batch_sampler=LeafSampler(sync, SAMPLES, 2),
            num_workers=self.workers,
            persistent_workers=self.persistent,
        )
        if self.more:
            sync.state(more=Losses())
        made(sync)
        more = {"cost": lambda samples: 1.0 + sum(samples), "measure_ranks": True}
        steps = sync.steps(loader, until=self.until, **(more if self.cost else {}))
        began(sync)
        for step in steps:
            scaler.scale(torch.zeros(1))  # also where there are no leaves
            for (rows,) in step:
                in_leaf(step)
                if self.counted:
                    step.count(step.leaf + 1)
                loss = model(rows.to(self.dtype)).square().sum()
                scaler.scale(loss).backward()
                step.log(loss=loss)
            scaler.unscale_(optimizer)
            sync.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            model.done += 0.1
            losses.each.append(step.logged["loss"])
            between(sync, step.number)
        ended(sync)
        found = sync.step, digest(model, optimizer, scheduler, scaler, losses)
        sync.close()
        return found


def digest(*objects: Any) -> str:
    """Of what their `state_dict` return."""
    whole = hashlib.sha256()
    for each in tree_flatten([each.state_dict() for each in objects])[0]:
        if isinstance(each, torch.Tensor):
            whole.update(each.detach().float().numpy().tobytes())
        else:
            whole.update(repr(each).encode())
    return whole.hexdigest()[:16]


@functools.cache
def undisturbed(training: Training) -> tuple[int, str]:
    """What it makes on one rank."""
    with pc.init(rank=0, size=1) as comm:
        return training.run(comm)


def train(
    _: None, training: Training, *faults: Fault, timeout: float = 20.0, **hooks: Any
) -> tuple[int, str, list[str]]:
    """What it makes on this rank, and the calls that it has made; `hooks` as `Training.run`."""
    elastic._LOOK_EVERY = 0.0
    membership._JOIN_WITHIN = 60.0  # who waits in vain for one that has died fails
    mine = Faults(faults) if "PYCOLLECTIVE_JOINS" in os.environ else None
    elastic.init = functools.partial(pc.init, timeout=timeout)
    group = None if training.own else elastic.init()
    store = StoreClient(os.environ["PYCOLLECTIVE_STORE"], job_secret(), timeout)
    after_step = hooks.pop("between", lambda sync, step: None)

    def began(sync: LeafSync) -> None:
        nonlocal mine
        store.set(f"joined {os.getpid()}", b"")
        mine = mine or Faults(faults)

    def between(sync: LeafSync, step: int) -> None:
        after_step(sync, step)
        deadline = time.monotonic() + timeout
        comm = sync.communicator
        while comm.size < training.ranks and step < training.until - 3:
            ranks = comm._membership
            if ranks.seen >= training.awaits or store.check([ranks.next_newcomer]):
                break
            assert time.monotonic() < deadline, "nobody comes"
            time.sleep(0.002)

    found = training.run(group, between, began, elastic=True, **hooks)
    return *found, mine.calls


def trained(
    training: Training,
    faults: dict[int, Sequence[Fault]],
    later: Sequence[Sequence[Fault]] = (),
    size: int = 3,
    **options: Any,
) -> list[Outcome]:
    """Run it on some ranks; the outcomes of all processes."""
    first = [(training, *faults.get(rank, ())) for rank in range(size)]
    with Job(size, **options) as job:
        return job.run(train, first, [(training, *each) for each in later] + 20 * [(training,)])
