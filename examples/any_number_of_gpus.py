"""LeafSync on GPUs: the weights do not depend on how many there are.

torchrun --nproc-per-node 1 examples/any_number_of_gpus.py
torchrun --nproc-per-node 2 examples/any_number_of_gpus.py

Takes NCCL where there are GPUs, and CPUs with Gloo elsewhere; ranks may share a GPU where NCCL
allows it (NCCL_MULTI_RANK_GPU_ENABLE=1).
"""

import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that cuBLAS repeats itself

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pycollective.torch import LeafSampler, LeafSync

LEAVES = 12  # micro-batches of a step, on all ranks together


class Network(torch.nn.Module):
    """A small transformer that reads an image of 8 x 8 pixels row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.read = torch.nn.Linear(8, 64)
        self.place = torch.nn.Parameter(torch.zeros(8, 64))
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.name = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a score for each of ten names: (n, 64) in, (n, 10) out."""
        rows = self.read(images.view(-1, 8, 8)) + self.place
        return self.name(self.layer(rows).mean(dim=1))


def train(device: torch.device, epochs: int) -> torch.nn.Module:
    """Train on scikit-learn's 1,797 digits, in bfloat16 where autocast takes it."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels))
    torch.manual_seed(0)
    model = Network().to(device)
    sync = LeafSync(model, LEAVES, seed=0)
    sampler = LeafSampler(sync, len(data), micro_batch=8)
    loader = DataLoader(data, batch_sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in sync.steps(loader, until=epochs * sampler.steps_per_epoch):
        for images, names in step:
            with torch.autocast(device.type, torch.bfloat16):
                scores = model(images.to(device, non_blocking=True))
            names = names.to(device, non_blocking=True)
            functional.cross_entropy(scores.float(), names).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    sync.close()
    return model


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all bits of the weights."""
    weights = torch.cat([each.detach().flatten().cpu() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train, and say which weights came out."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the same in every launch, for CPUs: torchrun's default is not
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    mine = digest(train(device, epochs=1))
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine)
    assert set(digests) == {mine}, f"ranks have other weights: {digests}"
    if dist.get_rank() == 0:
        where = "CPUs, over Gloo" if device.type == "cpu" else torch.cuda.get_device_name()
        print(f"{len(digests)} rank(s) on {where}: weights {mine}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
