"""`pycollective diff`: what it says, and its exit status."""

from __future__ import annotations

import json

from pycollective.ledger.layout import RESULT
from tests.ledger.made import changed, note, run


def test_the_same_runs(pycollective, tmp_path):
    run(tmp_path / "a", 1)
    run(tmp_path / "b", 3)
    done = pycollective("diff", tmp_path / "a", tmp_path / "b")
    assert done == (0, "4 steps have the same bits, to step 3\n", "")
    done = pycollective("diff", note(tmp_path / "c"), tmp_path / "b", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["same"] is True


def test_runs_that_differ(pycollective, tmp_path):
    run(tmp_path / "a", 1)
    run(tmp_path / "b", 3, changed((2, 4, "first.bias"), (2, RESULT, "first.bias")))
    done = pycollective("diff", tmp_path / "a", tmp_path / "b")
    assert (done.returncode, done.stderr) == (1, "")
    first, last = done.stdout.splitlines()
    assert first == "step 2, first.bias, leaf 4: rank 0 of 1 gave other bits than rank 2 of 3"
    assert last == "before that 2 steps have the same bits, to step 1"
    done = pycollective("diff", "--json", tmp_path / "a", tmp_path / "b")
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout) == {
        "same": False,
        "paths": [str(tmp_path / "a"), str(tmp_path / "b")],
        "steps": [[0, 3, 4], [0, 3, 4]],
        "agreed": 2,
        "last": 1,
        "leaves": 6,
        "compared": 6,
        "finding": {
            "step": 2,
            "parameter": "first.bias",
            "leaf": 4,
            "within": None,
            "ranks": [[0, 1]],
            "against": [[2, 3]],
            "lacks": False,
            "parameters": 1,
            "leaves": [4],
        },
    }


def test_a_run_that_is_shorter_is_not_the_same(pycollective, tmp_path):
    run(tmp_path / "a", 1)
    run(tmp_path / "b", 1, steps=range(3))
    done = pycollective("diff", tmp_path / "a", tmp_path / "b")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[0] == "3 steps have the same bits, to step 2"


def test_trouble_is_one_line(pycollective, tmp_path):
    path = note(tmp_path / "a")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    done = pycollective("diff", tmp_path / "a", tmp_path / "a")
    assert (done.returncode, done.stdout) == (2, "")
    begin = len(data) - 22 * 32
    assert done.stderr == f"pycollective diff: {path}, byte {begin}: block 3 is damaged\n"
