"""csrc/cuda/embed.py, with an nvcc that only notes its calls: what is made, and what is kept."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EMBED = runpy.run_path(str(Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "embed.py"))

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
    first = EMBED["embed"](tmp_path / "out", True).read_text()
    made = (tmp_path / "out" / "embedded.cpp").stat().st_mtime_ns
    assert EMBED["embed"](tmp_path / "out", True).read_text() == first
    assert (tmp_path / "out" / "embedded.cpp").stat().st_mtime_ns == made
    assert len(calls()) == 1
    assert "sm_80, sm_90, sm_100 and PTX" in first
    code = "code=[compute_80,sm_80,sm_90,sm_100]"
    for flag in (*EMBED["IEEE_FLAGS"], "-Werror all-warnings", code):
        assert all(flag in call for call in calls())
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_ARCHS", "90")
    other = EMBED["embed"](tmp_path / "out", True).read_text()
    assert other != first
    assert "sm_90 and PTX" in other
    assert len(calls()) == 2
    monkeypatch.setenv("VERSION", "2")
    assert EMBED["embed"](tmp_path / "out", True).read_text() != other
    assert len(calls()) == 3
    assert len(list((tmp_path / "out").glob("*.fatbin"))) == 1  # no old ones


def test_without_nvcc_there_are_sources_alone(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_NVCC", "0")
    text = EMBED["embed"](tmp_path / "out", True).read_text()
    assert calls() == []
    assert "incbin" not in text
    assert '{"program", "cuda/program.cu", nullptr, nullptr}' in text
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
    said = 'x.cu(1): warning\nx.cu(2): error: a "test\'s" ??/ \u00e9\nat the end'
    line = EMBED["quoted"](EMBED["telling_line"](said))
    assert line == r'''"x.cu(2): error: a \"test's\" \?\?/ ."'''
    monkeypatch.setenv("PYCOLLECTIVE_NVCC", "/no/such/nvcc")
    with pytest.raises(SystemExit, match="/no/such/nvcc"):
        EMBED["embed"](tmp_path / "out", True)


def test_an_older_nvcc_makes_what_it_knows(calls, tmp_path, monkeypatch):
    """12.8 was the first that knows 100; what was asked for by name is asked of it all the same."""
    monkeypatch.setenv("KNOWN", "compute_80 compute_90")
    text = EMBED["embed"](tmp_path / "made", True).read_text()
    assert "sm_80" in calls()[-1]
    assert "sm_90" in calls()[-1]
    assert "_100" not in calls()[-1]
    assert '"sm_80, sm_90 and PTX"' in text
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_ARCHS", "100")
    EMBED["embed"](tmp_path / "made", True)
    assert "sm_100" in calls()[-1]
