"""How long a turn is."""

import pytest

from pycollective.bench import measurement
from pycollective.bench.libraries import OWN
from pycollective.bench.settings import Settings

groups = []


class FakeGroup:
    """Ranks whose calls take a millisecond, and whose last timed call leaves wrong elements."""

    settings, versions = {}, {}

    def __init__(self, name, ranks, launch):
        self._ranks = ranks
        self.asked = []
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
            "run": {"seconds": [0.001] * message.get("blocks", 0)},
        }
        return [answer.get(message["command"], {})] * self._ranks


@pytest.mark.parametrize(
    ("reduce_op", "begins_anew"), [("sum", True), ("max", False)], ids=["sums of sums", "max"]
)
def test_what_the_last_timed_call_leaves_counts(monkeypatch, reduce_op, begins_anew):
    groups.clear()
    monkeypatch.setattr(measurement, "Group", FakeGroup)
    settings = Settings("all_reduce", (1024,), ranks=2, rounds=2, reduce_op=reduce_op)
    *_, record = measurement.measure(settings)
    assert [row.wrong for row in record.rows if row.wrong is not None] == [6]
    (group,) = groups
    own = [each for each in group.asked if each.get("variant") == OWN.variant]
    assert [each["command"] for each in own].count("left") == 1
    before = own[[each["command"] for each in own].index("left") - 1]
    assert before["command"] == "run"
    assert ((before["blocks"], before["calls"]) == (1, 1)) is begins_anew
