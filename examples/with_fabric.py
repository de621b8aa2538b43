"""Lightning Fabric: `process_group_backend` names the backend; the same bits as under plain DDP.

torchrun --nproc-per-node 4 examples/with_fabric.py
"""

import hashlib

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch  # noqa: F401  (registers the backend)


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a network (the same weights each time, on each rank) and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 128), torch.nn.ReLU()),
        *(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    )
    return model, torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(images: torch.Tensor, names: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return sixty random batches, different on each rank."""
    random = torch.Generator().manual_seed(dist.get_rank())
    chosen = torch.randint(len(images), (60, 32), generator=random)
    return [(images[each], names[each]) for each in chosen]


def main() -> None:
    """Train on scikit-learn's digits with Fabric, then without."""
    strategy = DDPStrategy(process_group_backend="pycollective", bucket_cap_mb=0.01)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    assert dist.get_backend() == "pycollective"
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)

    model, optimizer = fabric.setup(*network())
    for pixels, labels in batches(images[:1500], names[:1500]):
        optimizer.zero_grad()
        fabric.backward(functional.cross_entropy(model(pixels), labels))
        optimizer.step()

    plain, optimizer = network()
    ddp = DistributedDataParallel(plain)  # 1/4 is exact, so neither needs all_reduce_hook
    for pixels, labels in batches(images[:1500], names[:1500]):
        optimizer.zero_grad()
        functional.cross_entropy(ddp(pixels), labels).backward()
        optimizer.step()

    weights, expected = (
        torch.cat([each.detach().flatten() for each in trained.parameters()])
        for trained in (model, plain)
    )
    assert all(torch.equal(each, expected) for each in fabric.all_gather(weights))
    right = (plain(images[1500:]).argmax(dim=1) == names[1500:]).float().mean().item()
    assert right > 0.8, right
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    fabric.print(f"{right:.1%} of the digits right; weights {digest} by Fabric and by DDP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
