"""Whether gradients are finite, and NaNs in their place, in Triton's interpreter, and as PTX that
is executed."""

from __future__ import annotations

import pytest
import torch

from pycollective import ConfigurationError
from tests.kernels.segments import table_of
from tests.triton.compiled import module
from tests.triton.executed import address, executed, ways

kernels = ways("finite")
CPU = torch.device("cpu")
DTYPES = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
COUNTS = (4096 + 77, 0, 13)


def bucket(dtype):
    """Parameters of two types between guards, and their table."""
    whole = [torch.full((count + 8,), 3.0, dtype=dtype) for count in COUNTS]
    whole.append(torch.full((4096 + 8,), 3.0))
    inner = [each[3:-5] for each in whole]
    for each in whole:
        address(each)
    return whole, inner, table_of([{"x": each} for each in inner])


def words(bad=0):
    found = torch.tensor([bad, 0, 6, 6, 0, 0, 0])
    return found.to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_elements_become_nan_where_something_is_bad(kernels, dtype):
    for bad in (0, 1):
        whole, inner, table = bucket(dtype)
        found = words(bad)
        kernels.fill_nan(table, found, kernels.Tables(CPU))
        assert torch.equal(found, words(bad))
        for each, x in zip(whole, inner, strict=True):
            assert (each[:3] == 3).all()
            assert (each[-5:] == 3).all()
            bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
            assert (bits == DTYPES[x.dtype]).all() if bad else (x == 3).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_that_is_not_finite_is_seen(kernels, dtype):
    """Anywhere, and none beside the elements."""
    whole, inner, table = bucket(dtype)
    for each in whole:
        each[:3] = float("nan")
        each[-5:] = float("inf")
    for x in inner:
        x[: x.numel() // 2] = torch.finfo(x.dtype).max
    found = words()
    kernels.check_finite(table, found, kernels.Tables(CPU))
    assert torch.equal(found, words())
    for bad, x, place in (
        (float("inf"), inner[0], 4096 + 76),
        (float("-inf"), inner[3], 4095),
        (float("nan"), inner[0], 5),
        (-float("nan"), inner[2], 12),
    ):
        found, was = words(), x[place].clone()
        x[place] = bad
        kernels.check_finite(table, found, kernels.Tables(CPU))
        assert torch.equal(found, words(1))
        x[place] = was


def test_a_bucket_of_one_type_is_one_launch():
    compiled = module("finite", interpreted=False)
    x = torch.zeros(48, 100)
    for count in (1, 48):
        tables, table = compiled.Tables(CPU), table_of([{"x": each} for each in x[:count]])
        with executed(execute=False) as launches:
            compiled.fill_nan(table, words(), tables)
            compiled.check_finite(table, words(), tables)
        assert {name: len(each) for name, each in launches.kernels.items()} == {
            "fill": 1,
            "look": 1,
        }


def test_numbers_are_loaded_by_vectors():
    """16 bytes of each aligned segment at once, but for what does not fill a program."""
    compiled = module("finite", interpreted=False)
    x = torch.zeros(2 * 4096 + 9)
    start = -x.data_ptr() // 4 % 4
    x = x[start : start + 2 * 4096 + 5]
    with executed() as launches:
        address(x)
        compiled.check_finite(table_of([{"x": x}]), words(), compiled.Tables(CPU))
    assert launches.accesses["look"][16] == 2 * 4096 // 4


def test_found_is_words_of_32_bits():
    kernels = module("finite", interpreted=True)
    with pytest.raises(ConfigurationError, match=r"^found must have .* of int32"):
        kernels.fill_nan(bucket(torch.float32)[2], words().long(), kernels.Tables(CPU))
