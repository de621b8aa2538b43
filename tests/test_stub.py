"""The native core's type stub is what `tools/core_stub.py` writes, and is what the core has."""

from __future__ import annotations

import ast
import inspect
import runpy

import pytest

from pycollective import _core
from pycollective.leaves.reduction import LeafReductions
from tests.harness import ROOT

STUB = ROOT / "pycollective" / "_core.pyi"
# Of this class nothing is generated.
[COMMUNICATOR] = [
    node
    for node in ast.parse(STUB.read_text()).body
    if isinstance(node, ast.ClassDef) and node.name == "Communicator"
]
METHODS = [node for node in COMMUNICATOR.body if isinstance(node, ast.FunctionDef)]
COLLECTIVES = {node.name for node in METHODS if "async_op" in ast.unparse(node.args)}


def test_the_stub_is_what_the_script_writes():
    pytest.importorskip("pybind11_stubgen")
    script = runpy.run_path(str(ROOT / "tools" / "core_stub.py"))
    assert STUB.read_text() == script["text"](), "run python tools/core_stub.py"


def test_a_communicator_and_its_stub_have_the_same_members():
    members = {name for name in vars(_core.Communicator) if not name.startswith("__")}
    assert {node.name for node in METHODS} - {"__init__"} == members
    assert len(COLLECTIVES) == 11


def names_of(given: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*given.args, *given.kwonlyargs)]


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_a_collective_and_its_stubs_have_the_same_parameters_and_defaults(name):
    signature = inspect.signature(getattr(_core.Communicator, name))
    every = [node.args for node in METHODS if node.name == name]
    of_leaves = [each for each in every if "Accumulator" in ast.unparse(each)]
    overloads = [each for each in every if each not in of_leaves]
    # async_op left out, True, or a bool; all that again where the result goes to x or to `out`.
    assert len(overloads) == (6 if name in ("all_reduce", "reduce") else 3)
    for each in overloads:
        assert names_of(each) == [*signature.parameters]
    given = [p.default for p in signature.parameters.values() if p.default is not p.empty]
    assert [ast.literal_eval(default) for default in overloads[0].defaults] == given

    assert len(of_leaves) == (3 if hasattr(LeafReductions, name) else 0)
    for each in of_leaves:
        takes = inspect.signature(getattr(LeafReductions, name)).parameters
        assert names_of(each) == [parameter for parameter in takes if parameter != "stream"]
