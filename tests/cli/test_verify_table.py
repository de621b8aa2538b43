"""The conformance table behind `pycollective verify`: no wrong bit goes unseen."""

from __future__ import annotations

import contextlib
import hashlib
import re

import numpy as np
import pytest

from pycollective import reference
from pycollective.bootstrap import init as bootstrap
from pycollective.schedule import OPERATIONS
from pycollective.testing.inputs import portable_leaves
from pycollective.verify import select
from pycollective.verify import verify as verify_this_rank
from pycollective.verify.cases import cases, counts
from tests.inputs import DTYPES, ORDERED, words


def digest_of(output):
    """The last line, which must be the only one of its kind; and what it says of algorithms."""
    said = [line for line in output.splitlines() if line.startswith("digest of ")]
    assert len(said) == 1, output
    assert said == output.splitlines()[-1:]
    return re.fullmatch(r"(digest of .*: [0-9a-f]{32}) \((.*)\)", said[0]).groups()


def on_this_rank(comm, selection, plant=None):
    """Whether all is right, and what is printed."""
    lines = []
    planted = comm if plant is None else PLANTS[plant](comm)
    init, bootstrap.init = bootstrap.init, lambda timeout: contextlib.nullcontext(planted)
    try:
        return verify_this_rank(selection, 30.0, lines.append), "\n".join(lines)
    finally:
        bootstrap.init = init


def test_the_digest_depends_on_the_number_of_ranks(pool):
    selection = select(["all_reduce"], [], ["bfloat16"], quick=True)
    digests = set()
    for n in (2, 3):
        (right, output), *others = pool(n).call(on_this_rank, selection)
        assert right
        assert others == [(True, "")] * (n - 1)  # they print nothing
        digests.add(digest_of(output)[0].partition(": ")[2])
    assert len(digests) == 2


def test_the_digest_does_not_depend_on_which_algorithms_are_asked_for(pool):
    operations, dtypes = ["all_to_all", "all_gather", "all_reduce"], ["int16", "float16"]
    digests = set()
    for algorithms in ([], ["ring"], ["tree", "auto"]):
        selection = select(operations, algorithms, dtypes, quick=True)
        digest, named = digest_of(pool(3).call(on_this_rank, selection)[0][1])
        digests.add(digest)
        assert named == (
            "ring" if len(algorithms) == 1 else f"the same for {len(algorithms) or 7} algorithms"
        )
    (digest,) = digests
    assert digest.startswith(
        "digest of 3 ranks, quick, all_reduce all_gather all_to_all, float16 int16: "
    )


class Planted:
    """A communicator with a fault."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)


class RotatedRing(Planted):
    """The ring takes each leaf from the next rank."""

    def all_reduce(self, x, op, out, algorithm, async_op):
        if algorithm == "ring":
            mine = x.copy()
            to, source = (self.rank - 1) % self.size, (self.rank + 1) % self.size
            sending = self.send(mine, to, async_op=True)
            theirs = np.empty_like(x)
            self.recv(theirs, source)
            sending.wait()
            self._comm.all_reduce(theirs, op=op, out=x if out is None else out, algorithm="ring")
            algorithm, x = "direct", np.zeros(1)  # something to wait for
            op, out = "sum", None
        return self._comm.all_reduce(x, op=op, out=out, algorithm=algorithm, async_op=async_op)


class OneBit(Planted):
    """The tree's last bit is wrong, in one element of large messages, on one rank."""

    def reduce_scatter(self, out, x, algorithm, async_op, **options):
        work = self._comm.reduce_scatter(out, x, algorithm=algorithm, async_op=async_op, **options)
        if async_op:
            work.wait()
        if algorithm == "tree" and self.rank == 2 and out.size > 1000:
            words(out)[777] ^= 1
        return work


class SpoiltInput(Planted):
    """The last element of rank 1's input does not stay."""

    def all_to_all(self, out, x, **options):
        work = self._comm.all_to_all(out, x, **options)
        if options["async_op"]:
            work.wait()
        if self.rank == 1 and out is not x and x.size:
            words(x)[-1] ^= 1
        return work


class Hidden(OneBit):
    """As `OneBit`; and the all-gather brings each rank its own data from everyone."""

    def all_gather(self, out, x, **options):
        if "algorithm" in options or out.size != x.size * self.size:
            return self._comm.all_gather(out, x, **options)
        out[:] = np.tile(x, self.size)
        return None


class Stale(Planted):
    """The all-gather brings the report of another combination, in which all was right."""

    def __init__(self, comm):
        super().__init__(comm)
        self._report = None

    def all_gather(self, out, x, **options):
        if "algorithm" not in options:
            self._report = x if self._report is None else self._report
            x = self._report
        return self._comm.all_gather(out, x, **options)


PLANTS = {plant.__name__: plant for plant in (RotatedRing, OneBit, SpoiltInput, Hidden, Stale)}


def wrong_lines(output):
    return [line for line in output.splitlines() if line.startswith("WRONG")]


def said_of(pool, plant, *what):
    """What rank 0 prints of a fault, which all three see."""
    outcomes = pool(3).call(on_this_rank, select(*what, quick=True), plant)
    assert [right for right, _ in outcomes] == [False] * 3
    return outcomes[0][1]


def test_rotated_leaves_are_caught(pool):
    output = said_of(pool, "RotatedRing", ["all_reduce", "broadcast"], [], ["float32", "uint8"])
    (line,) = wrong_lines(output)  # uint8's order does not show: it wraps
    assert line.split()[1:4] == ["float32", "all_reduce", "ring"]
    assert int(line.split()[-1].replace(",", "")) > 0.25 * 3 * 10_007
    assert len(re.findall(r"^ +rank \d: [\d,]+ wrong; first ", output, re.MULTILINE)) == 3
    assert "WRONG: float32 all_reduce by ring: " in output
    assert "on rank(s) 0, 1, 2" in output
    one, other = re.findall(r"^digest of .*: (\w{32}) \((.*)\)$", output, re.MULTILINE)
    assert one[0] != other[0]
    assert {one[1], other[1]} == {
        "ring",
        "direct, tree, halving_doubling, recursive_doubling, hierarchical, auto",
    }


def test_one_bit_of_one_rank_is_caught_and_said(pool):
    output = said_of(pool, "OneBit", ["reduce_scatter"], ["direct", "tree"], ["bfloat16"])
    (line,) = wrong_lines(output)
    assert line.split()[1:4] == ["bfloat16", "reduce_scatter", "tree"]
    assert line.split()[-1] == "10"  # five reduce ops; equal and uneven shards
    assert re.search(
        r"^ +rank 2: 10 wrong; first 1 of 3,336 elements in sum of 10,008, (in|out of) place, "
        r"a?synchronous; element 777 is 0x[0-9a-f]+, not 0x[0-9a-f]+$",
        output,
        re.MULTILINE,
    )
    assert len(re.findall(r"^digest of .* \((?:direct|tree)\)$", output, re.MULTILINE)) == 2


def test_an_input_that_does_not_stay_is_caught(pool):
    output = said_of(pool, "SpoiltInput", ["all_to_all"], ["auto"], ["int64", "bool"])
    assert "elements of the input changed in " in output
    digest_of(output)  # the results are right


def test_a_wrong_all_gather_hides_nothing(pool):
    output = said_of(pool, "Hidden", ["reduce_scatter"], ["direct", "tree"], ["bfloat16"])
    assert "rank 2: its report came damaged through all_gather" in output
    assert "# WRONG: bfloat16 reduce_scatter by tree: no report from rank(s) 1, 2" in output
    assert output.splitlines()[-1].startswith("no digest of 3 ranks, quick, ")
    said_of(pool, "Stale", ["reduce_scatter"], ["direct", "tree"], ["bfloat16"])


@pytest.mark.parametrize("ranks", [3, 4, 7])
@pytest.mark.parametrize("dtype", ORDERED)
def test_the_inputs_tell_orders_apart(dtype, ranks):
    inputs = portable_leaves(dtype, "sum", ranks, 20_000)
    rotated = [*inputs[1:], inputs[0]]
    for op in ("sum", "avg"):
        want, other = reference.reduce(inputs, op), reference.reduce(rotated, op)
        assert np.mean(words(want) != words(other)) > 0.35
    with np.errstate(invalid="ignore"):
        assert any(np.isnan(leaf).any() for leaf in inputs)


GOLDEN_BEFORE_FLOATS_OF_A_BYTE = "acaf58f96e063d98e2650bff27b1d4d6"
GOLDEN = "af482f9af71da3696d336474395194c7"


def test_the_inputs_are_the_same_everywhere():
    """What they are made of is exact; other inputs would give everyone other digests."""
    total = hashlib.sha256()
    for dtype in DTYPES:
        if dtype == "float8_e4m3fn":  # the first that came later: nobody else's inputs changed
            assert total.hexdigest()[:32] == GOLDEN_BEFORE_FLOATS_OF_A_BYTE
        for op in ("sum", "prod"):
            total.update(b"".join(leaf.tobytes() for leaf in portable_leaves(dtype, op, 5, 1000)))
    assert total.hexdigest()[:32] == GOLDEN


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_count_meets_each_root_and_each_way_of_a_call(operation, ranks):
    met = {}
    for dtype in DTYPES:
        for case in cases(operation, dtype, ranks, False):
            met.setdefault((case.count, case.uneven), []).append(case)
    if OPERATIONS[operation].pieces == "cut":
        assert sorted({count for count, _ in met}) == counts(ranks, False)
    for found in met.values():
        ways = {(case.in_place, case.asynchronous) for case in found}
        assert len(ways) == 4
        roots = {0, ranks // 2, ranks - 1} if OPERATIONS[operation].rooted else {0}
        assert {case.root for case in found} == roots
        starts = [case.start for case in cases(operation, "int8", ranks, False)]
        assert len(set(starts)) == len(starts)


def test_inputs_of_many_ranks_stay_small():
    """Ranks hold everyone's inputs: with thousands the counts are smaller, up to 119 as ever."""
    assert counts(119, quick=True) == [1, 118, 10_007]
    assert counts(64, quick=False) == [0, 1, 17, 63, 5_003, 18_751]
    for ranks in (128, 1024, 4096):
        for quick in (True, False):
            assert max(counts(ranks, quick)) * ranks <= 1_200_004 + ranks
            assert 1 in counts(ranks, quick)
