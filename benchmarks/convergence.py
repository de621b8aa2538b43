"""Does training with compressed gradients end where training with dense ones ends?

Two tasks on real data under DDP, on two ranks that play two hosts (`convergence_train.py`), with
three seeds of each method, and one of a GPT of 10.9 M on request. What compresses holds AdamW's
second moment after the dense start, so there is also dense with the moment held.

*The final loss* of a run is the mean of its last three evaluations on held-out data; its *training
loss* that of the last tenth of its steps. A method is *within seed noise* of dense if its mean is
larger by at most two standard errors of the difference, sqrt((s_method^2 + s_dense^2) / seeds).
With three seeds one in 17 comparisons of a method with itself (normal losses) would be outside.

A run that has ended is kept in build/convergence.jsonl, and not run again; the results say what is
missing. `--seeds 1` runs those alone, so that several may run at a time.

Usage: python -m benchmarks.convergence [--tasks digits,text,text_10m] [--seeds 1,2,3] [--report]
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter

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


NO_FEEDBACK = ", no feedback"
# Apart for colour-blind readers too (Okabe and Ito).
_COLOURS = {
    "dense": "#222222",
    "dense, moment held": "#888888",
    "1-bit": "#0072B2",
    "8-bit": "#009E73",
    "top-k 1 % by tensor": "#D55E00",
    "top-k 1 % by chunk": "#E69F00",
    "PowerSGD, rank 2": "#CC79A7",
}
_DOTTED = ("dense, moment held",)  # another's curve may be the same
_INK, _FAINT = "#222222", "#dddddd"
_SKIPPED = 1 / 8  # of the steps, in which all are alike and far above


def training(result: dict[str, Any]) -> list[tuple[int, float]]:
    """At each evaluation but the first: the step, the mean training loss since the one before."""
    steps = [step for step, _ in result["curve"]]
    return [
        (end, statistics.fmean(result["train"][start:end]))
        for start, end in itertools.pairwise(steps)
    ]


def plot(tasks: Mapping[str, tuple[str, Sequence[dict[str, Any]]]], path: Path) -> None:
    """Draw the losses of all results into `path` (PNG).

    Args:
        tasks: by title, which loss ("training" or "held-out"), and the results.
        path: where to.
    """
    if not tasks:
        return
    # Without pyplot: no global state and no display.
    figure = Figure(figsize=(11, 0.4 + 4.1 * len(tasks)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    for row, (title, (loss, results)) in zip(panels, tasks.items(), strict=True):
        _draw(row[0], title, loss, [r for r in results if r["run"]["method"]["feedback"]])
        without = [
            r
            for r in results
            if not r["run"]["method"]["feedback"] or r["run"]["method"]["name"] == "dense"
        ]
        if len({r["run"]["method"]["name"] for r in without}) > 1:
            _draw(row[1], "The same without error feedback", loss, without)
        else:
            row[1].set_axis_off()
        row[0].set_ylabel(f"{loss} loss, nats")
    for axes in panels[-1]:
        axes.set_xlabel("step")
    figure.savefig(path)


def _draw(axes: Any, title: str, loss: str, results: Sequence[dict[str, Any]]) -> None:
    """Of each method the mean over its seeds, and a band from the lowest to the highest."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_method.setdefault(result["run"]["method"]["name"], []).append(result)
    for name, of in by_method.items():
        colour = _COLOURS[name.removesuffix(NO_FEEDBACK)]
        curves = [training(each) if loss == "training" else each["curve"] for each in of]
        total = curves[0][-1][0]
        points = [
            (step, [each[at][1] for each in curves])
            for at, (step, _) in enumerate(curves[0])
            if step >= total * _SKIPPED
        ]
        steps = [step for step, _ in points]
        means = [statistics.fmean(losses) for _, losses in points]
        axes.fill_between(
            steps,
            [min(losses) for _, losses in points],
            [max(losses) for _, losses in points],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        wide = name == "dense"
        axes.plot(
            steps,
            means,
            color=colour,
            linewidth=2.6 if wide else 1.5,
            linestyle=(0, (1.5, 2.5)) if name in _DOTTED else "-",
            zorder=4 if name in _DOTTED else 2 if wide else 3,
            label=f"{name.removesuffix(NO_FEEDBACK)}  {means[-1]:.4g}",
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    narrow = FormatStrFormatter("%g") if _narrow(axes) else NullFormatter()
    axes.yaxis.set_minor_formatter(narrow)
    axes.legend(frameon=False, fontsize=8.5, title="at the end, mean of seeds", title_fontsize=8.5)
    axes.set_title(title, fontsize=11, fontweight="bold", color=_INK, loc="left")
    axes.grid(True, axis="y", which="both", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(which="both", colors=_INK, length=0, labelsize=9)


def _narrow(axes: Any) -> bool:
    """Whether less than a decade is shown, so that powers of ten alone say too little."""
    low, high = axes.get_ylim()
    return bool(high < 10 * low)


if __name__ == "__main__":
    BENCHMARK.main()
