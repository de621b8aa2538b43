"""`pycollective schedule --plan`: the instructions of a plan, in words; native tests run plans."""

from __future__ import annotations

import re

from tests.cli.test_schedule import invoke
from tests.harness import ROOT


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


def test_one_rank_unless_more_are_asked_for() -> None:
    assert list(plans_of("ring", "-n", 4)) == [0]
    assert list(plans_of("ring", "-n", 4, "--rank", 3)) == [3]
    everyone = plans_of("ring", "-n", 4, "--rank", "all")
    assert everyone[3] == plans_of("ring", "-n", 4, "--rank", 3)[3]
    assert "instruction" not in invoke("ring", "-n", 4).stdout


# Rank 0 of two hosts of two ranks, by hierarchical.
BETWEEN_HOSTS = """
    0         post     from rank 2, step 1: node 2 (shard 0)
    1      1  copy     item 0 = input
    2      3  copy     item 1 = input
    3         publish  events 1 to 2
    4         wait     until rank 1 has published event 2
    5      0  combine  node 0 = input + rank 1's item 1
    6      2  combine  node 1 = input + rank 1's item 0
    7         send     to rank 2, step 1: node 1 (shard 2)
    8         receive  from rank 2, step 1
    9      0  combine  output, item 2 = finish(node 0 + node 2)
   10         send     to rank 2, step 2: output (shard 0)
   11         post     from rank 2, step 2: output (shard 2)
   12         receive  from rank 2, step 2
   13      2  copy     item 3 = output
   14         publish  events 3 to 4
   15         wait     until rank 1 has published event 3
   16      1  copy     output = rank 1's item 2
   17         wait     until rank 1 has published event 4
   18      3  copy     output = rank 1's item 3
"""


def test_every_kind_of_instruction_between_hosts() -> None:
    (lines,) = plans_of("hierarchical", "-n", 4, "--topology", "2x2").values()
    assert lines == BETWEEN_HOSTS.strip("\n").split("\n")


def test_the_documents_example() -> None:
    page = (ROOT / "docs" / "inside" / "algorithms.md").read_text()
    (shown,) = (
        block for block in page.split("```\n") if block.startswith("       shard  instruction\n")
    )
    assert shown in invoke("ring", "-n", 3, "--plan").stdout
