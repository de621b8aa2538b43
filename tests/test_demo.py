"""The demo end to end in its shortest form, what it concludes from results, and how it fails."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo
from benchmarks.demo import DemoFailure, train
from benchmarks.demo_report import _select, compressed, judge, judge_counts, judge_kills
from benchmarks.demo_train import Configuration, Result, Settings


def make_results(
    digest: Callable[[Configuration], str], buckets: dict[float, int] | None = None
) -> list[Result]:
    """Results of every configuration, all alike but for the digest."""
    buckets = buckets or {0.05: 4, 25.0: 1}
    return [
        Result(which, buckets[which.bucket_cap_mb], [2.0, 1.0], [0.01, 0.02], 0.001, 0.98, [d] * 4)
        for backend in ("gloo", "pycollective")
        for gradients in ("fp32", "bf16")
        for cap in buckets
        for repeat in (1, 2)
        for which in [Configuration(backend, gradients, cap, repeat)]
        for d in [digest(which)]
    ]


def by_cap(which: Configuration) -> str:
    return f"{which.backend} {which.gradients} {which.bucket_cap_mb}"


def same(which: Configuration) -> str:
    return f"{which.backend} {which.gradients}"


def gloo_by_cap(which: Configuration) -> str:
    return by_cap(which) if which.backend == "gloo" else same(which)


def bf16_by_cap(which: Configuration) -> str:
    return by_cap(which) if which.gradients == "bf16" else same(which)


KEPT = make_results(gloo_by_cap)


# Results; what the verdict begins with, and words of it.
VERDICTS = {
    "kept": (
        KEPT,
        "SHOWN: with Gloo the final weights changed with the bucket",
        ["with pycollective they were the same bits for every bucket size", "16 runs"],
    ),
    "Gloo keeps it too": (
        make_results(same),
        "SHOWN: with Gloo the final weights were the same",
        [],
    ),
    "broken": (make_results(by_cap), "PROMISE BROKEN", ["they changed with the bucket size"]),
    "broken in one dtype": (
        make_results(bf16_by_cap),
        "PROMISE BROKEN",
        [
            "with pycollective they changed with the bucket size (2 results for 2 sizes) in bf16",
            "were the same bits for every bucket size and repeat in fp32",
        ],
    ),
    "broken by a repeat": (
        make_results(lambda which: f"{same(which)} {which.repeat}"),
        "PROMISE BROKEN",
        ["with pycollective they changed from one repeat to the next"],
    ),
    "ranks differ": (
        [*KEPT[:-1], replace(KEPT[-1], digests=["a", "a", "a", "b"])],
        "PROMISE BROKEN",
        ["differed between the ranks of one run in bf16"],
    ),
    "one size": (make_results(gloo_by_cap, {0.05: 1, 25.0: 1}), "NOTHING", ["the same buckets"]),
    "a loss of NaN": (
        [*KEPT[:-1], replace(KEPT[-1], losses=[1.0, math.nan])],
        *("NOTHING SHOWN", ["not finite"]),
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_says_what_the_results_show(name: str) -> None:
    results, begins, words = VERDICTS[name]
    verdict = judge(results)
    assert verdict.line.startswith(begins)
    assert all(each in verdict.line for each in words), verdict.line
    assert verdict.shown == begins.startswith("SHOWN")


COUNTS = {
    "ANY NUMBER OF RANKS: 1 and 3 ranks ended with the same": ("aaaa", "abbb"),
    "PROMISE BROKEN: 1 and 3 ranks ended with 2 weights": ("aaab", "abbb"),
    "NOTHING SHOWN": ("aaaa", "aaaa"),
}


@pytest.mark.parametrize("begins", COUNTS)
def test_the_last_line_says_what_the_number_of_ranks_does(begins: str) -> None:
    own, gloo = ({1: digests[:1], 3: digests[1:]} for digests in COUNTS[begins])
    verdict = judge_counts({"pycollective": own, "gloo": gloo})
    assert verdict.line.startswith(begins)
    assert verdict.shown == begins.startswith("ANY")


# How many kills, other ends, and what was left.
KILLED = {
    "KILLED: in a training with 3 kills the other ranks had the next step within 0.4 s": (3, 0, []),
    "PROMISE BROKEN: a training with 3 kills ended with other weights": (3, 1, []),
    "PROMISE BROKEN: a training with 1 kills ended with other": (1, 0, ["process 1"]),
    "NOTHING SHOWN": (0, 0, []),
}


@pytest.mark.parametrize("begins", KILLED)
def test_a_line_says_what_became_of_killed_ranks(begins: str) -> None:
    kills, wrong, left = KILLED[begins]
    found = {"kills": kills, "wrong": wrong, "left": left, "weights": ["aaaa"]}
    verdict = judge_kills({**found, "pause": {"worst": 0.41}})
    assert verdict.line.startswith(begins)
    assert verdict.shown == begins.startswith("KILLED")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks of a process that has imported what they run, which takes each 5 s of CPU."""
    multiprocessing.set_forkserver_preload(["benchmarks.demo_train", "torch._dynamo"])
    start = demo.mp.start_processes

    def start_forks(*args: Any, start_method: str, **options: Any) -> Any:
        assert start_method == "spawn"  # which is like this one but for the fork
        return start(*args, start_method="forkserver", **options)

    monkeypatch.setattr(demo.mp, "start_processes", start_forks)


@pytest.mark.storm
@pytest.mark.usefixtures("forked")
def test_the_demo_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "4", "--pairs", "2", "--repeats", "1", "--caps", "0.05,25"]
    status = demo.main(["--out", str(tmp_path), *options, "--kills", "2"])
    done = capsys.readouterr()
    assert status == 0, done.out + done.err
    assert done.err.startswith("10 runs of 4 steps on 4 ranks: about 1 minute on ")
    assert "[10/10]" in done.err

    data = json.loads((tmp_path / "demo.json").read_text())
    results = [Result.from_json(result) for result in data["results"]]
    assert len(results) == 10
    for backend in ("gloo", "pycollective"):
        for gradients in ("fp32", "bf16"):
            chosen = _select(results, backend, gradients)
            assert len({r.buckets for r in chosen}) == 2
            # Gloo's must differ, or these runs could not see what they are for.
            digests = {digest for r in chosen for digest in r.digests}
            assert len(digests) == (2 if backend == "gloo" else 1)
            assert all(len(r.losses) == len(r.step_times) == 4 for r in chosen)
            assert all(r.losses[-1] < r.losses[0] for r in chosen)
    packed = [r for r in results if r.configuration.codec]
    assert len({r.buckets for r in packed}) == 2
    assert len({digest for r in packed for digest in r.digests}) == 1
    assert all(r.losses[-1] < r.losses[0] for r in packed)
    assert all(r.sent is not None and 3 * r.sent[0] < r.sent[1] for r in packed)
    for result in results:
        assert result.digests[0][:16] in done.out
    assert compressed(results) in done.out
    assert done.out.splitlines()[-3:] == [each["line"] for each in data["verdicts"]]
    assert data["verdicts"][0]["line"] == judge(results).line
    assert data["verdicts"][1]["line"].startswith("ANY NUMBER OF RANKS: 1, 3 and 4 ranks ended ")
    assert "over Gloo with 3 different ones" in data["verdicts"][1]["line"]
    assert data["verdicts"][2]["line"].startswith("KILLED: in a training with 2 kills ")
    assert "has joined the others" in done.err or "had not joined" in done.err

    from matplotlib.image import imread

    picture = imread(tmp_path / "demo.png")
    assert picture.shape[0] > 800
    assert len(set(map(tuple, picture[::20, ::20].reshape(-1, picture.shape[2])))) > 5


@pytest.mark.storm
def test_a_failing_rank_ends_the_demo_with_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    unknown = Configuration("no-such-backend", "fp32", 25.0, 1)
    with pytest.raises(DemoFailure, match=r"rank \d failed in .*no-such-backend"):
        train(Settings(ranks=1), [unknown], time.monotonic() + 110, lambda _: None)
    assert "Unknown backend type no-such-backend" in capfd.readouterr().err
    assert not multiprocessing.active_children()
