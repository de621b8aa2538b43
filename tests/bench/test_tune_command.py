"""`pycollective bench --tune`: a table that can be read, and added to."""

from __future__ import annotations

from pycollective.cores import in_turn
from pycollective.planning.tuning_table import read_table
from pycollective.schedule import algorithms_for
from tests.launchers import python

BENCH = ["-m", "pycollective", "bench"]
RUN = ["-m", "pycollective", "run", "-n", "2"]


def test_a_table_is_written_and_added_to(tmp_path):
    path = tmp_path / "t.json"
    once = ("--rounds", 1, "--tune", path)
    done = python(*BENCH, "all_reduce", "--ranks", 2, "-b", 64, "-e", 128, *once)
    before = {(each.operation, each.bytes): each for each in read_table(path).entries}
    assert list(before) == [("all_reduce", 64), ("all_reduce", 128)]
    for each in before.values():
        assert (each.topology, each.dtype) == ("1x2", "float32")
        assert each.seconds.keys() == set(algorithms_for("all_reduce"))
    assert done.stdout.count("*") == 3  # a choice a row, and in the heading
    pinned = "# pinned: each rank to a core of its own\n" in done.stdout
    assert pinned == (len(in_turn()) >= 2)
    # Ranks that are pinned know of each other's cores.
    rows = [line for line in done.stdout.splitlines() if line.startswith("all_reduce")]
    assert [each.endswith(" single") for each in rows] == [not pinned] * 2

    # The same again for one size, by ranks of a launch, and two more operations.
    python(*RUN, *BENCH, "all", "-b", 130, "-e", 130, "-d", "half", *once)
    python(*RUN, *BENCH, "all_reduce", "-b", 128, "-e", 128, *once)
    after = {(each.operation, each.dtype, each.bytes): each for each in read_table(path).entries}
    assert sorted(after) == [
        ("all_gather", "float16", 128),  # whole shards
        ("all_reduce", "float16", 130),
        ("all_reduce", "float32", 64),
        ("all_reduce", "float32", 128),
        ("reduce_scatter", "float16", 128),
    ]
    assert after["all_reduce", "float32", 64] == before["all_reduce", 64]
    assert after["all_reduce", "float32", 128] != before["all_reduce", 128]
