"""The arrows of a schedule's picture: messages, and the way of the one shard that is followed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective.cli.schedule_messages import Key, Made, Sent, Sizes, follow
from pycollective.order import Node
from pycollective.schedule import Schedule

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
