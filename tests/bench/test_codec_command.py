"""`pycollective bench --codec` as a user runs it: what it counts, and what it says."""

from __future__ import annotations

import re

import pytest

from pycollective.bench.codec import COMPARED
from pycollective.compression import CODECS
from tests.harness import ROOT
from tests.kernels.quantized import payload_bytes, usual_chunk
from tests.launchers import launcher

MAIN = str(ROOT / "pycollective" / "__main__.py")


def ways(text):
    """By name (ms, bytes sent, error) of each row of the table."""
    rows = re.findall(r"^ +256K +(\w[\w ]*\w) +([\d.]+) +(\d+|-) .*?(\S+) \w+$", text, re.M)
    return {name: (float(ms), sent, float(error)) for name, ms, sent, error in rows}


# Of 256 KiB of fp32 on two hosts of one rank, in each of two phases half goes to the other.
RAW = 256 << 10


ERROR = {"one_bit": (0.5, 1), "int8": (1e-3, 0.03), "top_k": (0.5, 1)}


def fewer_bytes(codec):
    """How many times, at least and at most: what the document says, and some for headers."""
    if codec == "top_k":
        return 120, 150
    times = RAW / payload_bytes(codec, usual_chunk(codec), RAW // 4)
    return 0.96 * times, times


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_errors_and_a_verdict(codec):
    fewer, error = fewer_bytes(codec), ERROR.get(codec, (0, 1))
    options = ["--codec", codec, "--rounds", "2"]
    options += ["-b", "256K", "-e", "256K"]
    # In a launch each rank takes part; that bench starts ranks itself is shown below.
    ranks = launcher("forks")
    done = ranks.run(2, MAIN, "bench", "all_reduce", *options, PYCOLLECTIVE_TOPOLOGY="2x1")
    assert done.returncode == 0, done.stderr
    found = ways(done.stdout)
    assert list(found) == [codec, "fp32", "bf16"]
    assert fewer[0] < RAW / int(found[codec][1]) < fewer[1]
    assert RAW <= int(found["fp32"][1]) < 1.01 * RAW
    assert error[0] < found[codec][2] < error[1]
    assert found["fp32"][2] < 1e-6 < found["bf16"][2] < 0.01
    times = {name: ms for name, (ms, *_) in found.items()}
    pays = times[codec] < min(times["fp32"], times["bf16"])
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("# 256K: pays:" if pays else "# 256K: does not pay:"), done.stdout


def test_exact_loses_no_bit():
    options = ["--codec", "exact", "--topology", "2x1", "--rounds", "1", "-b", "256K", "-e", "256K"]
    done = launcher("forks").run(2, MAIN, "bench", "all_reduce", *options)
    assert done.returncode == 0, done.stderr
    found = ways(done.stdout)
    assert list(found) == ["exact fp32", "exact bf16", "fp32", "bf16"]
    for dtype, raw in (("fp32", RAW), ("bf16", RAW / 2)):
        assert int(found[f"exact {dtype}"][1]) < 0.95 * raw
        assert re.search(f"^# 256K of {dtype}: .*; no bit lost$", done.stdout, re.M)


def test_on_one_host_each_rank_is_taken_for_one():
    options = ["--codec", "int8", "--rounds", "1", "-b", "256K", "-e", "256K"]
    done = launcher("forks").run(2, MAIN, "bench", "all_reduce", *options)
    assert "1 host(s), compressed between ranks" in done.stdout
    assert ways(done.stdout)["fp32"][1] == "-"  # nothing goes to another host


def test_the_help_names_every_codec(pycollective):
    said = " ".join(pycollective("bench", "--help").stdout.split())
    assert re.search(r"a codec \((.*?)\)", said)[1].split(", ") == list(COMPARED)
