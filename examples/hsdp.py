"""HSDP: sharded within pairs of ranks, replicated between pairs; the same bits as under DDP.

torchrun --nproc-per-node 4 examples/hsdp.py
"""

import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch  # registers the backend


def network() -> torch.nn.Sequential:
    """Make a network: the same weights each time, on each rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Linear(64, 128), torch.nn.ReLU()),
        *(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    )


def train(model: torch.nn.Module, images: torch.Tensor, names: torch.Tensor) -> None:
    """Train sixty steps; each rank takes 32 random images of its own in each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(60):
        chosen = torch.randint(len(images), (32,), generator=random)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), names[chosen]).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights in a row, gathered where they are sharded."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([each.detach().flatten() for each in whole])


def main() -> None:
    """Train on scikit-learn's digits both ways."""
    dist.init_process_group("pycollective")
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)

    # Gradients are added in each pair, then between the pairs. That is the contract's order for
    # four ranks, (0 + 1) + (2 + 3), which all calls use: so no bit depends on the mesh.
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copied", "cut_up"))
    hybrid = network()
    for module in (*hybrid, hybrid):
        fully_shard(module, mesh=pairs)
    train(hybrid, images[:1500], names[:1500])

    copied = network()
    ddp = DistributedDataParallel(copied)
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    train(ddp, images[:1500], names[:1500])

    everyone = [torch.empty_like(weights(copied)) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights(hybrid))
    assert all(torch.equal(each, weights(copied)) for each in everyone)
    right = (copied(images[1500:]).argmax(dim=1) == names[1500:]).float().mean().item()
    assert right > 0.8, right
    if dist.get_rank() == 0:
        digest = hashlib.sha256(everyone[0].numpy().tobytes()).hexdigest()[:16]
        print(f"{right:.1%} of the digits right; weights {digest} under HSDP and under DDP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
