"""Write pycollective/_core.pyi, the native core's type stub: ``python tools/core_stub.py``.

pybind11-stubgen reads the built core. core_signatures.pyi, beside this file, has the signatures
that it cannot see.
"""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "pycollective" / "_core.pyi"
BY_HAND = ROOT / "tools" / "core_signatures.pyi"
HEADER = (
    '"""The native core (csrc/bindings), for type checkers. tools/core_stub.py writes it."""\n\n'
)

# pybind11 takes all that converts; callers give the plain type.
PLAIN = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "collections.abc.Sequence": "Sequence",
    "typing.Any": "Any",
    "typing_extensions.CapsuleType": "_Capsule",
    "types.CapsuleType": "_Capsule",
    "typing_extensions.Buffer": "Any",
}

Definition = ast.FunctionDef | ast.ClassDef


class _Plainer(ast.NodeTransformer):
    """Leaves docstrings out, and says types plainly."""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and (plain := PLAIN.get(ast.unparse(node))):
            return ast.parse(plain, mode="eval").body
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Expr(ast.Constant(...))]
        elif isinstance(node, ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)


def generated() -> list[Definition]:
    """What the built core defines, as pybind11-stubgen sees it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "pycollective._core", "-o", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        tree = ast.parse(Path(folder, "pycollective", "_core.pyi").read_text())
    return [_Plainer().visit(node) for node in tree.body if isinstance(node, Definition)]


def overload(method: ast.FunctionDef, kind: str, returns: str) -> ast.FunctionDef:
    """The method for that type of `async_op`."""
    each = copy.deepcopy(method)
    given = each.args
    at = [argument.arg for argument in given.args].index("async_op")
    given.args[at].annotation = ast.parse(kind, mode="eval").body
    each.returns = ast.parse(returns, mode="eval").body
    if kind == "Literal[True]":  # it must be given, and so stands behind a "*"
        behind = len(given.args) - at
        given.kwonlyargs[:0], given.args = given.args[at:], given.args[:at]
        given.kw_defaults[:0] = [None, *given.defaults[len(given.defaults) - behind + 1 :]]
        given.defaults = given.defaults[: len(given.defaults) - behind]
    each.decorator_list = [ast.Name("overload")]
    return each


def overloads(methods: list[ast.FunctionDef]) -> list[ast.FunctionDef]:
    """Methods of one name for `async_op` False and True, and then for a bool that is not known."""
    known, unknown = [], []
    for method in methods:
        assert method.returns is not None
        result = ast.unparse(method.returns)
        known.append(overload(method, "Literal[False]", result))
        known.append(overload(method, "Literal[True]", f"Work[{result}]"))
        unknown.append(overload(method, "bool", f"Work[{result}] | {result}"))
    return [*known, *unknown]


def expanded(members: list[ast.stmt]) -> list[ast.stmt]:
    """The members of a class, with overloads of those that take `async_op`."""
    found: list[ast.stmt] = []
    taking: dict[str, list[ast.FunctionDef]] = {}
    for member in members:
        if isinstance(member, ast.FunctionDef) and "async_op" in ast.unparse(member.args):
            taking.setdefault(member.name, []).append(member)
        else:
            found.append(member)
    for methods in taking.values():
        found += overloads(methods)
    return found


def merged(made: Definition, by_hand: Definition | None) -> Definition:
    """What is said by hand in place of what was generated."""
    if not isinstance(made, ast.ClassDef) or not isinstance(by_hand, ast.ClassDef):
        return by_hand or made
    said = expanded(by_hand.body)
    names = {member.name for member in said if isinstance(member, ast.FunctionDef)}
    kept = [
        member
        for member in made.body
        if isinstance(member, ast.FunctionDef) and member.name not in names | {"__class_getitem__"}
    ]
    by_hand.body = [*said, *kept]
    return by_hand


def text() -> str:
    """The stub, formatted."""
    source = BY_HAND.read_text()
    by_hand = [node for node in ast.parse(source).body if isinstance(node, Definition)]
    named = {node.name: node for node in by_hand}
    lines = source.splitlines()[: by_hand[0].lineno - 1]
    preamble = "\n".join(line for line in lines if not line.startswith("#"))
    made = [ast.unparse(merged(node, named.get(node.name))) for node in generated()]
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    unformatted = "\n".join([HEADER, preamble, *made])
    return subprocess.run(
        command, cwd=ROOT, input=unformatted, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    STUB.write_text(text())
