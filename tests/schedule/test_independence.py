"""The proof does not trust what it proves: it knows the steps, and nothing of how they are made."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pycollective.schedule

FOLDER = Path(pycollective.schedule.__file__).parent
# What the proof reads: the order, the deal, what an operation asks for, and the steps.
MAY_IMPORT = {
    "pycollective.order": {"Node", "split"},
    "pycollective.leaves.deal": {"Deal"},
    "operation": {"Operation"},
    "steps": {
        *("INPUT", "OUTPUT", "Combine", "Copy", "RankSteps", "Receive", "Send", "Type"),
        "input_buffers",
    },
}


def parsed(file: str) -> ast.Module:
    return ast.parse((FOLDER / file).read_text())


@pytest.mark.parametrize("file", ["proof.py", "steps.py", "operation.py"])
def test_the_proof_imports_nothing_that_makes_steps(file: str) -> None:
    for node in ast.walk(parsed(file)):
        names = {alias.name for alias in getattr(node, "names", [])}
        if isinstance(node, ast.Import):
            assert not any(name.startswith("pycollective") for name in names)
        elif isinstance(node, ast.ImportFrom) and (node.level or "pycollective" in node.module):
            if file == "operation.py" and node.module == "pycollective.errors":
                continue
            assert node.module in MAY_IMPORT, f"{file} imports {node.module}"
            assert names <= MAY_IMPORT[node.module]
