"""Trainings whose final weights are compared between ways to average the same gradients.

A program too, for ranks that mpiexec starts: python tests/torch/trainings.py TASK STEPS
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

import pycollective as pc
from benchmarks.convergence_train import DigitsLearner, Method, Run, Task, TextLearner

# Of scikit-learn's digits, by a network of 226,570 parameters; of Python's sources, by a GPT.
TASKS = {
    "digits": Task("digits", (0, 0, 0, 0), 0, 8, 0, 0, "sgd", 0.05, 0, 0),
    "gpt": Task("text", (48, 2, 2, 32), 0, 4, 32, 0, "sgd", 0.05, 0, 1),
}


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
    run = Run(TASKS[name], Method("", "dense", {}), 1)
    learner = DigitsLearner(run) if name == "digits" else TextLearner(run)
    replica = replicate(learner.model)
    optimizer = torch.optim.SGD(learner.model.parameters(), run.task.rate, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        learner.loss(replica, rank, ranks).backward()
        average(learner.model)
        optimizer.step()
    weights = b"".join(each.detach().numpy().tobytes() for each in learner.model.parameters())
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
