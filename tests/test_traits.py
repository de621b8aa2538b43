"""What the core says of types and operations, beside those who know it independently."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import pycollective
from pycollective import _core, reference
from pycollective.config import MAX_RANKS_PER_HOST
from pycollective.dtypes import numpy_type
from pycollective.planning.tuning_table import ELEMENTS
from pycollective.schedule.operation import OPERATIONS
from tests.inputs import OPS, TRAITS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", list(TRAITS))
def test_a_type_is_what_numpy_and_the_reference_take_it_for(name):
    traits, dtype = TRAITS[name], numpy_type(name)
    assert dtype.itemsize == traits.size
    one = np.ones(1, dtype)
    total = one.astype(reference._ACCUMULATOR.get(name, dtype))
    assert total.dtype.itemsize == traits.accumulator
    assert traits.nan == reference._NAN.get(name, 0)
    beyond = np.array([traits.largest, traits.largest + 1], f"u{traits.size}").view(dtype)
    assert traits.numbers != "float" or np.isfinite(beyond.astype(float)).tolist() == [True, False]
    assert (traits.numbers == "float") == (name in reference._FLOATS)
    assert traits.reduce_ops == [op for op in OPS if reference.is_defined(dtype, op)]
    if traits.numbers == "float":
        largest_below_two = 2 - 2.0**-traits.mantissa
        assert one.dtype.type(largest_below_two) == largest_below_two
        assert one.dtype.type(2 - 2.0 ** -(traits.mantissa + 1)) == 2  # rounded
    assert ELEMENTS[name] == (element := type(ELEMENTS[name])(traits.size, traits.accumulator))
    assert element.accumulator >= element.size


def test_the_operations_of_schedules_are_the_cores():
    collectives = [each for each in _core.operations() if not each.pair and each.name != "barrier"]
    core = {each.name: (each.pieces, each.reduces, each.rooted) for each in collectives}
    ours = {each.name: (each.pieces, each.reduces, each.rooted) for each in OPERATIONS.values()}
    assert core == ours


def test_every_operation_is_a_method():
    for each in _core.operations():
        assert callable(getattr(_core.Communicator, each.name))


def test_as_many_ranks_share_a_host_as_the_core_has_room_for():
    node, most = _core.Node(), MAX_RANKS_PER_HOST
    node.allocate(most)
    with pytest.raises(pycollective.ConfigurationError, match=f"1 to {most} ranks"):
        node.allocate(most + 1)


# Who else names types: the reference; measurements' inputs, which must stay as they are; and what
# docs/inside/wire.md has formats for.
MAY_NAME_TYPES = {
    "pycollective/bench/plot.py",  # `bench --peers bfloat16`: our own ranks, in that type
    "pycollective/bench/record.py",  # likewise
    "pycollective/bench/ranks/library_mpi.py",  # MPI's names
    "pycollective/cli/schedule_table.py",
    "pycollective/compression/kernels.py",
    "pycollective/reference.py",
    "pycollective/segments.py",
    "pycollective/testing/inputs.py",
    "pycollective/typing.py",  # for type checkers; held to the table by tests/typing
}


def test_nothing_else_keeps_a_table_of_types():
    """No other literal of Python's has the names of two types as keys or members."""
    for path in sorted((ROOT / "pycollective").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            members: list[ast.expr | None] = []
            if isinstance(node, ast.Dict):
                members = list(node.keys)
            elif isinstance(node, ast.Tuple | ast.List | ast.Set):
                members = list(node.elts)
            named = {each.value for each in members if isinstance(each, ast.Constant)} & set(TRAITS)
            assert len(named) < 2 or where in MAY_NAME_TYPES, f"{where}: {sorted(named)}"
