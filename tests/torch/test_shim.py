"""How the shim for the torch that is here is found, refused, and built into the user's cache."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import pytest
import torch

import pycollective
import pycollective.torch
from pycollective.config import INSTALL_TORCH
from pycollective.errors import ConfigurationError
from pycollective.shim import building, compiling, loading
from tests.harness import ROOT

OWN = loading.PACKAGE / f"_torch{loading.SUFFIX}"
HERE = str(torch.__version__)


def stamped(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF, then pycollective's shim for torch " + version.encode() + b"\0")
    return path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A wheel's folder without any shim, and an empty cache, for `loading` in this process."""
    folder = tmp_path / "pycollective"
    folder.mkdir()
    monkeypatch.setattr(loading, "PACKAGE", folder)
    monkeypatch.setattr(loading, "PREBUILT", folder / "torch" / "shims")
    monkeypatch.setattr(loading, "in_a_wheel", lambda: True)
    monkeypatch.setattr(loading, "csrc", lambda: str(ROOT / "csrc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, loading.NAME, pycollective._torch)  # put back after it
    del sys.modules[loading.NAME]
    monkeypatch.setattr(pycollective, "_torch", pycollective._torch)
    return folder


@pytest.fixture
def loaded(monkeypatch):
    """The paths that are loaded, by a loader that finds a shim in every file."""
    paths = []
    monkeypatch.setattr(
        ExtensionFileLoader, "create_module", lambda self, spec: type(sys)(spec.name)
    )
    monkeypatch.setattr(
        ExtensionFileLoader, "exec_module", lambda self, module: paths.append(Path(self.path))
    )
    return paths


def in_cache(version: str = HERE) -> Path:
    loading.cache_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    path = stamped(loading.cache_folder() / loading.cache_name(version), version)
    path.chmod(0o700)
    return path


def as_torch(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)


def refusal() -> str:
    with pytest.raises(ImportError) as caught:
        loading.load()
    assert loading.NAME not in sys.modules
    return str(caught.value)


def test_the_own_shim_comes_first_then_the_prebuilt_one_then_the_cache(
    package, loaded, monkeypatch
):
    as_torch(monkeypatch, "2.99.1+cu130")
    own = stamped(package / f"_torch{loading.SUFFIX}", "2.99.0")
    prebuilt = stamped(loading.PREBUILT / loading.prebuilt_name("2.99"), "2.99.3")
    stamped(loading.PREBUILT / loading.prebuilt_name("2.98"), "2.98.0")
    cached = in_cache("2.99.1+cu130")
    for path, described in (
        (own, "this checkout's own, for torch 2.99"),
        (prebuilt, "prebuilt for torch 2.99"),
        (cached, f"built by pycollective build-torch: {cached}"),
    ):
        module = loading.load()
        assert loading.load() is module
        assert sys.modules["pycollective._torch"] is module
        assert loading.described() == described
        assert loaded.pop() == path
        assert loaded == []
        path.unlink()
        del sys.modules[loading.NAME]
    assert "torch 2.99.1+cu130" in refusal()


def test_the_error_names_torch_what_there_is_and_the_cure(package, monkeypatch):
    as_torch(monkeypatch, "2.99.0")
    for minor in ("2.100", "2.9"):
        stamped(loading.PREBUILT / loading.prebuilt_name(minor), f"{minor}.0")
    (loading.PREBUILT / "_torch_2_99.cpython-27-other.so").touch()  # another Python's
    message = refusal()
    assert message.startswith("pycollective has no torch backend for torch 2.99.0 and Python 3.")
    assert "prebuilt for this Python: torch 2.9, 2.100. " in message
    assert message.endswith("To build one: pycollective build-torch")
    shutil.rmtree(loading.PREBUILT)
    assert "prebuilt for this Python: none. " in refusal()


@pytest.mark.skipif(not compiling.compiler(), reason="needs a C++ compiler")
def test_an_undefined_symbol_becomes_an_error_that_says_what_to_do(package, tmp_path):
    source = tmp_path / "shim.cpp"
    source.write_text(
        f'const char* stamp() {{ return "pycollective\'s shim for torch {HERE}"; }}\n'
        'extern "C" void of_another_torch();\n'
        'extern "C" void* PyInit__torch() { of_another_torch(); return nullptr; }\n'
    )
    own = package / f"_torch{loading.SUFFIX}"
    command = [*compiling.compiler(), "-shared", "-fPIC", "-Wl,-z,now", str(source), "-o", str(own)]
    subprocess.run(command, check=True, timeout=120)
    message = refusal()
    assert f"{own} does not fit this torch (" in message
    assert "undefined symbol: of_another_torch" in message
    assert "To build one: pycollective build-torch" in message


def test_the_extra_and_the_advice_name_the_same_torch():
    pyproject = (ROOT / "pyproject.toml").read_text()
    ranges = re.findall(r'"(torch>=[^"]+)"', pyproject)
    assert len(ranges) == 3
    assert {f"pip install '{each}'" for each in ranges} == {INSTALL_TORCH}


def test_the_cached_shim_is_of_the_sources_and_of_torchs_version(monkeypatch, tmp_path):
    copy = tmp_path / "csrc"
    sources = loading.csrc()
    for path in compiling.read(sources):
        to = copy / os.path.relpath(path, sources)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    name = loading.cache_name("2.13.0")
    monkeypatch.setattr(loading, "csrc", lambda: str(copy))
    assert loading.cache_name("2.13.0") == name  # wherever they lie
    assert loading.cache_name("2.13.1") != name
    with (copy / "engine" / "api.h").open("a") as header:
        header.write("\n")
    assert loading.cache_name("2.13.0") != name


def of_another_torch(package, monkeypatch):
    return stamped(package / f"_torch{loading.SUFFIX}", "2.12.0")


def without_a_stamp(package, monkeypatch):
    own = stamped(package / f"_torch{loading.SUFFIX}", "2.12.0")
    own.write_bytes(b"\x7fELF")
    return own


def before_a_release(package, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0.dev20260101+cpu")
    stamped(loading.PREBUILT / loading.prebuilt_name("2.99"), "2.99.0")


def beside_a_checkout(package, monkeypatch):  # it may be of older sources
    monkeypatch.setattr(loading, "in_a_wheel", lambda: False)
    stamped(loading.PREBUILT / loading.prebuilt_name(".".join(HERE.split(".")[:2])), HERE)


def writable_folder(package, monkeypatch):
    folder = in_cache().parent
    folder.chmod(0o720)
    with pytest.raises(ConfigurationError, match="is refused: others may write"):
        building.build(print)
    return folder


def writable_file(package, monkeypatch):
    path = in_cache()
    path.chmod(0o702)
    return path


def another_users(package, monkeypatch):
    path, real, owner = in_cache(), os.lstat, os.geteuid()

    def lstat(name):
        found = list(real(name))
        found[4] = owner + 1 if name == path else owner
        return os.stat_result(found)

    monkeypatch.setattr(os, "lstat", lstat)
    return path


def a_link(package, monkeypatch):
    path = in_cache()
    path.rename(package / "elsewhere")
    path.symlink_to(package / "elsewhere")
    return path


def without_a_home(package, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", home)


# How a shim is laid that must not be loaded, whose path is returned; what is said of it.
SPOILT = {
    of_another_torch: "{} was built for torch 2.12; prebuilt",
    without_a_stamp: "{} does not say for which torch it was built",
    before_a_release: "torch 2.99.0.dev20260101",
    beside_a_checkout: "prebuilt for this Python: none",
    writable_folder: "{} is refused: others may write to it",
    writable_file: "{} is refused: others may write to it",
    another_users: "{} is refused: it is user",
    a_link: "{} is refused: it is a symbolic link",
    without_a_home: "there is no cache: Could not determine home directory. Set XDG_CACHE_HOME",
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_what_does_not_fit_is_not_loaded(package, loaded, monkeypatch, spoil):
    path = spoil(package, monkeypatch)
    assert SPOILT[spoil].format(path) in refusal()
    assert loaded == []


def test_beside_a_shim_of_another_torch_one_that_fits_is_loaded(package, loaded, monkeypatch):
    of_another_torch(package, monkeypatch)
    cached = in_cache()
    loading.load()
    assert loaded == [cached]


@pytest.fixture
def compiled(monkeypatch):
    """The targets that are compiled, by a compiler that takes no time."""
    targets = []

    def compile_shim(csrc, torch, folder, target):
        targets.append(target)
        stamped(target, HERE).chmod(0o666)

    monkeypatch.setattr(compiling, "compile_shim", compile_shim)
    return targets


def test_what_is_built_is_private_and_found(package, loaded, compiled):
    said: list[str] = []
    umask = os.umask(0)
    try:
        building.build(said.append)
    finally:
        os.umask(umask)
    (path,) = loaded
    assert path == loading.cache_folder() / loading.cache_name(HERE)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    assert sorted(each.name for each in path.parent.iterdir()) == sorted([path.name, "lock"])
    assert said[0].startswith(f"compiling for torch {HERE}")
    assert said[1] == f"built by pycollective build-torch: {path}"
    building.build(said.append)
    assert said[2].startswith("nothing to do: ")
    assert len(compiled) == 1


def test_a_failed_build_leaves_nothing_and_says_why(package, monkeypatch):
    def compile_shim(csrc, torch, folder, target):
        target.touch()
        raise RuntimeError("c++ failed:\nno such thing")

    monkeypatch.setattr(compiling, "compile_shim", compile_shim)
    with pytest.raises(ConfigurationError, match=r"c\+\+ failed:\nno such thing"):
        building.build(print)
    assert [each.name for each in loading.cache_folder().iterdir()] == ["lock"]


def test_a_build_waits_for_another_no_longer_than_it_may(package, loaded, compiled, monkeypatch):
    loading.cache_folder().mkdir(parents=True, mode=0o700)
    descriptor = os.open(loading.cache_folder() / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # which only an exclusive one waits for
    with pytest.raises(ConfigurationError, match=r"another process has been building for 0\.1 s"):
        building.build(print, longest=0.1)

    def other_ends(seconds):  # while this one waits
        in_cache()
        os.close(descriptor)

    monkeypatch.setattr(building, "sleep", other_ends)
    building.build(print)
    assert (len(loaded), compiled) == (1, [])


def test_what_building_lacks_is_named_before_anything_is_built(
    package, compiled, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"a C\+\+ compiler .* and Python's headers"):
        building.build(print)
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(ConfigurationError, match="compiler of CXX=no-such-compiler -m64"):
        building.build(print)
    assert compiled == []
    assert not loading.cache_folder().exists()


def test_what_the_compiler_says_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'print(\"no headers\"); raise SystemExit(1)'")
    with pytest.raises(RuntimeError, match=r"failed:\nno headers"):
        compiling.compile_shim(loading.csrc(), str(tmp_path), tmp_path, tmp_path / "shim")


TRAIN = """
import torch
import torch.distributed as dist
import pycollective.torch
from pycollective.shim import loading

dist.init_process_group("pycollective")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.full((3, 4), dist.get_rank() + 1.0)).sum().backward()
print(loading.described(), model.module.weight.grad[0, 0].item())
dist.destroy_process_group()
"""


@pytest.mark.storm  # it compiles torch's headers
@pytest.mark.timeout(3000)
def test_build_torch_builds_what_ddp_trains_with(tmp_path):
    """In a copy of the package as a wheel leaves it, without a shim."""
    package = tmp_path / "site" / "pycollective"
    shutil.copytree(
        loading.PACKAGE, package, ignore=shutil.ignore_patterns("_torch*.so", "__pycache__")
    )
    sources = loading.csrc()
    for path in compiling.read(sources):
        to = package / "csrc" / os.path.relpath(path, sources)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "site"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def run(*command, seconds=200):
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    train = ("-m", "pycollective", "run", "-n", "2", "train.py")
    assert "To build one: pycollective build-torch" in run(*train).stderr
    built = run("-m", "pycollective", "build-torch", seconds=2500)
    assert (built.returncode, built.stderr) == (0, ""), built
    done = run(*train)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("built by pycollective build-torch: ") == 2
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["4.5", "4.5"]


WITHOUT = """
from unittest import mock
import torch.distributed as dist
from pycollective.shim import loading

def load():
    raise ImportError("no shim fits")

loading.load = load
import pycollective.torch
from pycollective.torch import ordered

for call in (
    lambda: pycollective.torch.empty,
    lambda: dist.init_process_group(
        "pycollective", store=dist.HashStore(), rank=0, world_size=1
    ),
):
    try:
        call()
    except ImportError as error:
        print(error)
import torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
ordered.all_reduce(x, "avg")
pycollective.torch.all_reduce_hook(None, mock.Mock(**{"buffer.return_value": x})).wait()
print(x.tolist())
state = pycollective.torch.OneBitState([("w", torch.zeros(3, requires_grad=True))])
print(pycollective.torch.compressed_all_reduce(x, state, "w"), x.tolist())
state.close()
model = torch.nn.Linear(1, 1, bias=False)
sync = pycollective.torch.LeafSync(model, 2)
for leaf in sync.local_leaves:
    with sync.leaf(leaf):
        model(torch.ones(1)).backward()
print(model.weight.grad.item())
sync.close()
dist.destroy_process_group()
"""


def test_over_other_backends_no_shim_is_needed():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    x = "[1.0, 1.0, 1.0]"
    assert done.stdout.splitlines() == [*2 * ["no shim fits"], x, f"True {x}", "1.0"], done.stderr
