"""Real gradients: of a small byte-level GPT on the standard library's own sources.

Each step, 8 ranks' gradients of 8 different batches at the same weights, as data parallelism has
them; their mean makes the step. Everything is seeded. The gradients of some steps are kept in fp32
in a cache file, which is made on first use and not committed.

Usage: python -m benchmarks.gradients [--out FILE]
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "gradients.npy"

RANKS = 8
KEPT = (0, 20, 60)  # steps
BATCH = 4
VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Size:
    """Of a model. The default has 1.3 M parameters.

    Attributes:
        width: of a layer.
        heads: of attention; they divide the width.
        layers: how many.
        context: the longest text, bytes.
        dropout: the part of what a layer adds that training leaves out.
    """

    width: int = 160
    heads: int = 4
    layers: int = 4
    context: int = 128
    dropout: float = 0.0


DEFAULT = Size()


class Block(nn.Module):
    """A transformer's layer, normalised before each half."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, context, width) to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A byte-level language model."""

    def __init__(self, size: Size = DEFAULT) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of each next byte."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Mean nats a byte of each row's bytes, all but the first, given those before."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def batch_of(
    text: NDArray[np.uint8], random: np.random.Generator, rows: int, length: int
) -> Tensor:
    """Rows of `length` bytes and the next one, from random places."""
    starts = random.integers(0, len(text) - length - 1, rows)
    return torch.from_numpy(np.stack([text[s : s + length + 1] for s in starts])).long()


def corpus() -> NDArray[np.uint8]:
    """The standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def train(progress: bool = False) -> NDArray[np.float32]:
    """The gradients (step of `KEPT`, rank, parameter), all parameters flat in DDP's order."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    text = corpus()
    model = Gpt()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, 1e-3)
    kept = []
    for step in range(max(KEPT) + 1):
        gradients = []
        losses = []
        for _ in range(RANKS):
            loss = loss_of(model, batch_of(text, random, BATCH, DEFAULT.context))
            of_each = torch.autograd.grad(loss, parameters)
            gradients.append(torch.cat([each.flatten() for each in of_each]))
            losses.append(loss.item())
        if step in KEPT:
            kept.append(torch.stack(gradients).numpy())
        if progress and step % 10 == 0:
            print(f"step {step}: loss {np.mean(losses):.3f}", flush=True)
        mean = torch.stack(gradients).mean(0)
        sizes = [each.numel() for each in parameters]
        for parameter, gradient in zip(parameters, mean.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
    return np.stack(kept)


def load(path: Path = CACHE) -> NDArray[np.float32]:
    """`train()`'s gradients, out of the cache if it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, train(progress=True))
    return np.load(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the cache of gradients")
    parser.add_argument("--out", type=Path, default=CACHE)
    print(load(parser.parse_args().out).shape)
