"""Do trainings end with the same weights, bit for bit, on any number of ranks?

Two trainings by `pycollective.torch.LeafSync`: a convolutional network on scikit-learn's digits,
and a byte-level GPT of 1.3 M parameters with dropout on the standard library's sources. `RUNS` has
24 launches, in which every two settings of two columns occur together: the leaves of a step, the
ranks, one host or two (simulated), what carries bytes and starts ranks (torch and Gloo with
DistributedDataParallel, or mpiexec with the module alone), and what the numbers are:

- `fp32`;
- `bf16`: weights and gradients in bfloat16, their average and the optimizer's weights in fp32;
- `autocast`: bfloat16 where torch's autocast says so, fp32 weights, and a GradScaler; one leaf of
  the second step overflows, so all ranks skip that step.

Then all of them again over a plain Gloo group, whose gradients ordered calls add up. Each pair of
leaves and numbers must have one digest of the final weights. Beside it the same by torch's own
means, DistributedDataParallel over Gloo with `no_sync` for all but the last leaf.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.digits import Digits, Network
from benchmarks.driver import Benchmark, Record, Run
from benchmarks.gradients import Gpt, Size, corpus

SEED = 0
NUMBERS = ("fp32", "bf16", "autocast")
TASKS = ("digits", "gpt")
STEPS = {"digits": 12, "gpt": 5}
SPOILT = (1, 2)  # step and leaf whose gradients overflow under autocast
_LENGTH = 64  # bytes of a text


@dataclass(frozen=True)
class Launch:
    """Where and how both trainings run.

    Attributes:
        leaves: of a step.
        ranks: of all hosts.
        hosts: 1, or 2 that are simulated.
        carrier: "gloo" or "mpi", or "ordered": a plain Gloo group.
        numbers: one of `NUMBERS`.
    """

    leaves: int
    ranks: int
    hosts: int
    carrier: str
    numbers: str

    @property
    def topology(self) -> str:
        """As PYCOLLECTIVE_TOPOLOGY has it."""
        first = (self.ranks + 1) // 2
        return f"{first},{self.ranks - first}" if self.hosts == 2 else ""


RUNS = [
    Launch(*each)
    for each in (
        *((12, 1, 1, "gloo", "autocast"), (12, 1, 1, "gloo", "bf16"), (12, 2, 2, "mpi", "fp32")),
        *((12, 3, 1, "mpi", "fp32"), (12, 4, 1, "gloo", "fp32"), (12, 5, 2, "mpi", "bf16")),
        *((12, 6, 2, "gloo", "bf16"), (12, 8, 2, "gloo", "autocast"), (16, 1, 1, "gloo", "fp32")),
        *((16, 2, 1, "gloo", "bf16"), (16, 3, 2, "gloo", "bf16"), (16, 4, 2, "mpi", "autocast")),
        *((16, 5, 1, "mpi", "autocast"), (16, 6, 1, "mpi", "autocast"), (16, 8, 2, "gloo", "fp32")),
        *((24, 1, 1, "mpi", "autocast"), (24, 2, 1, "gloo", "fp32"), (24, 2, 1, "mpi", "autocast")),
        *((24, 3, 1, "mpi", "autocast"), (24, 4, 2, "gloo", "bf16"), (24, 5, 1, "gloo", "fp32")),
        *((24, 5, 1, "mpi", "bf16"), (24, 6, 2, "gloo", "fp32"), (24, 8, 1, "mpi", "bf16")),
    )
]
ORDERED = [replace(each, carrier="ordered") for each in RUNS]
GLOO_RANKS = (1, 2, 3, 4, 5, 6, 8)  # of torch's own
GLOO_LEAVES = 24


class Half(nn.Module):
    """A module with weights in bfloat16 that computes in fp32; not every CPU has fast bfloat16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """What the module makes of `x`."""
        weights = {name: each.float() for name, each in self.module.named_parameters()}
        return torch.func.functional_call(self.module, weights, x)


@dataclass(frozen=True)
class Data:
    """What a task learns from.

    Attributes:
        samples: how many.
        micro_batch: samples of a leaf.
        batch: inputs and targets of some samples.
        rate: of learning.
        test: inputs and targets that it is not trained on, if there are any.
    """

    samples: int
    micro_batch: int
    batch: Callable[[list[int]], tuple[Tensor, Tensor]]
    rate: float
    test: tuple[Tensor, Tensor] | None = None


@lru_cache
def data_of(task: str) -> Data:
    """Of a task; read once."""
    if task == "digits":
        digits = Digits.load()
        images, labels = digits.train_images, digits.train_labels
        test = digits.test_images, digits.test_labels
        return Data(len(labels), 8, lambda chosen: (images[chosen], labels[chosen]), 3e-3, test)
    text = torch.from_numpy(corpus().copy())

    def batch(chosen: list[int]) -> tuple[Tensor, Tensor]:
        starts = [each * _LENGTH for each in chosen]
        rows = torch.stack([text[start : start + _LENGTH + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    return Data((len(text) - 1) // _LENGTH, 2, batch, 1e-3)


class Trainer:
    """A model, the fp32 weights that the optimizer works on, and its leaves' losses."""

    def __init__(self, task: str, numbers: str) -> None:
        torch.manual_seed(SEED)
        self.data = data_of(task)
        self.numbers = numbers
        self.model = _network(task)
        self.masters = list(self.model.parameters())
        if numbers == "bf16":
            self.masters = [nn.Parameter(each.detach().clone()) for each in self.masters]
            self.model = Half(self.model)
        self.optimizer = torch.optim.Adam(self.masters, self.data.rate)
        self.scaler = torch.amp.GradScaler("cpu", enabled=numbers == "autocast")
        self.skipped = 0

    def backward(
        self, replica: nn.Module, batch: tuple[Tensor, Tensor], spoilt: bool, part: float
    ) -> float:
        """A leaf's, of this part of its loss, which is returned; spoilt, gradients overflow."""
        inputs, targets = batch
        autocast = torch.autocast("cpu", torch.bfloat16) if self.numbers == "autocast" else None
        with autocast or nullcontext():
            logits = replica(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
        self.scaler.scale(loss * part * (1e38 if spoilt else 1)).backward()
        return loss.item()

    def step(self) -> None:
        """Of the optimizer, with the gradients' norm cut to 1."""
        parameters = list(self.model.parameters())
        if self.numbers == "bf16":
            for master, each in zip(self.masters, parameters, strict=True):
                master.grad = each.grad.float() if each.grad is not None else None
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        with torch.no_grad():
            for master, each in zip(self.masters, parameters, strict=True):
                each.copy_(master)

    def digest(self) -> str:
        """SHA-256 of the weights' bytes."""
        weights = hashlib.sha256()
        for each in self.masters:
            weights.update(each.detach().numpy().tobytes())
        return weights.hexdigest()

    def test_loss(self) -> float | None:
        """Of the data that it was not trained on, in float64."""
        if self.data.test is None:
            return None
        inputs, targets = self.data.test
        with torch.no_grad():
            logits = self.model(inputs)
        return F.cross_entropy(logits.double(), targets).item()

    def result(self, last: float) -> Result:
        """What came of it; `last` is the last leaf's loss."""
        return Result(self.digest(), last, self.skipped, self.test_loss())


def _network(task: str) -> nn.Module:
    return Network() if task == "digits" else Gpt(Size(dropout=0.1))


@dataclass(frozen=True)
class Result:
    """What came of a training on this rank.

    Attributes:
        digest: SHA-256 of the final weights' bytes.
        loss: of the last leaf here; 0 without one.
        skipped: steps, by the GradScaler.
        test_loss: of the final weights; None where the task has no test data.
    """

    digest: str
    loss: float
    skipped: int
    test_loss: float | None


def train(
    task: str, numbers: str, leaves: int, steps: int, group: Any = None, ddp: bool = False
) -> Result:
    """By LeafSync, over `group` as it takes it."""
    from torch.nn.parallel import DistributedDataParallel

    from pycollective.torch import LeafSampler, LeafSync

    trainer = Trainer(task, numbers)
    data = trainer.data
    replica: nn.Module = trainer.model
    if ddp:
        replica = DistributedDataParallel(replica, process_group=group, bucket_cap_mb=1)
    wanted = torch.float32 if numbers == "bf16" else None
    sync = LeafSync(replica, leaves, seed=SEED, grad_dtype=wanted, bucket_cap_mb=1, group=group)
    sampler = LeafSampler(sync, data.samples, data.micro_batch)
    loader: Any = DataLoader(range(data.samples), batch_sampler=sampler, collate_fn=data.batch)
    last = 0.0
    for step in sync.steps(loader, until=steps):
        for batch in step:
            spoilt = numbers == "autocast" and (step.number, step.leaf) == SPOILT
            last = trainer.backward(replica, batch, spoilt, 1)
        trainer.step()
    sync.close()
    return trainer.result(last)


def train_by_ddp(
    task: str,
    numbers: str,
    leaves: int,
    steps: int,
    group: Any,
    bucket_cap_mb: float = 1,
    hook: Any = None,
) -> Result:
    """By torch's own DistributedDataParallel and `no_sync`, with the same samples and draws."""
    from torch.nn.parallel import DistributedDataParallel

    from pycollective import leaves_of
    from pycollective.torch import LeafSampler
    from pycollective.torch.leaves.generators import seed_of, seeded

    trainer = Trainer(task, numbers)
    data = trainer.data
    replica = DistributedDataParallel(
        trainer.model, process_group=group, bucket_cap_mb=bucket_cap_mb
    )
    if hook is not None:
        replica.register_comm_hook(group, hook)
    ranks = group.size()
    mine = leaves_of(group.rank(), ranks, leaves)
    as_sync: Any = SimpleNamespace(leaves=leaves, leaves_at=lambda step: mine, seed=SEED, step=0)
    batches = iter(LeafSampler(as_sync, data.samples, data.micro_batch))
    for step in range(steps):
        trainer.model.zero_grad()
        for leaf in mine:
            quiet = replica.no_sync() if leaf != mine[-1] else nullcontext()
            with quiet, seeded(seed_of(SEED, step, leaf)):
                # DDP divides by the ranks.
                batch = data.batch(next(batches))
                last = trainer.backward(replica, batch, False, ranks / leaves)
        trainer.step()
    return trainer.result(last)


def on_a_rank(run: Run) -> Record | None:
    """Both trainings of a launch."""
    import numpy as np
    import torch.distributed as dist

    import pycollective as pc
    import pycollective.torch

    torch.set_num_threads(1)
    launch = Launch(**json.loads(run.options["launch"]))
    comm = pc.init(timeout=100)
    by_torch = launch.carrier != "mpi"
    group: Any = None if by_torch else comm
    if by_torch:
        dist.init_process_group("pycollective")
    if launch.carrier == "ordered" or run.options["own"] == "no":
        group = dist.new_group(backend="gloo")
    found: Record = {}
    for task in TASKS:
        what = (task, launch.numbers, launch.leaves, STEPS[task])
        if run.options["own"] == "yes":
            result = train(*what, group=group, ddp=by_torch)
        else:
            result = train_by_ddp(*what, group)
        digests = np.empty((comm.size, 32), np.uint8)
        comm.all_gather(digests, np.frombuffer(bytes.fromhex(result.digest), np.uint8))
        found[task] = {
            **asdict(result),
            "digests": sorted({row.tobytes().hex() for row in digests}),
        }
    if by_torch:
        dist.destroy_process_group()
    comm.close()
    return found if comm.rank == 0 else None


def launched(run: Run, launch: Launch, own: bool) -> Record:
    """The results of a launch, by task."""
    options = {"launch": json.dumps(asdict(launch)), "own": "yes" if own else "no"}
    if launch.carrier != "mpi":
        found: Record = run.ranks_here(launch.ranks, launch.topology, **options)
    else:
        found = run.ranks_under("mpich", launch.ranks, launch.topology, **options)
    return {**asdict(launch), **found}


def digests_of(rows: list[Record]) -> dict[str, list[str]]:
    """The digests of all ranks, for each task, leaves and numbers."""
    found: dict[str, set[str]] = {}
    for row, task in itertools.product(rows, TASKS):
        key = f"{task}, {row['leaves']} leaves, {row['numbers']}"
        found.setdefault(key, set()).update(row[task]["digests"])
    return {key: sorted(digests) for key, digests in sorted(found.items())}


def measure(run: Run) -> Record:
    """All launches; ours, then torch's own."""
    rows: list[Record] = []
    for launch in (*RUNS, *ORDERED):
        rows.append(launched(run, launch, own=True))
        said = ", ".join(f"{task} {rows[-1][task]['digest'][:16]}" for task in TASKS)
        print(f"{len(rows):2}/{len(RUNS + ORDERED)} {launch}: {said}", flush=True)
    ours = digests_of(rows)
    gloo = [
        launched(run, Launch(GLOO_LEAVES, ranks, 1, "gloo", "fp32"), own=False)
        for ranks in GLOO_RANKS
    ]
    theirs = digests_of(gloo)
    for key, digests in ours.items():
        print(f"{key}: {len(digests)} digest{'s' * (len(digests) > 1)}")
    for key, digests in theirs.items():
        print(
            f"torch over Gloo, {key}: {len(digests)} digests of {len(GLOO_RANKS)} counts of ranks"
        )
    return {
        "steps": STEPS,
        "launches": rows,
        "digests": ours,
        "wrong": sum(len(digests) - 1 for digests in ours.values()),
        "gloo_launches": gloo,
        "gloo_digests": theirs,
    }


if __name__ == "__main__":
    hidden = {"launch": "", "own": ""}
    Benchmark("leaf_training", __doc__, measure, on_a_rank, rounds=0, hidden=hidden).main()
