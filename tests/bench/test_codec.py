"""`pycollective bench --codec` checks what each call has made, and what a state keeps."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from pycollective.bench import codec as comparing
from pycollective.bench.codec import Owed, Plan, measure
from pycollective.bootstrap import init as bootstrap
from pycollective.compression import CODECS
from tests.compression.players import noted_splits

RANKS, ROUNDS = 3, 2


def measured(comm, codec):
    """The ways of two sizes by phase, and of each communicator split off whether it is closed.

    A round is near, one far, and the very first turn flips, so that it is repeated.
    """
    plan = Plan.of(codec, [1 << 14, 1 << 15], density=0.01, rounds=2)
    near, far = 4e-8, 2e-7
    rounds = [near] * 6 + [far] * 6
    looks = iter([near, far, *rounds, *rounds])
    with (
        noted_splits() as made,
        patch.object(comparing, "look_together", lambda comm, cores: next(looks)),
    ):
        ways = [measure(comm, plan, size, "ranks") for size in plan.sizes]
    assert next(looks, None) is None
    assert not any(way.wrong for each in ways for of in each.values() for way in of.values())
    found = [(phase, list(of)) for each in ways for phase, of in each.items()]
    return found, [each.closed for each in made]


@pytest.mark.parametrize("codec", CODECS)
def test_phases_are_apart_and_the_state_of_each_size_is_closed(pool, codec):
    names = [codec, "fp32", "bf16"]
    for ways, closed in pool(2).call(measured, codec):
        assert ways == [("near", names), ("far", names)] * 2
        assert closed == [True, True]


def one_bit_of_a_rank(rank, x):
    x.ravel().view("u1")[0] ^= rank == 1


def zeros(rank, x):
    x.fill(0)


def compared(comm, codec, way="", spoil=None):
    """Whether all was right, and what was printed; a way's last timed call has its result spoiled.

    The ranks are one host's, for which exact packing does nothing: it is as if it were asked for.
    """
    calls_of = comparing.calls_of

    @contextmanager
    def spoiled(*arguments):
        with calls_of(*arguments) as calls:
            numbers = iter(range(1 + ROUNDS))

            def run(x):
                calls[way].run(x)
                if next(numbers) == ROUNDS:
                    spoil(comm.rank, x)

            yield {**calls, way: replace(calls[way], run=run)} if spoil else calls

    lines: list[str] = []
    with (
        patch.object(bootstrap, "init", lambda topology: nullcontext(comm)),
        patch.object(Plan, "refuse_one_host", lambda plan: None),
        patch.object(comparing, "look_together", lambda comm, cores: 4e-8),
        patch.object(comparing, "calls_of", spoiled),
    ):
        plan = Plan.of(codec, [1 << 14], 0.01, ROUNDS)
        right = comparing.compare(plan, "", lines.append)
    return right, "\n".join(lines)


@pytest.mark.parametrize("spoil", [one_bit_of_a_rank, zeros])
@pytest.mark.parametrize(
    ("codec", "way"),
    [
        *(("exact", way) for way in ("exact fp32", "exact bf16", "fp32", "bf16")),
        *((codec, codec) for codec in CODECS),
        ("int8", "bf16"),
    ],
)
def test_what_a_timed_call_has_made_is_looked_at(pool, codec, way, spoil):
    found = pool(RANKS).call(compared, codec, way, spoil)
    assert [right for right, _ in found] == [False] * RANKS
    assert f"# 16K: WRONG: {way} (" in found[0][1]
    assert "no bit lost" not in found[0][1]


@pytest.mark.parametrize("codec", comparing.COMPARED)
def test_what_is_right_is_said_to_be(pool, codec):
    found = pool(RANKS).call(compared, codec)
    assert [right for right, _ in found] == [True] * RANKS
    assert found[0][1].count("no bit lost") == (2 if codec == "exact" else 0)


MEANS = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)


def given_and_kept(spoiled=-1):
    """What error feedback makes of the means by every second element, and what it then keeps.

    One call can give zeros instead, and keep none of it.
    """
    held = np.zeros(MEANS.shape[1], np.float32)
    for number, mean in enumerate(MEANS):
        held += mean
        out = np.where(np.arange(held.size) % 2 == number % 2, held, 0)
        held -= out
        yield mean, out * (number != spoiled), held.copy()


def said(calls, worst=math.inf):
    """What is wrong with them."""
    owed = Owed(worst)
    for mean, out, held in calls:
        owed.add(mean, out)
        kept = held
    return owed.fault(kept)


@pytest.mark.parametrize("spoiled", range(-1, len(MEANS)))
def test_each_average_is_seen_that_is_lost(spoiled):
    assert ("neither given nor kept" in said(given_and_kept(spoiled))) == (spoiled >= 0)


@pytest.mark.parametrize(("worst", "wrong"), [(0.6, True), (0.8, False)])
def test_a_first_average_has_a_bound(worst, wrong):
    assert ("the first average is 7." in said(given_and_kept(), worst)) == wrong


def test_nan_is_wrong():
    for number in range(len(MEANS)):
        calls = list(given_and_kept())
        calls[number][1].fill(np.nan)
        assert said(calls)
