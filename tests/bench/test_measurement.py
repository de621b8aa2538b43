"""How long a turn is, and what is compared in which phase of the machine."""

import importlib.util
import itertools

import pytest

from pycollective.bench import measurement, table
from pycollective.bench.libraries import OWN, PEERS
from pycollective.bench.machine import CoreToCore
from pycollective.bench.settings import Settings
from pycollective.errors import ConfigurationError

groups = []
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the peer is torch's Gloo"
)


class FakeGroup:
    """Ranks whose calls take a millisecond, or `takes`, and leave wrong elements at the end."""

    settings, versions = {}, {}

    def __init__(self, name, ranks, launch):
        self._ranks = ranks
        self.asked = []
        self.takes = itertools.repeat(0.001)
        groups.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        pass

    def ask(self, message, seconds):
        self.asked.append(message)
        answer = {
            "check": {"wrong": 0},
            "left": {"wrong": 3},
            "run": {"seconds": [next(self.takes)] * message.get("blocks", 0)},
        }
        return [answer.get(message["command"], {})] * self._ranks


def measured_with(monkeypatch, looks, **more):
    """The record of one size of this library and Gloo, with what each look is to see (ns).

    A call takes 1 ms near and 5 ms far, as the look before it says, and Gloo's twice that.
    """
    groups.clear()
    planted = iter(looks)

    def look(cores):
        nanoseconds = next(planted)
        for group, factor in zip(groups, (1, 2), strict=True):
            group.takes = itertools.repeat(factor * (1e-3 if nanoseconds < 120 else 5e-3))
        return nanoseconds * 1e-9

    monkeypatch.setattr(measurement, "Group", FakeGroup)
    monkeypatch.setattr(measurement, "look", look)
    monkeypatch.setattr(measurement, "used_by_others", lambda: 0.0)
    monkeypatch.setattr(
        measurement.machine, "measure_core_to_core", lambda cores: CoreToCore(5e-8, 1e10)
    )
    settings = Settings(
        "all_reduce", (1024,), ranks=2, iterations=4, peers=(PEERS["gloo"],), **more
    )
    *_, record = measurement.measure(settings)
    assert next(planted, None) is None
    return record


def summary(record):
    return [
        (row.phase, row.library, row.timing.median, row.timing.samples, row.ratio)
        for row in record.rows
    ]


@needs_torch
def test_near_and_far_are_reported_apart(monkeypatch):
    near, far = (40, 44), (190, 180)
    # A round is a turn of ours, of Gloo, of the limit.
    looks = [*near, *near, *near, *far, *far, *far, *near, *far, *far]
    record = measured_with(monkeypatch, looks, rounds=3)
    assert summary(record) == [
        ("near", "pycollective", 1e-3, 2, 1.0),
        ("near", "gloo", 2e-3, 1, 2.0),
        ("far", "pycollective", 5e-3, 1, 1.0),
        ("far", "gloo", 10e-3, 2, 2.0),
    ]
    assert [limit.phase for limit in record.limits] == ["near", "far"]
    assert record.phases == dict(single=0, near=3, far=3, mixed=0, repeated=0, dropped=0)
    assert record.wrong == 2 * 3  # what one call leaves, on each of two ranks, is counted once
    lines = list(table.footer(record))
    assert [line.split()[-1] for line in lines[1:3]] == ["(near)", "(far)"]
    assert lines[3] == "# phases seen, in turns  : 3 near, 3 far; 0 repeated, 0 dropped"


@needs_torch
def test_a_turn_in_which_the_phase_changes_is_repeated_or_dropped(monkeypatch):
    near, flips = (40, 44), (44, 190)
    looks = [*flips, *near, *near, *near, *flips, *flips, *flips, *near, *near]
    record = measured_with(monkeypatch, looks, rounds=2)
    assert summary(record) == [
        ("near", "pycollective", 1e-3, 1, 1.0),
        ("near", "gloo", 2e-3, 2, 2.0),
    ]
    assert record.phases == dict(single=0, near=3, far=0, mixed=1, repeated=3, dropped=1)


@needs_torch
def test_what_shares_no_phase_is_mixed_and_said_to_be(monkeypatch):
    near, far = (40, 44), (190, 180)
    record = measured_with(monkeypatch, [*near, *far, *far], rounds=1)
    assert summary(record) == [
        ("mixed", "pycollective", 1e-3, 1, 1.0),
        ("mixed", "gloo", 10e-3, 1, 10.0),
    ]
    assert [limit.phase for limit in record.limits] == ["mixed"]
    first = next(table.rows(record, 1024))
    assert first.split()[-2:] == ["mixed", "pycollective"]


@needs_torch
def test_one_phase_alone_is_said(monkeypatch):
    record = measured_with(monkeypatch, [200] * 6, rounds=1)
    line = "# one phase seen, in turns  : 2 far; 0 repeated, 0 dropped"
    assert list(table.footer(record))[-1] == line


def test_other_types_have_as_many_bytes_and_an_answer_of_their_own(monkeypatch):
    groups.clear()
    monkeypatch.setattr(measurement, "Group", FakeGroup)
    monkeypatch.setattr(measurement, "look", lambda cores: 4e-8)
    more = {"peers": (PEERS["bfloat16"],), "rounds": 1}
    settings = Settings("reduce_scatter", (1030,), 2, "float16", **more)
    with pytest.raises(ConfigurationError, match="band has no meaning for bfloat16"):
        Settings("all_reduce", (1024,), 2, "int64", "band", **more)
    *_, record = measurement.measure(settings)
    loads = [next(each for each in group.asked if "case" in each) for group in groups]
    assert [each["case"]["dtype"] for each in loads] == ["float16", "bfloat16"]
    assert len({each["path"] for each in loads}) == 2
    assert {row.size for row in record.rows} == {1028}
    lines = [line.split() for line in table.rows(record, 1028)]
    assert [(line[1], line[2], line[-1]) for line in lines[:2]] == [
        ("257", "float16", "pycollective"),
        ("257", "bfloat16", "bfloat16"),
    ]


@pytest.mark.parametrize(
    ("reduce_op", "begins_anew"), [("sum", True), ("max", False)], ids=["sums of sums", "max"]
)
def test_what_the_last_timed_call_leaves_counts(monkeypatch, reduce_op, begins_anew):
    groups.clear()
    monkeypatch.setattr(measurement, "Group", FakeGroup)
    monkeypatch.setattr(measurement, "look", lambda cores: 4e-8)
    settings = Settings("all_reduce", (1024,), ranks=2, rounds=2, reduce_op=reduce_op)
    *_, record = measurement.measure(settings)
    assert [row.wrong for row in record.rows if row.wrong is not None] == [6]
    (group,) = groups
    own = [each for each in group.asked if each.get("variant") == OWN.variant]
    assert [each["command"] for each in own].count("left") == 1
    before = own[[each["command"] for each in own].index("left") - 1]
    assert before["command"] == "run"
    assert ((before["blocks"], before["calls"]) == (1, 1)) is begins_anew
