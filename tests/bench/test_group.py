"""Groups of real processes: how they start, talk, fail, and that none is left."""

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

import pycollective.bench
from pycollective.bench.group import Group, Launch, RankLost

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
    with Group("fake", 3, _launch(_SERVE, 3)) as group:
        replies = group.ask({"command": "any"}, 10)
        assert [reply["rank"] for reply in replies] == [0, 1, 2]
        assert group.versions == {"library": "fake"}
    assert not any(_alive(reply["pid"]) for reply in replies)


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


def test_a_rank_that_dies_is_named_and_quoted_and_the_others_are_ended():
    with Group("fake", 2, _launch(_SERVE)) as group:
        pids = [reply["pid"] for reply in group.ask({"command": "any"}, 10)]
        with pytest.raises(RankLost, match=r"(?s)rank 1 of fake: ended.*a last word"):
            group.ask({"command": "die"}, 10)
        group.end()
        assert not any(_alive(pid) for pid in pids)


def test_a_rank_that_stalls_is_named_in_time_and_ended():
    with Group("fake", 2, _launch(_SERVE)) as group:
        pids = [reply["pid"] for reply in group.ask({"command": "any"}, 10)]
        started = time.monotonic()
        with pytest.raises(RankLost, match=r"rank 1 of fake: no answer within 0.3 s"):
            group.ask({"command": "stall"}, 0.3)
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


def test_no_descriptor_is_left():
    def descriptors():
        return set(os.listdir("/proc/self/fd"))

    before = descriptors()
    with Group("fake", 2, _launch(_SERVE)) as group:
        group.ask({"command": "any"}, 10)
    assert descriptors() == before
