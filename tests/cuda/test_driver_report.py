"""What `pycollective doctor` says of CUDA: the driver, the GPUs and the kernels, or why not."""

from __future__ import annotations

import re
import subprocess

import pytest

from pycollective.cli import doctor
from pycollective.device_path import nvrtc_folders
from tests.cuda import standin

NOT = "needed for arrays on GPUs"


def report(monkeypatch, **variables):
    """What is found, and what it costs; the variables are the stand-in's, or whole names."""
    monkeypatch.delenv("PYCOLLECTIVE_CUDA_IMAGES", raising=False)
    # To load torch takes seconds.
    monkeypatch.setattr(doctor, "_torch_backend", lambda: ("torch backend", "of a test", ""))
    whole = {name: of for name, of in variables.items() if name.isupper()}
    more = {name: of for name, of in variables.items() if name not in whole}
    for name, of in {**standin.environment(**more), **whole}.items():
        monkeypatch.setenv(name, of)
    [(found, cost)] = [rest for name, *rest in doctor.report() if name == "CUDA"]
    return found, cost


NO_GPU = "finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES"
FAILS = "does not start: cuInit: CUDA_ERROR_UNKNOWN, unknown error; see nvidia-smi"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"PYCOLLECTIVE_CUDA_DRIVER": "/no/such/libcuda.so"},
            "no CUDA driver: /no/such/libcuda.so: cannot open.* or name its library in "
            "PYCOLLECTIVE_CUDA_DRIVER$",
        ),
        (
            {"PYCOLLECTIVE_CUDA_DRIVER": "libm.so.6"},
            "the CUDA driver libm.so.6 is too old: it has no cuGetProcAddress_v2; install",
        ),
        ({"version": 11000}, r"the CUDA driver \S+ is too old: it has no cuDeviceGetUuid; install"),
        ({"fail": "cuInit:1:100"}, rf"the CUDA driver \S+ {NO_GPU}"),
        ({"devices": 0}, rf"the CUDA driver \S+ {NO_GPU}"),
        ({"fail": "cuInit:1:999"}, rf"the CUDA driver \S+ {FAILS}"),
    ],
)
def test_a_driver_that_does_not_do_says_why(monkeypatch, variables, said):
    found, cost = report(monkeypatch, **variables)
    assert re.match(said, found), found
    assert cost == NOT


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        (
            {},
            "calls run as kernels over peer memory, with init(device=...) and a GPU for each rank",
        ),
        ({"devices": 1}, "calls go through host memory, as ranks would share the GPU"),
        (
            {"peers": 0},
            "calls go through host memory for ranks on GPUs without peer access: 0 and 1",
        ),
        (
            {"PYCOLLECTIVE_DEVICE_PATH": "host"},
            "device path host, by PYCOLLECTIVE_DEVICE_PATH",
        ),
    ],
)
def test_what_is_here_is_said_and_how_calls_go(monkeypatch, variables, path):
    found, cost = report(monkeypatch, version=12040, **variables)
    count, images = variables.get("devices", 2), standin.images()
    gpus = f"12.4 ({standin.library()}), {count} x stand-in for a GPU (9.0)"
    assert (found, cost) == (f"{gpus}; {path}; kernels: {images}", "")


@pytest.mark.storm
def test_kernels_are_nvccs_or_nvrtcs_or_missing_with_a_cure(monkeypatch):
    nvrtc = {"PYCOLLECTIVE_NVRTC": "/no/such/libnvrtc.so", "PYCOLLECTIVE_CUDA_IMAGES": ""}
    found, cost = report(monkeypatch, **nvrtc)
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
    library = tmp_path / "libkills.so"
    source = "__attribute__((constructor)) void start(void) { *(volatile int*)8 = 1; }"
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(compiler, input=source, text=True, check=True)
    found, cost = report(monkeypatch, PYCOLLECTIVE_CUDA_DRIVER=str(library))
    assert (found, cost) == ("the driver does not start: status -11", NOT)


def test_nvrtc_is_looked_for_in_nvidias_wheels(monkeypatch, tmp_path):
    for wheel in ("cu13/lib", "cuda_nvrtc/lib"):
        (tmp_path / "nvidia" / wheel).mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = [folder for folder in nvrtc_folders() if folder.startswith(str(tmp_path))]
    assert mine == [f"{tmp_path}/nvidia/cu13/lib", f"{tmp_path}/nvidia/cuda_nvrtc/lib"]
