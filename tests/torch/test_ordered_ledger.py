"""`LedgerState`: the averages of DDP with the hook, whatever its buckets and backend."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from pycollective import CollectiveMismatch, ConfigurationError
from pycollective.config import ENV_LEDGER
from pycollective.ledger.compare import compare
from pycollective.ledger.reader import read
from pycollective.torch import LedgerState, all_reduce_hook
from tests.torch.groups import standing_group
from tests.torch.ordered_groups import own_group
from tests.torch.test_ddp import SMALL, TINY, WHOLE, Net
from tests.torch.test_leaf_ledger import by_an_ulp

STEPS = 4


def trained(comm, folder, over="pycollective", cap=WHOLE, plant=None, step=0):
    """Train with the hook, three micro-batches a step; perhaps change a gradient on rank 1."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Other tests may have left calls on the standing group.
    with own_group(comm) if over == "gloo" else nullcontext(standing_group(comm)) as group:
        return trained_over(comm, group, folder, cap, plant, step)


def trained_over(comm, group, folder, cap, plant, step):
    ddp = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=cap)
    ddp.register_comm_hook(LedgerState(ddp, folder, step), all_reduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    random = torch.Generator().manual_seed(comm.rank)
    now = [0]
    if plant and comm.rank == 1:
        ddp.module.get_parameter(plant[1]).register_hook(
            lambda gradient: by_an_ulp(gradient, 5) if now == plant[:1] else gradient
        )
    for now[0] in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(torch.randn(6, 11, generator=random)).square().mean().backward()
        ddp(torch.randn(6, 11, generator=random)).square().mean().backward()
        optimizer.step()
    return [name for name, _ in ddp.module.named_parameters()]


def test_buckets_and_backends_do_not_matter(pool, tmp_path):
    [names, _] = pool(2).call(trained, tmp_path / "a")
    for over, cap in (("pycollective", TINY), ("gloo", SMALL), ("gloo", WHOLE)):
        folder = tmp_path / f"{over} {cap}"
        pool(2).call(trained, folder, over, cap)
        found = compare(read(tmp_path / "a"), read(folder))
        assert found.same, str(found)
        assert found.agreed == STEPS
    ledger = read(tmp_path / "a")
    assert [each.name for each in ledger.header.parameters] == names
    assert len(ledger.records) == 2 * STEPS * len(names)


def test_a_planted_change_is_named(pool, tmp_path):
    [names, _] = pool(2).call(trained, tmp_path / "a")
    for name in (names[0], names[-1]):
        pool(2).call(trained, tmp_path / name, "gloo", TINY, [2, name])
        found = compare(read(tmp_path / "a"), read(tmp_path / name))
        said = f"step 2, {name}, average: rank 0 of 2 has other bits than rank 0 of 2"
        assert str(found).splitlines()[0] == said
        assert found.finding.parameters == 1


def test_a_run_that_is_resumed_says_its_first_step(pool, tmp_path):
    pool(2).call(trained, tmp_path, "pycollective", WHOLE, None, 7)
    assert {*read(tmp_path).records["step"].tolist()} == {7, 8, 9, 10}


def failing(comm, folder):
    """What backward raises where rank 1 has a larger model."""
    group = standing_group(comm)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    ddp.register_comm_hook(LedgerState(ddp, folder), all_reduce_hook)
    loss = ddp(torch.ones(1, 2)).sum()
    if comm.rank == 1:
        torch.distributed.all_reduce(torch.ones(5))
    else:
        loss.backward()


def test_backward_raises_what_the_average_did(pool, tmp_path):
    with pytest.raises(CollectiveMismatch):
        pool(2).call(failing, tmp_path)


def asked_for(comm, folder):
    group = standing_group(comm)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    with mock.patch.dict("os.environ", {ENV_LEDGER: str(folder)}):
        ddp.register_comm_hook(None, all_reduce_hook)
        with pytest.raises(ConfigurationError, match=r"register_comm_hook\(LedgerState\(ddp\)"):
            ddp(torch.ones(1, 2)).sum().backward()
        other = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        other.register_comm_hook(LedgerState(other), all_reduce_hook)
    other(torch.ones(1, 2)).sum().backward()
    off = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    off.register_comm_hook(LedgerState(off), all_reduce_hook)
    off(torch.ones(1, 2)).sum().backward()


def test_the_environment_asks_for_it(pool, tmp_path):
    pool(1).call(asked_for, tmp_path)
    assert len(read(tmp_path).records) == 2
