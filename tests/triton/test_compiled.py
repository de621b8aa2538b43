"""The registers that ptxas needs for the kernel that Triton compiles."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tests.triton.compiled import kernel, needs


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.bfloat16, "avg"),
        (torch.float32, "sum"),
        (torch.float8_e4m3fn, "avg"),
        pytest.param(torch.float8_e5m2, "sum", marks=pytest.mark.storm),
        pytest.param(torch.float16, "min", marks=pytest.mark.storm),
        pytest.param(torch.int8, "max", marks=pytest.mark.storm),
    ],
)
def test_many_leaves_fit_the_registers(tmp_path, dtype, op):
    assert needs(kernel(dtype, op, 64), tmp_path)[1] == 0


# What takes most registers, of the types of each size.
HEAVIEST = [
    *((torch.float8_e4m3fn, "max"), (torch.bfloat16, "sum"), (torch.float32, "avg")),
    (torch.float64, "avg"),
]


@pytest.mark.parametrize(
    ("n", "most", "architecture"),
    [
        (8, 144, 90),
        *(
            pytest.param(*each, marks=pytest.mark.storm)
            for each in [(8, 144, 80), (8, 144, 100), (2, 64, 80), (2, 64, 90), (2, 64, 100)]
        ),
    ],
)
def test_registers_of_few_leaves(tmp_path, record_property, n, most, architecture):
    """A multiprocessor has 65,536 for its threads, which are 1,536 or 2,048 at most."""
    for dtype, op in HEAVIEST:
        compiled = kernel(dtype, op, n, target=GPUTarget("cuda", architecture, 32))
        registers, spilled = needs(compiled, tmp_path)
        record_property(f"registers {dtype} {op} {n} sm_{architecture}", registers)
        assert registers <= most
        assert spilled == 0
