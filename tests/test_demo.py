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
import torch

from benchmarks import demo
from benchmarks.demo import DemoFailure, duration, train
from benchmarks.demo_report import compressed, judge, table
from benchmarks.demo_train import Configuration, Digits, Result, Settings


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


def test_a_kept_promise_is_shown() -> None:
    verdict = judge(make_results(gloo_by_cap))
    assert verdict.shown
    assert verdict.line.startswith("SHOWN: with Gloo the final weights changed with the bucket")
    assert "with pycollective they were the same bits for every bucket size" in verdict.line
    assert "16 runs" in verdict.line


def test_a_broken_promise_is_said() -> None:
    verdict = judge(make_results(by_cap))
    assert not verdict.shown
    assert verdict.line.startswith("PROMISE BROKEN")
    assert "with pycollective they changed with the bucket size" in verdict.line


def test_a_promise_broken_in_one_dtype_is_broken() -> None:
    def digest(which: Configuration) -> str:
        return by_cap(which) if which.gradients == "bf16" else same(which)

    verdict = judge(make_results(digest))
    assert not verdict.shown
    own = verdict.line.partition("with pycollective")[2]
    assert "changed with the bucket size (2 results for 2 sizes) in bf16" in own
    assert "were the same bits for every bucket size and repeat in fp32" in own


def test_a_repeat_that_differs_breaks_the_promise() -> None:
    verdict = judge(make_results(lambda which: f"{same(which)} {which.repeat}"))
    assert not verdict.shown
    assert "with pycollective they changed from one repeat to the next" in verdict.line


def test_ranks_that_differ_break_the_promise() -> None:
    results = make_results(gloo_by_cap)
    results[-1] = replace(results[-1], digests=["a", "a", "a", "b"])
    verdict = judge(results)
    assert not verdict.shown
    assert "differed between the ranks of one run in bf16" in verdict.line


def test_gloo_is_not_said_to_change_where_it_does_not() -> None:
    verdict = judge(make_results(same))
    assert verdict.shown
    assert "with Gloo the final weights were the same bits" in verdict.line


@pytest.mark.parametrize(
    ("results", "why"),
    [
        (make_results(gloo_by_cap, {0.05: 1, 25.0: 1}), "the same buckets"),
        ([replace(r, digests=r.digests[:2]) for r in make_results(gloo_by_cap)], "three ranks"),
        ([replace(r, losses=[1.0, math.nan]) for r in make_results(gloo_by_cap)], "not finite"),
        ([replace(r, losses=[math.inf, 1.0]) for r in make_results(gloo_by_cap)], "not finite"),
        ([r for r in make_results(same) if r.configuration.backend == "gloo"], "pycollective"),
    ],
)
def test_runs_that_could_show_nothing_show_nothing(results: list[Result], why: str) -> None:
    verdict = judge(results)
    assert not verdict.shown
    assert verdict.line.startswith("NOTHING SHOWN")
    assert why in verdict.line


def test_the_table_has_a_line_a_run() -> None:
    results = make_results(lambda which: by_cap(which).replace(" ", "-").ljust(64, "0"))
    header, *lines = [line.split() for line in table(results) if line]
    assert header[:4] == ["backend", "gradients", "bucket_cap_mb", "buckets"]
    assert len(lines) == len(results)
    assert lines[0][:7] == ["gloo", "bf16", "0.05", "4", "1", "98.0%", "15.00"]
    assert lines[0][-1] == "gloo-bf16-0.0500"


def test_ranks_share_a_batch_without_overlap() -> None:
    digits = Digits.load()
    settings = Settings(ranks=4, rank_batch=32)
    images = torch.cat([digits.batch(0, rank, settings)[0] for rank in range(4)])
    alone = digits.batch(0, 0, Settings(ranks=1, rank_batch=128))[0]
    assert torch.equal(images, alone)
    assert not torch.equal(alone, digits.batch(11, 0, Settings(ranks=1, rank_batch=128))[0])


@pytest.mark.parametrize(("cores", "minutes"), [(1, "4 minutes"), (2, "2 minutes")])
def test_it_says_beforehand_how_long_it_takes(
    cores: int, minutes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda pid: set(range(cores)))
    said = duration(Settings(), 26, 2)
    assert said == f"26 runs of 44 steps on 4 ranks: about {minutes} on {cores} idle cores"


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
    status = demo.main(["--out", str(tmp_path), *options])
    done = capsys.readouterr()
    assert status == 0, done.out + done.err
    assert done.err.startswith("10 runs of 4 steps on 4 ranks: about 1 minute on ")
    assert "[10/10]" in done.err

    data = json.loads((tmp_path / "demo.json").read_text())
    results = [Result.from_json(result) for result in data["results"]]
    assert len(results) == 10
    for backend in ("gloo", "pycollective"):
        for gradients in ("fp32", "bf16"):
            chosen = [
                r
                for r in results
                if (r.configuration.label, r.configuration.gradients) == (backend, gradients)
            ]
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
    assert done.out.splitlines()[-1] == data["verdict"]["line"] == judge(results).line

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


@pytest.mark.storm
def test_the_time_limit_ends_the_demo() -> None:
    with pytest.raises(DemoFailure, match="time limit"):
        train(
            Settings(ranks=2),
            [Configuration("gloo", "fp32", 25.0, 1)],
            time.monotonic() + 1,
            lambda _: None,
        )
    assert not multiprocessing.active_children()
