"""The picture of `pycollective schedule`: what is on it, and that one can read it."""

from __future__ import annotations

import re
import struct

import pytest
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from pycollective.cli.schedule_messages import Sizes, messages
from pycollective.cli.schedule_picture import COLOURS, LEAF, NODE, RESULT, draw
from pycollective.schedule import Topology, algorithms_for, make_schedule

pytestmark = pytest.mark.storm
SIZES = Sizes(16 << 20, "bfloat16", 2, "float32", 4)


@pytest.fixture
def drawn(monkeypatch):
    """Gives the figure of a schedule, laid out but written nowhere."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: figures.append(self))

    def make(algorithm, ranks, operation="all_reduce", topology=None, shard=0):
        on = Topology.parse(topology, ranks) if topology else Topology.single_host(ranks)
        schedule = make_schedule(operation, algorithm, on)
        draw(schedule, SIZES, "unwritten.png", shard)
        figures[-1].draw_without_rendering()
        return schedule, figures[-1]

    return make


def labels(figure):
    """The texts on arrows."""
    texts = [text for text in figure.axes[0].texts if text.get_bbox_patch() is not None]
    return sorted(text.get_text() for text in texts), texts


def arrows(figure):
    """(colour, opacity, step and lane of the start, lane of the end) of each arrow."""
    found = []
    for patch in figure.axes[0].patches:
        if isinstance(patch, FancyArrowPatch):
            (x, y), (_, to_y) = patch._posA_posB
            found.append(
                (to_hex(patch.get_edgecolor()).upper(), patch.get_alpha(), int(x), y, to_y)
            )
    return found


def size_of(path):
    """Width and height of a PNG."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:])


@pytest.mark.parametrize(
    ("algorithm", "ranks", "topology"),
    [("tree", 8, "8"), ("hierarchical", 8, "2x4"), ("halving_doubling", 128, "16x8")],
)
def test_a_png_of_sensible_size(algorithm, ranks, topology, tmp_path):
    schedule = make_schedule("all_reduce", algorithm, Topology.parse(topology, ranks))
    draw(schedule, SIZES, tmp_path / "a.png")
    assert all(800 <= each <= 2800 for each in size_of(tmp_path / "a.png"))


def test_the_suffix_says_which_format_and_without_one_it_is_png(tmp_path):
    schedule = make_schedule("all_reduce", "tree", Topology.single_host(4))
    draw(schedule, SIZES, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    draw(schedule, SIZES, tmp_path / "picture")
    size_of(tmp_path / "picture")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.svg", "picture"]


def test_a_tree(drawn):
    """Every message is an arrow from its sender's lane to its receiver's, in its step."""
    _, figure = drawn("tree", 4)
    leaf, node, result = COLOURS
    assert sorted(arrows(figure), key=lambda arrow: arrow[2:]) == [
        (leaf, 1, 0, 1, 0),
        (leaf, 1, 0, 3, 2),
        (node, 1, 1, 2, 0),
        (result, 1, 2, 0, 2),
        (result, 1, 3, 0, 1),
        (result, 1, 3, 2, 3),
    ]
    assert labels(figure)[0] == ["1", "2-3", "3"]
    title = figure.axes[0].get_title(loc="left")
    assert title == "all_reduce by tree, 4 ranks"


def test_one_shard_stands_out(drawn):
    schedule, figure = drawn("ring", 6, shard=2)
    found = arrows(figure)
    assert len(found) == len(messages(schedule)) == 6 * 10
    full = sorted((step, start, end) for _, alpha, step, start, end in found if alpha == 1)
    around = [(3 + hop) % 6 for hop in range(11)]
    assert full == [(hop, around[hop], around[hop + 1]) for hop in range(10)]
    assert all(alpha < 0.5 for _, alpha, *_ in found if alpha != 1)
    assert labels(figure)[0] == sorted(["3", "3, 4", "3, 4-5", "0, 3, 4-5", "0-1, 3, 4-5"])


def test_hosts_are_named_and_apart(drawn):
    _, figure = drawn("hierarchical", 4, topology="3,1")
    lanes = figure.axes[0]
    hosts = [text.get_text() for text in lanes.texts if "host" in text.get_text()]
    assert hosts == ["host 0", "host 1"]
    names = [tick.get_text() for tick in lanes.get_yticklabels()]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]
    heights = lanes.get_yticks()
    assert heights[3] - heights[2] > heights[2] - heights[1] == heights[1] - heights[0]
    _, figure = drawn("ring", 4)
    assert not [text for text in figure.axes[0].texts if "host" in text.get_text()]


def cells(figure):
    """The numbers in the heat map, by rank and step."""
    found = {}
    for text in figure.axes[1].texts:
        x, y = text.get_position()
        found[int(y), int(x)] = float(text.get_text())
    return found


def test_the_bytes_are_those_that_each_rank_sends(drawn):
    """In MiB: a leaf or a result of 16 MiB has 16, a node, in fp32, 32."""
    _, figure = drawn("tree", 4)
    up = {(1, 0): 16, (3, 0): 16, (2, 1): 32}
    assert cells(figure) == {**up, (0, 2): 16, (0, 3): 16, (2, 3): 16}
    title = figure.axes[1].get_title(loc="left")
    assert title == "MiB that a rank sends; the buffer has 16 MiB of bfloat16"
    # A shard has 4. In step 2 three leaves travel, of which two are siblings, or were.
    _, figure = drawn("ring", 4)
    sent = [4, 8, 12, 4, 4, 4]
    assert cells(figure) == {(r, step): sent[step] for r in range(4) for step in range(6)}


def test_many_ranks_are_thin_lines_and_a_colour_bar(drawn):
    schedule, figure = drawn("ring", 16, shard=3)
    assert len(figure.axes) == 3
    assert labels(figure)[0] == []
    assert len(arrows(figure)) == 30  # the followed shard's
    (others,) = (each for each in figure.axes[0].collections if each.get_alpha())
    assert isinstance(others, LineCollection)
    assert len(others.get_segments()) == len(messages(schedule)) - 30
    (mesh,) = (each for each in figure.axes[1].collections if isinstance(each, QuadMesh))
    assert mesh.get_array().shape == (16, 30)
    assert mesh.get_array().min() == 1.0  # MiB: a shard
    assert mesh.get_array().max() <= figure.axes[2].get_ylim()[1]


@pytest.mark.parametrize("algorithm", algorithms_for("all_reduce"))
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 7, 8])
def test_no_label_hides_another(drawn, algorithm, ranks):
    _, figure = drawn(algorithm, ranks)
    _, texts = labels(figure)
    boxes = [text.get_bbox_patch().get_window_extent() for text in texts]
    for i, box in enumerate(boxes):
        for other, text in zip(boxes[:i], texts, strict=False):
            assert not box.overlaps(other), f"{texts[i].get_text()} and {text.get_text()}"


def test_colours_are_explained(drawn):
    def explained(figure):
        legend = figure.axes[0].get_legend()
        return {
            text.get_text(): to_hex(line.get_color()).upper()
            for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
        }

    _, figure = drawn("ring", 4)
    assert explained(figure) == {
        "leaf: a rank's input": COLOURS[LEAF],
        "node: a partial sum in float32": COLOURS[NODE],
        "result": COLOURS[RESULT],
        "adds": COLOURS[NODE],
        "adds and rounds": COLOURS[RESULT],
    }
    _, figure = drawn("direct", 4)  # where no node travels
    assert [re.split(r"\W", each)[0] for each in explained(figure)] == ["leaf", "result", "adds"]
    _, figure = drawn("tree", 4, operation="broadcast")
    assert explained(figure) == {"data": COLOURS[RESULT]}
