"""The same weights over NCCL, or Gloo, whatever the size of DDP's buckets: one line.

torchrun --nproc-per-node 3 examples/nccl_same_bits.py

Takes NCCL where there are GPUs, and Gloo elsewhere; ranks may share a GPU where NCCL allows it
(NCCL_MULTI_RANK_GPU_ENABLE=1). Take three ranks or more: two cannot differ, for a + b is b + a.
"""

import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that the GPU's own sums repeat

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pycollective.torch import ordered

BUCKETS = (25, 0.05, 0.01)  # bucket_cap_mb


def train(device: torch.device, bucket_cap_mb: float, hook: bool) -> torch.nn.Module:
    """Train a small network on this rank's share of scikit-learn's scanned digits."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().to(device) / 16
    names = torch.from_numpy(labels).to(device)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 128), torch.nn.ReLU()),
        *(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    ).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    if hook:
        ddp.register_comm_hook(None, ordered.hook)  # the one line
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(120):
        mine = slice((step * ranks + rank) * 16 % 1700, (step * ranks + rank) * 16 % 1700 + 16)
        optimizer.zero_grad()
        functional.cross_entropy(ddp(images[mine]), names[mine]).backward()
        optimizer.step()
    return model


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all bits of the weights."""
    weights = torch.cat([each.detach().flatten().cpu() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train with buckets of three sizes, with the hook and without it."""
    torch.use_deterministic_algorithms(True)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    found = {hook: [digest(train(device, cap, hook)) for cap in BUCKETS] for hook in (True, False)}
    everyone: list[dict[bool, list[str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert len({each for ranks in everyone for each in ranks[True]}) == 1, everyone
    if dist.get_rank() == 0:
        print(f"{backend}: weights {found[True][0]} with buckets of all sizes, by the hook")
        if dist.get_world_size() < 3:
            print("two ranks cannot differ, as a + b has one order: take 3 or more to see the rest")
        else:
            print(f"without the hook {len(set(found[False]))} different weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
