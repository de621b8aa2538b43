"""ZeRO: each rank keeps a part of Adam's state; the same bits as when each keeps all of it.

torchrun --nproc-per-node 3 examples/zero.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch  # registers the backend


def train(images: torch.Tensor, names: torch.Tensor, zero: bool) -> tuple[torch.nn.Module, int]:
    """Train 120 steps; return the network and how many numbers this rank's optimizer keeps."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = sharded = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.Adam, lr=3e-3, parameters_as_bucket_view=True
        )
        kept: torch.optim.Optimizer = sharded.optim
    else:
        optimizer = kept = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(120):
        chosen = torch.randint(len(images), (32,), generator=random)
        optimizer.zero_grad()
        functional.cross_entropy(ddp(images[chosen]), names[chosen]).backward()
        optimizer.step()
    state = kept.state_dict()["state"].values()
    return model, sum(each["exp_avg"].numel() + each["exp_avg_sq"].numel() for each in state)


def main() -> None:
    """Train on scikit-learn's digits with both optimizers."""
    dist.init_process_group("pycollective")
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    model, part = train(images[:1500], names[:1500], zero=True)
    reference, whole = train(images[:1500], names[:1500], zero=False)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, expected)  # bit for bit, on each rank
    parts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    assert sum(parts) == whole
    assert max(parts) < whole
    right = (model(images[1500:]).argmax(dim=1) == names[1500:]).float().mean().item()
    assert right > 0.8, right
    if dist.get_rank() == 0:
        print(f"{right:.1%} of the digits right; the optimizer keeps {parts} numbers, not {whole}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
