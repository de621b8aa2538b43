"""Choosing an algorithm: by the table where it covers the case, by the model elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollective import ConfigurationError
from pycollective.planning.tuning_table import ELEMENTS, read_table, write_table
from pycollective.schedule import ALGORITHMS, OPERATIONS, Topology, algorithms_for
from pycollective.schedule.cost import BETWEEN_HOSTS, TYPICAL, price
from pycollective.schedule.select import Measurement, Table, choose

BF16, FP32 = ELEMENTS["bfloat16"], ELEMENTS["float32"]
EIGHT = Topology.parse("2x4", 8)


def measured(size: int, topology: str = "2x4", dtype: str = "bfloat16", **seconds: float):
    return Measurement("all_reduce", topology, dtype, size, seconds, ELEMENTS[dtype])


def table(*entries: Measurement) -> Table:
    return Table({"cpu": "imaginary"}, entries)


def by_model(size: int, topology: Topology = EIGHT) -> str:
    return choose("all_reduce", topology, size, BF16, TYPICAL)


@given(
    operation=st.sampled_from(list(OPERATIONS)),
    topology=st.sampled_from(["1x1", "1x8", "2x4", "8x1", "3,5", "16x4"]),
    size=st.integers(0, 1 << 36),
    dtype=st.sampled_from(list(ELEMENTS)),
)
def test_the_model_chooses_what_is_about_the_cheapest(operation, topology, size, dtype) -> None:
    ranks = {"1x1": 1, "16x4": 64}.get(topology, 8)
    case = operation, Topology.parse(topology, ranks), size, ELEMENTS[dtype], TYPICAL
    chosen = choose(*case)
    prices = {
        name: price(operation, name, *case[1:])
        for name in ALGORITHMS
        if name in algorithms_for(operation)
    }
    assert prices[chosen] <= 1.1 * min(prices.values())


def test_of_what_costs_about_the_same_the_fewest_steps_are_chosen() -> None:
    where, size = Topology.parse("4x1", 4), 64 << 20
    few, many = (
        price("all_reduce", name, where, size, FP32, BETWEEN_HOSTS["gloo"])
        for name in ("direct", "halving_doubling")
    )
    assert many < few < 1.1 * many
    assert choose("all_reduce", where, size, FP32, BETWEEN_HOSTS["gloo"]) == "direct"


def test_one_rank_of_a_host_does_not_handle_much() -> None:
    """On a link of 1 Gbit/s 1 Mi of bf16 took 22 ms so, and 14 ms by halving-doubling."""
    where = Topology.parse("2x2", 4)

    def chosen(size: int) -> str:
        return choose("all_reduce", where, size, ELEMENTS["bfloat16"], BETWEEN_HOSTS["gloo"])

    assert chosen(256 << 10) == "recursive_doubling"
    assert chosen(1 << 20) in ("halving_doubling", "hierarchical")


@pytest.mark.parametrize("topology", ["1x16", "1x64", "64x1", "8x8", "100x1", "16x16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_ring_of_many_is_never_chosen(topology: str, dtype: str) -> None:
    hosts, local = map(int, topology.split("x"))
    where = Topology.parse(topology, hosts * local)
    for size in (1 << power for power in range(0, 40, 2)):
        assert choose("all_reduce", where, size, ELEMENTS[dtype], TYPICAL) != "ring"


def test_the_table_goes_before_the_model() -> None:
    size = 1 << 20
    assert by_model(size) != "ring"
    one = table(measured(size, ring=1e-3, direct=2e-3))
    assert choose("all_reduce", EIGHT, size, BF16, TYPICAL, one) == "ring"


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (1000, "tree"),
        (3162, "tree"),  # the middle of 1,000 and 10,000 in logarithm is 3,162.3
        (3163, "ring"),
        (5500, "ring"),  # the middle on a ruler
        (10_000, "ring"),
        (60_000, "direct"),
        (100_000, "direct"),
    ],
)
def test_the_nearest_measured_size_decides(size: int, name: str) -> None:
    tuned = table(  # in no order
        measured(10_000, ring=1, tree=2, direct=3),
        measured(100_000, ring=3, tree=2, direct=1),
        measured(1000, ring=2, tree=1, direct=3),
    )
    assert choose("all_reduce", EIGHT, size, BF16, TYPICAL, tuned) == name


@pytest.mark.parametrize(
    ("operation", "topology", "size", "dtype"),
    [
        ("reduce_scatter", "2x4", 2000, "bfloat16"),
        ("all_reduce", "4x2", 2000, "bfloat16"),
        ("all_reduce", "1x8", 2000, "bfloat16"),
        ("all_reduce", "2x4", 999, "bfloat16"),
        ("all_reduce", "2x4", 10_001, "bfloat16"),
        ("all_reduce", "2x4", 0, "bfloat16"),
        ("all_reduce", "2x4", 2000, "float32"),
    ],
)
def test_what_the_table_does_not_cover_is_left_to_the_model(
    operation: str, topology: str, size: int, dtype: str
) -> None:
    tuned = table(measured(1000, ring=1), measured(10_000, ring=1))
    where = Topology.parse(topology, 8)
    case = operation, where, size, ELEMENTS[dtype], TYPICAL
    assert choose(*case) != "ring"
    assert choose(*case, tuned) == choose(*case)


def test_types_of_one_width_share_measurements() -> None:
    tuned = table(measured(1000, dtype="bfloat16", ring=1), measured(1000, dtype="int16", tree=1))
    for dtype, name in (("float16", "ring"), ("bfloat16", "ring"), ("int16", "tree")):
        assert choose("all_reduce", EIGHT, 1000, ELEMENTS[dtype], TYPICAL, tuned) == name


def test_of_equals_the_first_is_chosen() -> None:
    # Whatever the order in the file: all ranks must choose the same.
    for seconds in ({"tree": 1.0, "direct": 1.0}, {"direct": 1.0, "tree": 1.0}):
        tuned = table(measured(1000, **seconds))
        assert choose("all_reduce", EIGHT, 1000, BF16, TYPICAL, tuned) == "direct"
    assert by_model(0, Topology.single_host(1)) == "direct"


@pytest.mark.parametrize(
    ("operation", "algorithm", "size", "says"),
    [
        ("all_reduce", "direct", -1, "-1 bytes"),
        ("all_reduce", "rings", 1, "unknown algorithm 'rings'"),
        ("all_to_all", "ring", 1, "there are direct"),
        ("all_reduced", "ring", 1, "no schedules for 'all_reduced'"),
    ],
)
def test_what_cannot_be_priced_or_chosen(
    operation: str, algorithm: str, size: int, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        price(operation, algorithm, EIGHT, size, BF16, TYPICAL)
    if operation == "all_reduced" or size < 0:
        with pytest.raises(ConfigurationError, match=says):
            choose(operation, EIGHT, size, BF16, TYPICAL, table(measured(1000, ring=1)))


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    scattered = str(Topology.of_hosts([0, 1, 0]))
    one = table(
        measured(1024, ring=1.5e-5, tree=0.1 + 0.2),
        measured(1024, dtype="float32", direct=3e-6),
        measured(4096, topology="3,1", direct=1e-3),
        measured(4096, topology=scattered, direct=1e-3),
    )
    write_table(tmp_path / "tuning.json", one)
    again = read_table(tmp_path / "tuning.json")
    assert again == one


def entry(**changes: Any) -> dict[str, Any]:
    """A right entry of a file, but for the changes; None takes a field away."""
    fields = {
        "operation": "all_reduce",
        "topology": "2x4",
        "dtype": "bfloat16",
        "bytes": 1024,
        "seconds": {"ring": 1e-5},
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def file(**changes: Any) -> dict[str, Any]:
    return {
        "format": "pycollective-tuning",
        "version": 1,
        "machine": {},
        "entries": [entry()],
        **changes,
    }


BROKEN = {
    "nothing": (b"", "is not JSON"),
    "half of it": (b'{"format": ', "is not JSON"),
    "no UTF-8": (b"\xff\xfe", "is not JSON"),
    "too deep": (b"[" * 100_000, "is not JSON"),
    "a list": ([], "no tuning file"),
    "a benchmark's": ({"schema": "pycollective-bench/1", "rows": []}, "no tuning file"),
    "later": (file(version=2), "has version 2, and this pycollective reads 1"),
    "no version": (file(version=None), "has version None"),
    "no entries": (file(entries=None), "broken"),
    "entries by name": (file(entries={}), "broken"),
    "machine": (file(machine="mine"), "broken"),
    "an entry that is none": (file(entries=[entry(), 7]), "entry 1.*and has 7"),
    "no bytes": (file(entries=[entry(bytes=None)]), "entry 0.*must have bytes"),
    "too much": (file(entries=[entry(rank=3)]), "entry 0.*has.*rank"),
    "operation": (file(entries=[entry(operation="sum")]), "no schedules for 'sum'"),
    "operation's type": (file(entries=[entry(operation=3)]), "operation must be a name.*3"),
    "dtype": (file(entries=[entry(dtype="float8")]), "unknown dtype 'float8'"),
    "dtype's type": (file(entries=[entry(dtype=[2])]), "dtype must be a name"),
    "bytes": (file(entries=[entry(bytes=0)]), "bytes must be a whole number.*is 0"),
    "bytes' type": (file(entries=[entry(bytes=True)]), "bytes.*True"),
    "too many bytes": (file(entries=[entry(bytes=10**400)]), "bytes must be"),
    "no times": (file(entries=[entry(seconds={})]), "seconds must hold"),
    "algorithm": (file(entries=[entry(seconds={"star": 1})]), "no algorithm 'star'.*direct"),
    "algorithm for another": (
        file(entries=[entry(operation="broadcast", seconds={"ring": 1.0})]),
        "no algorithm 'ring' for broadcast; there are direct, tree",
    ),
    "no time": (file(entries=[entry(seconds={"ring": 0})]), "ring took 0 seconds"),
    "not a number": (file(entries=[entry(seconds={"ring": float("nan")})]), "ring took nan"),
    "for ever": (file(entries=[entry(seconds={"ring": float("inf")})]), "ring took inf"),
    "a time in words": (file(entries=[entry(seconds={"ring": "1"})]), "ring took '1'"),
    "topology": (file(entries=[entry(topology="2 hosts")]), "topology '2 hosts' is neither"),
    "topology's type": (file(entries=[entry(topology=8)]), "topology must be a name"),
    "topology otherwise": (file(entries=[entry(topology="4,4")]), "must be written '2x4'"),
    "hosts otherwise": (file(entries=[entry(topology="hosts 0,0")]), "must be written '1x2'"),
    "hosts' numbers": (file(entries=[entry(topology="hosts 1,0")]), "not numbered from 0"),
    "no ranks": (file(entries=[entry(topology="0x4")]), "topology '0x4'"),
    "too many ranks": (file(entries=[entry(topology="1001x1000")]), "1,000,000 ranks"),
    "twice": (file(entries=[entry(), entry()]), "entry 1.*all_reduce 2x4 bfloat16 1024 bytes"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, what: str) -> None:
    data, says = BROKEN[what]
    path = tmp_path / "mine.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    with pytest.raises(ConfigurationError, match=says) as caught:
        read_table(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere.json: cannot be read: No such file"):
        read_table(tmp_path / "nowhere.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_table(tmp_path)


def test_the_example_in_the_documentation_is_read(tmp_path: Path) -> None:
    from pycollective.planning import tuning_table as tuning

    assert tuning.__doc__ is not None
    example = tuning.__doc__[tuning.__doc__.index("    {") :]
    path = tmp_path / "example.json"
    path.write_text(example)
    (only,) = read_table(path).entries
    assert only.fastest == "direct"
