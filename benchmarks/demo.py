"""`make demo`: train a small network on real images, and look at the bits of the final weights.

Four ranks on this host train the same network on the same digits under DistributedDataParallel,
with Gloo and with pycollective, in fp32 and bf16, under several bucket sizes. Bucket size is a
setting of speed alone; whether it changes what is learned is what the demo shows. Four ranks,
because the order in which two numbers are added does not matter. Then once more with gradients
compressed to 8 bits an element, each rank taken for a host. At last on 1, 3 and 4 ranks, which
share the micro-batches of each step. Then ranks of a training are killed, one after another.

Usage: python -m benchmarks.demo [--out DIR] [--steps N] [--caps MB,MB,...] [--repeats N]
                                 [--kills N]

Writes demo.json (every number) and demo.png to DIR. Status 0 if pycollective's weights were the
same bits every time, by LeafSync on any number of ranks, and whoever was killed; 1 if they were not
or the runs could not show it; 2 if a rank failed or time ran out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from benchmarks.demo_report import (
    Verdict,
    compressed,
    judge,
    judge_counts,
    judge_kills,
    legend,
    plot,
    table,
)
from benchmarks.demo_train import DTYPES, Configuration, Result, Settings, run_counts, run_rank
from benchmarks.elastic_kills import (
    LAST_STEPS,
    Event,
    JobFailure,
    Training,
    disturbed,
    summary,
    undisturbed,
)
from pycollective.bench.machine import describe_machine, describe_versions

BACKENDS = ("gloo", "pycollective")
# One bucket; the first linear layer apart; nearly every layer apart.
CAPS_MB = (0.05, 0.25, 25.0)
_POLL_SECONDS = 0.1
# Seconds of one core, on an AMD EPYC: until all ranks have imported torch, and a step of all.
_START, _STEP = 20.0, 0.12
_KILLS = 30.0  # seconds of the training whose ranks are killed, most of which it sleeps
_STEPS_BETWEEN_KILLS = 25


class DemoFailure(Exception):
    """A rank failed, or the time was up; nothing runs any more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    options = _parse(arguments)
    settings = Settings(steps=options.steps, pairs=options.pairs)
    repeats = range(1, options.repeats + 1)
    runs = sum(len(_configurations(options.caps, each)) for each in repeats)
    print(duration(settings, runs, options.repeats), file=sys.stderr, flush=True)
    progress = Progress(runs)
    deadline = time.monotonic() + options.time_limit
    results: list[Result] = []
    try:
        for repeat in repeats:
            configurations = _configurations(options.caps, repeat)
            results += train(settings, configurations, deadline, progress.show)
        print("the same on 1, 3 and 4 ranks", file=sys.stderr, flush=True)
        counts = train_on_counts(settings, deadline)
        killed = train_with_kills(options.kills, deadline)
    except DemoFailure as failure:
        print(f"demo: {failure}\n{failure.__cause__ or ''}".rstrip(), file=sys.stderr)
        return 2
    verdicts = [judge(results), judge_counts(counts), judge_kills(killed)]
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "demo.json", settings, results, verdicts)
    plot(results, options.out / "demo.png")
    print(f"\n{settings.ranks} ranks on this host, {settings.steps} steps a run\n")
    for line in (*table(results), "", *legend()):
        print(line)
    print(f"\n{options.out / 'demo.png'}: loss and step time; {options.out / 'demo.json'}: all")
    print(compressed(results))
    for verdict in verdicts:
        print(verdict.line)
    return 0 if all(verdict.shown for verdict in verdicts) else 1


def duration(settings: Settings, runs: int, repeats: int) -> str:
    """What is about to run, and about how long that takes where nothing else does."""
    cores = min(len(os.sched_getaffinity(0)), settings.ranks)
    steps = settings.steps + 2 * settings.pairs
    seconds = (_START * (repeats + 1) + _STEP * steps * runs) / cores + _KILLS
    minutes = math.ceil(seconds / 60)
    return (
        f"{runs} runs of {settings.steps} steps on {settings.ranks} ranks: about {minutes} "
        f"minute{'s' * (minutes > 1)} on {cores} idle cores"
    )


def train(
    settings: Settings,
    configurations: list[Configuration],
    deadline: float,
    show: Callable[[Configuration | None], None],
) -> list[Result]:
    """Run all configurations in one set of new rank processes.

    Args:
        settings: what they share.
        configurations: what to run, in this order.
        deadline: when to give up, by `time.monotonic`.
        show: called with each configuration as it starts, and with None while nothing is new.

    Raises:
        DemoFailure: a rank failed or the deadline passed. No process is left in any case.
    """
    with tempfile.TemporaryDirectory(prefix="pycollective-demo-") as name:
        folder = Path(name)

        def look() -> str:
            done = len(_read(folder))
            show(configurations[done] if done < len(configurations) else None)
            return str(configurations[min(done, len(configurations) - 1)])

        _run(run_rank, (settings, configurations, folder), settings.ranks, deadline, look)
        return _read(folder)


def train_on_counts(settings: Settings, deadline: float) -> dict[str, dict[int, list[str]]]:
    """The digests of each backend by the number of ranks; raises as `train`."""
    with tempfile.TemporaryDirectory(prefix="pycollective-demo-") as name:
        folder = Path(name)
        _run(run_counts, (settings, folder), settings.ranks, deadline, lambda: "runs of 1 to 4")
        found = json.loads((folder / "counts.json").read_text())
    return {
        backend: {int(count): digests for count, digests in of_counts.items()}
        for backend, of_counts in found.items()
    }


def train_with_kills(kills: int, deadline: float) -> dict[str, Any]:
    """What came of a training whose ranks are killed, beside the same in peace; raises as `train`.

    What happens is said on standard error, there by `pycollective run` too.
    """
    started = time.monotonic()
    training = Training(
        LAST_STEPS + kills * _STEPS_BETWEEN_KILLS, ranks=3, seconds=deadline - started
    )
    joining: set[int] = set()
    step = 0

    def show(event: Event) -> None:
        nonlocal step
        said = ""
        if event.moment == "between":
            step = int(event.more[0])
            if event.process in joining:
                said = f"pid {event.process} has joined the others, with their state"
                joining.remove(event.process)
        elif event.moment == "waiting":
            joining.add(event.process)
        elif event.moment == "shrinking":
            said = f"pid {event.process} sees that a rank has died, and goes on without it"
        if said:
            seconds = event.when - started
            print(f"{seconds:4.0f} s  step {step}: {said}", file=sys.stderr, flush=True)

    print(f"the same with {kills} kills: 3 ranks, {training.steps} steps", file=sys.stderr)
    try:
        found = disturbed(training, kills, show=show)
        print("and with none", file=sys.stderr, flush=True)
        return summary([found], undisturbed(dataclasses.replace(training, leaf_seconds=0.0)))
    except JobFailure as failure:
        raise DemoFailure(f"a training whose ranks are killed: {failure}") from failure


def _run(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    ranks: int,
    deadline: float,
    look: Callable[[], str],
) -> None:
    """Run `target` in new processes to the end; `look`, called meanwhile, says what they do."""
    started = mp.start_processes(target, arguments, nprocs=ranks, join=False, start_method="spawn")
    try:
        finished = False
        while not finished:
            look()
            finished = started.join(timeout=_POLL_SECONDS)
            if time.monotonic() > deadline:
                raise DemoFailure("the time limit has passed (--time-limit)")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
        raise DemoFailure(f"rank {failure.error_index} failed in {look()}") from failure
    finally:
        for process in started.processes:
            process.kill()
            process.join()


def _read(folder: Path) -> list[Result]:
    """The runs that are done, whole lines only."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Result.from_json(json.loads(line)) for line in lines if line.endswith("\n")]


class Progress:
    """Says which run is under way, a line each."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown: list[Configuration] = []
        self._started = time.monotonic()

    def show(self, configuration: Configuration | None) -> None:
        """Say that `configuration` runs now."""
        if configuration is None or configuration in self._shown:
            return
        self._shown.append(configuration)
        print(
            f"[{len(self._shown):2}/{self._total}] {time.monotonic() - self._started:4.0f} s  "
            f"{configuration.label}, {configuration.gradients} gradients, "
            f"bucket_cap_mb {configuration.bucket_cap_mb:g}, repeat {configuration.repeat}",
            file=sys.stderr,
            flush=True,
        )


def write_json(
    path: Path, settings: Settings, results: Sequence[Result], verdicts: list[Verdict]
) -> None:
    """Every number, with what explains it. Times are seconds."""
    data = {
        "schema": "pycollective-demo/1",
        "settings": dataclasses.asdict(settings),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "results": [dataclasses.asdict(result) for result in results],
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def _configurations(caps: Sequence[float], repeat: int) -> list[Configuration]:
    """Backends change fastest, so that a machine whose speed drifts treats both alike."""
    dense = [
        Configuration(backend, gradients, cap, repeat)
        for gradients, cap, backend in itertools.product(DTYPES, caps, BACKENDS)
    ]
    ends = sorted({min(caps), max(caps)})
    packed = [Configuration("pycollective", "fp32", cap, repeat, "int8") for cap in ends]
    return [*dense, *(packed if repeat == 1 else [])]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--steps", type=int, default=Settings.steps, help="a run")
    parser.add_argument("--pairs", type=int, default=Settings.pairs, help="timed for exposed ms")
    parser.add_argument("--repeats", type=int, default=2, help="each in new processes")
    parser.add_argument("--kills", type=int, default=3, help="of ranks of the last training")
    parser.add_argument(
        "--caps",
        type=lambda text: [float(cap) for cap in text.split(",")],
        default=CAPS_MB,
        help="bucket_cap_mb values, comma-separated",
    )
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for everything")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
