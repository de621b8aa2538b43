"""DDP with 1-bit gradients over NCCL, or Gloo: all ranks get the same weights, from fewer bytes.

torchrun --nproc-per-node 2 examples/compressed_on_gpus.py

Takes NCCL where there are GPUs, and Gloo elsewhere; ranks may share a GPU where NCCL allows it
(NCCL_MULTI_RANK_GPU_ENABLE=1). On GPUs it needs Triton.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pycollective.torch import OneBitState, one_bit_hook, ordered


def train(images: torch.Tensor, names: torch.Tensor, compress: bool) -> tuple[torch.nn.Module, int]:
    """Train on the first 1,500 digits; return the bytes that this rank sent for gradients, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 512), torch.nn.ReLU()),
        *(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)),
    ).to(images.device)
    ddp = DistributedDataParallel(model)
    if compress:
        # Between all ranks, as if each were a host: by default nothing is compressed within one.
        state = OneBitState(ddp, between="ranks")
        ddp.register_comm_hook(state, one_bit_hook)
    else:
        ddp.register_comm_hook(None, ordered.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    before = ordered.stats()["sent_bytes"]
    random = torch.Generator().manual_seed(dist.get_rank())  # each rank's own batches
    for _ in range(100):
        batch = torch.randint(1500, (32,), generator=random).to(images.device)
        optimizer.zero_grad()
        functional.cross_entropy(ddp(images[batch]), names[batch]).backward()
        optimizer.step()
    if not compress:
        return model, ordered.stats()["sent_bytes"] - before
    counts = state.stats()  # waits for the last step
    assert counts["steps"] == 100, counts  # none was given up
    state.close()
    return model, counts["payload_bytes"]


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all bits of the weights."""
    weights = torch.cat([each.detach().flatten().cpu() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train with compression and without it."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().to(device) / 16
    names = torch.from_numpy(labels).to(device)

    ordered.prepare(device=device)  # compiles, so that no step has to
    dense, dense_bytes = train(images, names, compress=False)
    model, sent_bytes = train(images, names, compress=True)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(model))
    assert len(set(digests)) == 1, digests
    assert sent_bytes < dense_bytes / 20, (sent_bytes, dense_bytes)
    rights = [
        (each(images[1500:]).argmax(dim=1) == names[1500:]).float().mean().item()
        for each in (model, dense)
    ]
    assert rights[0] > 0.8, rights
    if dist.get_rank() == 0:
        print(
            f"{backend}: {rights[0]:.1%} of the digits right, without compression {rights[1]:.1%}; "
            f"weights {digests[0]} on all ranks; {sent_bytes / 1e6:.1f} MB sent by a rank, without "
            f"compression {dense_bytes / 1e6:.1f} MB"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
