"""What a rank of `elastic_kills.py` runs: a training that tells what it does, moment by moment.

Each moment is a line on a pipe: CLOCK_MONOTONIC in nanoseconds, the process, the moment, and more:
of BETWEEN the step that all ranks have now and its loss, of HELD the number of ranks and what this
process has open, of END a digest of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pycollective.communicator import Communicator
from pycollective.config import ENV_JOINS
from pycollective.torch import LeafSampler, LeafSync
from pycollective.torch.leaves.elastic import Elastic

LEAVES = 8
# What a process does from then on, until it tells another moment.
FORWARD, BACKWARD, EXCHANGE, BETWEEN = "forward", "backward", "exchange", "between"
SHRINKING, WAITING, JOINING, STATE = "shrinking", "waiting", "joining", "state"
HELD, END = "held", "end"  # no such moments
_PRIVATE: Any = LeafSync


class Quantized:
    """Gradients of 8 bits with error feedback: what a step loses the next one adds.

    `pycollective.compression` has such states between ranks. Here the average is cut, which all
    ranks have, so all have one residual, on any number of ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._residuals = [torch.zeros_like(each) for each in self._parameters]

    def cut(self) -> None:
        """Cut each parameter's gradient."""
        for parameter, residual in zip(self._parameters, self._residuals, strict=True):
            assert parameter.grad is not None
            wanted = parameter.grad + residual
            unit = wanted.abs().max().clamp(min=1e-20) / 127
            parameter.grad.copy_((wanted / unit).round() * unit)
            residual.copy_(wanted - parameter.grad)

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on."""
        return {"residuals": self._residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        for mine, its in zip(self._residuals, state["residuals"], strict=True):
            mine.copy_(its)


def main() -> None:
    """Train, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--data", type=Path, help="images and labels, by torch.save")
    parser.add_argument("--pipe", type=Path)
    parser.add_argument("--leaf-seconds", type=float, help="a backward sleeps so long")
    parser.add_argument("--compress", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipe = os.open(options.pipe, os.O_WRONLY)
    me = os.getpid()

    def tell(*words: object) -> None:
        os.write(pipe, f"{time.monotonic_ns()} {me} {' '.join(map(str, words))}\n".encode())

    _tell_when_called(_PRIVATE, "_end_step", lambda: tell(EXCHANGE))
    _tell_when_called(Elastic, "recover", lambda: tell(SHRINKING))
    _tell_when_called(Communicator, "grow", lambda: tell(JOINING))
    _tell_when_called(Elastic, "_admit", lambda: tell(STATE))
    train(options, tell)
    os.close(pipe)


def _tell_when_called(owner: Any, name: str, tell: Callable[[], None]) -> None:
    call = getattr(owner, name)

    def told(*args: Any, **options: Any) -> Any:
        tell()
        return call(*args, **options)

    setattr(owner, name, told)


def train(options: argparse.Namespace, tell: Callable[..., None]) -> None:
    """A small convolutional network with dropout on scikit-learn's digits."""
    torch.manual_seed(0)
    images, labels = torch.load(options.data)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    if ENV_JOINS in os.environ:
        tell(WAITING)
    sync = LeafSync(model, LEAVES, elastic=True)
    loader = DataLoader(
        TensorDataset(images, labels), batch_sampler=LeafSampler(sync, len(labels), 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.8)
    quantized = Quantized(model)
    sync.state(optimizer=optimizer, scheduler=scheduler, residual=quantized)

    def pause(gradient: torch.Tensor) -> None:
        time.sleep(options.leaf_seconds)

    ranks = None
    for step in sync.steps(loader, until=options.steps):
        for batch, targets in step:
            tell(FORWARD)
            logits = model(batch)
            logits.register_hook(pause)
            loss = F.cross_entropy(logits, targets)
            tell(BACKWARD)
            loss.backward()
            step.log(loss=loss)
        tell(BETWEEN, step.number, step.logged["loss"].hex())
        if ranks is not sync.communicator:
            ranks = sync.communicator
            tell(HELD, ranks.size, *held())
        if options.compress:
            quantized.cut()
        sync.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
    sync.close()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    tell(END, hashlib.sha256(weights.numpy().tobytes()).hexdigest())


def held() -> tuple[int, int, int]:
    """How many descriptors, mappings of memory that has no file, and threads this process has."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    shared = sum("/memfd:" in each or "/dev/shm" in each for each in mappings)
    return len(os.listdir("/proc/self/fd")), shared, len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    main()
