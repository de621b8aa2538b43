"""Exact packing through torch.distributed: asked for by the environment, seen in what was sent."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import pycollective.torch
from pycollective import ConfigurationError
from tests.launchers import Forks

PROGRAM = """
import os
import numpy as np
import torch
import torch.distributed as dist
import pycollective.torch
from pycollective import reference
from tests.torch.groups import to_numpy

WORDS = ("sent_messages", "sent_bytes", "sent_raw_bytes")
dist.init_process_group("pycollective")
rank, size = dist.get_rank(), dist.get_world_size()
assert pycollective.torch.stats() == dict.fromkeys(WORDS, 0)
leaves = [torch.randn(200_000, generator=torch.Generator().manual_seed(r)).bfloat16()
          for r in range(size)]
for turn in range(2):  # synchronous, then asynchronous
    mine = leaves[rank].clone()
    work = dist.all_reduce(mine, async_op=turn == 1)
    if work is not None:
        work.wait()
    whole = reference.reduce(np.stack([to_numpy(leaf) for leaf in leaves]))
    assert to_numpy(mine).tobytes() == whole.tobytes()
whole_world = pycollective.torch.stats(dist.group.WORLD)
assert tuple(whole_world) == WORDS and whole_world == pycollective.torch.stats()
across = dist.new_group([0, size - 1])
near = dist.new_group([0, 1])
if rank in (0, size - 1):
    before = pycollective.torch.stats()
    dist.broadcast(leaves[rank].clone(), src=0, group=across)
    sent = pycollective.torch.stats(across)
    assert pycollective.torch.stats() == before
    assert rank != 0 or sent["sent_raw_bytes"] >= 400_000, sent
    assert rank != 0 or (sent["sent_bytes"] < 0.9 * sent["sent_raw_bytes"]) == (
        os.environ["PYCOLLECTIVE_WIRE"] == "exact"), sent
if rank in (0, 1):
    dist.all_reduce(leaves[rank].clone(), group=near)
    assert pycollective.torch.stats(near)["sent_bytes"] == 0
else:
    try:
        pycollective.torch.stats(near)
    except pycollective.ConfigurationError as error:
        assert "in no such process group" in str(error)
    else:
        raise AssertionError
both = torch.tensor([whole_world["sent_bytes"], whole_world["sent_raw_bytes"]])
dist.all_reduce(both)
if rank == 0:
    print("SENT", *both.tolist(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("wire", "packs"), [("exact", True), ("raw", False)])
def test_the_environment_says_how_and_the_counter_shows_it(tmp_path, wire, packs):
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"PYCOLLECTIVE_TOPOLOGY": "2x2", "PYCOLLECTIVE_WIRE": wire}
    done = Forks().run(4, str(tmp_path / "program.py"), timeout=100, **variables)
    assert done.returncode == 0, done.stderr
    sent, raw = map(int, done.stdout.split("SENT ")[1].split()[:2])
    assert raw > 2 * 2 * 400_000  # two calls, in each of which both hosts send at least a buffer
    assert sent < 0.9 * raw if packs else sent == raw


def test_stats_without_a_group_of_the_backend(tmp_path):
    with pytest.raises(ConfigurationError, match="in no such process group"):
        pycollective.torch.stats()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match="for cpu, and its is gloo"):
            pycollective.torch.stats()
    finally:
        dist.destroy_process_group()
