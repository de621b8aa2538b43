"""What one rank of `convergence.py` runs: trainings under DDP, one after another.

A run's seed decides the initial weights and the batches, so all methods of a seed start alike and
see the same data. The held-out data is the same for all.

Usage, by two ranks: python -m benchmarks.convergence_train FILE RUN... (runs as JSON)

No `from __future__ import annotations` here: DDP compares a hook's annotations with the types
themselves.
"""

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from benchmarks.digits import Digits, Network
from benchmarks.gradients import Gpt, Size, batch_of, corpus, loss_of
from pycollective import torch as pct

HELD_OUT = 10  # one part in so many of the text
EVALUATION_SEED = 4711


@dataclass(frozen=True)
class Task:
    """What is trained, and how.

    Attributes:
        data: "digits" or "text".
        size: of the GPT: width, heads, layers, context.
        steps: optimizer steps.
        rows: images or texts a rank and step.
        length: bytes of a text.
        dense_steps: the first steps, which every method averages densely.
        optimizer: "sgd" (momentum 0.9) or "adamw"; of the latter all methods but "dense" hold the
            second moment when the dense steps are over (`pycollective.torch.hold_second_moment`).
        rate: the learning rate at its highest: it rises over a twentieth of the steps, and falls
            as a cosine to a twentieth.
        evaluations: how often the held-out loss is taken.
        evaluated: texts for each.
    """

    data: str
    size: tuple[int, int, int, int]
    steps: int
    rows: int
    length: int
    dense_steps: int
    optimizer: str
    rate: float
    evaluations: int
    evaluated: int


@dataclass(frozen=True)
class Method:
    """How gradients are averaged.

    Attributes:
        name: for people.
        codec: "dense", "dense_held" (dense, Adam's second moment held as for the compressed),
            "one_bit", "int8", "top_k" or "power_sgd".
        options: of the codec's state.
        feedback: without it what is held is dropped after each step.
    """

    name: str
    codec: str
    options: dict[str, Any]
    feedback: bool = True


@dataclass(frozen=True)
class Run:
    """One training."""

    task: Task
    method: Method
    seed: int

    @classmethod
    def from_json(cls, text: str) -> "Run":
        """The inverse of `to_json`."""
        of = json.loads(text)
        of["task"]["size"] = tuple(of["task"]["size"])
        return cls(Task(**of["task"]), Method(**of["method"]), of["seed"])

    def to_json(self) -> str:
        """One line, the same for the same run."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


class DigitsLearner:
    """The demo's network on scikit-learn's digits."""

    def __init__(self, run: Run) -> None:
        self.model: nn.Module = Network()
        self._digits = Digits.load()
        self._random = np.random.default_rng(run.seed)
        self._rows = run.task.rows
        self._order = np.empty(0, np.int64)

    def loss(self, replica: nn.Module, rank: int, ranks: int) -> Tensor:
        """Of this rank's part of the next batch: every epoch in a new order."""
        if self._order.size < self._rows * ranks:
            self._order = self._random.permutation(len(self._digits.train_labels))
        chosen = torch.from_numpy(self._order[rank * self._rows : (rank + 1) * self._rows])
        self._order = self._order[self._rows * ranks :]
        images, labels = self._digits.train_images[chosen], self._digits.train_labels[chosen]
        return F.cross_entropy(replica(images), labels)

    def held_out(self, rank: int, ranks: int) -> float:
        """This rank's part of the held-out loss: its images', over all."""
        images, labels = (
            self._digits.test_images[rank::ranks],
            self._digits.test_labels[rank::ranks],
        )
        total = F.cross_entropy(self.model(images), labels, reduction="sum").item()
        return total / len(self._digits.test_labels)


class TextLearner:
    """The byte-level GPT on the standard library's sources, the last tenth held out."""

    def __init__(self, run: Run) -> None:
        task = run.task
        self.model: nn.Module = Gpt(Size(*task.size))
        text = corpus()
        border = len(text) - len(text) // HELD_OUT
        self._text = text[:border]
        self._random = np.random.default_rng(run.seed)
        self._rows, self._length = task.rows, task.length
        fixed = np.random.default_rng(EVALUATION_SEED)
        self._held_out = batch_of(text[border:], fixed, task.evaluated, task.length)

    def loss(self, replica: nn.Module, rank: int, ranks: int) -> Tensor:
        """Of this rank's part of the next batch."""
        batch = batch_of(self._text, self._random, ranks * self._rows, self._length)
        return loss_of(replica, batch[rank * self._rows : (rank + 1) * self._rows])

    def held_out(self, rank: int, ranks: int) -> float:
        """This rank's part of the held-out loss."""
        mine = self._held_out[rank::ranks]
        return loss_of(self.model, mine).item() * len(mine) / len(self._held_out)


def listen(replica: DistributedDataParallel, method: Method, dense_steps: int) -> Any:
    """Register the method's hook; its state, None if it has none."""
    codec, options = method.codec, method.options
    if codec in ("dense", "dense_held"):
        replica.register_comm_hook(None, pct.all_reduce_hook)
        return None
    if codec == "power_sgd":
        state: Any = power_sgd.PowerSGDState(
            None, start_powerSGD_iter=max(2, dense_steps), random_seed=0, **options
        )
        replica.register_comm_hook(state, pct.in_order(power_sgd.powerSGD_hook))
        return state
    make, hook = {
        "one_bit": (pct.OneBitState, pct.one_bit_hook),
        "int8": (pct.Int8State, pct.int8_hook),
        "top_k": (pct.TopKState, pct.top_k_hook),
    }[codec]
    state = make(replica, dense_steps=dense_steps, **options)
    replica.register_comm_hook(state, hook)
    return state


def bytes_of(state: Any, run: Run, numel: int, ranks: int) -> dict[str, Any]:
    """What the gradients were, and what went for them: counted (PowerSGD's by its own report)."""
    if state is None:
        return {"payload_ratio": 1.0}
    if run.method.codec == "power_sgd":
        return {"payload_ratio": state.compression_stats()[0]}
    stats = state.stats()
    if stats["compressed_calls"] == 0 or stats["steps"] != run.task.steps:
        raise AssertionError(f"not all went compressed: {stats}")
    kept = ("steps", "compressed_calls", "payload_bytes", "dense_bytes", "residual_bytes")
    return {name: stats[name] for name in kept} | {
        "payload_ratio": stats["dense_bytes"] / stats["payload_bytes"]
    }


def optimizer_of(
    task: Task, model: nn.Module
) -> tuple[torch.optim.Optimizer, Callable[[int], float]]:
    """The optimizer, and its learning rate by step."""
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if task.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, task.rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(parameters, task.rate)

    def rate(step: int) -> float:
        rising = min(1.0, (step + 1) / max(1, task.steps // 20))
        falling = 0.525 + 0.475 * math.cos(math.pi * step / task.steps)
        return task.rate * rising * falling

    return optimizer, rate


def train(run: Run) -> dict[str, Any]:
    """One training in the process group there is."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = run.task
    torch.manual_seed(run.seed)
    learner = DigitsLearner(run) if task.data == "digits" else TextLearner(run)
    replica = DistributedDataParallel(learner.model)
    state = listen(replica, run.method, task.dense_steps)
    optimizer, rate = optimizer_of(task, learner.model)
    holds = task.optimizer == "adamw" and run.method.codec != "dense"

    def mean(number: float) -> float:
        tensor = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.item()

    def held_out() -> float:
        with torch.no_grad():
            return mean(learner.held_out(rank, ranks))

    curve = [(0, held_out())]
    losses = []
    started = time.perf_counter()
    for step in range(task.steps):
        loss = learner.loss(replica, rank, ranks)
        loss.backward()
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == task.dense_steps and holds:
            pct.hold_second_moment(optimizer)
        if not run.method.feedback and run.method.codec != "power_sgd":
            state.reset()
        if (step + 1) * task.evaluations // task.steps > step * task.evaluations // task.steps:
            curve.append((step + 1, held_out()))
    seconds = time.perf_counter() - started
    weights = b"".join(each.detach().numpy().tobytes() for each in learner.model.parameters())
    digests: list[Any] = [None] * ranks
    dist.all_gather_object(digests, hashlib.sha256(weights).hexdigest())
    if len(set(digests)) != 1:
        raise AssertionError(f"{run.method.name}: the ranks' weights differ")
    numel = sum(each.numel() for each in learner.model.parameters())
    return {
        "run": json.loads(run.to_json()),
        "curve": curve,
        "train": [mean(loss) / ranks for loss in losses],
        "seconds": seconds,
        "parameters": numel,
        "digest": digests[0],
        **bytes_of(state, run, numel, ranks),
    }


def main() -> None:
    """Every run in a process group of its own; rank 0 adds a line for each to the file."""
    torch.set_num_threads(1)
    file, *runs = sys.argv[1:]
    for run in map(Run.from_json, runs):
        dist.init_process_group("pycollective")
        result = train(run)
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank == 0:
            # One write: several launches may add to the file.
            with Path(file).open("ab", buffering=0) as out:
                out.write(json.dumps(result).encode() + b"\n")
            last = result["curve"][-1][1]
            print(f"{run.method.name}, seed {run.seed}: {last:.4f}", flush=True)


if __name__ == "__main__":
    main()
