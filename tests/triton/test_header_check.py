"""Reductions compare headers by the way: by the Triton kernel, interpreted and as PTX that is
executed, by torch's operations, and as the library does on CPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pycollective import order, reference
from pycollective.errors import ConfigurationError
from pycollective.torch.ordered import plain, reduction
from pycollective.triton.formats import FORMATS, words
from pycollective.triton.header_check import FITS, NUMBER, WORDS, Check
from tests.inputs import awkward, dtype_of, same_bits
from tests.triton.compiled import COMPILED, module, needs
from tests.triton.executed import executed

WAYS = {
    "interpreted": module("reduce", interpreted=True),
    "ptx": COMPILED,
    "torch": plain,
    "cpu": reduction,
}
HEADER = (0x6F726465726564, 7, 0, 9, 0, 1 << 34, -1, 1)
PROGRAM = 128 * 8  # elements of bfloat16


@pytest.fixture(params=WAYS)
def way(request):
    with np.errstate(all="ignore"), executed():
        yield WAYS[request.param]


class Received:
    """Messages of `n` ranks as they came to one: headers that agree, and leaves behind these."""

    def __init__(self, dtype="bfloat16", n=3, m=20, rank=1, gap=0):
        self.dtype, self.rank = getattr(torch, dtype), rank
        self.leaves = awkward(dtype, n, m, n)
        stride = 64 * (1 + gap) + -(-self.leaves[0].nbytes // 64) * 64
        flat = torch.zeros(n * stride + 64, dtype=torch.uint8)
        rows = flat[-flat.data_ptr() % 64 :][: n * stride].view(n, stride)
        self.terms = rows[:, 64 : 64 + self.leaves[0].nbytes].view(self.dtype)
        for row, leaf in zip(rows, self.leaves, strict=True):
            row[64 : 64 + leaf.nbytes] = torch.from_numpy(leaf.view(np.uint8))
        self.rows = rows.view(torch.int64)
        self.headers = self.rows[:, :WORDS]
        self.headers[:] = torch.tensor(HEADER)
        self.own = torch.tensor(HEADER)
        self.found = torch.zeros(1 + n * WORDS, dtype=torch.int64)
        self.number = torch.tensor([6])

    def reduce(self, way, op="sum", last=True, out="", finish=True, divisor=None):
        """The result; nothing is written beside it."""
        n, m = self.terms.shape
        room = torch.full((m + 2,), 1).to(getattr(torch, out) if out else self.dtype)
        check = Check(self.rows, self.own, self.rank, self.found, self.number, last)
        recipe = order.recipe((0, n), [(i, i + 1) for i in range(n)])
        result = room[:m]
        by = n if divisor is None else torch.tensor([divisor], dtype=torch.float64)
        way.reduce(self.terms, result, op, recipe, by, self.dtype, finish, check)
        assert (room[m:].to(torch.float32) == 1).all()
        return result

    @property
    def told(self):
        """What the host learns where headers differ."""
        told = self.headers.clone()
        told[self.rank] = self.own
        return told

    def want(self, op="sum"):
        return reference.reduce(self.leaves, op)


def bits(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.view(torch.uint8).numpy().view(dtype_of(name))


def all_nan(result):
    return bool((words(result) == FORMATS[result.dtype].nan).all())


@pytest.mark.parametrize(
    ("dtype", "op", "n", "m"),
    [
        ("bfloat16", "sum", 2, PROGRAM + 3),
        ("float32", "avg", 3, 5),
        ("float16", "max", 5, 130),
        ("float8_e4m3fn", "sum", 8, 33),
        ("float64", "prod", 3, 40),
        ("int32", "sum", 4, 7),
        ("bool", "bor", 3, 9),
    ],
)
@pytest.mark.parametrize("gap", [0, 1])
def test_headers_that_agree_change_no_bit(way, dtype, op, n, m, gap):
    came = Received(dtype, n, m, rank=n - 1, gap=gap)
    assert same_bits(bits(came.reduce(way, op)), came.want(op))
    assert not came.found.any()


@pytest.mark.parametrize("word", range(WORDS))
@pytest.mark.parametrize("row", [0, 1, 2])
def test_each_word_that_differs_makes_nan_and_is_told(way, word, row):
    """Of this rank's own row, the second, too."""
    came = Received(m=PROGRAM + 3)
    came.headers[row, word] ^= 1
    assert all_nan(came.reduce(way))
    assert came.found[0] == 1
    assert torch.equal(came.found[1:].view(3, WORDS), came.told)


def test_rows_that_all_are_an_earlier_calls_make_nan(way):
    """No message has come, on any rank; the host learns what this one has sent."""
    came = Received()
    came.headers[:, NUMBER] -= 1
    assert all_nan(came.reduce(way))
    assert came.found[0] == 1
    assert torch.equal(came.found[1:].view(3, WORDS), came.told)
    assert came.told[1, NUMBER] == HEADER[NUMBER]


def test_the_upper_half_of_a_word_is_compared(way):
    came = Received()
    came.headers[2, 5] ^= 1 << 40
    assert all_nan(came.reduce(way))


def test_leaves_that_fit_nowhere_make_nan(way):
    """No rank differs from another."""
    came = Received()
    came.headers[:, FITS] = came.own[FITS] = 0
    assert all_nan(came.reduce(way))
    assert torch.equal(came.found[1:].view(3, WORDS), came.told)


def test_what_lies_behind_headers_is_not_compared(way):
    came = Received(n=5, m=1)
    came.rows[:, WORDS:].view(torch.uint8)[:, 2:] = torch.arange(5, dtype=torch.uint8)[:, None]
    assert same_bits(bits(came.reduce(way)), came.want())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("op", "finish"), [("sum", True), ("sum", False), ("min", True)])
def test_nan_is_the_contracts_of_each_format(way, dtype, op, finish):
    name = str(dtype).removeprefix("torch.")
    out = name if finish else str(reduction.node_dtype(dtype, op)).removeprefix("torch.")
    came = Received(name)
    came.headers[0, 4] = 3
    assert all_nan(came.reduce(way, op, out=out, finish=finish))


@pytest.mark.parametrize(("dtype", "op"), [("int32", "sum"), ("bool", "bor")])
def test_integers_are_left_and_told_of(way, dtype, op):
    came = Received(dtype)
    came.headers[0, 4] = 3
    assert same_bits(bits(came.reduce(way, op)), came.want(op))
    assert came.found[0] == 1


def test_the_first_finding_stays(way):
    came = Received()
    came.headers[0, 5] = 1
    came.reduce(way)
    first = came.found.clone()
    came.headers[2, 5] = 2
    assert all_nan(came.reduce(way))
    assert torch.equal(came.found, first)


def test_a_finding_does_not_poison_later_calls(way):
    came = Received()
    came.headers[0, 5] = 1
    came.reduce(way)
    came.headers[0] = came.headers[1]
    assert same_bits(bits(came.reduce(way)), came.want())
    assert came.found[0] == 1


@pytest.mark.parametrize("m", [0, 1, 2 * PROGRAM])
def test_the_last_reduction_of_a_call_counts_it_once(way, m):
    """However many programs there are, and of nothing too."""
    came = Received(m=m)
    came.reduce(way, last=False)
    assert came.number.item() == 6
    came.reduce(way, last=True)
    assert came.number.item() == 7
    came.headers[1, 1] = 9
    came.reduce(way, last=True)
    assert came.number.item() == 8


def test_a_rank_without_elements_sees_what_differs(way):
    came = Received(m=0)
    came.headers[0, 3] = 1
    came.reduce(way)
    assert came.found[0] == 1
    assert torch.equal(came.found[1:].view(3, WORDS), came.told)


def test_headers_of_other_ranks_than_the_terms(way):
    """Sums of hosts, with all ranks' headers."""
    came = Received(n=5)
    came.terms = came.terms[:2]
    came.leaves = came.leaves[:2]
    assert same_bits(bits(came.reduce(way)), came.want())
    came.headers[4, 2] = 1
    assert all_nan(came.reduce(way))


@pytest.mark.parametrize("divisor", [24, 2**24 + 1, float("nan")])
def test_a_divisor_on_the_device(way, divisor):
    came = Received("float32", m=PROGRAM + 3)
    if way is reduction and np.isnan(divisor):  # which says on devices that there is none
        with pytest.raises(ConfigurationError, match="not above 0"):
            came.reduce(way, "avg", divisor=divisor)
        return
    out = bits(came.reduce(way, "avg", divisor=divisor))
    assert same_bits(out, reference.reduce(came.leaves, "avg", divisor))
    came.headers[2, 4] = 3
    assert all_nan(came.reduce(way, "avg", divisor=divisor))


@pytest.mark.parametrize("finish", [True, False])
def test_one_term(way, finish):
    came = Received(n=1, rank=0, dtype="float32")
    assert same_bits(bits(came.reduce(way, finish=finish)), came.want())
    came.headers[0, FITS] = 0
    assert all_nan(came.reduce(way, finish=finish))


def test_the_flag_is_released_to_the_host_behind_the_headers():
    came = Received()
    with executed(execute=False) as launches:
        came.reduce(COMPILED)
    [made] = launches.kernels["reduce_and_check"]
    text = made.asm["ptx"]
    flag = text.index("atom.global.sys.acq_rel.add")
    assert text.count(".sys.") == 1
    stores = [at for at in range(len(text)) if text.startswith("st.global.b64", at)]
    barrier = text.rindex("bar.sync", 0, flag)
    assert stores
    assert all(at < barrier for at in stores)


def test_full_programs_move_16_bytes_with_a_check():
    came = Received(m=2 * PROGRAM + 5)
    with executed() as launches:
        came.reduce(COMPILED)
    moved = launches.accesses["reduce_and_check"]
    assert moved[16] == 2 * (3 + 1) * PROGRAM // 8


def test_64_ranks_fit_the_registers(tmp_path):
    came = Received(n=64, m=0, rank=63)
    with executed(execute=False) as launches:
        came.reduce(COMPILED)
    [made] = launches.kernels["reduce_and_check"]
    assert needs(made, tmp_path)[1] == 0
