"""Reductions of what accumulators hold: the reference's bits, by every way, and what is refused."""

from __future__ import annotations

import os
import random
import re
import signal
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pycollective as pc
from pycollective import Deal, reference
from pycollective.agree import agree
from tests.harness import PerRank, results, run_ranks
from tests.inputs import order_sensitive, same_bits
from tests.launchers import run_text
from tests.leaves.dealt import Case, any_case, wrong_of_each
from tests.pools import forked_beyond


@pytest.fixture(scope="module")
def pool(pool):
    with forked_beyond(2, pool, __name__) as pools:
        yield pools


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.storm)])
def test_the_bits_are_the_references(pool, ranks):
    turns = random.Random(ranks)
    cases = [any_case(turns, ranks) for _ in range(12)]
    assert pool(ranks).call(wrong_of_each, cases, 2) == [[]] * ranks


@pytest.mark.storm
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(ranks=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_any_case_at_all(pool, ranks, seed):
    cases = [any_case(random.Random(seed), ranks)]
    assert pool(ranks).call(wrong_of_each, cases, 6) == [[]] * ranks


BLOCKS = {  # one block each, the last one cut or not: on one host today's native paths
    "small": (2, 8, 500),
    "two-shot": (3, 11, 30_011),
    "sixteen": (4, 64, 3_000),
}


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("small", "bfloat16"),
        ("two-shot", "bfloat16"),
        pytest.param("two-shot", "float32", marks=pytest.mark.storm),
        ("sixteen", "float32"),
    ],
)
def test_aligned_blocks(pool, name, result):
    ranks, leaves, count = BLOCKS[name]
    cases = [
        Case(kind, leaves, None, counts, "bfloat16", result, op, divisor, seed)
        for seed, (kind, op, divisor) in enumerate(
            (kind, op, divisor)
            for kind in ("all_reduce", "reduce_scatter", "reduce")
            for op, divisor in (("sum", None), ("avg", None), ("avg", 7.0), ("avg", 3 * 2**24 + 1))
        )
        for counts in [tuple(count // ranks + (seed % 2) * rank for rank in range(ranks))]
    ]
    assert pool(ranks).call(wrong_of_each, cases, 0) == [[]] * ranks


def several_at_once(comm, leaves):
    """Buckets, asynchronous, one behind the other, with accumulators that are used again."""
    shapes = [(30, 7), (), (401,)]
    accs = [pc.Accumulator(shapes, leaves=leaves) for _ in range(5)]
    for step in range(2):
        works, wants, outs = [], [], []
        for bucket, acc in enumerate(accs):
            inputs = order_sensitive("float32", leaves, 612, seed=10 * step + bucket)
            acc.reset()
            for leaf in pc.leaves_of(comm.rank, comm.size, leaves):
                flat = inputs[leaf]
                acc.add(leaf, [flat[:210].reshape(30, 7), flat[210:211].reshape(()), flat[211:]])
            outs.append(np.zeros(612, np.float32))
            works.append(comm.all_reduce(acc, out=outs[-1], op="avg", async_op=True))
            wants.append(reference.reduce(inputs, "avg"))
        for work, out, want in zip(works, outs, wants, strict=True):
            assert work.wait(timeout=30) is out
            assert same_bits(out, want)


@pytest.mark.parametrize("leaves", [7, 12])
def test_buckets_under_way_together(pool, leaves):
    pool(3).call(several_at_once, leaves)


def used_again(comm):
    """What a reduction has is not written by the next step; what a failed one had, never again."""
    side = comm.split(0)

    def made():
        acc = pc.Accumulator(5000, leaves=2)
        acc.add(comm.rank, np.ones(5000, np.float32))
        return acc

    acc, out = made(), np.zeros(5000, np.float32)
    if comm.rank == 1:
        side.barrier()
    work = comm.all_reduce(acc, out=out, async_op=True)
    if comm.rank == 0:  # the other has not called
        with pytest.raises(pc.ConfigurationError, match="wait for the Work"):
            acc.reset()
        assert acc.nodes == ((0, 1),)
        side.barrier()
    assert (work.wait(timeout=30) == 2).all()
    kept = acc.nbytes
    acc.reset()
    acc.add(comm.rank, out)
    assert acc.nbytes == kept > 0

    lost, other, refused = made(), made(), made()
    wrong = np.zeros(5000, np.float32 if comm.rank else np.float16)
    work = comm.all_reduce(lost, out=wrong, async_op=True)
    with pytest.raises(pc.CollectiveMismatch):
        work.wait(timeout=30)
    with pytest.raises(pc.CollectiveMismatch):
        side.all_reduce(other, out=wrong)
    for acc in (lost, other):
        acc.reset()
        assert acc.nbytes == 0
    with pytest.raises(pc.CollectiveError):  # it had failed before
        comm.all_reduce(refused, out=out)
    refused.add(1 - comm.rank, out)
    assert refused.nodes == ((0, 2),)


def test_rows_are_used_again_once_the_reduction_is_done():
    results(run_ranks(used_again, 2))


def shaped(comm):
    """An accumulator of one shape gives an array of it, one of a list of shapes a flat one."""
    x = np.arange(6, dtype=np.float32)
    for shape, leaf, right, wrong in (
        ((2, 3), x.reshape(2, 3), (2, 3), (3, 2)),
        ([(2, 3)], [x.reshape(2, 3)], (6,), (2, 3)),
    ):
        acc = pc.Accumulator(shape, leaves=comm.size)
        acc.add(comm.rank, leaf)
        assert acc.shape == right
        with pytest.raises(pc.ConfigurationError, match=re.escape(f"leaves, {right}")):
            comm.all_reduce(acc, out=np.zeros(wrong, np.float32))
        assert same_bits(comm.all_reduce(acc, out=np.zeros(right, "f")).ravel(), comm.size * x)


def test_the_output_has_the_leaves_shape(pool):
    pool(2).call(shaped)


# --- Errors.


class Withheld:
    """As a tensor that requires gradients."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        raise BufferError("not mine to give")


def refused(comm):
    """What is refused on a rank alone: nothing moves, and the accumulator can still be used."""
    leaves, mine = 4, pc.leaves_of(comm.rank, comm.size, 4)
    out = np.zeros(6, np.float32)

    def expect(says, call):
        with pytest.raises(pc.ConfigurationError, match=says):
            call()

    acc = pc.Accumulator(6, leaves=leaves)
    acc.add(mine[0], np.ones(6, np.float32))
    lacks = f"lacks leaf {mine[1]}, which is rank {comm.rank}'s"
    expect(lacks, lambda: comm.all_reduce(acc, out=out))
    acc.add(mine[1], np.ones(6, np.float32))
    other = pc.Accumulator(6, leaves=leaves)
    for leaf in range(4):
        other.add(leaf, np.ones(6, np.float32))
    foreign = (mine[-1] + 1) % 4
    theirs = f"leaf {foreign if comm.rank == 0 else 0}, which is rank {1 - comm.rank}'s"
    expect(theirs, lambda: comm.all_reduce(other, out=out))
    expect("op 'sum' and 'avg', not 'max'", lambda: comm.all_reduce(acc, "max", out))
    expect("needs an array: out=", lambda: comm.all_reduce(acc))
    for shape in [(7,), (2, 3), ()]:
        expect(r"shape of the .* \(6,\)", partial(comm.all_reduce, acc, out=np.zeros(shape, "f")))
    expect("up to float32", lambda: comm.all_reduce(acc, out=np.zeros(6)))
    expect("up to float32", lambda: comm.all_reduce(acc, out=np.zeros(6, np.int32)))
    overlapping = acc._rows()[0]
    expect("overlaps what the accumulator", lambda: comm.all_reduce(acc, out=overlapping))
    expect("goes with op='avg'", lambda: comm.all_reduce(acc, out=out, divisor=3))
    odd = 2**53 + 1
    for bad in (0, -1, np.inf, np.nan, odd, np.int64(odd), 10**400, "3", "x", [1, 2]):
        expect("float64 holds exactly", partial(comm.all_reduce, acc, "avg", out, divisor=bad))
    expect("one of 4 leaves to 2 ranks", lambda: comm.all_reduce(acc, out=out, deal="x"))
    other_deal = Deal.contiguous(2, 6)
    expect("one of 4 leaves to 2 ranks", lambda: comm.all_reduce(acc, out=out, deal=other_deal))
    expect("unknown algorithm 'rign'", lambda: comm.all_reduce(acc, out=out, algorithm="rign"))
    expect("there are direct, tree", lambda: comm.reduce(acc, out=out, algorithm="ring"))
    expect("rank 2 is not one of 0 to 1", lambda: comm.reduce(acc, root=2, out=out))
    one = np.zeros(1, np.float32)
    expect("whose sum is 6", lambda: comm.reduce_scatter(one, acc, counts=[1, 1]))
    expect("wire 'zip'", lambda: comm.all_reduce(acc, out=out, wire="zip"))
    with pytest.raises(BufferError, match="not mine to give"):
        comm.all_reduce(acc, out=Withheld())
    expect("not with an accumulator", lambda: comm.all_reduce(acc, out=out, stream=1))
    expect("not a list of them", lambda: comm.all_reduce([acc, acc], out=out))
    for more in ({"divisor": 2.0}, {"deal": other_deal}, {"root": 0}):
        with pytest.raises(TypeError, match=f"argument '{next(iter(more))}'"):
            comm.all_reduce(acc if "root" in more else out, **more)
    assert comm.all_reduce(acc, out=out) is out
    assert (out == 4).all()
    expect("given to a reduction", lambda: comm.all_reduce(acc, out=out))
    expect("given to a reduction", lambda: acc.add(mine[0], np.ones(6, np.float32)))


def test_what_is_refused_before_anything_moves():
    results(run_ranks(refused, 2))


def dealing(comm):
    """Deals that are none: all ranks hear which leaf and which ranks, and the group works on."""
    wrong_ones = [
        ((6, [0, 1, 2]), (6, [2, 3, 4, 5]), r"leaf 2 is given twice, by rank\(s\) 0, 1"),
        ((6, [0, 1]), (6, [3, 4, 5]), "no rank gives leaf 2 of 6"),
        ((6, []), (6, [0, 1, 2]), "no rank gives leaf 3 and 2 more of 6"),
        ((6, [0, 1, 2]), (7, [3, 4, 5, 6]), "rank 0 deals 6 leaves and rank 1 deals 7"),
    ]
    for *said, says in wrong_ones:
        with pytest.raises(pc.CollectiveMismatch, match=says):
            comm.deal(*said[comm.rank])
    for mine, says in (
        ([0, 6], "leaf 6 is none of 0 to 5"),
        ([1, 1], "leaf 1 is named twice"),
    ):
        refusal = f"^{says}" if comm.rank == 1 else f"refused on rank\\(s\\) 1: .*{says}"
        with pytest.raises(pc.ConfigurationError, match=refusal):
            comm.deal(6, mine if comm.rank == 1 else [2, 3, 4, 5])
    with pytest.raises(TypeError if comm.rank == 1 else pc.ConfigurationError, match="JSON"):
        agree(comm._all_gather_bytes, "test", lambda: object() if comm.rank == 1 else 0)
    assert comm.failure is None
    number = np.int64 if comm.rank == 1 else int
    deal = comm.deal(number(6), map(number, [[5, 0, 2], [1, 3, 4]][comm.rank]))
    assert deal == Deal.of(6, [[0, 2, 5], [1, 3, 4]])


def test_leaves_that_overlap_or_lack():
    results(run_ranks(dealing, 2))


def differ(comm, kind, what, algorithm):
    """Each rank's arguments go together; those of the ranks do not."""
    odd = comm.rank == 1
    leaves = 7 if what == "another M" and odd else 6
    given = {"op": "avg" if what == "another divisor" else "sum", "algorithm": algorithm}
    if what == "another divisor":
        given["divisor"] = 2**53 - odd  # one number of fp32
    mine = pc.leaves_of(comm.rank, 2, leaves)
    if what == "another deal":
        both = [[0, 1, 2], [3, 4, 5]] if odd else [[0, 1], [2, 3, 4, 5]]
        given["deal"] = Deal.of(6, both)
        mine = both[comm.rank]
    count = 60 if what == "another count" and odd else 40
    acc = pc.Accumulator(count, leaves=leaves)
    for leaf in mine:
        acc.add(leaf, np.ones(count, np.float32))
    out = np.full(count, 7, np.float16 if what == "another dtype" and odd else np.float32)
    if what == "an array" and odd:
        call = partial(comm.all_reduce, out)
    else:
        call = partial(getattr(comm, kind), acc, out=out, **given)
    with pytest.raises(pc.CollectiveMismatch) as caught:
        call()
    assert (out == 7).all()
    return str(caught.value)


SAYS = {
    "another divisor": r"divisor 900719925474099(1|2)\b.*divisor 900719925474099(1|2)\b",
    "another deal": r"nodes of deal (\w{8}).*nodes of deal (?!\1)\w{8}",
    "another M": r"nodes of deal (\w{8}).*nodes of deal (?!\1)\w{8}",
    "another dtype": r"float(32|16).*float(16|32)",
    "another count": r"count (40|60|20|30).*count (60|40|30|20)",
    "an array": r"nodes of deal",
}


@pytest.mark.parametrize("what", SAYS)
@pytest.mark.parametrize("algorithm", ["auto", "tree"])
def test_arguments_that_differ(what, algorithm):
    kind = "reduce" if what == "another deal" else "all_reduce"
    for told in results(run_ranks(differ, 2, kind, what, algorithm)):
        assert re.search(SAYS[what], told), told
        assert "algorithm and wire, and nodes by the same deal and divisor" in told


def leave_midway(comm, counts):
    acc = pc.Accumulator(200_000, leaves=5)
    for leaf in pc.leaves_of(comm.rank, comm.size, 5):
        acc.add(leaf, np.ones(200_000, np.float32))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pc.PeerFailure):
        comm.all_reduce(acc, out=np.zeros(200_000, np.float16))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.storm)])
def test_a_rank_that_dies_is_named(ranks):
    outcomes = run_ranks(leave_midway, ranks, PerRank([None] * ranks))
    assert outcomes[1].exit_code == -9
    results([each for each in outcomes if each.rank != 1])


# --- Between hosts.

HOSTS = """
import random, sys
import pycollective as pc
from tests.leaves.dealt import any_case, wrong_of_each

with pc.init(timeout=60) as comm:
    turns = random.Random({seed} * 64 + comm.size)
    cases = [any_case(turns, comm.size) for _ in range({number})]
    for name in ("raw", "exact"):
        found = wrong_of_each(comm, cases, {some}, (name,))
        assert not found, found
    sys.stdout.write(f"RANK {{comm.rank}}\\n")
"""


@pytest.mark.parametrize(
    ("name", "ranks", "topology", "number", "some"),
    [
        ("forks", 4, "2x2", 6, 1),
        pytest.param(*("forks", 3, "1,2", 12, 2), marks=pytest.mark.storm),
        pytest.param(*("mpich", 4, "2x2", 12, 3), marks=pytest.mark.storm),
        pytest.param(*("openmpi", 3, "2,1", 12, 3), marks=pytest.mark.storm),
        pytest.param(*("mpich", 5, "1,3,1", 30, 6), marks=pytest.mark.storm),
        pytest.param(*("forks", 8, "4,3,1", 30, 6), marks=pytest.mark.storm),
    ],
)
def test_hosts_give_the_bits_of_one(tmp_path, name, ranks, topology, number, some):
    program = HOSTS.format(seed=1, number=number, some=some)
    assert run_text(tmp_path, name, program, ranks, topology).stdout.count("RANK") == ranks


# Rank 3 gives nothing, so by a tree to root 0 it sends rank 2 nothing: both hear of a mismatch all
# the same. The others may have done their part by then.
FAR_MISMATCH = """
import numpy as np
import pycollective as pc

with pc.init(timeout=20) as comm:
    acc = pc.Accumulator(10, leaves=3)
    if comm.rank < 3:
        acc.add(comm.rank, np.ones(10, np.float32))
    try:
        # Ranks 0 and 1 may still be at its end when they hear of the mismatch.
        deal = comm.deal(3, [comm.rank] if comm.rank < 3 else [])
        comm.reduce(acc, op="avg", out=np.empty(10, np.float32), deal=deal, algorithm="tree",
                    divisor=2 if comm.rank == 3 else 3)
    except pc.CollectiveMismatch as error:
        assert "divisor 2" in str(error) and "divisor 3" in str(error), error
    else:
        assert comm.rank < 2, "no mismatch"
"""


def test_a_rank_without_leaves_on_another_host_hears_of_a_mismatch(tmp_path):
    run_text(tmp_path, "forks", FAR_MISMATCH, 4, "4x1")


# By the formula of algorithms.md, between hosts of one rank each. What announces calls depends
# on who waits for whom, and is some hundred bytes.
BYTES = """
import sys
import numpy as np
import pycollective as pc
from pycollective.leaves.deal import Deal

def sent(comm, elements, leaves, kind):
    acc = pc.Accumulator(elements, leaves=leaves)
    for leaf in pc.leaves_of(comm.rank, comm.size, leaves):
        acc.add(leaf, np.ones(elements, np.float32))
    before = comm.stats()["sent_bytes"]
    if kind == "all_reduce":
        comm.all_reduce(acc, out=np.empty(elements, np.float16), algorithm="direct")
    else:
        shard = np.empty(elements // comm.size, np.float16)
        comm.reduce_scatter(shard, acc, algorithm="direct")
    return comm.stats()["sent_bytes"] - before

with pc.init(timeout=30, wire="raw") as comm:
    n = comm.size
    for leaves in (n, 2, 11):
        k = len(Deal.contiguous(n, leaves).nodes(comm.rank))
        for kind, each in (("reduce_scatter", 4 * k), ("all_reduce", 4 * k + 2)):
            less, more = (sent(comm, 960 * n * times, leaves, kind) for times in (20, 30))
            want = 960 * 10 * each * (n - 1)
            assert abs(more - less - want) < 1000, (leaves, kind, k, more - less, want)
"""


def test_the_bytes_between_hosts_are_those_of_the_formula(tmp_path):
    run_text(tmp_path, "forks", BYTES, 3, "3x1")
