"""A record as a picture: time against size, one line a library, the machine's limit as a floor."""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from typing import Any

from pycollective.bench.record import Record
from pycollective.bench.settings import format_size
from pycollective.config import INSTALL_MATPLOTLIB
from pycollective.errors import ConfigurationError

# Apart for colour-blind readers too (Okabe and Ito), this library's the strongest.
_COLOURS = {
    "pycollective": "#0072B2",
    "native": "#56B4E9",
    "shared": "#332288",
    "bfloat16": "#44AA99",
    "float16": "#117733",
    "torch": "#009E73",
    "fake": "#999999",
    "gloo": "#D55E00",
    "mpich": "#CC79A7",
    "openmpi": "#E69F00",
    "openmpi-nocma": "#8C6D00",
    "impi": "#882255",
}
_NAMES = {
    "gloo": "Gloo",
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "openmpi-nocma": "Open MPI without CMA",
    "impi": "Intel MPI",
}
_INK, _FAINT = "#222222", "#d9d9d9"


def check() -> None:
    """Raise if `plot` cannot draw, before minutes are spent on measuring.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"--plot needs matplotlib: {INSTALL_MATPLOTLIB}") from error


def plot(record: Record, path: str | os.PathLike[str]) -> None:
    """Draw `record` into `path` (PNG, or whatever its suffix says).

    Raises:
        ConfigurationError: matplotlib is not installed, or the record has no rows.
    """
    if not record.rows:
        raise ConfigurationError("nothing was measured: there is nothing to plot")
    check()
    record = _of_one_phase(record)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no global state, no display, and the caller's own figures are left alone.
    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = [*_draw_limit(axes, record), *_draw_libraries(axes, record)]
    _dress(axes, record)
    figure.draw_without_rendering()  # settles the layout, which the labels go by
    spread_labels(axes, labels)
    figure.savefig(path, bbox_inches="tight")  # the labels lie outside the axes


def _of_one_phase(record: Record) -> Record:
    """Return what was measured in the commonest phase; its latency stands for the run's."""
    phase = statistics.mode(row.phase for row in record.rows)
    limits = [limit for limit in record.limits if limit.phase == phase]
    rows = [row for row in record.rows if row.phase == phase]
    described = dict(record.machine)
    if phase:
        described["phase"] = phase
    if phase and limits:
        described["latency"] = statistics.median(limit.latency for limit in limits)
    return replace(record, rows=rows, limits=limits, machine=described)


def _draw_limit(axes: Any, record: Record) -> list[Any]:
    """The two limits as a band; its label, if there are limits."""
    sizes = [limit.size for limit in record.limits]
    if not sizes:
        return []
    faster = [min(limit.stream, limit.copy) * 1e6 for limit in record.limits]
    slower = [limit.seconds * 1e6 for limit in record.limits]
    axes.fill_between(sizes, faster, slower, color="#bbbbbb", alpha=0.55, linewidth=0, zorder=1)
    axes.plot(sizes, slower, color="#777777", linewidth=1, zorder=1)
    return [label_line(axes, sizes, slower, "limit of the machine", "#777777")]


def _draw_libraries(axes: Any, record: Record) -> list[Any]:
    """A line and a label a library; where it could do nothing, neither."""
    labels = []
    for name in record.libraries:
        timed = [row for row in record.rows if row.library == name and row.timing is not None]
        if not timed:
            continue
        timings = [row.timing for row in timed if row.timing is not None]
        sizes = [row.size for row in timed]
        medians = [timing.median * 1e6 for timing in timings]
        lower = [timing.lower_quartile * 1e6 for timing in timings]
        upper = [timing.upper_quartile * 1e6 for timing in timings]
        colour = _COLOURS.get(name, _INK)
        own = name == "pycollective"
        axes.fill_between(sizes, lower, upper, color=colour, alpha=0.15, linewidth=0, zorder=2)
        axes.plot(
            sizes,
            medians,
            color=colour,
            linewidth=2.6 if own else 1.5,
            marker="o",
            markersize=4.5 if own else 3,
            zorder=4 if own else 3,
        )
        labels.append(label_line(axes, sizes, medians, _NAMES.get(name, name), colour, bold=own))
    return labels


def label_line(
    axes: Any, sizes: list[int], times: list[float], text: str, colour: str, bold: bool = False
) -> Any:
    """Name a line at its right end, where the eye is; `spread_labels` keeps names apart."""
    return axes.annotate(
        text,
        (sizes[-1], times[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold" if bold else "normal",
        annotation_clip=False,
    )


def spread_labels(axes: Any, labels: list[Any], gap: float = 11.0) -> None:
    """Move labels that would overlap upwards, so that they are at least `gap` points apart."""
    points = 72 / axes.figure.dpi

    def height(label: Any) -> float:
        return float(axes.transData.transform(label.xy)[1]) * points

    previous = float("-inf")
    for label in sorted(labels, key=height):
        placed = max(height(label), previous + gap)
        label.xyann = (8, placed - height(label))
        previous = placed


def _dress(axes: Any, record: Record) -> None:
    settings, machine = record.settings, record.machine
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.size for row in record.rows})
    # At most nine ticks, or they run into each other.
    ticks = sizes[:: -(-len(sizes) // 9)]
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(format_time)
    axes.grid(True, color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, length=0)
    axes.set_xlabel("message size, bytes (K and M are binary)", color=_INK)
    axes.set_ylabel("time of a call", color=_INK)
    reduce_op = f" {settings['reduce_op']}" if "reduce" in settings["operation"] else ""
    axes.set_title(
        f"{settings['operation']}{reduce_op}, {settings['dtype']}, {settings['ranks']} ranks",
        loc="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
        pad=22,
    )
    axes.text(
        0,
        1.025,
        f"{machine['cpu']}, {machine['cores']} cores, {machine['phase']} "
        f"({machine['latency'] * 1e9:.0f} ns core to core) · median and quartiles, lower is better",
        transform=axes.transAxes,
        fontsize=8.5,
        color="#555555",
    )


def format_time(microseconds: float, position: int | None = None) -> str:
    """A tick's text, in the unit that reads best."""
    for unit, scale in (("s", 1e6), ("ms", 1e3), ("µs", 1)):
        if microseconds >= scale:
            return f"{microseconds / scale:g} {unit}"
    return f"{microseconds * 1000:g} ns"
