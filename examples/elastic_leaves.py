"""A rank is killed: the others go on, another takes its place, and no bit is lost.

pycollective run -n 3 --elastic examples/elastic_leaves.py
pycollective run -n 3 --elastic examples/elastic_leaves.py --kill-at 100
"""

import argparse
import hashlib
import os
import signal
import sys

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pycollective.torch import LeafSampler, LeafSync

LEAVES, STEPS = 12, 300


def main() -> None:
    """Train on scikit-learn's digits; say which weights came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-at", type=int, help="the step in which a process kills itself")
    kill_at = parser.parse_args().kill_at
    if os.environ["PYCOLLECTIVE_RANK"] != "1" or "PYCOLLECTIVE_JOINS" in os.environ:
        kill_at = None  # the first that has this place does, and not who takes it
    torch.set_num_threads(1)  # the same in every process
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels))
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 768), torch.nn.ReLU(), torch.nn.Dropout(0.1)),
        *(torch.nn.Linear(768, 384), torch.nn.ReLU(), torch.nn.Linear(384, 10)),
    )
    sync = LeafSync(model, LEAVES, seed=0, elastic=True)
    loader = DataLoader(dataset, batch_sampler=LeafSampler(sync, len(dataset), micro_batch=32))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sync.state(optimizer=optimizer)  # what a step depends on besides the model
    ranks = 0
    for step in sync.steps(loader, until=STEPS):
        if sync.communicator.size != ranks:
            ranks = sync.communicator.size
            sys.stderr.write(f"step {step.number}: process {os.getpid()} of {ranks} ranks\n")
        for images, names in step:
            if step.number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = functional.cross_entropy(model(images), names)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
    first = sync.communicator.rank == 0
    sync.close()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    if first:
        print(f"loss {step.logged['loss']:.4f}; weights {digest}")


if __name__ == "__main__":
    main()
