"""The wheel and the sdist that `make wheel` has put into dist/, and what they say of themselves.

The wheel is installed as users do it, into an environment where no compiler, make or git is found.
"""

from __future__ import annotations

import ast
import email
import os
import platform
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import pytest

from pycollective import _core
from pycollective.config import VERSION
from tests.harness import ROOT

DIST = ROOT / "dist"
CORE = f"pycollective/{Path(_core.__file__).name}"
CSRC, SHIMS = "pycollective/csrc/", "pycollective/torch/shims/"
# What is tracked and of use to git and GitHub alone.
NOT_IN_SDIST = re.compile(r"\.gitignore|\.github/.*")

IN_A_CHECKOUT = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="these are an sdist's files"
)


def tracked(*paths: str) -> list[str]:
    """The files that git tracks, or those of them below some folders."""
    command = ["git", "ls-files", "-z", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def only(pattern: str) -> Path:
    """The one file of dist/ with such a name."""
    found = list(DIST.glob(pattern))
    assert len(found) == 1, f"make wheel puts one {pattern} into dist/, and there are {found}"
    return found[0]


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    return zipfile.ZipFile(only("*.whl"))


@pytest.fixture(scope="module")
def files(wheel: zipfile.ZipFile) -> set[str]:
    """The names of the wheel's files."""
    return {name for name in wheel.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_bytes(wheel.read(f"pycollective-{VERSION}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def sdist() -> list[str]:
    """The names of the sdist's files, without its folder."""
    with tarfile.open(only("*.tar.gz")) as archive:
        return [each.name.partition("/")[2] for each in archive if each.isfile()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program of an environment that the wheel has been installed into; what it prints."""
    home = tmp_path_factory.mktemp("installed")
    environment, folder = home / "venv", home / "empty"
    folder.mkdir()
    venv = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(venv, check=True, timeout=100)
    python = str(environment / "bin" / "python")
    # With a PYTHONPATH pip might find a checkout's package, and install none.
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
    pip += ["--only-binary", ":all:", str(only("*.whl"))]
    subprocess.run(pip, cwd=folder, env=outside, check=True, timeout=250)
    variables = {"PATH": str(environment / "bin"), "HOME": str(home), "LANG": "C.UTF-8"}

    def run(program: str, *arguments: str, **more: str) -> str:
        done = subprocess.run(
            [str(environment / "bin" / program), *arguments],
            cwd=folder,
            env={**variables, **more},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.wheel
def test_the_wheel_says_its_licence_and_what_it_needs(metadata: Message) -> None:
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Version"] == VERSION
    needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert [re.split(r"\W", each)[0] for each in needed] == ["numpy"]


@pytest.mark.wheel
def test_the_wheel_is_for_any_linux_of_this_processor(wheel: zipfile.ZipFile) -> None:
    """auditwheel chose the tag by what the libraries ask of glibc and libstdc++."""
    tag = Path(str(wheel.filename)).stem.split("-")[-1]
    assert re.fullmatch(rf"(manylinux_2_\d+_{platform.machine()}\.?)+", tag)


@pytest.mark.wheel
@IN_A_CHECKOUT
def test_the_wheel_holds_the_package_and_nothing_else(
    wheel: zipfile.ZipFile, files: set[str]
) -> None:
    made = {name for name in files if name.startswith((f"pycollective-{VERSION}.dist-info/", CSRC))}
    native = {name for name in files if name.endswith(".so")}
    assert files - made - native == set(tracked("pycollective"))
    shims = [path.name for path in (ROOT / SHIMS).glob("*.so")]
    assert native == {CORE, *(SHIMS + name for name in shims)}
    licence = wheel.read(f"pycollective-{VERSION}.dist-info/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()


@pytest.mark.wheel
def test_the_wheel_holds_the_torch_shims_sources(wheel: zipfile.ZipFile, files: set[str]) -> None:
    """All that a compiler reads of csrc/ when it compiles the shim."""
    held = {name.removeprefix(CSRC) for name in files if name.startswith(CSRC)}
    shim = {f"torch/{path.name}" for path in (ROOT / "csrc" / "torch").iterdir()}
    assert held >= {*shim, "bindings/errors_py.cpp"}
    for name in held:
        text = wheel.read(CSRC + name).decode()
        assert text == (ROOT / "csrc" / name).read_text()
        included = re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
        assert set(included) <= held, f"{name} includes what the wheel lacks"


@pytest.mark.wheel
def test_installed_it_runs_the_quick_start(installed: Callable[..., str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start" / "numpy.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    program = tmp_path / "average.py"
    program.write_text(example)
    lines = installed("pycollective", "run", "-n", "4", "--tag-output", str(program)).splitlines()
    said = [line.partition(" ") for line in lines]
    assert sorted(rank for rank, _, _ in said) == ["[0]", "[1]", "[2]", "[3]"]
    assert len({text for _, _, text in said}) == 1


@pytest.mark.wheel
def test_installed_it_trains_beside_torch(installed: Callable[..., str], tmp_path: Path) -> None:
    """By a prebuilt shim: there is no compiler. torch is lent by the environment of these tests."""
    torch = pytest.importorskip("torch")
    minor = "_".join(torch.__version__.split(".")[:2])
    assert list((ROOT / SHIMS).glob(f"_torch_{minor}.*")), "make wheel SHIMS=--installed makes it"
    example, _ = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    program = tmp_path / "train.py"
    where = "\nprint(pycollective._torch.__file__)\n"
    program.write_text(example + where)
    lent = {"PYTHONPATH": str(Path(torch.__file__).parents[1])}
    # A file for each rank: torchrun's ranks write a line and its end apart, and two may mix them.
    apart = ("--log-dir", str(tmp_path / "said"), "--redirects", "1")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", *apart)
    installed("python", *torchrun, str(program), **lent)
    said = [path.read_text().split() for path in tmp_path.glob("said/**/stdout.log")]
    assert len(said) == 3
    for *_, shim in said:
        assert f"/site-packages/{SHIMS}_torch_{minor}." in shim
    [words] = [each for each in said if len(each) > 1]
    assert words[2] == words[5]  # over pycollective, with two bucket sizes


@pytest.mark.wheel
def test_installed_its_commands_work_and_it_has_the_instruction_sets_of_here(
    installed: Callable[..., str],
) -> None:
    assert installed("pycollective", "verify", "-n", "2", "--quick")
    said = installed("pycollective", "doctor")
    assert re.search(rf"^ok +pycollective +{re.escape(VERSION)} ", said), said
    code = "from pycollective import _core; print(_core.simd_levels())"
    assert ast.literal_eval(installed("python", "-c", code)) == _core.simd_levels()


@pytest.mark.wheel
def test_the_wheel_holds_the_gpu_kernels_that_nvcc_compiled(wheel: zipfile.ZipFile) -> None:
    core = wheel.read(CORE)
    images = list((ROOT / "build" / "cuda").glob("*.fatbin"))
    nvcc = runpy.run_path(str(ROOT / "csrc" / "cuda" / "embed.py"))["find_nvcc"]()
    assert bool(images) == bool(nvcc)
    assert not [path.name for path in images if path.read_bytes() not in core]


@pytest.mark.wheel
@IN_A_CHECKOUT
def test_the_sdist_holds_what_git_tracks(sdist: list[str]) -> None:
    wanted = {name for name in tracked() if not NOT_IN_SDIST.fullmatch(name)}
    made = {name for name in sdist if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert set(sdist) - made == wanted


@pytest.mark.storm
@pytest.mark.timeout(1500)
def test_a_wheel_can_be_built_from_the_sdist(tmp_path: Path) -> None:
    """Without git, a checkout, nvcc or torch."""
    variables = {**os.environ, "PYCOLLECTIVE_TORCH": "0", "PYCOLLECTIVE_NVCC": "0"}
    variables.pop("PYTHONPATH", None)
    # Without --sdist or --wheel the wheel is built from the sdist.
    build = [sys.executable, "-m", "build", "-q", "-n", "-o", str(tmp_path), str(ROOT)]
    subprocess.run(build, cwd=tmp_path, env=variables, check=True, timeout=1200)
    (made,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(made).namelist()
    assert CORE in names
    assert CSRC + "torch/backend.cpp" in names


def test_the_version_is_the_same_everywhere() -> None:
    said = {"pyproject.toml": f'version = "{VERSION}"', "CITATION.cff": f"version: {VERSION}"}
    for name, line in said.items():
        assert line in (ROOT / name).read_text().splitlines(), name
