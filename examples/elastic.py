"""A rank is killed: torchrun restarts all ranks, and they go on from their checkpoint.

torchrun --nproc-per-node 3 --max-restarts 1 examples/elastic.py
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch  # registers the backend

CHECKPOINT = Path("out/elastic.pt")
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def train(images: torch.Tensor, names: torch.Tensor, kept: Path | None) -> torch.nn.Module:
    """Train a network for 60 steps, from the checkpoint `kept` where there is one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    begin = 0
    if kept and kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
        sys.stderr.write(f"rank {dist.get_rank()} goes on from step {begin}\n")
    for step in range(begin, 60):
        if kept and step > begin and step % 10 == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)  # all of it or nothing
        if kept and step == 35 and dist.get_rank() == 1 and RESTARTS == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        random = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        chosen = torch.randint(len(images), (32,), generator=random)
        optimizer.zero_grad()
        functional.cross_entropy(ddp(images[chosen]), names[chosen]).backward()
        optimizer.step()
    return model


def main() -> None:
    """Train on scikit-learn's digits; then again, with nobody killed, to compare."""
    if RESTARTS == 0 and os.environ["RANK"] == "0":
        CHECKPOINT.parent.mkdir(exist_ok=True)
        CHECKPOINT.unlink(missing_ok=True)  # from an earlier launch
    dist.init_process_group("pycollective")
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    try:
        model = train(images, names, CHECKPOINT)
    except pycollective.PeerFailure as error:
        sys.exit(f"rank {os.environ['RANK']}: {error}")  # torchrun restarts all
    assert RESTARTS == 1
    for found, expected in zip(
        model.parameters(), train(images, names, None).parameters(), strict=True
    ):
        assert torch.equal(found, expected)
    if dist.get_rank() == 0:
        print("killed at step 35, went on from step 30: the bits of a run in which nobody was")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
