"""What type checkers see: a wrong program is refused at each line that is marked, examples are not;
the names they know are those that there are."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import zipfile
from typing import get_args

import pytest

import pycollective as pc
from pycollective import _core, schedule, typing
from pycollective.bootstrap.options import TRANSPORTS
from pycollective.compression.kernels import VALUES
from tests.harness import ROOT

WRONG = "tests/typing/wrong.py"
# By line: what is said of it, behind `# wrong: `.
EXPECTED = {
    (WRONG, number): line.split("# wrong: ")[1]
    for number, line in enumerate((ROOT / WRONG).read_text().splitlines(), 1)
    if "# wrong: " in line
}


def errors(checker: str, *options: str) -> list[tuple[str, int, str]]:
    """What a type checker finds in the wrong program and in the examples."""
    command = [sys.executable, "-m", checker, *options, WRONG, "examples"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(r"^ *(\S+\.pyi?):(\d+)(?::\d+ -|:) error: (.*)$", done.stdout, re.M)
    return [(name.removeprefix(f"{ROOT}/"), int(line), message) for name, line, message in found]


def test_mypy_refuses_each_wrong_line_and_no_example() -> None:
    # With the options of `make lint`, so with its cache; without one this takes half a minute.
    found = errors("mypy")
    assert len(EXPECTED) >= 10
    assert {(name, line) for name, line, _ in found} == EXPECTED.keys(), found
    for name, line, message in found:
        assert EXPECTED[name, line] in message, message


@pytest.mark.storm  # seconds, and mypy sees the same
def test_pyright_does_too() -> None:
    pytest.importorskip("basedpyright", reason="pip install basedpyright")
    found = errors("basedpyright", "--level", "error", "--pythonpath", sys.executable)
    assert {(name, line) for name, line, _ in found} == EXPECTED.keys(), found


@pytest.mark.parametrize(
    ("literal", "there_are"),
    [
        (typing.ReduceOp, _core.reduce_ops()),
        (typing.Algorithm, ["auto", *schedule.ALGORITHMS]),
        (typing.Wire, _core.wires()),
        (typing.Transport, TRANSPORTS),
        (typing.Dtype, [each.name for each in _core.dtypes()]),
        (typing.Values, VALUES),
    ],
    ids=lambda each: "",
)
def test_the_names_are_those_that_there_are(literal, there_are):
    assert sorted(get_args(literal)) == sorted(there_are)


@pytest.mark.parametrize("name", ["ReduceOp", "Algorithm", "Wire", "Dtype"])
def test_the_docstring_of_the_class_has_all_names(name):
    text = pc.Communicator.__doc__ or ""
    for each in get_args(getattr(typing, name)):
        assert re.search(rf"\b{each}\b", text), each


@pytest.mark.parametrize("operation", [each.name for each in _core.operations()])
def test_a_docstring_names_the_algorithms_that_can_do_it(operation):
    text = " ".join(re.sub(r"[`\"]", "", getattr(pc.Communicator, operation).__doc__).split())
    there_are = set(schedule.algorithms_for(operation))
    if "Every algorithm can do it." in text:
        said = set(schedule.ALGORITHMS)
    elif but := re.search(r"Every algorithm can do it but (\w+)\.", text):
        said = set(schedule.ALGORITHMS) - {but[1]}
    else:
        named = re.search(r"Algorithms?: ([\w, ]+)\.", text)
        said = set(named[1].split(", ")) if named else set()
    assert said == there_are


def test_a_communicator_is_made_by_init_alone():
    assert not inspect.signature(pc.Communicator).parameters
    with pytest.raises(pc.ConfigurationError, match=r"made by pycollective\.init"):
        pc.Communicator()


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    """Of the package without native code: what is written is the same."""
    package = tmp_path / "pycollective"
    package.mkdir()
    for name in ("__init__.py", "py.typed"):
        (package / name).write_text((ROOT / "pycollective" / name).read_text())
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "setup.py").write_text("from setuptools import setup; setup()")
    code = "from setuptools import build_meta; build_meta.build_editable('.')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=100
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
        [path] = files
        assert path.endswith(".pth")
        assert archive.read(path).decode().split() == [str(tmp_path)]
