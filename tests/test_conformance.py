"""One table: operation, algorithm, dtype, reduce op, count and number of ranks, bit for bit."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pycollective import ConfigurationError, _core, reference
from pycollective.schedule import algorithms_for
from tests.harness import PerRank, Ranks, results, run_ranks
from tests.inputs import (
    DTYPES,
    FLOATS,
    PAIRS,
    awkward,
    crossed,
    crossed_in_turns,
    order_sensitive,
    same_bits,
)
from tests.pools import forked_beyond
from tests.turns import in_turns

RANKS = [1, 2, 3, 4, 5, 7]
COUNTS = [0, 1, 2, 5, 17, 1000, 16_384, 30_011, 100_003]
WINDOWS = 40  # more than any test here has calls
AVERAGED = [*FLOATS, "int8", "int64"]


def ways(operation):
    """The direct paths, and every algorithm."""
    return ["auto", *algorithms_for(operation)]


WAYS = ways("all_reduce")


@pytest.fixture(scope="module")
def pool(pool):
    with forked_beyond(3, pool, __name__) as pools:
        yield pools


def windows(x):
    """Of an array of `count` + WINDOWS elements, for each call `count` others, or the same in other
    places: what an earlier call has left behind is wrong, even of one element."""
    return (x[place : place + x.size - WINDOWS] for place in range(WINDOWS))


def all_reduce(comm, x, op, algorithm, how="in place"):
    if how == "out":
        out = np.empty_like(x)
        comm.all_reduce(x, op=op, out=out, algorithm=algorithm)
        return out
    if how == "async":
        comm.all_reduce(x, op=op, async_op=True, algorithm=algorithm).wait(timeout=30)
    elif how == "strided":
        wide = np.zeros((2, x.size, 3), x.dtype)
        wide[1, :, 2] = x
        comm.all_reduce(wide[1, :, 2], op=op, algorithm=algorithm)
        assert not wide[0].view(np.uint8).any()
        return wide[1, :, 2].copy()
    else:
        comm.all_reduce(x, op=op, algorithm=algorithm)
    return x


def wrong_by_each(comm, x, want, op, algorithms=WAYS):
    """Which algorithms' results are not the reference's; each has a window of its own. Found in the
    ranks: to send so many results to the test takes longer than to make them."""
    return [
        (algorithm, shown.size)
        for algorithm, shown, expected in zip(algorithms, windows(x), windows(want), strict=False)
        if not same_bits(all_reduce(comm, shown.copy(), op, algorithm), expected)
    ]


def wrong_of_several(comm, several, wants, op):
    """The longest by the direct paths alone."""
    *shorter, longest = zip(several, wants, strict=True)
    return [
        *(wrong for x, want in shorter for wrong in wrong_by_each(comm, x, want, op)),
        *wrong_by_each(comm, *longest, op, ["auto"]),
    ]


@pytest.mark.parametrize(("ranks", "dtype", "op"), crossed_in_turns(RANKS, PAIRS))
def test_all_reduce(pool, ranks, dtype, op):
    several = [awkward(dtype, ranks, count + WINDOWS, seed=count) for count in COUNTS]
    wants = [reference.reduce(inputs, op) for inputs in several]
    by_rank = [*zip(*several, strict=True)]
    assert pool(ranks).call(wrong_of_several, PerRank(by_rank), wants, op) == [[]] * ranks


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.sampled_from(RANKS),
    pair=st.sampled_from(PAIRS),
    count=st.integers(0, 400_000) | st.integers(0, 200),
    algorithm=st.sampled_from(WAYS),
    how=st.sampled_from(["in place", "out", "async", "strided"]),
    seed=st.integers(0, 1000),
)
def test_all_reduce_anyhow(pool, ranks, pair, count, algorithm, how, seed):
    dtype, op = pair
    inputs = order_sensitive(dtype, ranks, count, seed)
    want = reference.reduce(inputs, op)
    for got in pool(ranks).call(all_reduce, PerRank(inputs), op, algorithm, how):
        assert same_bits(got, want)


def scatter_then_gather_by_each(comm, x, counts, in_place):
    """Of each call, in order, what it was and the result; each has a window of its own."""
    mine = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
    shown = windows(x)
    got = []
    for algorithm in ways("reduce_scatter"):
        whole = next(shown).copy()
        shard = whole[mine] if in_place else np.empty(counts[comm.rank], x.dtype)
        comm.reduce_scatter(shard, whole, counts=counts, algorithm=algorithm)
        got.append(("reduce_scatter", algorithm, shard.copy()))
    for algorithm in ways("all_gather"):
        whole = np.zeros(sum(counts), x.dtype)
        shard = next(shown)[mine]
        if in_place:
            whole[mine] = shard
            shard = whole[mine]
        comm.all_gather(whole, shard, counts=counts, algorithm=algorithm)
        got.append(("all_gather", algorithm, whole))
    return got


@pytest.mark.parametrize(
    ("dtype", "scale", "in_place", "ranks"),
    in_turns(["bfloat16", "float64", "uint8"], [0, 1, 300, 20_000], [False, True], RANKS),
)
def test_reduce_scatter_and_all_gather(pool, ranks, dtype, scale, in_place):
    counts = [scale * (1 + r % 3) + (r == 1) for r in range(ranks)]
    inputs = awkward(dtype, ranks, sum(counts) + WINDOWS)
    edges = np.cumsum([0, *counts])
    outcomes = pool(ranks).call(scatter_then_gather_by_each, PerRank(inputs), counts, in_place)
    for r, each in enumerate(outcomes):
        reduced, shown = windows(reference.reduce(inputs)), zip(*map(windows, inputs), strict=True)
        for (operation, algorithm, got), want, own in zip(each, reduced, shown, strict=False):
            if operation == "reduce_scatter":
                expected = want[edges[r] : edges[r + 1]]
            else:
                expected = np.concatenate([x[edges[i] : edges[i + 1]] for i, x in enumerate(own)])
            assert same_bits(got, expected), (operation, algorithm)


def with_root_by_each(comm, x, root):
    """reduce, broadcast, gather and scatter: of each call, in order, what it was and the result;
    each has a window of its own."""
    shown = windows(x)
    on_root = comm.rank == root
    got = []
    for algorithm in ways("reduce"):
        given = next(shown)
        own = given.copy()
        comm.reduce(own, root=root, op="avg", algorithm=algorithm)
        assert on_root or same_bits(own, given)
        got.append(("reduce", algorithm, own))
    for algorithm in ways("broadcast"):
        own = next(shown).copy()
        comm.broadcast(own, root=root, algorithm=algorithm)
        got.append(("broadcast", algorithm, own))
    for algorithm in ways("gather"):
        given = next(shown)
        whole = np.empty(given.size * comm.size, x.dtype) if on_root else None
        comm.gather(whole, given, root=root, algorithm=algorithm)
        got.append(("gather", algorithm, whole))
    for algorithm in ways("scatter"):
        whole = apart(next(shown), comm.size) if on_root else None
        back = np.empty_like(given)
        comm.scatter(back, whole, root=root, algorithm=algorithm)
        got.append(("scatter", algorithm, back))
    return got


def apart(x, ranks):
    """What a root scatters: every rank's part is another one."""
    return np.concatenate([np.roll(x, rank) for rank in range(ranks)])


@pytest.mark.parametrize(
    ("ranks", "dtype", "count"),
    in_turns(RANKS, AVERAGED, [1, 1000, 70_003], among=crossed(RANKS, AVERAGED)),
)
def test_with_a_root(pool, ranks, dtype, count):
    for root in {0, ranks // 2, ranks - 1}:
        inputs = awkward(dtype, ranks, count + WINDOWS, seed=root)
        outcomes = pool(ranks).call(with_root_by_each, PerRank(inputs), root)
        for rank, each in enumerate(outcomes):
            averages = windows(reference.reduce(inputs, "avg"))
            shown = zip(*map(windows, inputs), strict=True)
            for (operation, algorithm, got), average, own in zip(
                each, averages, shown, strict=False
            ):
                if operation == "broadcast":
                    want = own[root]
                elif operation == "scatter":
                    want = np.roll(own[root], rank)
                elif rank != root:
                    continue
                else:
                    want = average if operation == "reduce" else np.concatenate(own)
                assert same_bits(got, want), (operation, algorithm, root)


def mixed(comm, x):
    """Paths and algorithms in turn: none may leave anything behind that disturbs the next. Numbers
    fall from call to call, so that one of an earlier call would be the maximum."""
    call = 0
    for _ in range(4):
        for algorithm in ["auto", *algorithms_for("all_reduce"), "auto"]:
            for count in (3, 700, x.size):
                call += 1
                part = x[:count] - 100 * call
                comm.all_reduce(part, op="max", algorithm=algorithm)
                assert (part == comm.size - 1 - 100 * call).all(), (algorithm, count)
    return True


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_algorithms_take_turns(pool, ranks):
    assert all(pool(ranks).call(mixed, PerRank([np.full(200_000, r * 1.0) for r in range(ranks)])))


def in_flight(comm, x):
    """Several at once on one communicator, by different algorithms; no two of the same numbers."""
    algorithms = algorithms_for("all_reduce")
    arrays = [np.roll(x, call) for call in range(3 * len(algorithms))]
    works = [
        comm.all_reduce(array, algorithm=algorithms[i % len(algorithms)], async_op=True)
        for i, array in enumerate(arrays)
    ]
    for work in works:
        work.wait(timeout=30)
    return arrays


def test_several_in_flight(pool):
    inputs = order_sensitive("float32", 3, 50_001)
    want = reference.reduce(inputs)
    for arrays in pool(3).call(in_flight, PerRank(inputs)):
        for call, array in enumerate(arrays):
            assert same_bits(array, np.roll(want, call)), call


def in_many_groups(comm, x):
    """Late groups have little memory; what fits must be right."""
    groups = [comm.split(0, comm.rank) for _ in range(60)]
    for place, algorithm in enumerate(algorithms_for("all_reduce")):
        rolled = np.roll(x, place)
        got = all_reduce(groups[-1], rolled.copy(), "sum", algorithm)
        assert same_bits(got, all_reduce(comm, rolled, "sum", "auto")), algorithm
    for group in groups:
        group.close()
    return True


def test_a_group_with_little_memory(pool):
    inputs = order_sensitive("bfloat16", 4, 40_001)
    assert all(pool(4).call(in_many_groups, PerRank(inputs)))


@pytest.mark.parametrize("ranks", [8, 16, 19])
def test_many_ranks(ranks):
    inputs = order_sensitive("bfloat16", ranks, 20_011)
    want = reference.reduce(inputs)
    answers = results(run_ranks(wrong_by_each, ranks, PerRank(inputs), want, "sum"))
    assert answers == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_messages(pool, ranks):
    """Many chunks: slots are used again and again."""
    inputs = order_sensitive("float32", ranks, 3_000_001)
    want = reference.reduce(inputs)
    assert pool(ranks).call(wrong_by_each, PerRank(inputs), want, "sum") == [[]] * ranks


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_with_other_instruction_sets_understand_each_other(dtype):
    """Nodes travel; each rank's vectors have another width and another order of elements."""
    levels = _core.simd_levels()
    if len(levels) < 2:
        pytest.skip("this CPU has one instruction set only")
    inputs = awkward(dtype, 4, 5003)
    op = "max" if dtype == "bool" else "sum"
    want = reference.reduce(inputs, op)
    with Ranks(4, module=__name__) as ranks:
        used = results(ranks.call(choose_level, levels))
        assert used == [levels[r % len(levels)] for r in range(4)]
        assert results(ranks.call(wrong_by_each, PerRank(inputs), want, op)) == [[]] * 4


def choose_level(comm, levels):
    os.environ["PYCOLLECTIVE_SIMD"] = levels[comm.rank % len(levels)]
    return _core.simd_level()  # asked for the first time


def move(comm, x):
    """Everything that only moves bytes; equal shards."""
    n, r = comm.size, comm.rank
    gathered = np.empty(n * x.size, x.dtype)
    comm.all_gather(gathered, x)
    to_all = np.empty_like(gathered)
    comm.all_to_all(to_all, np.roll(gathered, r))
    on_root = np.empty_like(gathered) if r == n - 1 else None
    comm.gather(on_root, x, root=n - 1)
    back = np.empty_like(x)
    comm.scatter(back, on_root, root=n - 1)
    passed = np.empty_like(x)
    if n > 1:
        sending = comm.send(x, (r + 1) % n, async_op=True)
        comm.recv(passed, (r - 1) % n)
        sending.wait(timeout=30)
    comm.barrier()
    return gathered, to_all, on_root, back, passed


@pytest.mark.parametrize(("ranks", "dtype"), crossed_in_turns(RANKS, DTYPES))
def test_moving_keeps_every_byte(pool, ranks, dtype):
    for count in [0, 1, 33, 5000, 60_001]:
        inputs = awkward(dtype, ranks, count)
        whole = np.concatenate(inputs)
        rolled = [np.roll(whole, r) for r in range(ranks)]
        exchanged = reference.all_to_all(rolled)
        for r, got in enumerate(pool(ranks).call(move, PerRank(inputs))):
            gathered, to_all, on_root, back, passed = got
            assert same_bits(gathered, whole)
            assert same_bits(to_all, exchanged[r])
            assert on_root is None or same_bits(on_root, whole)
            assert same_bits(back, inputs[r])
            assert ranks == 1 or same_bits(passed, inputs[r - 1])


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
def test_what_has_no_meaning_is_refused(op):
    for outcome in run_ranks(all_reduce, 2, np.zeros(3, bool), op, "auto"):
        assert isinstance(outcome.error, ConfigurationError)
        assert f"{op} has no meaning for bool" in str(outcome.error)
