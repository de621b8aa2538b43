"""The code that Triton's compiler makes of the kernel for a GPU."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas

from tests.triton.compiled import HOPPER, kernel, ptx


def spilled(text, folder):
    """Bytes that threads keep in memory for want of registers."""
    (folder / "kernel.ptx").write_text(text)
    target = re.search(r"\.target (\w+)", text)[1]
    command = [get_ptxas(HOPPER.arch).path, "-v", f"-arch={target}", folder / "kernel.ptx"]
    done = subprocess.run(
        [*command, "-o", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    )
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stdout + done.stderr)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("op", ["avg", "prod"])
def test_nothing_is_fused_flushed_or_approximate(dtype, op):
    text = ptx(dtype, op, 3)
    assert not re.search(r"\bfma\.|\.ftz|\.approx|\.full|\batom|\bred\.", text)
    assert ("div.rn.f32" in text) == (op == "avg")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.float32, torch.int8])
def test_aligned_rows_are_read_and_written_once_in_sixteen_bytes(dtype):
    """A full program; one of what is left has an element a thread."""
    text = ptx(dtype, "sum", 5)
    assert (text.count("ld.global.v4.b32"), text.count("ld.global")) == (5, 10)
    assert (text.count("st.global.v4.b32"), text.count("st.global")) == (1, 2)
    text = ptx(dtype, "sum", 5, aligned=False)
    assert text.count("ld.global.v4.b32") == text.count("st.global.v4.b32") == 0


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
    assert spilled(kernel(dtype, op, 64).asm["ptx"], tmp_path) == 0
