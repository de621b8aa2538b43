"""The machine's phase, of planted latencies; no test depends on this machine's."""

import pytest

from pycollective.bench import phase
from pycollective.bench.phase import FAR, MIXED, NEAR, SINGLE, Turn
from pycollective.cores import cores_of

NS = 1e-9


@pytest.mark.parametrize(
    ("nanoseconds", "is_"),
    [(0, SINGLE), (22, NEAR), (40, NEAR), (80, NEAR), (175, FAR), (280, FAR), (2000, FAR)],
)
def test_what_was_met_is_classified(nanoseconds, is_):
    assert phase.phase_of(nanoseconds * NS) == is_


def test_a_look_takes_the_best_try_between_each_two_neighbours():
    tries = {(0, 1): [900, 41, 300], (1, 4): [182, 175, 5000]}
    asked = []

    def latency(one, other, round_trips):
        asked.append((one, other))
        return tries[one, other][asked.count((one, other)) - 1] * NS

    assert phase.look([1, 0, 4, 1], latency) == 175 * NS  # the largest of the two best
    assert asked == [(0, 1)] * 3 + [(1, 4)] * 3


def test_ranks_on_one_core_have_nothing_between_them():
    assert phase.phase_of(phase.look([3, 3])) == SINGLE


def test_a_look_at_this_machine_is_of_one_of_the_phases():
    cores = cores_of(2)
    seen = phase.look(cores)
    assert (seen == 0) == (len(set(cores)) == 1)
    assert seen < 0.1


@pytest.mark.parametrize(
    ("looks", "seen"),
    [
        ([40, 44], Turn(1, NEAR, 44 * NS, 0)),
        ([200, 190], Turn(1, FAR, 200 * NS, 0)),
        ([40, 200, 200, 210], Turn(2, FAR, 210 * NS, 1)),
        ([40, 200, 200, 40, 50, 40], Turn(3, NEAR, 50 * NS, 2)),
        ([40, 200, 200, 40, 40, 200], Turn(3, MIXED, 200 * NS, 2)),
    ],
)
def test_a_turn_whose_looks_disagree_is_repeated(looks, seen):
    planted, turns = iter(looks), []

    def run():
        turns.append(None)
        return len(turns)

    assert phase.within_one(run, lambda: next(planted) * NS) == seen
    assert next(planted, None) is None


def test_only_turns_of_one_phase_are_compared():
    def turns(phases):
        return [Turn(at, each, 0.0, 0) for at, each in enumerate(phases)]

    seen = {"ours": turns([NEAR, FAR, MIXED, NEAR, FAR]), "theirs": turns([NEAR, MIXED, FAR])}
    found = phase.by_phase(seen)
    assert list(found) == [NEAR, FAR]
    assert [turn.result for turn in found[NEAR]["ours"]] == [0, 3]
    assert [turn.result for turn in found[FAR]["theirs"]] == [2]
    assert phase.by_phase(seen, least=2) == {}
    assert list(phase.by_phase({**seen, "third": turns([NEAR, MIXED])})) == [NEAR]
