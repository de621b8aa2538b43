"""Forked children of a rank, such as a DataLoader's workers, leave the rank unharmed."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import pycollective.torch
from pycollective import ConfigurationError
from tests.torch.groups import standing_group


class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor([float(i * i)])


def train_with_workers(comm):
    standing_group(comm)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1), bucket_cap_mb=0.0001)
    model.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    seen = 0
    for _ in range(2):  # workers come and go while collectives run
        for batch in DataLoader(
            Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork"
        ):
            model.zero_grad()
            (model(batch) * (comm.rank + 1)).mean().backward()
            seen += len(batch)
    return seen, model.module.bias.grad.item()


def test_data_loader_workers(pool):
    assert pool(2).call(train_with_workers) == [(128, 1.5)] * 2


def fork_with_work_pending(comm):
    """A child is forked while futures wait; it tries to use the group, and ends normally."""
    standing_group(comm)
    dist.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
    tensor = torch.ones(1 << 16)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future().then(lambda f: f.value()[0].sum().item())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(ConfigurationError, match="this process is a fork"):
                dist.all_reduce(torch.ones(1))
            with pytest.raises(ConfigurationError, match="this process is a fork"):
                dist.all_reduce(torch.ones(1), async_op=True)
            dist.destroy_process_group()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    value = future.wait()
    dist.barrier()
    return status, value, tensor[-1].item()


def test_a_forked_child_is_refused_and_harms_nobody(pool):
    assert pool(2).call(fork_with_work_pending) == [(0, 2.0 * (1 << 16), 2.0)] * 2


def join_after_fork(comm):
    """A child that makes a group of its own."""
    standing_group(comm)
    dist.barrier()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dist.destroy_process_group()
            dist.init_process_group("pycollective", store=dist.HashStore(), rank=0, world_size=1)
            tensor = torch.ones(3)
            dist.all_reduce(tensor, async_op=True).get_future().wait()
            dist.destroy_process_group()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    dist.barrier()
    return status


def test_a_forked_child_can_make_groups_of_its_own(pool):
    assert pool(2).call(join_after_fork) == [0, 0]
