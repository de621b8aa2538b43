"""Whatever the store says, at whichever step: a rank joins, or raises an error of the library's.

Two ranks are threads that attach each other for real. What one of them reads, or both do, is
spoiled on the way: types, lengths, numbers, rows, text that is no JSON. If both join all the same,
their sums are right.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import pycollective as pc
from pycollective import placement
from pycollective.bootstrap import joining, rendezvous
from pycollective.bootstrap.joining import Common, Row, host_table, read_host_table
from pycollective.bootstrap.rendezvous import Record
from tests.joining import CountingStore, NodeOfThread

DECIDED = "decided "
DEEP = "[" * 100_000
NASTY = [
    *(None, True, False, -1, 0, 1, 4096, 2**31, 2**32 + 4096, 2**63 - 4096, 2**63, 2**64 - 4096),
    *(2**64, -(2**63), 10**400, 1.5, 1e308, float("nan"), float("inf"), "", "x", "x" * 5000, "00"),
    *("\ud800", "\0", "é", [], [[]], {}, {"a": 1}, "00" * 16, "zz" * 16),
]


TEXTS = [
    *("", "null", "0", "{}", "[]", "[[]]", "[1]", '["a", 1]', '{"data_bytes": 1}', '"x"', "["),
    *(DEEP, '["ConfigurationError", {"a": 1}]', '["CollectiveTimeout"]', '[["a"], ["b"]]'),
    *("x" * 5000, "\ud800", "9" * 5000, '{"size": ' + "9" * 5000 + "}", "{" * 1000),
    *(DEEP + "]" * 100_000, "AAAA"),
]


def spoil(text: str, turns: random.Random) -> str:
    """Something near to `text`, or nowhere near."""
    prefix = DECIDED if text.startswith(DECIDED) and turns.random() < 0.9 else ""
    if turns.random() < 0.25:
        return prefix + turns.choice(TEXTS)
    text = text.removeprefix(DECIDED)
    if turns.random() < 0.2:
        at = turns.randrange(len(text) + 1)
        return prefix + text[:at] + turns.choice(["", "0", '"', "]", "\xff"]) + text[at + 1 :]
    try:
        value = json.loads(text)
    except ValueError:
        return prefix + text[: turns.randrange(len(text) + 1)]
    return prefix + json.dumps(spoil_part(value, turns))


def spoil_part(value: object, turns: random.Random) -> object:
    """The value with one part of it, or itself, replaced, dropped, doubled or moved."""
    if not isinstance(value, list | dict) or not value or turns.random() < 0.1:
        return turns.choice(NASTY)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, way = turns.choice(keys), turns.random()
    if way < 0.1:
        del value[key]
    elif way < 0.2 and isinstance(value, list):
        value.insert(key, value[key])
    elif way < 0.3 and isinstance(value, list):
        turns.shuffle(value)
    else:
        value[key] = spoil_part(value[key], turns)
    return value


class Spoiled:
    """What one rank sees of a store: `key` spoiled, in the same way each time."""

    def __init__(self, store, key, seed):
        self._store, self._key, self._seed = store, key, seed
        self.set, self.wait = store.set, store.wait
        self.check, self.add = store.check, store.add

    def _seen(self, key, value):
        if key != self._key:
            return value
        text = spoil(value.decode(), random.Random(self._seed))
        return text.encode(errors="surrogatepass")

    def get(self, key):
        return self._seen(key, self._store.get(key))

    def compare_set(self, key, expected, desired):
        return self._seen(key, self._store.compare_set(key, expected, desired))


def act(store, rank, seconds):
    """Joins, adds up, leaves: whether it came so far, or what the library raised. All else is
    a fault."""
    try:
        with joining.connect(store, rank, 2, seconds, "here") as comm:
            for count in (4, 100_000):
                x = np.full(count, rank + 1, np.int64)
                comm.all_reduce(x)
                assert (x == 3).all()
            return None
    except (pc.CollectiveError, pc.ConfigurationError) as error:
        return error


KEYS = [
    *("here/rank 0", "here/size", "here/arrived/0", "here/arrived/1", "here/arrived"),
    *(
        "here/host/arrived/0",
        "here/host/arrived/1",
        *["here/host/arrived"] * 4,
        "here/host/attached",
    ),
]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.storm) for seed in (0, 2, 3))]
)
def test_a_spoiled_store_ends_in_a_typed_error_or_in_right_sums(seed, monkeypatch):
    monkeypatch.setattr(joining, "NODE", NodeOfThread())
    monkeypatch.setattr(rendezvous, "_GRACE", 0.2)
    turns = random.Random(seed)
    ends = {"joined": 0, "refused": 0, "late": 0}
    with ThreadPoolExecutor(2) as threads:
        for number in range(40):
            store, key = CountingStore(), "pycollective/" + turns.choice(KEYS)
            those = turns.choice([(0, 1), (0, 1), (0,), (1,)])
            spoiled = Spoiled(store, key, turns.random())
            seen = [spoiled if rank in those else store for rank in range(2)]
            start = time.monotonic()
            jobs = [threads.submit(act, seen[rank], rank, 0.5) for rank in range(2)]
            for each in jobs:
                error = each.result(30)
                late = isinstance(error, pc.CollectiveTimeout)
                ends["joined" if error is None else "late" if late else "refused"] += 1
            assert time.monotonic() - start < 15, (number, key, those)
    assert ends["refused"] > 20, ends


def record(rank):
    token, name = f"{rank:032x}", f"pycollective-{rank}"
    return Record(2, host="here", token=token, offset=4096, data_bytes=1 << 20, socket_name=name)


def read_table(text):
    rows = read_host_table(text, record(0), 0, [0, 1])
    assert rows[0] == Row.of(record(0))
    for row in rows:
        assert len(bytes.fromhex(row.token)) == 16
        assert 0 <= row.offset < 2**63
        assert 0 <= row.data_bytes < 2**63
    assert len(rows) == 2


def read_record(text):
    read = Record.from_text(text, 0)
    for name, value in vars(read).items():
        assert type(value) is type(getattr(record(0), name))


def read_common(text):
    common = Common.from_text(text, 1 << 20)
    assert type(common.address) is str
    assert 0 < common.data_bytes <= 1 << 20


def read_place(text):
    where = object.__new__(joining.FirstRendezvous)
    where.rank, where.size, where._simulated = 1, 3, ()
    where._take(text)
    assert len(where.host_of) == 3
    assert where.on_machine == where.host_of.count(where.host_of[1])
    assert set(where.host_of) == set(range(max(where.host_of) + 1))


def read_report(text):
    with suppress(pc.CollectiveError):
        rendezvous.raise_reported(text, 0)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_table, host_table([record(0), record(1)])),
        (read_record, record(0).as_text()),
        (read_common, Common.of_records([record(0), record(1)])),
        (read_place, placement.pack((0, 1, 0))),
        (read_place, placement.pack((0,) * 10_000_000)),
        (read_report, json.dumps(["ConfigurationError", "rank 1: no"])),
    ],
)
def test_what_is_read_can_be_or_is_refused(read, text):
    """Every reader by itself, far more often: also those that ranks of several hosts need."""
    turns = random.Random(7)
    refused = 0
    with suppress(pc.ConfigurationError):
        read(text)
    for _ in range(3000):
        try:
            read(spoil(text, turns))
        except pc.ConfigurationError:
            refused += 1
    assert refused > 1000
