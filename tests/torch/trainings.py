"""Trainings whose final weights are compared between ways to average the same gradients.

A program too, for ranks that mpiexec starts: python tests/torch/trainings.py TASK STEPS
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pycollective as pc
from benchmarks.digits import Digits, Network
from benchmarks.gradients import Gpt, Size, batch_of, corpus, loss_of

# A model, and the loss of its replica on this rank's part of the next batch.
Learner = tuple[nn.Module, Callable[[nn.Module, int, int], Tensor]]


def digits() -> Learner:
    """Scikit-learn's digits, by a network of 226,570 parameters; every epoch in a new order."""
    data, random, order = Digits.load(), np.random.default_rng(1), np.empty(0, np.int64)
    rows = 8

    def loss(replica: nn.Module, rank: int, ranks: int) -> Tensor:
        nonlocal order
        if order.size < rows * ranks:
            order = random.permutation(len(data.train_labels))
        chosen = torch.from_numpy(order[rank * rows : (rank + 1) * rows])
        order = order[rows * ranks :]
        return F.cross_entropy(replica(data.train_images[chosen]), data.train_labels[chosen])

    return Network(), loss


def gpt() -> Learner:
    """Python's sources, by a byte-level GPT."""
    text, random = corpus(), np.random.default_rng(1)
    text = text[: len(text) - len(text) // 10]
    rows, length = 4, 32

    def loss(replica: nn.Module, rank: int, ranks: int) -> Tensor:
        batch = batch_of(text, random, ranks * rows, length)
        return loss_of(replica, batch[rank * rows : (rank + 1) * rows])

    return Gpt(Size(48, 2, 2, length)), loss


TASKS = {"digits": digits, "gpt": gpt}


def digest(
    name: str,
    steps: int,
    rank: int,
    ranks: int,
    replicate: Callable[[torch.nn.Module], torch.nn.Module],
    average: Callable[[torch.nn.Module], None] = lambda _: None,
) -> str:
    """Of the final weights.

    Args:
        name: of the task.
        steps: of the optimizer.
        rank: this one.
        ranks: how many take part.
        replicate: makes what runs the model; all ranks have the same one.
        average: averages the gradients, unless what runs the model does.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, loss = TASKS[name]()
    replica = replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(replica, rank, ranks).backward()
        average(model)
        optimizer.step()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def under_ddp(hook, group, **options) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Make a model's replica whose hook averages over the group; None for DDP's own way."""

    def replicate(model: torch.nn.Module) -> torch.nn.Module:
        replica = DistributedDataParallel(model, process_group=group, **options)
        if hook is not None:
            replica.register_comm_hook(group, hook)
        return replica

    return replicate


def by_communicator(communicator: pc.Communicator) -> Callable[[torch.nn.Module], None]:
    """Average a model's gradients with no process group at all."""

    def average(model: torch.nn.Module) -> None:
        for each in model.parameters():
            communicator.all_reduce(each.grad.numpy(), op="avg")

    return average


def main() -> None:
    name, steps = sys.argv[1], int(sys.argv[2])
    with pc.init(timeout=60) as comm:
        found = digest(
            name, steps, comm.rank, comm.size, lambda model: model, by_communicator(comm)
        )
        sys.stdout.write(f"RANK {found}\n")


if __name__ == "__main__":
    main()
