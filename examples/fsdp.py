"""FSDP2 and HSDP: sharded parameters, gradients and Adam's state have DDP's bits.

torchrun --nproc-per-node 4 examples/fsdp.py
"""

import argparse
import copy
import hashlib
import inspect

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pycollective.torch  # registers the backend


class Reader(torch.nn.Module):
    """A transformer of two layers that predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes, self.places = torch.nn.Embedding(256, 64), torch.nn.Embedding(64, 64)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True)
        self.layers = torch.nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.head = torch.nn.Linear(64, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over (batch, 65) bytes."""
        hidden = self.bytes(text[:, :-1]) + self.places.weight
        later = torch.nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=later, is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def train(model: torch.nn.Module, text: torch.Tensor, steps: int = 50) -> float:
    """Train on random places of the text, different on each rank; return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        starts = torch.randint(len(text) - 64, (8, 1), generator=random)
        optimizer.zero_grad()
        loss = model(text[starts + torch.arange(65)])
        loss.backward()
        optimizer.step()
    return loss.item()


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all bits of the weights, gathered where they are sharded."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    weights = torch.cat([each.detach().flatten() for each in whole])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train on the source of the standard library's argparse: under DDP, then sharded twice."""
    dist.init_process_group("pycollective")
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    whole = Reader()
    ddp = DistributedDataParallel(whole)
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    train(ddp, text)

    # HSDP adds gradients in each pair, then between the pairs. That is the contract's order for
    # four ranks, (0 + 1) + (2 + 3), which all calls use: so no bit depends on the mesh.
    for shape, names in (((4,), ("sharded",)), ((2, 2), ("replicated", "sharded"))):
        cut_up = Reader()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for module in (*cut_up.layers, cut_up):
            fully_shard(module, mesh=mesh)
        loss = train(cut_up, text)
        assert loss < 3, loss  # from 5.5
        assert digest(cut_up) == digest(whole)
    if dist.get_rank() == 0:
        print(f"loss {loss:.3f}; weights {digest(whole)} under FSDP2, HSDP and DDP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
