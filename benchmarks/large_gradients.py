"""Gradients of a 30 M-parameter GPT on two ranks: what compression between hosts is timed on.

A seeded model after a few AdamW steps on the standard library's sources; of the last step both
ranks' gradients are kept, in the order of `Gpt.named_parameters()`, fp32, in a file that is made on
first use and not committed.

Usage: python -m benchmarks.large_gradients
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gradients import Gpt, Size, batch_of, corpus, loss_of

CACHE = Path(__file__).resolve().parent.parent / "build" / "gradients_30m.npy"
SIZE = Size(width=528, heads=8, layers=9, context=128)
RANKS, STEPS, ROWS, LENGTH = 2, 8, 4, 64


def shapes() -> dict[str, tuple[int, ...]]:
    """Of the model's parameters, by name, in order."""
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in Gpt(SIZE).named_parameters()}


def make() -> NDArray[np.float32]:
    """The gradients (rank, element)."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    text = corpus()
    model = Gpt(SIZE)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, 3e-4)
    gradients = torch.empty(RANKS, sum(each.numel() for each in parameters))
    for step in range(STEPS):
        for row in gradients:
            loss = loss_of(model, batch_of(text, random, ROWS, LENGTH))
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)], out=row)
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
        mean = gradients.mean(0).split([each.numel() for each in parameters])
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
    return gradients.numpy()


def ensure() -> None:
    """Make the file if it is not there."""
    if not CACHE.exists():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        np.save(CACHE, make())


def load() -> NDArray[np.float32]:
    """What `make` made; without reading it into memory."""
    found: NDArray[np.float32] = np.load(CACHE, mmap_mode="r")
    return found


if __name__ == "__main__":
    ensure()
    print(load().shape)
