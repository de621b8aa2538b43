"""Groups of real processes: how they start, talk, fail, and that none is left."""

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

import pycollective.bench
from pycollective.bench import group as group_module
from pycollective.bench.group import Group, Launch, RankLost
from pycollective.errors import ConfigurationError

_BENCH = str(Path(pycollective.bench.__file__).parent)


def _launch(body, ranks=2):
    """Ranks that run `body`, with `channel`, `rank` and `os` at hand."""
    program = textwrap.dedent(
        """
        import os, sys, time
        from ranks.channel import connect
        rank = int(sys.argv[2])
        channel = connect(sys.argv[1])
        channel.send({"rank": rank})
        """
    ) + textwrap.dedent(body)
    environment = {**os.environ, "PYTHONPATH": _BENCH}
    command = [sys.executable, "-c", program, "{address}"]
    return Launch([[*command, str(rank)] for rank in range(ranks)], environment, "")


_SERVE = """
channel.send({"versions": {"library": "fake"}})
while True:
    message = channel.receive()
    if message["command"] == "die" and rank == 1:
        sys.exit("a last word")
    if message["command"] == "stall" and rank == 1:
        time.sleep(60)
    channel.send({"pid": os.getpid(), "rank": rank})
    if message["command"] == "close":
        break
"""


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_replies_come_in_rank_order_and_nothing_is_left():
    before = set(os.listdir("/proc/self/fd"))
    with Group("fake", 3, _launch(_SERVE, 3)) as group:
        replies = group.ask({"command": "any"}, 10)
        assert [reply["rank"] for reply in replies] == [0, 1, 2]
        assert group.versions == {"library": "fake"}
    assert not any(_alive(reply["pid"]) for reply in replies)
    assert set(os.listdir("/proc/self/fd")) == before


def test_ranks_give_each_other_values_while_they_start():
    exchange = """
if rank == 1:
    time.sleep(0.2)
    channel.send({"set": "key", "value": 7})
    channel.receive()
channel.send({"get": "key"})
value = channel.receive()["value"]
"""
    serve = _SERVE.replace('"fake"', "value")
    with Group("fake", 2, _launch(exchange + serve)) as group:
        assert group.versions == {"library": 7}


@pytest.mark.parametrize(
    ("command", "seconds", "says"),
    [("die", 10, r"ended[\s\S]*a last word"), ("stall", 0.5, "no answer within 0.5 s")],
)
def test_a_rank_that_is_lost_is_named_in_time_and_all_are_ended(command, seconds, says):
    with Group("fake", 2, _launch(_SERVE)) as group:
        pids = [reply["pid"] for reply in group.ask({"command": "any"}, 10)]
        started = time.monotonic()
        with pytest.raises(RankLost, match=f"rank 1 of fake: {says}"):
            group.ask({"command": command}, seconds)
        group.end()
        assert time.monotonic() - started < 10
        assert not any(_alive(pid) for pid in pids)


def test_an_exception_in_the_block_ends_the_ranks():
    pids = []

    def interrupt():
        with Group("fake", 2, _launch(_SERVE)) as group:
            pids.extend(reply["pid"] for reply in group.ask({"command": "any"}, 10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert len(pids) == 2
    assert not any(_alive(pid) for pid in pids)


def test_a_group_that_cannot_start_says_what_its_ranks_said():
    launch = Launch([[sys.executable, "-c", "import sys; sys.exit('no such MPI')"]], {}, "")
    with pytest.raises(RankLost, match="no such MPI"), Group("fake", 1, launch):
        pass


_FAIL = """
def fail(kind, text, at):
    channel.send({"failed": kind, "text": text, "at": at})
    time.sleep(60)  # neither this rank nor the others end by themselves
"""


# A rank may fail before the others have come: rank 0 sleeps before it connects.
LATE = """
import sys, time
if sys.argv[2] == "0":
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("body", "late", "kind", "says"),
    [
        (
            'fail("ConfigurationError", "no room", 1.0) if rank == 1 else time.sleep(60)',
            *(False, ConfigurationError, "rank 1 of fake: no room"),
        ),
        (
            'fail("ConfigurationError", "no such algorithm", 1.0)',  # a mistake of all ranks
            *(False, ConfigurationError, "no such algorithm"),
        ),
        (  # the first is named
            'if rank == 0:\n    fail("PeerFailure", "rank 1 has gone", 2.0)\n'
            'time.sleep(0.05)\nfail("MemoryError", "that much", 1.0)',
            *(False, RankLost, "rank 1 of fake: MemoryError: that much; its group wrote"),
        ),
        (
            'channel.send({"failed": "ConfigurationError", "text": "no room", "at": 1.0})\n'
            "sys.exit(1)",
            *(True, ConfigurationError, "rank 1 of fake: no room"),
        ),
    ],
    ids=["one", "all", "the first of several", "before the others have come"],
)
def test_what_ranks_fail_of_is_raised_at_once_and_all_are_ended(
    monkeypatch, body, late, kind, says
):
    # Who waits for ranks that fail, whatever time they need, stops when all have.
    monkeypatch.setattr(
        group_module, "_SETTLE_SECONDS", 0.2 if late or "if rank == 1" in body else 30
    )
    launch = _launch(_FAIL + body)
    for command in launch.commands:
        command[2] = (LATE if late else "") + command[2]
    started = time.monotonic()
    group = Group("fake", 2, launch)
    processes = group._processes
    with pytest.raises(kind) as raised, group:
        pass
    assert time.monotonic() - started < 20
    assert processes == []  # each was waited for
    assert str(raised.value).startswith(says)


def test_what_one_rank_refuses_and_the_others_do_not_ends_the_wait(monkeypatch):
    monkeypatch.setattr(group_module, "_REFUSE_SECONDS", 0.3)
    body = """
channel.send({"versions": {}})
channel.receive()
channel.send({})
channel.receive()
if rank == 1:
    channel.send({"unsupported": "no such type"})
time.sleep(60)
"""
    with Group("fake", 2, _launch(body)) as group:
        with pytest.raises(ConfigurationError, match=r"rank 1 of fake: no such type \(rank 0 does"):
            group.ask({"command": "any"}, 30)
        group.end()
