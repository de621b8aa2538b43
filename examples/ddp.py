"""DistributedDataParallel: the weights do not depend on the size of DDP's buckets.

torchrun --nproc-per-node 3 examples/ddp.py
"""

import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pycollective.torch  # registers the backend


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels: training data, then test data."""
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    return TensorDataset(images[:1500], names[:1500]), TensorDataset(images[1500:], names[1500:])


def train(dataset: TensorDataset, bucket_cap_mb: float) -> torch.nn.Module:
    """Train a small network for four epochs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 128), torch.nn.ReLU()),
        *(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    # Without the hook DDP multiplies gradients by 1/ranks before it adds them: one rounding more.
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(dataset, seed=0)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for images, names in DataLoader(dataset, batch_size=20, sampler=sampler):
            optimizer.zero_grad()
            functional.cross_entropy(ddp(images), names).backward()
            optimizer.step()
    return model


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all bits of the weights."""
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train with large buckets and with small ones."""
    dist.init_process_group("pycollective")
    training, testing = data()
    models = [train(training, bucket_cap_mb) for bucket_cap_mb in (25, 0.01)]
    digests: list[str] = [""] * dist.get_world_size()
    for model in models:
        dist.all_gather_object(digests, digest(model))
        assert set(digests) == {digest(models[0])}, digests  # on every rank, with every size
    images, names = testing.tensors
    right = (models[0](images).argmax(dim=1) == names).float().mean().item()
    assert right > 0.8, right
    if dist.get_rank() == 0:
        print(f"{right:.1%} of the digits right; weights {digests[0]} with large and small buckets")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
