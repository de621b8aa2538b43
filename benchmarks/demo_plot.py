"""The demo's results as a picture: the loss, how far runs drift apart, and what a step costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.demo_train import Result

# Apart for colour-blind readers too (Okabe and Ito); the same as in the benchmarks' plots.
_COLOURS = {"gloo": "#D55E00", "pycollective": "#0072B2"}
_PALE = {"gloo": "#EDBD9D", "pycollective": "#9DC6DF"}
_NAMES = {"gloo": "Gloo", "pycollective": "pycollective"}
_STYLES = {"fp32": "-", "bf16": (0, (4, 1.5))}
_INK, _MUTED, _FAINT = "#222222", "#666666", "#dddddd"


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw all results into `path` (PNG)."""
    # Without pyplot: no global state and no display.
    figure = Figure(figsize=(11, 7.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, gridspec_kw={"hspace": 0.08, "wspace": 0.06})
    panels[1, 1].sharey(panels[1, 0])
    _draw_loss(panels[0, 0], results)
    _draw_spread(panels[0, 1], results)
    for axes, gradients in zip(panels[1], _STYLES, strict=True):
        _draw_step_times(axes, results, gradients)
    panels[1, 0].margins(y=0.3)  # room for the legends
    for axes in panels.flat:
        _dress(axes)
    figure.savefig(path)


def _draw_loss(axes: Any, results: Sequence[Result]) -> None:
    """Every run's loss: that they lie on each other is why bits must be looked at."""
    for backend, colour in _COLOURS.items():
        for gradients, style in _STYLES.items():
            for index, result in enumerate(_select(results, backend, gradients)):
                axes.plot(
                    range(1, len(result.losses) + 1),
                    result.losses,
                    color=colour,
                    linestyle=style,
                    linewidth=1.1,
                    alpha=0.75,
                    label=f"{_NAMES[backend]}, {gradients}" if index == 0 else None,
                )
    for index, result in enumerate(_select(results, "8-bit", "fp32")):
        label = "8-bit gradients, pycollective" if index == 0 else None
        steps = range(1, len(result.losses) + 1)
        axes.plot(steps, result.losses, color=_INK, linestyle=":", linewidth=1.1, label=label)
    axes.set_title("Training loss of every run")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)


def _draw_spread(axes: Any, results: Sequence[Result]) -> None:
    """Largest less smallest loss over all bucket sizes and repeats, step by step."""
    spreads = {
        (backend, gradients): _spread(_select(results, backend, gradients))
        for backend in _COLOURS
        for gradients in _STYLES
    }
    positive = [value for spread in spreads.values() for value in spread if value > 0]
    # Zero has no place on a logarithmic axis: it gets a line of its own, below all else.
    floor = min(positive, default=1e-7) / 10
    for (backend, gradients), spread in spreads.items():
        axes.plot(
            range(1, len(spread) + 1),
            [value if value > 0 else floor for value in spread],
            color=_COLOURS[backend],
            linestyle=_STYLES[gradients],
            linewidth=2.4 if backend == "pycollective" else 1.3,
            label=f"{_NAMES[backend]}, {gradients}",
        )
    axes.set_yscale("log")
    axes.set_ylim(floor / 10, max(positive, default=1e-3) * 100)
    axes.minorticks_off()
    axes.annotate(
        "this line is exactly 0",
        (0.99, floor),
        xycoords=("axes fraction", "data"),
        xytext=(0, -12),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=_MUTED,
    )
    axes.set_title("How far the loss spreads over bucket sizes and repeats")
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")


def _draw_step_times(axes: Any, results: Sequence[Result], gradients: str) -> None:
    """A bar a backend and bucket size; the upper, pale part is exposed communication."""
    chosen = [r for r in results if r.configuration.gradients == gradients]
    caps = sorted({r.configuration.bucket_cap_mb for r in chosen})
    for offset, (backend, colour) in zip((-0.2, 0.2), _COLOURS.items(), strict=True):
        for position, cap in enumerate(caps):
            runs = [r for r in _select(chosen, backend, gradients, cap)]
            total = statistics.median(r.step_time for r in runs) * 1e3
            # The two are measured apart, so noise may make the part more than the whole.
            exposed = min(max(statistics.median(r.exposed for r in runs) * 1e3, 0.0), total)
            place = position + offset
            label = _NAMES[backend] if position == 0 else None
            axes.bar(place, total - exposed, 0.36, color=colour, label=label)
            axes.bar(place, exposed, 0.36, bottom=total - exposed, color=_PALE[backend])
            axes.text(place, total, f"{total:.1f}", ha="center", va="bottom", fontsize=9)
    buckets = [_select(chosen, "pycollective", gradients, cap)[0].buckets for cap in caps]
    axes.set_xticks(
        range(len(caps)),
        [
            f"{cap:g} MiB\n{count} bucket{'s' if count > 1 else ''}"
            for cap, count in zip(caps, buckets, strict=True)
        ],
    )
    axes.set_ylabel("ms")
    axes.set_title(f"Step time, {gradients} gradients")
    title = "pale: communication not hidden by backward"
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right", title=title)


def _select(
    results: Sequence[Result], backend: str, gradients: str, cap: float | None = None
) -> list[Result]:
    return [
        result
        for result in results
        if (result.configuration.label, result.configuration.gradients) == (backend, gradients)
        and cap in (None, result.configuration.bucket_cap_mb)
    ]


def _spread(results: Sequence[Result]) -> list[float]:
    """Of each step, the largest loss less the smallest."""
    return [
        max(step) - min(step) for step in zip(*(result.losses for result in results), strict=True)
    ]


def _dress(axes: Any) -> None:
    axes.title.set(fontsize=11, fontweight="bold", color=_INK)
    axes.title.set_horizontalalignment("left")
    axes.title.set_x(0)
    axes.grid(True, axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, length=0, labelsize=9)
