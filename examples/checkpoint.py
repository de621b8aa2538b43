"""Distributed checkpoint: four ranks save a sharded model, two load it and go on.

torchrun --nproc-per-node 4 examples/checkpoint.py save out/checkpoint
torchrun --nproc-per-node 2 examples/checkpoint.py load out/checkpoint
"""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import pycollective.torch  # noqa: F401  (registers the backend)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train on random digits, different on each rank; return the mean of the ranks' last losses."""
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,), generator=random)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[chosen]), names[chosen])
        loss.backward()
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all bits of the weights and of Adam's state, gathered on each rank."""
    parts = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for part in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            assert isinstance(part, DTensor)
            parts.update(part.full_tensor().detach().numpy().tobytes())
    return parts.hexdigest()[:16]


def main() -> None:
    """Train 40 steps and save, or load and train 40 more."""
    dist.init_process_group("pycollective")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 130), torch.nn.ReLU(), torch.nn.Linear(130, 10))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    what, folder = sys.argv[1:]  # a folder that all ranks can read and write
    if what == "save":
        loss = train(model, optimizer, 40)
        weights, moments = get_state_dict(model, optimizer)
        about: dict[str, Any] = {"loss": loss, "digest": digest(model, optimizer)}
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "about": about}
        checkpoint.save(state, checkpoint_id=folder)
        line = f"loss {loss:.3f}: saved {about['digest']}"
    else:
        weights, moments = get_state_dict(model, optimizer)  # loaded into
        about = {"loss": 0.0, "digest": ""}
        state = {"model": weights, "optimizer": moments, "about": about}
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        about = state["about"]
        assert digest(model, optimizer) == about["digest"], about
        loss = train(model, optimizer, 40)
        assert loss < about["loss"] / 2, (loss, about)
        line = f"loss {about['loss']:.3f}: loaded {about['digest']}; 40 steps later {loss:.3f}"
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {line}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
