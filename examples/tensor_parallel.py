"""Tensor parallel: each rank has half of each layer's columns or rows, for the same batch.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import pycollective.torch  # noqa: F401  (registers the backend)


class Network(torch.nn.Module):
    """A norm that every rank has whole, and two linear layers that are sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(64)
        self.wide = torch.nn.Linear(64, 256)
        self.narrow = torch.nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, 64) pixels to (batch, 10) logits."""
        return self.narrow(torch.relu(self.wide(self.norm(images))))


def train(model: torch.nn.Module, images: torch.Tensor, names: torch.Tensor) -> list[float]:
    """Train 100 steps; return the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(0)  # every rank takes the same batch
    losses = []
    for _ in range(100):
        chosen = torch.randint(len(images), (64,), generator=random)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[chosen]), names[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train on scikit-learn's digits, sharded and whole."""
    dist.init_process_group("pycollective")
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)

    model = Network()
    plan: dict[str, ParallelStyle] = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    losses = train(model, images, names)

    # Ranks add their halves of `narrow`, and of the gradient that reaches `norm`. All get the
    # same bits, so what each has whole stays the same and is never exchanged.
    assert isinstance(model.narrow.bias, DTensor)
    bias = model.narrow.bias.to_local()  # a DTensor, but whole: only the weight is sharded
    mine = torch.cat([model.norm.weight, model.norm.bias, bias]).detach()
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    assert all(torch.equal(ranks[0], each) for each in ranks)
    everyone: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    assert all(each == losses for each in everyone)
    whole = train(Network(), images, names)  # adds in another order, so equal up to rounding
    most = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
    assert losses[-1] < 0.4 < losses[0], losses
    assert most < 1e-3, most
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; at most {most:.1e} from one process's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
