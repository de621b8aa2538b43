"""The comparison with PyTorch's symmetric memory: what PyTorch says against it is the result."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import shown
from tests.cuda import standin
from tests.cuda.standin import ROOT
from tests.test_launches import clean_environment

# As much of torch as is called, over arrays of the library's own.
TORCH = """
import numpy as np
from pycollective import _core
from pycollective.gpu.array import DeviceArray

__version__ = "a test's"
float32 = "float32"

class Tensor:
    def __init__(self, array):
        self.array = DeviceArray.from_numpy(array, 0, _core.DeviceStream(0))
        self.__dlpack__ = self.array.__dlpack__
        self.__dlpack_device__ = self.array.__dlpack_device__
        self.__cuda_array_interface__ = self.array.__cuda_array_interface__
    def __eq__(self, value):
        return self.array.to_numpy() == value
    def fill_(self, value):
        return full(self.array.shape, value, None)

def full(shape, value, device):
    return Tensor(np.full(shape, value, np.float32))

def empty_like(tensor):
    return full(tensor.array.shape, 0, None)

class cuda:
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda: None)

class ops:
    class symm_mem:
        one_shot_all_reduce = staticmethod(lambda x, op, name: full(x.array.shape, {SUM}, None))
"""
DISTRIBUTED = """
class group:
    class WORLD:
        group_name = "0"
FileStore = lambda path, ranks: None
init_process_group = lambda backend, store, rank, world_size: None
"""
SYMMETRIC = """
import torch
def empty(count, dtype, device):
    return torch.full((count,), 0, None)
def rendezvous(tensor, group):
    {then}
"""


def compared(folder, then="pass", its_sum=3.0):
    distributed = folder / "torch" / "distributed"
    distributed.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(TORCH.replace("{SUM}", str(its_sum)))
    (distributed / "__init__.py").write_text(DISTRIBUTED)
    (distributed / "_symmetric_memory.py").write_text(SYMMETRIC.replace("{then}", then))
    environment = clean_environment(**standin.environment(devices=1))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.symmetric_memory", "3"],
        env={**environment, "PYTHONPATH": f"{folder}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_both_are_timed(tmp_path):
    found = compared(tmp_path)
    assert found["ours_us"] > 0
    assert found["torch_us"] > 0
    assert [row.why_not for row in shown.symmetric_memory(found)] == ["", ""]


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("raise RuntimeError('allocations from\\n overlapping devices')", "from overlapping"),
        ("torch._C", "AttributeError: module 'torch' has no attribute '_C'"),
        ("import os; os.abort()", "ended the process"),
    ],
)
def test_what_torch_says_against_it_is_the_result(tmp_path, then, says):
    found = compared(tmp_path, then)
    assert found["ours_us"] > 0
    assert "torch_us" not in found
    assert says in shown.symmetric_memory(found)[-1].why_not


def test_a_wrong_sum_is_no_time(tmp_path):
    assert "the sum is wrong" in compared(tmp_path, its_sum=4.0)["torch"]
