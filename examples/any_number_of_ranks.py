"""LeafSync: the weights do not depend on the number of ranks.

torchrun --nproc-per-node 1 examples/any_number_of_ranks.py
torchrun --nproc-per-node 3 examples/any_number_of_ranks.py
"""

import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pycollective.torch import LeafSampler, LeafSync

LEAVES = 8  # micro-batches of a step, on all ranks together


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels: training data, then test data."""
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    return TensorDataset(images[:1500], names[:1500]), TensorDataset(images[1500:], names[1500:])


def train(dataset: TensorDataset, epochs: int) -> torch.nn.Module:
    """Train a small network with dropout."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1)),
        *(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    )
    sync = LeafSync(model, LEAVES, seed=0)
    sampler = LeafSampler(sync, len(dataset), micro_batch=8)
    loader = DataLoader(dataset, batch_sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in sync.steps(loader, until=epochs * sampler.steps_per_epoch):
        for images, names in step:
            functional.cross_entropy(model(images), names).backward()
        sync.clip_grad_norm_(1.0)
        optimizer.step()
    sync.close()
    return model.eval()


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all bits of the weights."""
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train, and say which weights came out."""
    torch.set_num_threads(1)  # the same in every launch: torchrun's default is not
    dist.init_process_group("pycollective")
    training, testing = data()
    model = train(training, epochs=4)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(model))
    assert set(digests) == {digest(model)}, digests
    images, names = testing.tensors
    right = (model(images).argmax(dim=1) == names).float().mean().item()
    assert right > 0.8, right
    if dist.get_rank() == 0:
        print(f"{len(digests)} rank(s): {right:.1%} of the digits right; weights {digests[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
