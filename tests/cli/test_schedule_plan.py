"""`pycollective schedule --plan`: what is printed, carried out on symbols, is the collective."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from pycollective.order import split
from pycollective.schedule import OPERATIONS, Topology, make_schedule
from tests.cli.test_schedule import invoke
from tests.harness import ROOT

PLACE = r"(?:rank (\d+)'s )?(input|output|(?:node|item) \d+)"


class Value:
    """A leaf, or a sum that remembers how it was made."""

    def __init__(self, made: object, node: bool = False, finished: bool = False) -> None:
        self.made, self.node, self.finished = made, node, finished

    def __add__(self, other: Value) -> Value:
        assert not self.finished
        assert not other.finished
        return Value((self.made, other.made), node=True)


def finish(value: Value) -> Value:
    return Value(value.made, finished=True)


Wire = dict[tuple[int, int, str], list[Value]]


class Rank:
    """Carries out the lines of one rank, knowing nothing but what they say."""

    def __init__(self, number: int, lines: list[str], inputs: dict[int, Value]) -> None:
        self.number, self.lines = number, lines
        self.memory: dict[tuple[str, int | None], Value] = {
            ("input", shard): value for shard, value in inputs.items()
        }
        self.published = 0
        self.posted: dict[tuple[str, str], list[tuple[str, str, str]]] = {}

    @staticmethod
    def at(place: str, shard: int) -> tuple[str, int | None]:
        """A slot's place is one for all shards."""
        return place, shard if place in ("input", "output") else None

    def write(self, place: str, shard: int, value: Value) -> None:
        assert place != "input"
        assert value.node == place.startswith("node")
        self.memory[self.at(place, shard)] = value

    def run(self, ranks: list[Rank], wire: Wire) -> Iterator[None]:
        for number, line in enumerate(self.lines):
            at, shard, verb, what = matched(r" *(\d+) +(\d*) *([a-z]+) +(.+)", line)
            assert int(at) == number
            if verb in ("copy", "combine"):
                self.compute(ranks, verb, int(shard), what)
                continue
            assert not shard
            if verb == "publish":
                first, last = matched(r"events? (\d+)(?: to (\d+))?", what)
                assert int(first) == self.published + 1
                self.published = int(last or first)
            elif verb == "wait":
                whose, event = matched(r"until rank (\d+) has published event (\d+)", what)
                while ranks[int(whose)].published < int(event):
                    yield
            elif verb == "settle":
                matched(r"until the first (\d+) messages sent have left their memory", what)
            else:
                yield from self.message(ranks, wire, verb, what)
        assert not self.posted

    def compute(self, ranks: list[Rank], verb: str, shard: int, what: str) -> None:
        to, made = what.split(" = ")
        assert ("+" in made or "finish" in made) == (verb == "combine")

        def read(whose: int, place: str) -> Value:
            return ranks[whose].memory[self.at(place, shard)]

        source = re.sub(PLACE, lambda m: f"read({m[1] or self.number}, {m[2]!r})", made)
        value = eval(source, {"read": read, "finish": finish})
        for place in to.split(", "):
            self.write(place, shard, value)

    def message(self, ranks: list[Rank], wire: Wire, verb: str, what: str) -> Iterator[None]:
        way, other, step, listed = matched(r"(\w+) rank (\d+), step (-?\d+)(?:: (.+))?", what)
        assert way == ("to" if verb == "send" else "from")
        pieces = re.findall(rf"{PLACE} \(shard (\d+)\)", listed or "")
        if verb == "post":
            self.posted[other, step] = pieces
        elif verb == "send":
            assert (self.number, int(other), step) not in wire
            wire[self.number, int(other), step] = [
                ranks[int(whose or self.number)].memory[self.at(place, int(shard))]
                for whose, place, shard in pieces
            ]
        else:
            assert (verb, listed) == ("receive", None)
            while (int(other), self.number, step) not in wire:
                yield
            parcel = wire.pop((int(other), self.number, step))
            for (_, place, shard), value in zip(
                self.posted.pop((other, step)), parcel, strict=True
            ):
                self.write(place, int(shard), value)


def matched(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of what is all of a text."""
    found = re.fullmatch(pattern, text)
    assert found, text
    return found.groups()


def plans_of(*arguments: object) -> dict[int, list[str]]:
    """The lines of each rank whose plan is printed."""
    done = invoke(*arguments, "--plan")
    assert (done.exit_code, done.stderr) == (0, "")
    found = {}
    for block in done.stdout.split("\n\n"):
        head = re.match(r"rank (\d+) of \d+: (\d+) instructions? for each chunk; ", block)
        if head:
            _, _, *lines = block.splitlines()
            assert len(lines) == int(head[2])
            found[int(head[1])] = lines
    return found


def tree(lo: int, hi: int, leaves: list[str]) -> object:
    """What the contract says is added to what."""
    if hi - lo == 1:
        return leaves[lo]
    middle = split(lo, hi)
    return tree(lo, middle, leaves), tree(middle, hi, leaves)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("operation", "algorithm", "topology"),
    [
        ("all_reduce", "ring", "1x3"),
        ("all_reduce", "ring", "1x1"),
        ("all_reduce", "direct", "1x4"),
        ("all_reduce", "tree", "1x5"),
        ("all_reduce", "halving_doubling", "1x7"),
        ("all_reduce", "recursive_doubling", "3,3"),
        ("all_reduce", "hierarchical", "2x3"),
        ("reduce_scatter", "ring", "2x2"),
        ("all_gather", "hierarchical", "2x2"),
        ("reduce", "tree", "2,3"),
        ("broadcast", "tree", "1x4"),
        ("scatter", "direct", "1,2"),
        ("all_to_all", "direct", "2x2"),
    ],
)
def test_what_is_printed_carried_out_is_the_collective(
    operation: str, algorithm: str, topology: str, seed: int
) -> None:
    n = sum(eval(f"[{topology.replace('x', '*')}]"))
    traits = OPERATIONS[operation]
    root = n - 1 if traits.rooted else 0
    schedule = make_schedule(operation, algorithm, Topology.parse(topology, n), root)
    printed = plans_of(
        *(algorithm, "-n", n, "--topology", topology, "--operation", operation),
        *("--root", root, "--rank", "all"),
    )
    assert sorted(printed) == list(range(n))
    inputs: list[dict[int, Value]] = [{} for _ in range(n)]
    for shard in range(schedule.shards):
        for rank in traits.sources(shard, n, root):
            inputs[rank][shard] = Value(f"shard {shard} of rank {rank}")
    ranks = [Rank(rank, printed[rank], inputs[rank]) for rank in range(n)]
    wire: dict[tuple[int, int, str], list[Value]] = {}
    running = [rank.run(ranks, wire) for rank in ranks]
    turns = random.Random(seed)
    for _ in range(1000):
        turns.shuffle(running)
        running = [each for each in running if next(each, "done") != "done"]
    assert not running, "some wait for ever"
    assert not wire
    for shard in range(schedule.shards):
        leaves = [f"shard {shard} of rank {rank}" for rank in traits.sources(shard, n, root)]
        expected = tree(0, n, leaves) if traits.reduces else leaves[0]
        for rank in traits.wants(shard, n, root):
            place = "output" if ("output", shard) in ranks[rank].memory else "input"
            assert place == "output" or (operation == "broadcast" and rank == root)
            result = ranks[rank].memory[place, shard]
            assert result.made == expected
            assert result.finished == traits.reduces


def test_one_rank_unless_more_are_asked_for() -> None:
    assert list(plans_of("ring", "-n", 4)) == [0]
    assert list(plans_of("ring", "-n", 4, "--rank", 3)) == [3]
    everyone = plans_of("ring", "-n", 4, "--rank", "all")
    assert everyone[3] == plans_of("ring", "-n", 4, "--rank", 3)[3]
    assert "instruction" not in invoke("ring", "-n", 4).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-n", 4, "--rank", 4), "--rank '4' is neither one of 0 to 3 nor 'all'"),
        (("-n", 4, "--rank", -1), "--rank '-1' is neither"),
        (("-n", 4, "--rank", "two"), "--rank 'two' is neither"),
        (("-n", 65), "the engine runs 4096 ranks at most, 64 on a host"),
        (("-n", 4100, "--topology", "82x50"), "the engine runs 4096 ranks at most"),
    ],
)
def test_ranks_that_nobody_runs(arguments: tuple[object, ...], said: str) -> None:
    done = invoke("tree", *arguments, "--plan")
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_the_documents_example() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    (shown,) = (
        block for block in page.split("```\n") if block.startswith("       shard  instruction\n")
    )
    assert shown in invoke("ring", "-n", 3, "--plan").stdout
