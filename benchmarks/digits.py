"""Scikit-learn's scanned digits, and a small network that learns them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

SEED = 0
_TEST_IMAGES = 360


class Network(nn.Module):
    """Three convolutions and two linear layers for 8 x 8 images: 226,570 parameters.

    Computes in fp32 whatever the dtype of its parameters, because not every CPU has fast bf16
    arithmetic. A bf16 parameter's gradient is rounded to bf16, and so it is what DDP sends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) to (batch, 10) logits, both fp32."""
        weights = {name: weight.float() for name, weight in self.layers.named_parameters()}
        return torch.func.functional_call(self.layers, weights, images)


@dataclass(frozen=True)
class Digits:
    """The data: scikit-learn's 1,797 scanned digits, split once and for all."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        """Read them from scikit-learn's own files (no download); fp32 pixels from 0 to 1."""
        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
        test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
        targets = torch.from_numpy(labels)
        return cls(images[train], targets[train], images[test], targets[test])

    def batch(self, step: int, rank: int, ranks: int, rows: int) -> tuple[Tensor, Tensor]:
        """This rank's `rows` images of the batch of `step`: every epoch in a new, fixed order."""
        size = rows * ranks
        epoch, index = divmod(step, len(self.train_labels) // size)
        generator = torch.Generator().manual_seed(SEED + 1 + epoch)
        order = torch.randperm(len(self.train_labels), generator=generator)
        start = index * size + rank * rows
        chosen = order[start : start + rows]
        return self.train_images[chosen], self.train_labels[chosen]
