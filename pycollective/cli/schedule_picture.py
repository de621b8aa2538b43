"""A schedule as a picture: who sends what when.

Above, ranks as lanes, host by host, steps from left to right, each message an arrow in the colour
of what it carries and as thick as it is large. One shard is drawn in full, the others are faint:
with all of them in full one sees nothing. Below, the bytes that each rank sends in each step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective.cli.schedule_messages import Key, Made, Sent, Sizes, follow, messages
from pycollective.config import INSTALL_MATPLOTLIB
from pycollective.errors import ConfigurationError
from pycollective.order import Node
from pycollective.schedule import Schedule

MOST_RANKS = 128  # that a picture can show
_HOST = "#f3f3f3"
_GAP = 0.5  # between hosts, in lanes
_WORDS = 16  # ranks: with more, their names are numbers alone


def draw(schedule: Schedule, sizes: Sizes, path: str | os.PathLike[str], shard: int = 0) -> None:
    """Draw `schedule` into `path` (PNG, or whatever its suffix says), following one shard.

    Raises:
        ConfigurationError: matplotlib is not installed, the path cannot be written, there is no
            such shard, nothing is sent, or there is more than a picture can show.
    """
    scene = _scene(schedule, sizes, shard)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ConfigurationError(f"--picture needs matplotlib: {INSTALL_MATPLOTLIB}") from error
    height = max(scene.lanes) + 1
    above = height * min(0.62, max(0.08, 7.0 / scene.ranks))
    below = height * min(0.26, max(0.03, 2.6 / scene.ranks))
    width = min(max(1.1 * scene.steps, 7.4), 16.0)
    # Without pyplot: no global state, no display.
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(width + 1.2, above + below + 2.1), dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    lanes, heat = figure.subplots(2, 1, sharex=True, height_ratios=[above, below])
    _draw_lanes(lanes, scene)
    draw_messages(lanes, scene)
    draw_followed(lanes, scene)
    _draw_titles(lanes, scene)
    _draw_bytes(heat, scene)
    try:
        # Named, or a path without a suffix would be given one.
        figure.savefig(path, format=Path(path).suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--picture {os.fspath(path)}: {error}") from error


def check(schedule: Schedule, shard: int) -> None:
    """Whether `draw` can show it: at once, before anything is looked at that takes long.

    Raises:
        ConfigurationError: there is no such shard, or there is more than a picture can show.
    """
    if not 0 <= shard < schedule.shards:
        raise ConfigurationError(f"--shard {shard} is not one of 0 to {schedule.shards - 1}")
    ranks = schedule.topology.ranks
    if ranks > MOST_RANKS:
        raise ConfigurationError(
            f"--picture: nobody can tell {ranks} ranks apart; it draws {MOST_RANKS} at most"
        )


def _scene(schedule: Schedule, sizes: Sizes, shard: int) -> Scene:
    check(schedule, shard)
    ranks = schedule.topology.ranks
    kinds = messages(schedule)
    if not kinds:
        raise ConfigurationError("--picture: nothing is sent, so there is nothing to draw")
    lanes = [0.0] * ranks
    height = 0.0
    for members in schedule.topology.hosts:
        for rank in members:
            lanes[rank] = height
            height += 1
        height += _GAP
    return Scene(schedule, sizes, shard, kinds, lanes, steps=max(kinds)[0] + 1)


def _draw_lanes(axes: Any, scene: Scene) -> None:
    """Lanes, steps, and the hosts as bands."""
    hosts = scene.schedule.topology.hosts
    for host, members in enumerate(hosts):
        low, high = scene.lanes[members[0]] - 0.5, scene.lanes[members[-1]] + 0.5
        axes.axhspan(low, high, color=_HOST, linewidth=0, zorder=0)
        if len(hosts) > 1:
            axes.annotate(
                f"host {host}",
                (0, (low + high) / 2),
                xycoords=("axes fraction", "data"),
                xytext=(-50, 0),
                textcoords="offset points",
                rotation=90 if scene.ranks <= _WORDS else 0,
                ha="center",
                va="center",
                fontsize=9 if scene.ranks <= _WORDS else 7,
                color=GREY,
            )
    axes.hlines(
        scene.lanes, 0, scene.steps, color="#c4c4c4", linewidth=min(0.8, 16 / scene.ranks), zorder=1
    )
    if scene.steps <= 32:
        bottom = max(scene.lanes) + 0.5
        axes.vlines(range(1, scene.steps), -0.5, bottom, color="white", linewidth=1.5, zorder=0.5)
    axes.tick_params(labelbottom=False)
    _dress(axes, scene, most_names=40)


def _dress(axes: Any, scene: Scene, most_names: int) -> None:
    """Name the ranks; what both panels have in common."""
    few = scene.ranks <= _WORDS
    ranks = range(0, scene.ranks, -(-scene.ranks // most_names))
    axes.set_yticks(
        [scene.lanes[rank] for rank in ranks],
        [f"rank {rank}" if few else str(rank) for rank in ranks],
        fontsize=9 if few else 7,
    )
    axes.set_xlim(0, scene.steps)
    axes.set_ylim(max(scene.lanes) + 0.5, -0.5)
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_titles(axes: Any, scene: Scene) -> None:
    """What it is, how to read it, and what the colours mean."""
    from matplotlib.transforms import offset_copy

    schedule = scene.schedule
    rooted = f", root {schedule.root}" if schedule.operation.rooted else ""
    hosts = len(schedule.topology.hosts)
    on_hosts = f" on {hosts} hosts ({schedule.topology})" if hosts > 1 else ""
    axes.set_title(
        f"{schedule.operation.name} by {schedule.algorithm.name}, "
        f"{scene.ranks} ranks{on_hosts}{rooted}",
        loc="left",
        fontsize=13,
        fontweight="bold",
        color=INK,
        pad=40,
    )
    notes = ["width: bytes of the message"]
    if scene.labelled and schedule.operation.reduces:
        notes.insert(0, "labels: leaves, a-b being one sum")
    if schedule.shards > 1:
        notes.insert(0, f"shard {scene.shard} of {schedule.shards} in full, the others faint")
    axes.annotate(
        " · ".join(notes),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 26),
        textcoords="offset points",
        fontsize=8.5,
        color=GREY,
    )
    legend = axes.legend(
        handles=_legend(scene),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=offset_copy(axes.transAxes, axes.figure, y=7, units="points"),
        ncols=5,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.5,
        handletextpad=0.5,
        columnspacing=1.5,
        borderpad=0,
        borderaxespad=0,
    )
    legend.set_in_layout(False)  # it may be wider than the lanes, which it must not squeeze


def _legend(scene: Scene) -> list[Any]:
    from matplotlib.lines import Line2D

    sizes = scene.sizes
    wide = f" in {sizes.accumulator}" if sizes.accumulator != sizes.dtype else ""
    names = {LEAF: "leaf: a rank's input", NODE: f"node: a partial sum{wide}"}
    names[RESULT] = "result" if scene.schedule.operation.reduces else "data"
    carried = np.sum(list(scene.kinds.values()), axis=0)
    handles = [
        Line2D([], [], color=COLOURS[kind], linewidth=2.5, label=name)
        for kind, name in names.items()
        if carried[kind]
    ]
    if not scene.schedule.operation.reduces:
        return handles
    dots = {RESULT: "adds and rounds" if wide else "adds the root"}
    if scene.labelled and carried[NODE]:
        dots = {NODE: "adds", **dots}
    return handles + [
        Line2D([], [], color=COLOURS[kind], marker="o", linestyle="", label=name)
        for kind, name in dots.items()
    ]


def _draw_bytes(axes: Any, scene: Scene) -> None:
    """What each rank sends in each step, as a heat map."""
    shard = scene.sizes.shard(scene.schedule)
    sent = np.zeros((scene.ranks, scene.steps))
    for (step, source, _), kinds in scene.kinds.items():
        sent[source, step] += kinds @ shard
    scale, unit = _unit(sent.max())
    sent /= scale
    largest = sent.max()
    for members in scene.schedule.topology.hosts:
        first = scene.lanes[members[0]] - 0.5
        mesh = axes.pcolormesh(
            np.arange(scene.steps + 1),
            first + np.arange(len(members) + 1),
            np.ma.masked_equal(sent[list(members)], 0),
            cmap="Greys",
            vmin=-0.15 * largest,  # the least is a grey, too; nothing is white
            vmax=1.5 * largest,
            edgecolors="white",
            linewidth=1.0 if scene.labelled else 0.0,
        )
    _dress(axes, scene, most_names=16)
    steps = range(0, scene.steps, -(-scene.steps // 32))
    axes.set_xticks([step + 0.5 for step in steps], list(map(str, steps)), fontsize=9)
    axes.set_xlabel("step", color=INK)
    total, total_unit = _unit(scene.sizes.total)
    axes.set_title(
        f"{unit} that a rank sends; the buffer has "
        f"{scene.sizes.total / total:.4g} {total_unit} of {scene.sizes.dtype}",
        loc="left",
        fontsize=8.5,
        color=GREY,
    )
    if not scene.labelled or scene.steps > 16:
        bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01, aspect=12)
        bar.outline.set_visible(False)
        bar.ax.set_ylim(0, largest)
        bar.ax.tick_params(length=0, labelsize=7, labelcolor=INK)
        return
    for (rank, step), value in np.ndenumerate(sent):
        if value:
            colour = "white" if value > 0.75 * largest else INK
            at = step + 0.5, scene.lanes[rank]
            axes.text(*at, f"{value:.3g}", fontsize=7.5, ha="center", va="center", color=colour)


def _unit(size: float) -> tuple[int, str]:
    for scale, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= scale:
            return scale, name
    return 1, "bytes"


# Apart for colour-blind readers too (Okabe and Ito), in the order of KINDS.
COLOURS = ("#E69F00", "#0072B2", "#009E73")
LEAF, NODE, RESULT = range(3)
INK, GREY = "#222222", "#555555"
_MOST_LABELLED = 8  # ranks: with more, labels run into each other
_START, _END = 0.08, 0.92  # of an arrow within its step
# Where on an arrow its label may be, the best place first.
_PLACES = np.array([0.3, 0.26, 0.34, 0.22, 0.38, 0.18, 0.42, 0.14, 0.46, 0.6, 0.7])
_NEAR = 0.34  # lanes: labels that are closer overlap


@dataclass(frozen=True, eq=False)
class Scene:
    """What is drawn.

    Attributes:
        schedule: the schedule.
        sizes: how large what it sends is.
        shard: the shard that is followed.
        kinds: the buffers in each message, by kind.
        lanes: the height of each rank's lane.
        steps: number of steps.
    """

    schedule: Schedule
    sizes: Sizes
    shard: int
    kinds: dict[Key, NDArray[np.int64]]
    lanes: list[float]
    steps: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.schedule.topology.ranks

    @property
    def labelled(self) -> bool:
        """Whether there is room for words."""
        return self.ranks <= _MOST_LABELLED

    @cached_property
    def widths(self) -> dict[Key, float]:
        """Each arrow's points: as its bytes are to those of the largest message."""
        shard = self.sizes.shard(self.schedule)
        sent = {key: float(kinds @ shard) for key, kinds in self.kinds.items()}
        thickest = min(3.4, 28 / self.ranks) / max(sent.values())
        return {key: max(0.3, thickest * size) for key, size in sent.items()}

    def ends(self, key: Key) -> tuple[tuple[float, float], tuple[float, float]]:
        """Where an arrow begins and ends."""
        step, source, target = key
        return (step + _START, self.lanes[source]), (step + _END, self.lanes[target])


def draw_messages(axes: Any, scene: Scene) -> None:
    """All messages that have nothing of the followed shard, faint."""
    followed = {each.key for each in follow(scene.schedule, scene.shard) if isinstance(each, Sent)}
    others = [key for key in scene.kinds if key not in followed]
    shard = scene.sizes.shard(scene.schedule)
    colours = [COLOURS[int(np.argmax(scene.kinds[key] * shard))] for key in others]
    if scene.labelled:
        for key, colour in zip(others, colours, strict=True):
            _arrow(axes, scene, key, colour, alpha=0.28, zorder=2)
        return
    from matplotlib.collections import LineCollection

    axes.add_collection(
        LineCollection(
            [scene.ends(key) for key in others],
            colors=colours,
            linewidths=[scene.widths[key] for key in others],
            alpha=0.3,
            zorder=2,
        )
    )


def _arrow(axes: Any, scene: Scene, key: Key, colour: str, alpha: float, zorder: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    width = scene.widths[key]
    axes.add_patch(
        FancyArrowPatch(
            *scene.ends(key),
            arrowstyle="-|>",
            mutation_scale=6 + 1.8 * width if scene.labelled else 3 + 1.5 * width,
            color=colour,
            alpha=alpha,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
            joinstyle="miter",
            capstyle="butt",
            zorder=zorder,
        )
    )


def draw_followed(axes: Any, scene: Scene) -> None:
    """The way of the shard that is followed, in full."""
    labels = _Labels(axes, scene)
    for event in follow(scene.schedule, scene.shard):
        if isinstance(event, Made):
            _draw_made(axes, scene, event)
            continue
        leaves = any(hi - lo == 1 for lo, hi in event.nodes)
        nodes = any(hi - lo > 1 for lo, hi in event.nodes)
        colour = COLOURS[NODE if nodes else LEAF if leaves else RESULT]
        if not scene.labelled:  # thin lines must still stand out from the others, if there are any
            least = 1.3 if scene.schedule.shards > 1 else 0.6
            scene.widths[event.key] = max(least, scene.widths[event.key])
        _arrow(axes, scene, event.key, colour, alpha=1, zorder=4)
        if leaves and nodes and scene.labelled:
            _draw_leaf_beside_nodes(axes, scene, event.key)
        if scene.labelled and event.nodes:
            labels.place(event.key, ", ".join(map(_leaves, event.nodes)), colour)


def _draw_leaf_beside_nodes(axes: Any, scene: Scene, key: Key) -> None:
    """Both colours: dashes of a leaf's over the line of the nodes."""
    (x, y), (to_x, to_y) = scene.ends(key)
    end = 0.85  # the arrow's head keeps its colour
    axes.plot(
        (x, x + end * (to_x - x)),
        (y, y + end * (to_y - y)),
        color=COLOURS[LEAF],
        linewidth=scene.widths[key],
        linestyle=(0, (2.5, 2.5)),
        dash_capstyle="butt",
        zorder=4.5,
    )


def _draw_made(axes: Any, scene: Scene, made: Made) -> None:
    """A dot where a rank adds; larger where this makes the result."""
    if not (made.finish or scene.labelled):
        return
    axes.plot(
        made.step + 1,
        scene.lanes[made.rank],
        marker="o",
        markersize=(9 if made.finish else 6) if scene.labelled else 4,
        color=COLOURS[RESULT if made.finish else NODE],
        markeredgecolor="white",
        markeredgewidth=0.8,
        clip_on=False,
        zorder=5,
    )


@dataclass
class _Labels:
    """Labels on arrows, near their senders but apart from each other."""

    axes: Any
    scene: Scene
    placed: list[tuple[int, float]] = field(default_factory=list)  # step, height

    def place(self, key: Key, text: str, colour: str) -> None:
        (x, y), (to_x, to_y) = self.scene.ends(key)
        heights = y + _PLACES * (to_y - y)
        there = [height for step, height in self.placed if step == key[0]]
        distances = [min((abs(h - other) for other in there), default=1.0) for h in heights]
        free = [at for at, far in enumerate(distances) if far >= _NEAR]
        at = free[0] if free else int(np.argmax(distances))
        self.placed.append((key[0], heights[at]))
        self.axes.text(
            x + _PLACES[at] * (to_x - x),
            heights[at],
            text,
            fontsize=7.5,
            color=INK,
            ha="center",
            va="center",
            bbox={
                "boxstyle": "round,pad=0.2",
                "facecolor": "white",
                "edgecolor": colour,
                "linewidth": 0.7,
            },
            zorder=6,
        )


def _leaves(node: Node) -> str:
    """``3`` for a leaf, ``0-3`` for the sum of leaves 0 to 3."""
    lo, hi = node
    return str(lo) if hi == lo + 1 else f"{lo}-{hi - 1}"
