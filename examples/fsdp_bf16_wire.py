"""FSDP2 over Gloo or NCCL: bf16 gradients travel as bf16, and are added up and kept in fp32.

torchrun --nproc-per-node 4 examples/fsdp_bf16_wire.py

On GPUs with ``--backend nccl``.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pycollective.torch import ordered


def data(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels, and what they are."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels).float().to(device) / 16, torch.from_numpy(labels).to(device)


def sharded(mesh: DeviceMesh, narrow: torch.dtype | None) -> torch.nn.Module:
    """Return a network whose weights are sharded, each of its layers by itself."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 512), torch.nn.ReLU()),
        *(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)),
    ).to(mesh.device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model[0], model[2], model[4], model):
        fsdp = fully_shard(module, mesh=mesh, mp_policy=policy)
        fsdp.set_custom_reduce_scatter(ordered.ReduceScatter(narrow=narrow))
    return model


def train(model: torch.nn.Module, images: torch.Tensor, names: torch.Tensor) -> int:
    """Train on the first 1,500; return the bytes that this rank sent for gradients."""
    before = ordered.stats()["sent_bytes"]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(dist.get_rank())  # each rank's own batches
    for _ in range(40):
        batch = torch.randint(1500, (32,), generator=random).to(images.device)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[batch]).float(), names[batch]).backward()
        optimizer.step()
    return ordered.stats()["sent_bytes"] - before


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all bits of the weights."""
    whole = [each.full_tensor() for each in model.parameters() if isinstance(each, DTensor)]
    weights = torch.cat([each.detach().flatten() for each in whole])
    return hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train twice: gradients travel as bf16 where that is exact, and always as fp32."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo", help="gloo for CPUs, nccl for GPUs")
    backend = parser.parse_args().backend
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    images, names = data(device)

    ordered.prepare(device=device)  # so that only gradients count
    models = [sharded(mesh, narrow) for narrow in (torch.bfloat16, None)]
    small, large = (train(model, images, names) for model in models)
    assert small < 0.55 * large, (small, large)
    bits = digest(models[0])
    assert digest(models[1]) == bits
    right = (models[0](images[1500:]).argmax(dim=1) == names[1500:]).float().mean().item()
    assert right > 0.8, right
    if dist.get_rank() == 0:
        print(
            f"{right:.1%} of the digits right; weights {bits} whether gradients travelled as bf16 "
            f"({small / 1e6:.1f} MB from a rank) or as fp32 ({large / 1e6:.1f} MB)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
