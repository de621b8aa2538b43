"""The two pictures of the README, from files of results: python -m benchmarks.front_page

They have no background, and colours that can be read on white and on black.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import ticker
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pycollective.bench.plot import format_time, label_line, spread_labels
from pycollective.bench.record import Record, read_json
from pycollective.bench.settings import format_size

RESULTS = Path(__file__).resolve().parent / "results"
_INK, _FAINT = "#7d8590", "#7d859040"
_OURS, _GLOO = "#2f81d7", "#dd6b20"
_WIDTH = 8.6  # inches; GitHub shows a picture some 830 pixels wide
_DPI = 192


def final_weights(record: Mapping[str, Any], path: Path) -> None:
    """Test loss of each training's final weights, with the first digits of their digest."""
    figure = _figure(3.7)
    panels = figure.subplots(1, 2, sharey=True)
    settings = record["settings"]
    titles = {
        "buckets": f"{settings['ranks_of_buckets']} ranks, by bucket_cap_mb of DDP",
        "ranks": "By the number of ranks",
    }
    ways = {"buckets": "pycollective, DDP", "ranks": "pycollective, LeafSync"}
    for axes, (table, title) in zip(panels, titles.items(), strict=True):
        own, gloo = (record["backends"][each][table] for each in ("pycollective", "gloo"))
        _draw_ends(axes, gloo, "Gloo, DDP", _GLOO, digests=True)
        _draw_ends(axes, own, f"{ways[table]}: all {own[0]['digest'][:6]}", _OURS)
        axes.set_xticks(range(len(own)), [f"{next(iter(row.values())):g}" for row in own])
        _dress(axes, title)
        axes.margins(x=0.1)
        axes.legend(frameon=False, fontsize=10, loc="upper left", labelcolor="linecolor")
    lowest, highest = panels[0].get_ylim()
    room = highest - lowest
    panels[0].set_ylim(lowest - 0.06 * room, highest + 0.35 * room)  # for the legends
    panels[0].set_ylabel("test loss of the final weights", color=_INK)
    figure.savefig(path, transparent=True)


def _draw_ends(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    label: str,
    colour: str,
    digests: bool = False,
) -> None:
    losses = [row["test_loss"] for row in rows]
    # No line leads from one of Gloo's ends to another. Where both end alike, both are seen.
    how = {"linestyle": "none", "markersize": 9} if digests else {"linewidth": 2, "markersize": 5}
    axes.plot(range(len(rows)), losses, color=colour, marker="o", label=label, **how)
    if digests:
        for place, row in enumerate(rows):
            axes.annotate(
                row["digest"][:6],
                (place, row["test_loss"]),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                family="monospace",
                color=colour,
            )


# Their curves and colours; of Open MPI's two settings the faster one at each size.
_CURVES = {
    "Gloo": (("gloo",), _GLOO),
    "Open MPI": (("openmpi", "openmpi-nocma"), "#bf8700"),
    "Intel MPI": (("impi",), "#a371c7"),
    "pycollective": (("pycollective",), _OURS),
}


def speed(record: Record, path: Path) -> None:
    """Time against size of four libraries, above the machine's limit."""
    figure = _figure(4.3)
    axes = figure.subplots()
    sizes = [limit.size for limit in record.limits]
    limits = [limit.seconds * 1e6 for limit in record.limits]
    axes.fill_between(sizes, limits, min(limits), color=_FAINT, linewidth=0)
    axes.annotate(
        "less than this machine's memory needs", (sizes[-5], limits[-9]), color=_INK, ha="center"
    )
    labels = []
    for name, (libraries, colour) in _CURVES.items():
        times = [min(_median(record, each, size) for each in libraries) for size in sizes]
        own = name == "pycollective"
        width, marker = (2.8, 5) if own else (1.7, 3)
        axes.plot(sizes, times, color=colour, linewidth=width, marker="o", markersize=marker)
        labels.append(label_line(axes, sizes, times, name, colour, bold=own))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes[::2], [format_size(size) for size in sizes[::2]])
    axes.yaxis.set_major_locator(ticker.LogLocator(numticks=12))
    axes.yaxis.set_major_formatter(format_time)
    axes.minorticks_off()
    axes.set_ylim(bottom=min(limits))
    axes.set_xlabel("bytes of the array (K and M are binary)", color=_INK)
    _dress(axes, "Time of an all-reduce of fp32 on two ranks")
    figure.draw_without_rendering()  # settles the layout, which the labels go by
    spread_labels(axes, labels)
    figure.savefig(path, transparent=True)


def _median(record: Record, library: str, size: int) -> float:
    row = record.row(library, size)
    assert row is not None
    assert row.timing is not None
    return row.timing.median * 1e6


def _figure(height: float) -> Figure:
    # Without pyplot: no global state and no display.
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK)
    axes.grid(True, axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
    axes.tick_params(colors=_INK, length=0, labelsize=10)


def main() -> None:
    """Draw both."""
    weights = json.loads((RESULTS / "final_weights.json").read_text())
    final_weights(weights, RESULTS / "final_weights.png")
    speed(read_json(RESULTS / "all_reduce_2_ranks.json"), RESULTS / "speed.png")


if __name__ == "__main__":
    main()
