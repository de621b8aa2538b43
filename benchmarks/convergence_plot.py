"""The curves of `convergence.py` as a picture: a row a task, with and without error feedback."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter

WITHOUT = ", no feedback"
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
        colour = _COLOURS[name.removesuffix(WITHOUT)]
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
            label=f"{name.removesuffix(WITHOUT)}  {means[-1]:.4g}",
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
