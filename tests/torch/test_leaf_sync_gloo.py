"""`LeafSync` over Gloo, by ordered calls: the bits and errors that it has over pycollective."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from tests.inputs import same_bits
from tests.torch import test_leaf_sync as over_pycollective
from tests.torch.ordered_groups import standing
from tests.torch.test_leaf_sync import BF16, DDP, FP32, MIXED, wanted


def over_gloo(comm, name, topology, *given):
    """What a function of `test_leaf_sync` returns over a group of Gloo's."""
    torch.set_num_threads(1)
    standing(comm)
    with (
        mock.patch.object(over_pycollective, "standing_group", standing),
        mock.patch.dict(os.environ, {"PYCOLLECTIVE_TOPOLOGY": topology} if topology else {}),
    ):
        return getattr(over_pycollective, name)(comm, *given)


def check(pool, ranks, dtypes, leaves, options=None, counts=None, ddp=None, topology=""):
    options = options or {}
    want = [*wanted(dtypes, leaves, options.get("grad_dtype"), counts and sum(counts))]
    given = "averages", topology, dtypes, leaves, options, counts, ddp
    for steps in pool(ranks).call(over_gloo, *given):
        for step in steps:
            assert all(same_bits(*each) for each in zip(step, want, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_the_references_average(pool, ranks):
    check(pool, ranks, FP32, 24)
    check(pool, ranks, FP32, 7)
    check(pool, ranks, FP32, 2)
    check(pool, ranks, MIXED, 6, {"bucket_cap_mb": 0.003})
    check(pool, ranks, MIXED, ranks)
    check(pool, ranks, BF16, 5, {"grad_dtype": torch.float32})
    check(pool, ranks, FP32, 4, counts=[3, 0, 0, 0])  # as many as some ranks give nodes
    check(pool, ranks, FP32, 4, counts=[1, 1 << 24, 0, 0])  # which fp32 does not hold


def test_ranks_of_hosts_add_up_their_nodes_first(pool):
    check(pool, 4, FP32, 7, topology="2,2")
    check(pool, 4, BF16, 4, {"grad_dtype": torch.float32}, topology="2,2")
    check(pool, 4, MIXED, 3, topology="3,1")


@pytest.mark.parametrize("name", DDP)
def test_under_ddp(pool, name):
    check(pool, 2, FP32, 3, ddp=DDP[name])


def test_two_leaf_syncs_share_a_group(pool):
    alone, both = (pool(ranks).call(over_gloo, "two_models", "", 3) for ranks in (1, 2))
    for found in both:
        assert all(same_bits(*each) for each in zip(found, alone[0], strict=True))
