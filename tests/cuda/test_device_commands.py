"""`bench` and `verify` on GPUs (the stand-in): the oracle's bits, and the digest of the CPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from pycollective.bench.record import read_json
from tests.cli.test_verify_table import digest_of
from tests.cuda import standin
from tests.launchers import Launcher


def run(*arguments, status=0, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", *map(str, arguments)],
        env=Launcher().environment(**environment),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def on_gpus(*arguments, status=0, **options):
    return run(*arguments, "--device", "cuda", status=status, **standin.environment(**options))


# Of numbers that round and such that do not, every operation and algorithm; large counts; and by
# kernels, which ranks that share a GPU do not have, every algorithm of floats of a byte, whose
# nodes have four.
TABLES = [
    pytest.param(2, "host", (3, "--quick", "-d", "bfloat16,int32"), marks=pytest.mark.storm),
    (2, "peer", (2, "-d", "float32", "--operation", "all_reduce")),
    pytest.param(
        *(3, "peer", (3, "--quick", "-d", "float8_e5m2", "--operation", "all_reduce")),
        marks=pytest.mark.storm,
    ),
]


@pytest.mark.parametrize(("devices", "path", "table"), TABLES)
def test_the_digest_is_the_cpus(devices, path, table):
    table = ("verify", "-n", *table)
    gpu = on_gpus(*table, devices=devices)
    assert f"device path {path!r}" in gpu.stdout
    assert "arrays in GPU memory, each host's GPUs in turn: rank 0 on GPU 0" in gpu.stdout
    assert digest_of(gpu.stdout) == digest_of(run(*table).stdout)


@pytest.mark.storm
@pytest.mark.parametrize("devices", [1, 4])
def test_ranks_take_the_gpus_in_turn(devices, tmp_path):
    done = on_gpus(
        *("bench", "all_reduce", "--ranks", 3, "-b", "8", "-e", "2M", "-f", 512),
        *("-d", "bfloat16", "--rounds", 2, "--iterations", 2, "-J", tmp_path / "r.json"),
        devices=devices,
    )
    record = read_json(tmp_path / "r.json")
    wrong = {row.size: row.wrong for row in record.rows}  # in two phases of the machine, or one
    assert wrong == {8: 0, 4096: 0, 2 << 20: 0}
    assert all(row.timing.median > 0 for row in record.rows)
    assert (record.limits, record.settings["device"]) == ([], "cuda")
    assert re.search(rf"^# arrays in GPU memory: .*, of {devices} x \w", done.stdout, re.M)
    assert "# Out of bounds values : 0 OK" in done.stdout


@pytest.mark.parametrize(
    "operation",
    [
        "reduce_scatter",
        *(pytest.param(each, marks=pytest.mark.storm) for each in ("all_gather", "broadcast")),
    ],
)
def test_the_other_collectives_are_verified(operation, tmp_path):
    on_gpus(
        *("bench", operation, "--ranks", 3, "-b", "24", "-e", "96K", "-f", 4096, "-r", 1),
        *("--rounds", 1, "--iterations", 2, "-J", tmp_path / "r.json"),
    )
    assert [row.wrong for row in read_json(tmp_path / "r.json").rows] == [0, 0]


@pytest.mark.storm
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the peer is torch's NCCL")
def test_nccl_says_why_it_is_not_measured():
    nccl = ("--ranks", 1, "--peers", "nccl")  # each rank imports torch
    done = on_gpus("bench", "all_reduce", "-b", 64, "-e", 64, "--rounds", 1, *nccl)
    why = r"n/a +\w+ +nccl: (torch .* finds no GPU|NCCL refuses ranks that)"
    assert re.search(why, done.stdout)


@pytest.mark.parametrize("command", [("bench", "all_reduce"), ("verify", "-n", 2, "--quick")])
def test_without_a_gpu_it_says_so_in_a_line(command):
    missing = {"PYCOLLECTIVE_CUDA_DRIVER": "/no/such/libcuda.so"}
    done = run(*command, "--device", "cuda", status=2, **missing)
    assert re.search(
        r"^pycollective \w+: (rank 0( of own)?: )?no CUDA driver: /no/such/libcuda.so",
        done.stderr,
        re.M,
    )
    assert "Traceback" not in done.stderr
