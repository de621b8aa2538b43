"""Trainings end with the same weights on any number of ranks; by torch alone they do not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import astuple
from unittest import mock

import pytest
import sklearn.datasets  # noqa: F401  ranks are forks of a process that has it, and
import torch
import torch._dynamo  # what DDP imports, a second each
import torch.distributed as dist

from benchmarks import leaf_training
from benchmarks.leaf_training import GLOO_RANKS, NUMBERS, RUNS, train, train_by_ddp
from pycollective.torch.backend import communicator_of
from tests.harness import ROOT
from tests.pools import forked_beyond
from tests.torch.groups import standing_group


@pytest.fixture(scope="module")
def pool():
    with forked_beyond(0, None, __name__) as pools:
        yield pools


def dropout_first():
    """While it holds, the digits' network begins with dropout."""
    network = leaf_training._network

    def with_dropout(task):
        return torch.nn.Sequential(torch.nn.Dropout(0.1), network(task))

    return mock.patch.object(leaf_training, "_network", with_dropout)


def trained(comm, numbers, leaves, steps, topology, ddp, backend):
    """The digest of the digits' weights."""
    torch.set_num_threads(1)
    standing_group(comm)
    with mock.patch.dict(os.environ, {"PYCOLLECTIVE_TOPOLOGY": topology}), dropout_first():
        group = dist.new_group(backend=backend)
        result = train("digits", numbers, leaves, steps, group, ddp)
    if backend == "pycollective":
        assert len({*communicator_of(group, "").host_of}) == (2 if topology else 1)
    dist.destroy_process_group(group)
    return result.digest, result.skipped


def digests(pool, ranks, numbers, topology="", ddp=True, backend="pycollective"):
    found = pool(ranks).call(trained, numbers, 6, 3, topology, ddp, backend)
    assert len({*found}) == 1, found
    digest, skipped = found[0]
    assert skipped == (numbers == "autocast")
    return digest


@pytest.mark.parametrize(
    "numbers",
    [pytest.param(each, marks=pytest.mark.storm if each == "bf16" else ()) for each in NUMBERS],
)
def test_one_digest_on_any_number_of_ranks(pool, numbers):
    found = {
        "alone, no DDP": digests(pool, 1, numbers, ddp=False),
        "two hosts of one": digests(pool, 2, numbers, "1,1"),
        "three, no DDP": digests(pool, 3, numbers, ddp=False),
        "two hosts of two": digests(pool, 4, numbers, "2,2"),
        "three over Gloo": digests(pool, 3, numbers, backend="gloo"),
        "two hosts over Gloo, no DDP": digests(pool, 4, numbers, "2,2", False, "gloo"),
    }
    assert len({*found.values()}) == 1, found


def trained_by_gloo(comm):
    torch.set_num_threads(1)
    standing_group(comm)
    group = dist.new_group(backend="gloo")
    try:
        with dropout_first():
            return train_by_ddp("digits", "fp32", 6, 3, group).digest
    finally:
        dist.destroy_process_group(group)


def test_by_torch_alone_each_number_of_ranks_has_its_own(pool):
    """It is what the leaves are for, and the trainings show it."""
    assert len({pool(ranks).call(trained_by_gloo)[0] for ranks in (1, 2, 3)}) == 3


def test_every_two_settings_of_a_launch_occur_together():
    columns = [sorted({*column}) for column in zip(*map(astuple, RUNS), strict=True)]
    assert columns[1] == [1, 2, 3, 4, 5, 6, 8]
    assert len(RUNS) == 24
    for first, second in itertools.combinations(range(5), 2):
        wanted = {*itertools.product(columns[first], columns[second])}
        if (first, second) == (1, 2):
            wanted.remove((1, 2))  # one rank on two hosts
        assert {(astuple(each)[first], astuple(each)[second]) for each in RUNS} == wanted


@pytest.mark.storm
@pytest.mark.timeout(3000)
def test_24_launches_of_two_trainings(tmp_path):
    command = [sys.executable, "-m", leaf_training.__name__, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "leaf_training.json").read_text())
    assert len(found["digests"]) == 2 * 3 * 3
    assert {len(each) for each in found["digests"].values()} == {1}
    assert {len(each) for each in found["gloo_digests"].values()} == {len(GLOO_RANKS)}
