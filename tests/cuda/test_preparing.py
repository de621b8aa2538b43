"""Kernels that NVRTC has to compile are compiled before a rank joins the others. NVRTC is the fake
one of csrc/tests, the driver the stand-in, which takes what that makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycollective.bootstrap import init as bootstrap
from tests.cuda import standin
from tests.launchers import launcher

FAKE = standin.ROOT / "csrc" / "tests" / "fake_nvrtc.cpp"

JOINS = """
import os
import pycollective as pc

rank = os.environ["PYCOLLECTIVE_RANK"]
if rank == os.environ.get("FAILS"):
    os.environ["FAKE_NVRTC_LOG"] = "error"
compiled = os.environ["FAKE_NVRTC_COMPILED"] = os.environ["FAKE_NVRTC_COMPILED"] + rank
comm = pc.init(device="cuda", timeout=30)
print("PATH", comm.device_path[0], len(open(compiled).readlines()), comm.device_path[1])
"""

WAITS = """
import pycollective as pc

try:
    pc.init(rank=1, size=2, store="tcp://127.0.0.1:9", device="cuda", timeout=0.1)
except (pc.CollectiveTimeout, pc.ConfigurationError):
    print("alone")
"""


@pytest.fixture
def compiler(tmp_path):
    """Of a process whose kernels NVRTC compiles, and keeps in no file."""
    library = tmp_path / "libfake_nvrtc.so"
    cxx = os.environ.get("CXX", "g++").split()
    subprocess.run([*cxx, "-std=c++17", "-shared", "-fPIC", FAKE, "-o", library], check=True)
    (tmp_path / "pycollective").write_text("no folder")
    env = standin.environment(devices=8)
    del env["PYCOLLECTIVE_CUDA_IMAGES"]
    env |= {
        "PYCOLLECTIVE_NVRTC": str(library),
        "FAKE_NVRTC_PREFIX": "// ",
        "FAKE_NVRTC_COMPILED": str(tmp_path / "compiled"),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    report = [sys.executable, "-c", "from pycollective import _core; print(_core.cuda_report([]))"]
    done = subprocess.run(report, env=os.environ | env, capture_output=True, text=True, check=True)
    if "by nvcc" in done.stdout:
        pytest.skip("nvcc has compiled the kernels: NVRTC has nothing to do")
    assert "NVRTC" in done.stdout
    return env


def lines(env):
    return Path(env["FAKE_NVRTC_COMPILED"]).read_text().splitlines()


def test_who_waits_for_others_has_compiled(tmp_path, compiler):
    (tmp_path / "program.py").write_text(WAITS)
    done = launcher("run").run(1, str(tmp_path / "program.py"), **compiler)
    assert done.stdout.count("alone") == 1, done.stdout + done.stderr
    assert [line.split(",")[0] for line in lines(compiler)] == ["cuda/program.cu"]


def test_one_gpu_that_fails_leaves_the_others_their_kernels(tmp_path, compiler):
    compiler["PYCOLLECTIVE_STANDIN_FAIL"] = "cuDeviceGetAttribute:1"
    test_who_waits_for_others_has_compiled(tmp_path, compiler)


def test_each_rank_compiles_once(tmp_path, compiler):
    (tmp_path / "program.py").write_text(JOINS)
    done = launcher("run").run(2, str(tmp_path / "program.py"), **compiler)
    assert done.stdout.count("PATH peer 1 each GPU maps") == 2, done.stdout + done.stderr


def test_what_one_rank_cannot_compile_all_are_told(tmp_path, compiler):
    (tmp_path / "program.py").write_text(JOINS)
    done = launcher("run").run(2, str(tmp_path / "program.py"), **compiler, FAILS="1")
    assert done.stdout.count("PATH host 2 rank 1: NVRTC 13.0 (") == 2, done.stdout + done.stderr
    assert done.stdout.count(" does not compile cuda/program.cu for sm_90") == 2


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 3])
def test_init_prepares_before_it_joins(monkeypatch, device):
    order = []

    def told(name):
        return lambda *_, **__: order.append(name)

    monkeypatch.setattr(bootstrap.device_paths, "prepare", lambda given: order.append(given))
    monkeypatch.setattr(bootstrap, "_init_explicit", told("joins"))
    monkeypatch.setattr(bootstrap.InitOptions, "apply", told("granted"))
    bootstrap.init(rank=0, size=2, store="tcp://127.0.0.1:9", device=device)
    assert order == [device, "joins", "granted"]


def test_what_is_no_gpu_is_told_later():
    bootstrap.device_paths.prepare("gpu")
