"""What `pycollective doctor` says of CUDA: the driver, the GPUs and the kernels, or why not."""

from __future__ import annotations

import re

import pytest

from pycollective.cli import doctor
from pycollective.gpu import nvrtc
from tests.cuda import fake_driver

NOT = "without it, not: arrays on GPUs"


@pytest.fixture(autouse=True)
def no_images_named(monkeypatch):
    monkeypatch.delenv("PYCOLLECTIVE_CUDA_IMAGES", raising=False)


def line(monkeypatch, driver):
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_DRIVER", driver)
    [(found, cost)] = [rest for name, *rest in doctor.report() if name == "CUDA"]
    return found, cost


def test_no_driver_says_how_one_is_named(monkeypatch):
    found, cost = line(monkeypatch, "/no/such/libcuda.so")
    assert found.startswith("no CUDA driver: /no/such/libcuda.so: cannot open")
    assert found.endswith("or name its library in PYCOLLECTIVE_CUDA_DRIVER")
    assert cost == NOT


@pytest.mark.parametrize(
    "lacks", ["cuGetProcAddress_v2", pytest.param("cuIpcGetMemHandle", marks=pytest.mark.storm)]
)
def test_a_driver_that_lacks_a_function_is_too_old(monkeypatch, tmp_path, lacks):
    library = "libm.so.6" if "Proc" in lacks else fake_driver.build(tmp_path, lacks=lacks)
    found, cost = line(monkeypatch, library)
    assert found.startswith(f"the CUDA driver {library} is too old: it has no {lacks}; install")
    assert cost == NOT


@pytest.mark.storm
@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"init": 100}, "finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ({"devices": 0}, "finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ({"init": 803}, "does not start: cuInit: CUDA_ERROR_OF_A_TEST, made up; see nvidia-smi"),
    ],
)
def test_a_driver_without_a_gpu_says_so(monkeypatch, tmp_path, made, said):
    library = fake_driver.build(tmp_path, **made)
    found, cost = line(monkeypatch, library)
    assert found.startswith(f"the CUDA driver {library} {said}")
    assert cost == NOT


def test_what_is_here_is_said(monkeypatch, tmp_path):
    images = tmp_path / "images"
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_IMAGES", str(images))
    library = fake_driver.build(tmp_path, version=12040)
    found, cost = line(monkeypatch, library)
    path = "calls by kernels over peer memory, under init(device=...) with a GPU for each rank"
    assert found == f"12.4 ({library}), 2 x Fake GPU (9.0); {path}; kernels: {images}"
    assert cost == ""


@pytest.mark.storm
@pytest.mark.parametrize(
    ("made", "wish", "path"),
    [
        ({"devices": 1}, "", "calls by way of the host, as ranks would share the GPU"),
        (
            {"reaches": 0},
            "",
            "calls by way of the host, where ranks use GPUs that are apart: 0 and 1",
        ),
        ({}, "host", "device path host, by PYCOLLECTIVE_DEVICE_PATH"),
    ],
)
def test_how_calls_go_is_said_and_why(monkeypatch, tmp_path, made, wish, path):
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_IMAGES", str(tmp_path))
    monkeypatch.setenv("PYCOLLECTIVE_DEVICE_PATH", wish)
    found, _ = line(monkeypatch, fake_driver.build(tmp_path, **made))
    assert f"; {path}; kernels: " in found


@pytest.mark.storm
def test_kernels_are_nvccs_or_nvrtcs_or_missing_with_a_cure(monkeypatch, tmp_path):
    monkeypatch.setenv("PYCOLLECTIVE_NVRTC", "/no/such/libnvrtc.so")
    found, cost = line(monkeypatch, fake_driver.build(tmp_path))
    kernels = found.partition("; kernels: ")[2]
    if kernels == "none":  # built without nvcc
        assert cost.startswith(
            "no NVRTC to compile CUDA kernels with: PYCOLLECTIVE_NVRTC: /no/such/libnvrtc.so: "
            "cannot open shared object file: No such file or directory; install NVRTC (pip install"
        )
    else:
        assert re.fullmatch(r"compiled by nvcc for sm_\d+(, sm_\d+)* and PTX", kernels)
        assert cost == ""


@pytest.mark.storm
def test_a_driver_that_kills_its_process_costs_a_line(monkeypatch, tmp_path):
    library = fake_driver.build(tmp_path, init="*(volatile int*)8")
    found, cost = line(monkeypatch, library)
    assert found == "the driver does not start: status -11"
    assert cost == NOT


def test_nvrtc_is_looked_for_in_nvidias_wheels(monkeypatch, tmp_path):
    for wheel in ("cu13/lib", "cuda_nvrtc/lib"):
        (tmp_path / "nvidia" / wheel).mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = [folder for folder in nvrtc.folders() if folder.startswith(str(tmp_path))]
    assert mine == [f"{tmp_path}/nvidia/cu13/lib", f"{tmp_path}/nvidia/cuda_nvrtc/lib"]
