"""`pycollective doctor`: every piece has a line, and a missing one says what it is needed for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pycollective
from pycollective import _core, cores, host_memory
from pycollective.bench import phase
from pycollective.bootstrap.attach import NODE
from pycollective.cli import doctor
from pycollective.config import INSTALL_TORCH, VERSION
from pycollective.shim import loading

single_copy = doctor._single_copy


@pytest.fixture(autouse=True)
def no_torch_is_loaded(monkeypatch):
    """It takes seconds; the last test looks at it, in processes of their own."""
    monkeypatch.setattr(doctor, "_torch_backend", lambda: ("torch backend", "of a test", ""))
    monkeypatch.setattr(doctor, "_single_copy", lambda: ("of a test", ""))  # another process
    monkeypatch.setattr(cores, "used_by_others", lambda: 0.0)  # takes a moment


def report():
    """What is reported: {piece: (found, cost)}."""
    lines = doctor.report()
    found = {name: rest for name, *rest in lines}
    assert len(found) == len(lines)
    return found


def test_what_is_here_is_found():
    lines = report()
    assert lines["pycollective"][0].startswith(f"{VERSION} on Linux")
    assert lines["cores"][0] == str(len(os.sched_getaffinity(0)))
    assert lines["SIMD"][0] == _core.simd_level()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert lines["open files"][0] == f"each process may have {files}"
    assert lines["peer watch"] == ["a rank sees at once that another has died (pidfd)", ""]


def test_a_wrong_simd_level_is_said(monkeypatch):
    def refuse():
        raise ValueError("PYCOLLECTIVE_SIMD=avx99 is not one of these")

    monkeypatch.setattr(_core, "simd_level", refuse)
    found, cost = report()["SIMD"]
    assert found == "PYCOLLECTIVE_SIMD=avx99 is not one of these"
    assert cost.endswith("unset the variable, or correct it")


# What doctor says of it in a process that may not call process_vm_readv, nor may what it starts.
REFUSED = """
from tests import seccomp
try:
    seccomp.refuse(seccomp.PROCESS_VM_READV)
except OSError:
    raise SystemExit("no seccomp here")
from pycollective.cli import doctor
print(*doctor._single_copy(), sep="; ")
"""


@pytest.mark.skipif(doctor.ptrace_scope() != 0, reason="Yama forbids it to those without rights")
def test_ranks_may_read_each_other():
    assert single_copy() == (
        "large messages are copied once: ranks may read each other (process_vm_readv)",
        "",
    )


def test_that_ranks_may_not_read_each_other_is_said():
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
    if "no seccomp here" in done.stderr:
        pytest.skip("no seccomp filter can be installed here")
    assert "process_vm_readv is refused: Operation not permitted" in done.stdout, done.stderr
    assert "up to three times as long" in done.stdout


@pytest.mark.parametrize(
    ("nanoseconds", "found", "cost"),
    [
        (0, "one core", ""),
        (41, "near: 41 ns one way, the cores share a cache", ""),
        (180, "far: 180 ns one way, the cores share no cache", "3 to 10"),
    ],
)
def test_the_phase_of_the_machine_is_said(monkeypatch, nanoseconds, found, cost):
    monkeypatch.setattr(phase, "look", lambda cores: nanoseconds * 1e-9)
    line = report()["core to core"]
    assert line[0].startswith(found)
    assert cost in line[1]
    assert bool(line[1]) == bool(cost)


@pytest.mark.parametrize(
    ("used", "found", "cost"),
    [
        (0.2, "other processes leave the cores free", ""),
        (1.04, "other processes use 1.0 of 2 cores", "waits milliseconds"),
    ],
)
def test_other_processes_that_compute_are_said(monkeypatch, used, found, cost):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cores, "used_by_others", lambda: used)
    assert doctor._other_load()[0] == found
    assert cost in doctor._other_load()[1]
    assert bool(doctor._other_load()[1]) == bool(cost)


def test_how_hosts_could_be_joined(monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_TOPOLOGY", "2x2")
    monkeypatch.setenv("PYCOLLECTIVE_WIER", "raw")
    lines = report()
    assert lines["topology"] == ["2x2 is simulated, by PYCOLLECTIVE_TOPOLOGY", ""]
    assert "PYCOLLECTIVE_TOPOLOGY" in lines["variables"][0]
    assert "PYCOLLECTIVE_WIER: did you mean PYCOLLECTIVE_WIRE?" in lines["variables"][1]
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mpi4py" else there(name)
    )
    lines = report()
    assert lines["MPI"][0] == "unknown without mpi4py"
    assert lines["between hosts"][0].startswith("Gloo carries data")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_torch_backend", lambda: ("torch backend", "none", "a cost"))
    assert report()["between hosts"][1].startswith("all ranks must be on one host")


@pytest.mark.parametrize(
    ("module", "found", "cost"),
    [
        ("def Get_library_version(): return 'Some MPI 1.0, of a test'", "Some MPI 1.0, MPI_", ""),
        ("def Query_thread(): return 0", "Open MPI v9, not MPI_THREAD_MULTIPLE", "needed to send"),
        (
            "raise RuntimeError('no such network')",
            "does not start: RuntimeError: no",
            "under mpiexec",
        ),
    ],
)
def test_mpi_is_tried_in_a_process_of_its_own(monkeypatch, tmp_path, module, found, cost):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(
        "THREAD_MULTIPLE = 3\n"
        "def Get_library_version(): return 'Open MPI v9, package'\n"
        f"def Query_thread(): return 3\n{module}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    line = report()["MPI"]
    assert line[0].startswith(found)
    assert line[1].startswith(cost)
    assert bool(line[1]) == bool(cost)


def test_shared_memory_says_who_limits_it(monkeypatch):
    room = host_memory.Headroom(3 << 20, "the limit of a test")
    monkeypatch.setattr(host_memory, "headroom", lambda: room)
    found, _ = report()["shared memory"]
    assert found.startswith("3 MiB free (the limit of a test); ")
    assert f"each of 16 {_core.Node().mailbox_bytes(16) / (1 << 20):.1f} MiB" in found


def test_a_limit_of_file_sizes_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "_single_copy", single_copy)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, usual[1]))
    NODE.forget()  # whoever has joined in this process before has its segment
    try:
        lines = report()
        with pytest.raises(pycollective.ConfigurationError, match="files of this process may have"):
            pycollective.init()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    found, cost = lines["shared memory"]
    assert "a file of 256 MiB" in found
    assert "may have 100 MiB: raise the limit (ulimit -f)" in found
    assert cost == "no rank can join"
    assert lines["single copy"][0] == "unknown without shared memory"


def test_what_is_missing_says_what_it_costs(monkeypatch, capsys):
    def refuse(pid, flags=0):
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(resource, "getrlimit", lambda what: (100, 100))
    monkeypatch.setattr(_core, "simd_level", lambda: "portable")
    monkeypatch.setenv("PATH", "")
    doctor.doctor()
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line, cost in [
        ("-- cores 1", "2 ranks share 1 core, so they take turns"),
        ("-- SIMD portable", "take several times as long"),
        ("-- peer watch no pidfd: not here", "a rank cannot see that another is dead"),
        ("-- open files each process may have 100", "ulimit -n"),
        (
            "-- mpiexec not found",
            "needed to launch by mpiexec, and for MPI as a peer of pycollective bench",
        ),
    ]:
        assert cost in said[said.index(line) + 1]
    assert said[0].startswith(f"ok pycollective {VERSION} on ")


WITHOUT_TORCH = """
import importlib.metadata, sys
def version(name, found=importlib.metadata.version):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
sys.modules["torch"] = None
"""


@pytest.mark.parametrize("which", ["no torch", "its own shim", "no shim"])
def test_the_torch_backend_is_loaded_or_its_absence_explained(tmp_path, which):
    """In a copy of the package, where a file can be missing."""
    package = tmp_path / "site" / "pycollective"
    shutil.copytree(
        Path(pycollective.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("_torch*.so", "__pycache__"),
    )
    own = Path(pycollective.__file__).parent / f"_torch{loading.SUFFIX}"
    if which == "its own shim":
        shutil.copy(own, package)
    program = tmp_path / "site" / "program.py"
    program.write_text(
        (WITHOUT_TORCH if which == "no torch" else "")
        + "import pycollective.cli.doctor as doctor; print(doctor.__file__); doctor.doctor()"
    )
    another = tmp_path / "another"  # where the user is: not to be imported
    (another / "pycollective").mkdir(parents=True)
    (another / "pycollective" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=another,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path / "site"),
            "XDG_CACHE_HOME": str(tmp_path / "none"),
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert said[0] == str(package / "cli" / "doctor.py")
    assert sum(line.startswith(("ok ", "-- ")) for line in said) == len(doctor.report())
    if which == "its own shim":
        (line,) = [each for each in said if "torch backend" in each]
        assert line.startswith("ok torch backend this checkout's own, for torch 2.")
    elif which == "no torch":
        assert "-- torch not installed" in said
        assert said[said.index("-- torch backend needs torch") + 1] == INSTALL_TORCH
    else:
        cost = said[said.index("-- torch backend does not load") + 1]
        assert cost.startswith("ImportError: pycollective has no torch backend for torch 2.")
        assert cost.endswith("To build one: pycollective build-torch")
