"""Does training with compressed gradients end where training with dense ones ends?

Two tasks on real data, data-parallel under DDP on two ranks that play two hosts, so that all
gradients are compressed between them: the demo's network on scikit-learn's digits, and a byte-level
GPT of 1.3 M parameters on the standard library's sources (`convergence_train.py`). Three seeds of
each: dense; 1-bit, 8-bit, top-k 1 % by tensor and by chunk; the same without error feedback, their
states reset after each step; and beside them PyTorch's PowerSGD of rank 2. The texts are trained
with AdamW; whatever compresses holds its second moment after the dense start, so there is also
dense with the moment held. One seed of a GPT of 10.9 M, on request.

*The final loss* of a run is the mean of its last three evaluations on held-out data; its *training
loss* that of the last tenth of its steps, before each. A method is *within seed noise* of dense if
its mean over the seeds is larger than dense's by at most two standard errors of the difference,
sqrt((s_method^2 + s_dense^2) / seeds), s the standard deviations over the seeds. Two of them are
not much with three seeds: in one of 17 comparisons of a method with itself (normal losses) one
would be outside. Beside it an absolute bound on the mean final loss, below.

A run that has ended is kept in build/convergence.jsonl, and not run again; what is not there is
missing from the results, which say so. `--seeds 1` runs those alone, so that several may run at a
time.

Usage: python -m benchmarks.convergence [--tasks digits,text,text_10m] [--seeds 1,2,3] [--report]
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.convergence_plot import plot, training
from benchmarks.convergence_train import Method, Run, Task
from benchmarks.driver import ROOT, Benchmark, Record
from benchmarks.driver import Run as Asked

CACHE = ROOT / "build" / "convergence.jsonl"
SEEDS = (1, 2, 3)
TASKS = {
    "digits": Task(
        **{"data": "digits", "size": (0, 0, 0, 0), "steps": 1200, "rows": 16, "length": 0},
        **{"dense_steps": 120, "optimizer": "sgd", "rate": 0.03},
        **{"evaluations": 20, "evaluated": 0},
    ),
    "text": Task(
        **{"data": "text", "size": (160, 4, 4, 128), "steps": 1920, "rows": 4, "length": 64},
        **{"dense_steps": 384, "optimizer": "adamw", "rate": 1e-3},
        **{"evaluations": 20, "evaluated": 64},
    ),
    "text_10m": Task(
        **{"data": "text", "size": (384, 6, 6, 128), "steps": 400, "rows": 4, "length": 64},
        **{"dense_steps": 80, "optimizer": "adamw", "rate": 5e-4},
        **{"evaluations": 20, "evaluated": 64},
    ),
}
TITLES = {
    "digits": "Digits: a network of 0.2 M parameters",
    "text": "Text: a byte-level GPT of 1.3 M parameters",
    "text_10m": "Text: a byte-level GPT of 10.9 M parameters",
}
# What the mean final loss may be at most, nats: stated before the runs; of the text after a trial
# of one seed (dense: 1.69).
BOUNDS = {"digits": 0.12, "text": 1.75, "text_10m": 2.4}
# Which loss the plot shows: digits are learnt by heart, so only the training loss tells runs apart.
SHOWN = {"digits": "training", "text": "held-out", "text_10m": "held-out"}
LAST = 3  # evaluations that the final loss is the mean of

DENSE = Method("dense", "dense", {})
CODECS = (
    Method("1-bit", "one_bit", {}),
    Method("8-bit", "int8", {}),
    Method("top-k 1 % by tensor", "top_k", {"density": 0.01}),
    Method("top-k 1 % by chunk", "top_k", {"density": 0.01, "by": "chunk"}),
)
WITHOUT = tuple(
    Method(f"{each.name}, no feedback", each.codec, each.options, False) for each in CODECS
)
# What holding the second moment does by itself; of the texts, which are trained with Adam.
HELD = Method("dense, moment held", "dense_held", {})
POWER_SGD = Method("PowerSGD, rank 2", "power_sgd", {"matrix_approximation_rank": 2})
METHODS = (DENSE, HELD, *CODECS, *WITHOUT, POWER_SGD)
ONCE = (DENSE, HELD, *CODECS, POWER_SGD)  # of the large one


def runs_of(task: str) -> list[Run]:
    """All runs of a task, seed by seed, so that what has ended can be compared.

    After the dense start the density of top-k falls to its value in as many steps again.
    """
    of, large = TASKS[task], task == "text_10m"
    methods = [
        replace(each, options=each.options | {"warm_up": of.dense_steps})
        if each.codec == "top_k"
        else each
        for each in (ONCE if large else METHODS)
        if each is not HELD or of.optimizer == "adamw"
    ]
    return [Run(of, each, seed) for seed in (SEEDS[:1] if large else SEEDS) for each in methods]


def ended(cache: Path) -> dict[str, dict[str, Any]]:
    """The results there are, by run."""
    if not cache.exists():
        return {}
    results = [json.loads(line) for line in cache.read_text().splitlines()]
    return {json.dumps(each["run"], sort_keys=True): each for each in results}


def carry_out(runs: Sequence[Run], cache: Path) -> None:
    """Run what has not ended yet, on two ranks of this host that play two."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    found = ended(cache)
    missing = [run.to_json() for run in runs if run.to_json() not in found]
    if not missing:
        return
    command = (sys.executable, "-m", "pycollective", "run", "--no-tag-output", "-n", "2")
    program = ("-m", "benchmarks.convergence_train", str(cache))
    environment = {**os.environ, "PYCOLLECTIVE_TOPOLOGY": "2x1", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *program, *missing], cwd=ROOT, env=environment, check=True)


def finite(loss: float) -> float:
    """Infinite if it is not a number."""
    return loss if math.isfinite(loss) else math.inf


def held_out_loss(result: dict[str, Any]) -> float:
    """The final loss of a run."""
    return finite(statistics.fmean(loss for _, loss in result["curve"][-LAST:]))


def training_loss(result: dict[str, Any]) -> float:
    """The mean loss of the last tenth of its steps."""
    losses = result["train"]
    return finite(statistics.fmean(losses[-max(1, len(losses) // 10) :]))


def compare(losses: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """The mean over the seeds, and whether it is within seed noise of what stands beside it."""
    row: dict[str, Any] = {"of_seeds": list(losses), "mean": statistics.fmean(losses)}
    if math.isinf(row["mean"]):
        return row | {"within_seed_noise": False}
    if len(losses) > 1 and len(beside) > 1:
        error = math.sqrt(
            statistics.variance(losses) / len(losses) + statistics.variance(beside) / len(beside)
        )
        over = row["mean"] - statistics.fmean(beside)
        row |= {
            "over": over,
            "two_standard_errors": 2 * error,
            "within_seed_noise": over <= 2 * error,
        }
    return row


def judge(task: str, results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each method its losses, compared with dense's, its bytes and its time."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_method.setdefault(result["run"]["method"]["name"], []).append(result)
    rows: dict[str, dict[str, Any]] = {}
    dense = by_method.get(DENSE.name, [])
    for name in (method.name for method in METHODS if method.name in by_method):
        mine = by_method[name]
        rows[name] = {
            "seeds": [each["run"]["seed"] for each in mine],
            **{
                measure: compare(
                    [loss(each) for each in mine],
                    [loss(each) for each in dense] if name != DENSE.name else [],
                )
                for measure, loss in MEASURES.items()
            },
            "fewer_bytes": statistics.fmean(each["payload_ratio"] for each in mine),
            "seconds": statistics.median(each["seconds"] for each in mine),
        }
        if name != DENSE.name and name != HELD.name and HELD.name in by_method:
            held = [held_out_loss(each) for each in by_method[HELD.name]]
            rows[name]["beside_held"] = compare([held_out_loss(each) for each in mine], held)
        rows[name]["within_bound"] = rows[name]["held_out"]["mean"] <= BOUNDS[task]
    return rows


def verdict(row: dict[str, Any]) -> str:
    """One comparison in words."""
    if "two_standard_errors" not in row:
        return f"{row['mean']:.4f}"
    inside = "within" if row["within_seed_noise"] else "OUTSIDE"
    return f"{row['mean']:.4f} ({row['over']:+.4f}, {inside} {row['two_standard_errors']:.4f})"


def report(task: str, rows: dict[str, dict[str, Any]], missing: Sequence[Run]) -> None:
    """Print the table of a task, and what is met."""
    print(f"{TITLES[task]}, {TASKS[task].steps} steps; mean final loss at most {BOUNDS[task]}")
    for name, row in rows.items():
        beside = f"  beside held {verdict(row['beside_held'])}" if "beside_held" in row else ""
        print(
            f"  {name:34} {len(row['seeds'])} seeds  held out {verdict(row['held_out']):36} "
            f"{'met' if row['within_bound'] else 'MISSED'}  training {verdict(row['training']):36} "
            f"{row['fewer_bytes']:.1f}x fewer bytes{beside}"
        )
    for method in (each for each in WITHOUT if each.name in rows):
        with_feedback = rows.get(method.name.removesuffix(", no feedback"), {})
        for measure in MEASURES:
            verdicts = [
                row.get(measure, {}).get("within_seed_noise")
                for row in (with_feedback, rows[method.name])
            ]
            shown = "met" if verdicts == [True, False] else "MISSED"
            print(f"  {method.name} fails where feedback does not, {measure}: {shown}")
    for run in missing:
        print(f"  missing: {run.method.name}, seed {run.seed}")


MEASURES = {"held_out": held_out_loss, "training": training_loss}


def measure(asked: Asked) -> Record:
    """Run what is missing, print the tables, draw the plot."""
    cache, seeds = Path(asked.options["cache"]), asked.options["seeds"].split(",")
    tasks: dict[str, Any] = {}
    curves: dict[str, tuple[str, list[dict[str, Any]]]] = {}
    for task in asked.options["tasks"].split(","):
        runs = runs_of(task)
        if "report" not in asked.flags:
            carry_out([run for run in runs if str(run.seed) in seeds], cache)
        found = ended(cache)
        results = [found[run.to_json()] for run in runs if run.to_json() in found]
        missing = [run for run in runs if run.to_json() not in found]
        rows = judge(task, results)
        report(task, rows, missing)
        if not results:
            continue
        curves[TITLES[task]] = (SHOWN[task], results)
        tasks[task] = {
            "settings": results[0]["run"]["task"],
            "parameters": results[0]["parameters"],
            "methods": rows,
            "missing": [[run.method.name, run.seed] for run in missing],
            "curves": [
                {
                    "method": each["run"]["method"]["name"],
                    "seed": each["run"]["seed"],
                    "held_out": [[step, round(loss, 5)] for step, loss in each["curve"]],
                    "training": [[step, round(loss, 6)] for step, loss in training(each)],
                }
                for each in results
            ],
        }
    plot(curves, asked.out / "convergence.png")
    return {"tasks": tasks}


BENCHMARK = Benchmark(
    *("convergence", __doc__, measure),
    rounds=0,
    options={
        "tasks": "digits,text",
        "seeds": ",".join(map(str, SEEDS)),
        "cache": str(CACHE),
    },
    flags={"report": "only of what has ended"},
)

if __name__ == "__main__":
    BENCHMARK.main()
