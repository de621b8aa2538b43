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
from pycollective import _core
from pycollective.testing.device_array import DeviceArray

__version__ = "a test's"
float32 = "float32"

class Host:
    def __init__(self, array):
        self.numpy = lambda: array

class Tensor:
    def __init__(self, count):
        self.array = DeviceArray((count,), "float32", 0, None, 0, _core.DeviceStream(0))
        self.__dlpack__ = self.array.__dlpack__
        self.__dlpack_device__ = self.array.__dlpack_device__
        self.__cuda_array_interface__ = self.array.__cuda_array_interface__
    def copy_(self, host):
        self.array.write(host.numpy())
    def cpu(self):
        return Host(self.array.to_numpy())

from_numpy = Host

def empty(count, dtype="float32", device=None):
    return Tensor(count)

def empty_like(tensor):
    return Tensor(tensor.array.size)

class cuda:
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda: None)

class ops:
    class symm_mem:
        group = None  # of its rendezvous
        calls = 0
        @classmethod
        def one_shot_all_reduce(cls, x, op, name):
            cls.calls += 1
            total = x.array.to_numpy()
            cls.group.all_reduce(total)
            if cls.calls == {WRONG}:
                total[0] += 1
            out = Tensor(total.size)
            out.copy_(Host(total))
            return out
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
from torch import empty
import pycollective
def rendezvous(tensor, group):
    torch.ops.symm_mem.group = pycollective.init(timeout=40)
    {then}
"""


def compared(folder, then="pass", wrong=0):
    """The last line of the benchmark, of 3 calls; `wrong`: which of torch's sums is."""
    distributed = folder / "torch" / "distributed"
    distributed.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(TORCH.replace("{WRONG}", str(wrong)))
    (distributed / "__init__.py").write_text(DISTRIBUTED)
    (distributed / "_symmetric_memory.py").write_text(SYMMETRIC.replace("{then}", then))
    environment = clean_environment(**standin.environment(devices=1))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.symmetric_memory", "3"],
        env={**environment, "PYTHONPATH": f"{folder}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
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
        pytest.param(
            *("torch._C", "AttributeError: module 'torch' has no attribute '_C'"),
            marks=pytest.mark.storm,  # an exception, as the first
        ),
        ("import os; os.abort()", "ended the process"),
    ],
)
def test_what_torch_says_against_it_is_the_result(tmp_path, then, says):
    found = compared(tmp_path, then)
    assert found["ours_us"] > 0
    assert "torch_us" not in found
    assert says in shown.symmetric_memory(found)[-1].why_not


def test_a_wrong_sum_is_no_time(tmp_path):
    """Whichever it is: the last but one here, of 5 that warm up and 3."""
    found = compared(tmp_path, wrong=7)
    assert "the sum is wrong" in found["torch"]
    assert "torch_us" not in found
