"""What a rank process does, with a library that lives in this one: above all, what #wrong sees."""

import dataclasses
import itertools
import os
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

import numpy as np
import pytest

from pycollective import reference
from pycollective.bench.operations import OPERATIONS, Problem
from pycollective.bench.ranks.__main__ import RankProcess
from pycollective.bench.ranks.case import Case, Prepared, Unsupported
from pycollective.bench.ranks.channel import StartLine
from pycollective.cores import cores_of

RANKS = 3
CASE = Case("all_reduce", "float32", 4, "sum", 0, 4096)


class FakeLibrary:
    """Rank 0 of a group whose other inputs it reads from the problem; may do it wrong."""

    rank, ranks, versions = 0, RANKS, {}

    def __init__(self, path, order=(0, 1, 2), flip=None):
        self._path, self._order, self._flip = path, order, flip
        self.calls = 0

    def prepare(self, case, variant, buffer):
        if variant == "none":
            raise Unsupported("not in this library")
        if variant == "native":  # the plain call, which is not timed, does nothing of use
            return Prepared(lambda: buffer.fill(0), buffer, lambda calls: self._loop(buffer, calls))
        if variant == "counted":  # 7 bytes a call, 10 unpacked
            return Prepared(
                *(lambda: self._call(buffer), buffer, None),
                lambda: (7 * self.calls, 10 * self.calls),
            )
        return Prepared(lambda: self._call(buffer), buffer)

    def _loop(self, buffer, calls):
        for _ in range(calls):
            self._call(buffer)
        return 1.0

    def _call(self, buffer):
        self.calls += 1
        rows = np.fromfile(self._path, np.uint8).reshape(RANKS + 1, -1)
        inputs = [buffer, *rows[1:RANKS]]
        inputs = [inputs[rank].view(np.float32) for rank in self._order]
        buffer[:] = reference.reduce(inputs, "sum").view(np.uint8)
        if self._flip is not None:
            buffer[self._flip // 8] ^= 1 << self._flip % 8

    def close(self):
        pass


def test_buffers_begin_where_the_case_says():
    case = dataclasses.replace(CASE, offsets=(16, 1040))
    for rank, behind in ((0, 16), (1, 1040), (2, 16)):
        process = RankProcess(FakeLibrary("nowhere"), rank, RANKS)
        with closing(Problem(OPERATIONS["all_reduce"], case, RANKS, 1)) as problem:
            process.load(dataclasses.asdict(case), problem.path)
        assert process._buffer.ctypes.data % 4096 == behind


@pytest.fixture(autouse=True)
def unpinned():
    """A rank process pins itself, which here is the tests' own."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def problem():
    problem = Problem(OPERATIONS["all_reduce"], CASE, RANKS, seed=1)
    yield problem
    problem.close()


def _process(problem, tmp_path, **how):
    library = FakeLibrary(problem.path, **how)
    process = RankProcess(library, 0, RANKS)
    path = tmp_path / "start"
    path.write_bytes(b"\xff" * StartLine.bytes(RANKS))  # the other ranks are always there
    process.start_line(str(path), cores_of(RANKS))
    process.load(CASE.__dict__, problem.path)
    return process, library


def test_what_is_timed_is_timed_on_the_ranks_core(problem, tmp_path):
    anywhere, cores = os.sched_getaffinity(0), cores_of(RANKS)
    process, library = _process(problem, tmp_path)
    process.prepare("python")
    process.check("python")
    assert os.sched_getaffinity(0) == anywhere  # and so may threads that the library starts
    where = []
    library._call = lambda buffer: where.append(os.sched_getaffinity(0))
    process.run("python", blocks=1, calls=2)
    assert where == [{cores[0]}] * 2


def test_the_contract_is_counted_right(problem, tmp_path):
    process, _ = _process(problem, tmp_path)
    assert process.prepare("python") == {}
    assert process.check("python") == {"wrong": 0}
    assert process.check("python") == {"wrong": 0}  # the inputs were restored


@pytest.mark.parametrize("bit", [0, 4097, 4096 * 8 - 1])
def test_a_single_flipped_bit_is_one_wrong_element(problem, tmp_path, bit):
    process, _ = _process(problem, tmp_path, flip=bit)
    process.prepare("python")
    assert process.check("python") == {"wrong": 1}


def test_of_a_variant_with_a_loop_of_its_own_the_loop_is_checked(problem, tmp_path):
    right, _ = _process(problem, tmp_path)
    right.prepare("native")
    assert right.check("native") == {"wrong": 0}
    wrong, library = _process(problem, tmp_path, flip=0)
    wrong.prepare("native")
    assert wrong.check("native") == {"wrong": 1}
    assert library.calls == 1


def test_what_timed_calls_have_left_is_counted(problem, tmp_path):
    process, library = _process(problem, tmp_path)
    for variant in ("python", "native"):
        process.prepare(variant)
        assert process.check(variant) == {"wrong": 0}
        process.run(variant, blocks=2, calls=1)
        assert process.left(variant) == {"wrong": 0}
        library._flip = 0  # right when it was verified, and not when it was timed
        process.run(variant, blocks=2, calls=1)
        assert process.left(variant) == {"wrong": 1}
        library._flip = None
    process.run("python", blocks=1, calls=2)
    assert process.left("python")["wrong"] > 200  # a sum of sums is none


@pytest.mark.parametrize("order", [p for p in itertools.permutations(range(3)) if p[2] != 2])
def test_another_order_of_the_leaves_is_wrong_in_many_elements(problem, tmp_path, order):
    process, _ = _process(problem, tmp_path, order=order)
    process.prepare("python")
    assert process.check("python")["wrong"] > 200


def test_what_a_turn_has_sent_and_no_other(problem, tmp_path):
    process, _ = _process(problem, tmp_path)
    process.prepare("counted")
    for _ in range(2):
        assert process.run("counted", blocks=3, calls=5)["sent"] == [105, 150]
    process.prepare("python")
    assert "sent" not in process.run("python", blocks=1, calls=1)


def test_nobody_leaves_the_start_line_before_the_last_has_come(tmp_path):
    path = tmp_path / "start"
    path.write_bytes(bytes(StartLine.bytes(RANKS)))
    lines = [StartLine(str(path), rank, RANKS) for rank in range(RANKS)]
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(line.wait) for line in lines[:2]]
        assert wait(waiting, 0.2).done == set()
        lines[2].wait()
        for each in waiting:
            each.result(10)


def test_a_rank_that_never_comes_to_the_start_line_is_a_timeout(tmp_path):
    path = tmp_path / "start"
    path.write_bytes(bytes(StartLine.bytes(2)))
    with pytest.raises(TimeoutError, match="not every rank arrived"):
        StartLine(str(path), 0, 2).wait(timeout=0.1)
