"""csrc/cuda/embed.py, with an nvcc that only notes its calls: what is made, and what is kept."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

EMBED = runpy.run_path(str(Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "embed.py"))

# What doctor says of the images, with a driver that needs none of them.
PROBE = """
#include <cstdio>
#include <stdexcept>
#include "cuda/images.h"
int main() {
  try {
    std::puts(pycollective::cuda::describe_images(13000, {}).c_str());
  } catch (const std::runtime_error& error) {
    std::printf("thrown: %s\\n", error.what());
  }
}
"""
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "a test's nvcc $VERSION"; exit; fi
if [ "$1" = --list-gpu-arch ]; then echo $KNOWN | tr ' ' '\\n'; exit; fi
echo "$@" >> "{calls}"
{then}
while [ "$1" != -o ]; do shift; done
echo an image > "$2"
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What nvcc was called with, a line each."""
    make_nvcc(tmp_path, monkeypatch)
    return lambda: (tmp_path / "calls").read_text().splitlines()


def make_nvcc(folder, monkeypatch, then=":"):
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC.format(calls=folder / "calls", then=then))
    nvcc.chmod(0o755)
    (folder / "calls").touch()
    monkeypatch.setenv("PYCOLLECTIVE_NVCC", str(nvcc))
    monkeypatch.setenv("KNOWN", "compute_75 compute_80 compute_90 compute_100")
    monkeypatch.delenv("PYCOLLECTIVE_CUDA_ARCHS", raising=False)


def test_an_image_is_made_once_for_what_it_is_made_of(calls, tmp_path, monkeypatch):
    modules = len(EMBED["modules"]())
    first = EMBED["embed"](tmp_path / "out", True).read_text()
    made = (tmp_path / "out" / "embedded.cpp").stat().st_mtime_ns
    assert EMBED["embed"](tmp_path / "out", True).read_text() == first
    assert (tmp_path / "out" / "embedded.cpp").stat().st_mtime_ns == made
    assert len(calls()) == modules
    assert "sm_80, sm_90, sm_100 and PTX" in first
    code = "code=[compute_80,sm_80,sm_90,sm_100]"
    for flag in (*EMBED["IEEE_FLAGS"], "-Werror all-warnings", code):
        assert all(flag in call for call in calls())
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_ARCHS", "90")
    other = EMBED["embed"](tmp_path / "out", True).read_text()
    assert other != first
    assert "sm_90 and PTX" in other
    assert len(calls()) == 2 * modules
    monkeypatch.setenv("VERSION", "2")
    assert EMBED["embed"](tmp_path / "out", True).read_text() != other
    assert len(calls()) == 3 * modules
    assert len(list((tmp_path / "out").glob("*.fatbin"))) == modules  # no old ones


def test_without_nvcc_there_are_sources_alone(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_NVCC", "0")
    text = EMBED["embed"](tmp_path / "out", True).read_text()
    assert calls() == []
    assert "incbin" not in text
    assert '{"program", "cuda/program.cu", nullptr, nullptr},' in text
    for name in ("cuda/device.h", "cuda/reduce.h", "numerics.h", "dtype.h", "cstdint"):
        assert f'{{"{name}", R"kernel(' in text


def test_an_nvcc_that_fails_leaves_the_kernels_to_nvrtc(tmp_path, monkeypatch, capsys):
    make_nvcc(tmp_path, monkeypatch, "echo 'a warning of a test' >&2; exit 1")
    text = EMBED["embed"](tmp_path / "out", False).read_text()
    assert "incbin" not in text
    said = capsys.readouterr().err
    assert "does not compile the CUDA kernels; NVRTC will" in said
    assert "a warning of a test" in said
    assert f'"{tmp_path}/nvcc: a warning of a test"' in text
    with pytest.raises(SystemExit, match="a warning of a test"):
        EMBED["embed"](tmp_path / "out", True)
    monkeypatch.setenv("PYCOLLECTIVE_NVCC", "/no/such/nvcc")
    with pytest.raises(SystemExit, match="/no/such/nvcc"):
        EMBED["embed"](tmp_path / "out", True)


@pytest.mark.storm  # it compiles for five seconds
def test_what_a_failing_nvcc_said_is_in_the_report(tmp_path, monkeypatch):
    """The line that tells of the error, through the C++ compiler, whatever is in it."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    said = """x.cu(1): warning\nx.cu(2): error: a "test\\'s" ??/ %d )kernel" \u00e9\nat the end"""
    (tmp_path / "said").write_text(said)
    make_nvcc(tmp_path, monkeypatch, f"cat '{tmp_path}/said' >&2; exit 1")
    embedded = EMBED["embed"](tmp_path, False)
    (tmp_path / "probe.cpp").write_text(PROBE)
    sources = [EMBED["CSRC"] / "cuda" / f"{name}.cpp" for name in ("images", "nvrtc")]
    driver = EMBED["CSRC"] / "cuda" / "driver.cpp"
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{EMBED['CSRC']}")
    files = map(str, (*sources, driver, embedded, tmp_path / "probe.cpp"))
    program = str(tmp_path / "probe")
    subprocess.run([compiler, *flags, *files, "-ldl", "-o", program], check=True, timeout=300)
    monkeypatch.delenv("PYCOLLECTIVE_CUDA_IMAGES", raising=False)
    monkeypatch.setenv("PYCOLLECTIVE_NVRTC", "/no/such/libnvrtc.so")
    report = subprocess.run([program], check=True, timeout=60, capture_output=True, text=True)
    assert report.stdout.startswith("thrown: no NVRTC to compile CUDA kernels with: ")
    assert report.stdout.endswith(
        "or build pycollective where nvcc is; nvcc failed when pycollective was built: "
        f'{tmp_path}/nvcc: x.cu(2): error: a "test\\\'s" ??/ %d )kernel" .\n'
    )


def test_an_older_nvcc_makes_what_it_knows(calls, tmp_path, monkeypatch):
    """12.8 was the first that knows 100; what was asked for by name is asked of it all the same."""
    monkeypatch.setenv("KNOWN", "compute_80 compute_90")
    text = EMBED["embed"](tmp_path / "made", True).read_text()
    assert "sm_80" in calls()[-1]
    assert "sm_90" in calls()[-1]
    assert "100" not in calls()[-1]
    assert '"sm_80, sm_90 and PTX"' in text
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_ARCHS", "100")
    EMBED["embed"](tmp_path / "made", True)
    assert "sm_100" in calls()[-1]
