"""Compressed training as its user starts it: the same weights on every rank, by each launcher."""

from __future__ import annotations

import pytest

from tests.launchers import Forks, OwnLauncher, Torchrun
from tests.torch.compressed import HOOKS

# What forks compute is test_compression's; that torchrun's ranks join is test_launches', that they
# train test_two_hosts'.
pytestmark = pytest.mark.storm

# `pycollective run` gives ranks the environment that forks have.
LAUNCHERS = {"forks": Forks("tests.torch.compressed"), "torchrun": Torchrun()}

PROGRAM = """
import hashlib, sys
from pathlib import Path
import torch
import torch.distributed as dist
import pycollective.torch as pct
from pycollective.compression import CODECS

dist.init_process_group("pycollective")
rank = dist.get_rank()
said = []
for name, of_numpy in CODECS.items():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(60, 90), torch.nn.Tanh(), torch.nn.Linear(90, 70))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    options = {"density": 0.03} if name == "top_k" else {"chunk": 256}
    state = getattr(pct, of_numpy.__name__)(ddp, **options)
    ddp.register_comm_hook(state, getattr(pct, name + "_hook"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    random = torch.Generator().manual_seed(100 + rank)
    for _ in range(6):
        x = torch.randn(8, 60, generator=random)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    stats = state.stats()
    digest = hashlib.blake2b(weights, digest_size=8).hexdigest()
    said.append(f"{name} {digest} {stats['steps']} {stats['compressed_calls'] > 6}")
Path(sys.argv[1], str(rank)).write_text("\\n".join(said))
dist.destroy_process_group()
"""


def trained(launcher, folder):
    """By rank and hook, what a training under the launcher says."""
    (folder / "program.py").write_text(PROGRAM)
    arguments = str(folder / "program.py"), str(folder)
    done = launcher.run(2, *arguments, timeout=100, PYCOLLECTIVE_TOPOLOGY="2x1")
    assert done.returncode == 0, done.stderr
    lines = [(folder / str(rank)).read_text().splitlines() for rank in range(2)]
    return [{line.split()[0]: line.split()[1:] for line in each} for each in lines]


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """What each rank says under each launcher."""
    return [
        each
        for name, launcher in LAUNCHERS.items()
        for each in trained(launcher, tmp_path_factory.mktemp(name))
    ]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_rank_of_every_launcher_ends_with_the_same_weights(digests, hook):
    said = [of[hook] for of in digests]
    assert len(said) == 2 * len(LAUNCHERS)
    assert len({digest for digest, *_ in said}) == 1
    assert [rest for _, *rest in said] == [["6", "True"]] * len(said), "it was not compressed"


def test_each_hook_trains_to_weights_of_its_own(digests):
    assert len({of[hook][0] for of in digests for hook in HOOKS}) == len(HOOKS)


def test_ranks_of_pycollective_run_end_with_them_too(digests, tmp_path):
    assert trained(OwnLauncher(), tmp_path) == digests[:2]
