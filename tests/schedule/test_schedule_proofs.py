"""The benchmark that proves schedules of thousands of ranks, on few."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import schedule_proofs
from benchmarks.schedule_proofs import LOGARITHMIC, OPERATIONS, Case, cases, prove
from pycollective.schedule import ALGORITHMS, algorithms_for
from pycollective.schedule.proof import verify
from tests.schedule.mutations import Rotated


def test_all_is_proved_that_there_is() -> None:
    asked = set(cases(quick=False))
    for operation in OPERATIONS:
        for algorithm in algorithms_for(operation):
            assert Case(operation, algorithm, 1024) in asked
            assert (Case(operation, algorithm, 4096) in asked) == (algorithm in LOGARITHMIC)
    assert {case.algorithm for case in asked} == set(ALGORITHMS)


@pytest.mark.parametrize("processes", [1, 3])
def test_ranges_of_shards_count_what_the_whole_does(processes: int) -> None:
    case = Case("all_reduce", "hierarchical", 24)
    proof = prove(case, processes)
    traffic = verify(case.schedule())
    assert proof.topology == "3x8"
    assert proof.shards == 24
    assert proof.steps == traffic.steps == 4
    assert proof.messages == max(traffic.messages) == 2 * (7 + 2)
    # 4(L - 1)/L within hosts of L = 8, and 6(H - 1)/n between H = 3
    assert proof.bytes_sent == proof.mean_bytes_sent == pytest.approx(4 * 7 / 8 + 6 * 2 / 24)
    assert 10 << 20 < proof.peak_memory < schedule_proofs.MOST_MEMORY


def test_the_file_says_what_was_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [Case("all_gather", "recursive_doubling", 5), Case("all_reduce", "tree", 5)]
    monkeypatch.setattr(schedule_proofs, "cases", lambda quick: iter(asked))
    monkeypatch.setattr(sys, "argv", ["schedule_proofs", "--out", str(tmp_path), "--processes=2"])
    schedule_proofs.BENCHMARK.main()
    assert "2 schedules proved in" in capsys.readouterr().out
    written = json.loads((tmp_path / "schedule_proofs.json").read_text())
    assert written["schema"] == schedule_proofs.SCHEMA
    assert written["machine"]["cores"] > 0
    assert "python" in written["versions"]
    assert [(each["algorithm"], each["shards"]) for each in written["proofs"]] == [
        ("recursive_doubling", 5),
        ("tree", 1),
    ]


def test_a_wrong_schedule_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Rotated.of(Case("all_reduce", "ring", 5).schedule())

    def prove_here(case: Case, processes: int) -> None:
        verify(wrong)

    monkeypatch.setattr(schedule_proofs, "prove", prove_here)
    monkeypatch.setattr(sys, "argv", ["schedule_proofs", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="not a right schedule: all_reduce, ring, 1x5, shard 0"):
        schedule_proofs.BENCHMARK.main()
    assert not list(tmp_path.iterdir())
