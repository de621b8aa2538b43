"""Accelerate: it uses the existing process group; the bits do not depend on bucket sizes.

torchrun --nproc-per-node 3 examples/with_accelerate.py
"""

import hashlib

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pycollective.torch  # registers the backend


def train(accelerator: Accelerator, training: TensorDataset) -> torch.nn.Module:
    """Train a small network for six epochs."""
    set_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 128), torch.nn.ReLU()),
        *(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(training, batch_size=20, shuffle=True)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    for _ in range(6):
        for images, names in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(ddp(images), names))
            accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
    return accelerator.unwrap_model(ddp)


def main() -> None:
    """Train on scikit-learn's digits with large buckets and with small ones."""
    # On CPU Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=...)]) refuses the name.
    # It uses a group that was made before, though `accelerator.state` says "gloo".
    dist.init_process_group("pycollective")
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    digests = set()
    for bucket_cap_mb in (25, 0.01):
        buckets = DistributedDataParallelKwargs(bucket_cap_mb=bucket_cap_mb)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[buckets])
        model = train(accelerator, TensorDataset(images[:1500], names[:1500]))
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        everyone = accelerator.gather(weights[None])  # the weights of each rank
        digests |= {hashlib.sha256(each.numpy()).hexdigest()[:16] for each in everyone}
    assert dist.get_backend() == "pycollective"
    assert len(everyone) == accelerator.num_processes == dist.get_world_size()
    assert len(digests) == 1, digests  # on every rank, with every size
    right = (model(images[1500:]).argmax(dim=1) == names[1500:]).float().mean().item()
    assert right > 0.8, right
    accelerator.print(f"{right:.1%} of the digits right; weights {digests} with any buckets")
    accelerator.end_training()  # destroys the group


if __name__ == "__main__":
    main()
