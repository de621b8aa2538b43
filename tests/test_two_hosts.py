"""Two real hosts, as far as one machine has them: two network namespaces joined by a slow link.

torchrun starts two ranks on each. They share no sockets, so nothing but the link joins them; the
bits are those of one host.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.driver import two_hosts, why_not
from tests.harness import ROOT
from tests.launchers import Launcher, launcher

# By the communicator, and by the torch backend with DDP: a digest of all that they compute.
PROGRAM = """
import hashlib, sys
import torch
import torch.distributed as dist
import pycollective as pc
import pycollective.torch
from pycollective.testing.inputs import leaves

def digest(*arrays):
    return hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()[:16]

with pc.init(timeout=60) as comm:
    shared = len({line.split()[4] for line in open("/proc/self/maps") if "memfd:pyc" in line})
    results = []
    for dtype in ("float32", "bfloat16"):
        for algorithm in ("auto", "ring", "hierarchical"):
            mine = leaves(dtype, "sum", comm.size, 100_003, 1)[comm.rank].copy()
            comm.all_reduce(mine, algorithm=algorithm)
            results.append(mine)
    communicator = digest(*results)

dist.init_process_group("pycollective")
rank, size = dist.get_rank(), dist.get_world_size()
everybody = [None] * size
dist.all_gather_object(everybody, rank)
assert everybody == list(range(size))
pair = dist.new_group([1, 2])  # on both hosts
if rank in (1, 2):
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x, group=pair)
    assert (x == 3).all()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))
model = torch.nn.parallel.DistributedDataParallel(net.bfloat16(), bucket_cap_mb=0.01)
model.register_comm_hook(None, pycollective.torch.all_reduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    torch.manual_seed(step * size + rank)
    optimizer.zero_grad()
    model(torch.randn(16, 64, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
weights = digest(*(each.detach().view(torch.int16).numpy() for each in model.parameters()))
dist.destroy_process_group()
sys.stdout.write(f"RANK {rank}: {shared} {communicator} {weights}\\n")
"""


def said(text: str) -> list[list[str]]:
    found = sorted(re.findall(r"RANK (\d): (\d+) (\w+) (\w+)", text))
    assert len(found) == 4, text
    return [list(each) for each in found]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hosts") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture(scope="module")
def on_one_host(program: str) -> list[list[str]]:
    done = launcher("forks").run(4, program)
    assert done.returncode == 0, done.stderr
    answers = said(done.stdout)
    assert {each[1] for each in answers} == {"4"}  # segments, one a rank
    return answers


def run_together(commands: Iterable[tuple[list[str], dict[str, str]]]) -> list[tuple[str, str]]:
    """What each command has written, in its environment; all must succeed."""
    pipe = subprocess.PIPE
    jobs = [
        subprocess.Popen(command, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        for command, env in commands
    ]
    try:
        outputs = [job.communicate(timeout=200) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], outputs
    return outputs


@pytest.mark.storm
def test_two_hosts(program: str, on_one_host: list[list[str]]) -> None:
    problem = why_not()
    if problem:
        pytest.skip(problem)
    clean = Launcher().environment()
    with two_hosts() as hosts:
        outputs = run_together(
            (
                host.torchrun(Path(sys.executable), 2, node, program),
                {**host.environment(), **clean, "GLOO_SOCKET_IFNAME": host.interface},
            )
            for node, host in enumerate(hosts)
        )
        sent = [host.bytes_sent() for host in hosts]
    answers = said("".join(out for out, _ in outputs))
    assert {each[1] for each in answers} == {"2"}
    assert [each[2:] for each in answers] == [each[2:] for each in on_one_host]
    assert min(sent) > 1_000_000  # over the link it went


# What Debian makes of a host's own name, which no other host finds there.
BY_ITSELF = """
import socket, sys
socket.gethostname = lambda: "127.0.1.1"
import numpy as np
import pycollective as pc

rank = int(sys.argv[1])
with pc.init(rank=rank, size=2, store=sys.argv[2], timeout=60) as comm:
    x = np.full(100_000, rank + 1.0)
    comm.all_reduce(x)
    sys.stdout.write(f"RANK {rank}: {comm.host_of} {x[-1]}\\n")
"""


def test_two_hosts_whose_names_lead_to_themselves(tmp_path: Path) -> None:
    """Ranks that bootstrap themselves: what Gloo listens at must be found from outside."""
    problem = why_not()
    if problem:
        pytest.skip(problem)
    program = tmp_path / "program.py"
    program.write_text(BY_ITSELF)
    clean = Launcher().environment(PYCOLLECTIVE_SECRET="a-word-of-this-test")
    clean.pop("GLOO_SOCKET_IFNAME", None)
    with two_hosts() as hosts:
        place = f"tcp://{hosts[0].address}:29517"
        outputs = run_together(
            (host.command(sys.executable, str(program), str(rank), place), clean)
            for rank, host in enumerate(hosts)
        )
    for rank, (out, err) in enumerate(outputs):
        assert out == f"RANK {rank}: (0, 1) 3.0\n", err
