"""The type stub of the native core says what the module has: no name more, none less."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import pycollective
from pycollective import _core

PACKAGE = Path(pycollective.__file__).parent
STUB = ast.parse((PACKAGE / "_core.pyi").read_text())


def definitions(body):
    """What a module or a class of the stub defines: {name: its first definition}."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.setdefault(node.name, node)
    return found


def parameters(function):
    """The parameters that a caller may name, without self."""
    names = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
    return [name for name in names if name != "self"]


STUBBED = {name: node for name, node in definitions(STUB.body).items() if not name.startswith("_")}
CLASSES = [name for name, node in STUBBED.items() if isinstance(node, ast.ClassDef)]
FUNCTIONS = [name for name, node in STUBBED.items() if isinstance(node, ast.FunctionDef)]
COLLECTIVES = [
    name
    for name in definitions(STUBBED["Communicator"].body)
    if not name.startswith("_") and inspect.ismethoddescriptor(getattr(_core.Communicator, name))
]


def test_the_module_and_the_stub_have_the_same_names():
    assert set(STUBBED) == {name for name in dir(_core) if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_and_its_stub_have_the_same_members(name):
    members = {
        each for each in vars(getattr(_core, name)) if not each.startswith(("__", "_pybind"))
    }
    assert set(definitions(STUBBED[name].body)) - {"__init__"} == members


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_and_its_stub_have_the_same_parameters(name):
    signature = getattr(_core, name).__doc__.splitlines()[0]
    named = re.findall(r"[(,] ?(\w+): ", signature)
    assert parameters(STUBBED[name]) == named


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in ("abort", "stats")])
def test_a_collective_and_its_stubs_have_the_same_parameters_and_defaults(name):
    signature = inspect.signature(getattr(_core.Communicator, name))
    overloads = [
        node
        for node in STUBBED["Communicator"].body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    # async_op left out, True, or a bool; all that again where the result goes to x or to `out`.
    assert len(overloads) == (6 if name in ("all_reduce", "reduce") else 3)
    for each in overloads:
        assert set(parameters(each)) == set(signature.parameters)
    first = overloads[0].args
    assert parameters(overloads[0]) == list(signature.parameters)
    given = [p.default for p in signature.parameters.values() if p.default is not p.empty]
    assert [ast.literal_eval(default) for default in first.defaults] == given
