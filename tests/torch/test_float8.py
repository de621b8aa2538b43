"""Floats of a byte as torch and ml_dtypes have them: where the two agree is the contract."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist

from pycollective import reference
from tests.harness import PerRank
from tests.inputs import EIGHT_BITS, TRAITS, awkward, from_words, same_bits, words
from tests.torch.groups import standing_group, to_numpy, to_torch


def boundaries(dtype: str) -> np.ndarray:
    """fp32 around each number and each tie of the type, and beyond; both signs."""
    largest = from_words([TRAITS[dtype].largest], dtype).astype(np.float32)[0]
    numbers = from_words(np.arange(TRAITS[dtype].largest + 1), dtype).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    far = largest + (largest - numbers[-2]) * np.float32([0.25, 0.5, 0.75, 1, 100])
    middle = words(np.concatenate([numbers, ties, far, np.float32([1e9, 3e38])]))
    near = np.concatenate([middle, middle + 1, np.maximum(middle, 1) - 1])
    special = words(np.float32([np.inf, np.nan]))
    magnitudes = np.concatenate([near, special]).astype(np.uint32)
    return np.concatenate([magnitudes, magnitudes | 0x80000000]).view(np.float32)


def check_casts(dtype: str, values: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        theirs = words(values.astype(getattr(ml_dtypes, dtype)))
    torchs = torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    differ = theirs != torchs
    if dtype == "float8_e4m3fn":
        beyond = ~(np.abs(values) <= 464)
        assert (differ <= beyond).all()
        assert set(np.unique(theirs[beyond])) <= {0x7F, 0xFF}
        assert set(np.unique(torchs[beyond])) <= {0x7E, 0xFE, 0x7F, 0xFF}
    else:
        is_nan = np.isnan(values)
        assert (differ <= is_nan).all()
        assert set(np.unique(theirs[is_nan])) <= {0x7E, 0xFE}
        assert set(np.unique(torchs[is_nan])) <= {0x7E, 0xFE, 0x7F, 0xFF}


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_casts_agree_but_where_the_contract_says(dtype):
    check_casts(dtype, boundaries(dtype))


@pytest.mark.storm  # all there are
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_casts_agree_of_every_fp32(dtype):
    block = np.arange(1 << 24, dtype=np.uint32)
    for first in range(0, 1 << 32, len(block)):
        check_casts(dtype, (block + np.uint32(first)).view(np.float32))


def reduced(comm, x, op):
    standing_group(comm)
    tensor = to_torch(x)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return to_numpy(tensor)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_tensors_are_reduced_by_the_contract(pool, dtype):
    names = {"SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
    for turn, (theirs, op) in enumerate(names.items()):
        inputs = awkward(dtype, 3, 4001, seed=turn)
        for got in pool(3).call(reduced, PerRank(inputs), theirs):
            assert same_bits(got, reference.reduce(inputs, op)), op
