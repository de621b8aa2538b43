"""`benchmarks/ordered_price.py` makes the calls that it times, with as many launches as they are to
have."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks import ordered_price
from benchmarks.driver import ROOT


def test_calls_are_counted_and_timed(tmp_path):
    """In a process of its own: kernels keep handles of a driver that is not there."""
    command = [sys.executable, "-m", "benchmarks.ordered_price", "--rounds", "1"]
    environment = {each: value for each, value in os.environ.items() if each != "TRITON_INTERPRET"}
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, check=True)
    rows = json.loads((tmp_path / "ordered_price.json").read_text())["rows"]
    wanted = {*ordered_price.WANTED, "torch"}
    assert {row["call"].partition(",")[0] for row in rows} == wanted
    ranks = [str(each) for each in ordered_price.RANKS]
    assert all(list(row["us"]) == ranks and min(row["us"].values()) > 0 for row in rows)
