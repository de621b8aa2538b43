"""What the benchmark is asked to measure: settings, sizes as text, and the operations' numbers."""

import pytest

from pycollective import ConfigurationError
from pycollective.bench.libraries import find_peers, launch
from pycollective.bench.operations import bandwidths, find_operation
from pycollective.bench.settings import ladder, parse_size


def test_peers():
    assert [peer.name for peer in find_peers("gloo, mpich")] == ["gloo", "mpich"]
    assert find_peers("") == []


@pytest.mark.parametrize("group", ["gloo", "pycollective"])
def test_missing_torch_says_how_to_get_it(group, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"needs torch: pip install 'torch>="):
        launch(group, 2, {})


def test_open_mpi_is_told_when_there_are_more_ranks_than_cores(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for program in ("mpiexec", "python"):
        (tmp_path / "bin" / program).touch()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    fits = launch("openmpi", 2, {"openmpi": str(tmp_path)}).commands[0]
    exceeds = launch("openmpi", 3, {"openmpi": str(tmp_path)}).commands[0]
    assert "--oversubscribe" not in fits
    assert "--oversubscribe" in exceeds
    without_cma = launch("openmpi-nocma", 2, {"openmpi": str(tmp_path)})
    assert without_cma.settings == "mpiexec --bind-to none --mca smsc ^cma"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("64K", 65536),
        ("64k", 65536),
        ("64KiB", 65536),
        ("1.5M", 3 << 19),
        (" 2G ", 2 << 30),
        ("8B", 8),
    ],
)
def test_suffixes_are_binary(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "12X", "-4", "1e3", "0.3K", "4 K 5"])
def test_what_is_no_size_is_an_error_that_quotes_it(text):
    with pytest.raises(ConfigurationError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("begin", "end", "step", "factor", "sizes"),
    [
        (1024, 16384, 0, 2, [1024, 2048, 4096, 8192, 16384]),
        (1000, 9999, 0, 3, [1000, 3000, 9000]),
        (100, 450, 100, 0, [100, 200, 300, 400]),
        (1, 4, 0, 1.1, [1, 2, 3, 4]),  # a factor that rounds to nothing
    ],
)
def test_a_ladder_climbs_to_the_end(begin, end, step, factor, sizes):
    assert ladder(begin, end, step, factor) == sizes


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 8, 0.875),
        ("all_to_all", 4, 0.75),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 2, 1.0),
        ("broadcast", 8, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bandwidths(name, ranks, factor):
    # 3 GB in 2 s.
    algbw, busbw = bandwidths(find_operation(name), 3_000_000_000, 2.0, ranks)
    assert algbw == 1.5
    assert busbw == pytest.approx(1.5 * factor)


@pytest.mark.parametrize(
    ("name", "whole", "count", "touched"),
    [
        ("all_reduce", 1024, 256, 2),
        ("broadcast", 1024, 256, 1),
        ("all_gather", 1020, 85, 1),
        ("all_to_all", 1020, 85, 2),
        ("gather", 1020, 85, 2 / 3),
        ("scatter", 1020, 85, 2 / 3),
        ("reduce_scatter", 1020, 85, 4 / 3),
    ],
)
def test_of_1024_bytes_of_float32_on_three_ranks(name, whole, count, touched):
    """Sizes with shards round down to equal ones, and the count is of one shard."""
    operation = find_operation(name)
    assert operation.whole(1024, 4, 3) == whole
    assert operation.count(whole, 4, 3) == count
    assert operation.touched(3) == pytest.approx(touched)
