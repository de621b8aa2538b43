"""`pycollective bench` as a user runs it: real ranks, real peers, small sizes."""

import importlib.util
import re

import pytest

from pycollective.bench.record import read_json
from pycollective.cores import BUSY
from tests.launchers import NAMES, find, python

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the peer is torch's Gloo"
)


# Nothing is rounded, so peers have to give the same bits.
_MOVING = ("gather", "scatter", "all_to_all")


def bench(*arguments):
    return python("-m", "pycollective", "bench", *arguments)


@pytest.mark.storm
@needs_torch
def test_beside_gloo_with_files(tmp_path):
    done = bench(
        *("all_reduce", "--ranks", 3, "-b", "4", "-e", "1M", "-f", 512, "-d", "bfloat16"),
        *("--peers", "gloo,native", "--rounds", 2, "--iterations", 4, "-c", 2),
        *("--json", tmp_path / "r.json", "--plot", tmp_path / "p.png"),
    )
    record = read_json(tmp_path / "r.json")
    sizes = [4, 2048, 1 << 20]
    libraries = ["pycollective", "gloo", "native"]
    # In two phases of the machine, where it has them, each.
    assert list(dict.fromkeys((row.size, row.library) for row in record.rows)) == [
        (size, library) for size in sizes for library in libraries
    ]
    assert all(row.wrong == 0 for row in record.rows if row.library != "gloo")
    # Gloo rounds at every hop, in an order of its own: with these inputs that must show.
    assert record.row("gloo", 1 << 20).wrong > 100_000
    assert all(row.timing.median > 0 for row in record.rows)
    assert list(dict.fromkeys(limit.size for limit in record.limits)) == sizes
    assert ("# busy: " in done.stdout) == (record.machine["used_by_others"] >= BUSY)
    assert "# pinned: rank by rank, the thread that calls, to cores " in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert done.stderr == ""  # no progress line where there is no terminal
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("operation", "name", "dtype"),
    [  # types by the names that nccl-tests have for them, too
        ("reduce_scatter", "float", "float32"),
        ("all_to_all", "half", "float16"),
        ("gather", "int32", "int32"),
        pytest.param("scatter", "uint8", "uint8", marks=pytest.mark.storm),
        pytest.param("all_gather", "half", "float16", marks=pytest.mark.storm),
        pytest.param("broadcast", "double", "float64", marks=pytest.mark.storm),
        pytest.param("reduce_scatter", "float8_e5m2", "float8_e5m2", marks=pytest.mark.storm),
    ],
)
def test_the_other_collectives_are_verified_from_python_natively_and_in_shared_arrays(
    operation, name, dtype, tmp_path
):
    done = bench(
        *(operation, "--ranks", 3, "-b", "24", "-e", "96K", "-f", 4096, "-r", 1, "-d", name),
        *("--peers", "native,shared", "--rounds", 1, "--iterations", 2),
        *("-J", tmp_path / "r.json"),
    )
    rows = read_json(tmp_path / "r.json").rows
    assert [row.wrong for row in rows] == [0] * 6
    row = rf"^ +\d+ +\d+ +{dtype} .* (pycollective|native|shared)$"
    assert len(re.findall(row, done.stdout, re.M)) == 6


@needs_torch
@pytest.mark.parametrize(
    ("wire", "peer"),
    # Each rank between hosts imports torch, and each of the peer's does.
    [
        ("exact", ""),
        pytest.param("exact", "torch", marks=pytest.mark.storm),
        pytest.param("raw", "", marks=pytest.mark.storm),
    ],
)
def test_where_hosts_are_played_it_says_what_was_sent_between_them(wire, peer, tmp_path):
    done = bench(
        *("all_reduce", "--ranks", 2, "--topology", "2x1", "--wire", wire, "-d", "bfloat16"),
        *("-b", "512K", "-e", "512K", "--algorithm", "halving_doubling"),
        *("--rounds", 2, "--iterations", 2),
        *("--peers", peer, "-J", tmp_path / "r.json"),
    )
    assert f"2 ranks on 2 simulated hosts, {wire} between them, 2 rounds" in done.stdout
    record = read_json(tmp_path / "r.json")
    assert (record.settings["wire"], record.settings["topology"]) == (wire, "2x1")
    row = record.row("pycollective", 512 << 10)
    # Each of two ranks sends half of it, a leaf, and then half of the result.
    assert 1 << 20 <= row.sent_raw < (1 << 20) + 1000
    assert row.sent == row.sent_raw if wire == "raw" else row.sent < 0.99 * row.sent_raw
    for name in filter(None, ("pycollective", peer)):
        row = record.row(name, 512 << 10)
        assert re.search(rf" {row.sent:.0f} +{row.sent_raw:.0f}  \w+ +{name}$", done.stdout, re.M)
        assert row.sent == row.sent_raw if wire == "raw" else row.sent < row.sent_raw
    assert re.search(r"ratio +sent +raw  phase   library$", done.stdout, re.M)


@pytest.mark.storm
@needs_torch
@pytest.mark.parametrize("operation", ["all_reduce", *_MOVING])
def test_beside_each_mpi_and_gloo(operation, tmp_path):
    environments = [part for mpi in NAMES for part in (f"--{mpi}-env", find(mpi).folder)]
    bench(
        *(operation, "-n", 3, "-r", 1, "-b", "1200", "-e", "1200", "--rounds", 1),
        *("--iterations", 20, "--peers", ",".join(("gloo", "torch", *NAMES)), *environments),
        *("-J", tmp_path / "r.json"),
    )
    record = read_json(tmp_path / "r.json")
    for row in record.rows:
        assert row.timing is not None, row.note
        assert row.wrong == 0 or operation == "all_reduce", row.library
    for mpi in NAMES:
        assert "mpi4py" in record.libraries[mpi]["versions"]
