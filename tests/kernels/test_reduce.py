"""The native kernels, one call at a time: each instruction set has the oracle's bits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective import ConfigurationError, _core, reference
from pycollective.order import recipe
from tests.float_environment import flushes, flushing, needs_flushing
from tests.inputs import (
    DTYPES,
    EIGHT_BITS,
    FLOATS,
    OPS,
    PAIRS,
    awkward,
    dtype_of,
    from_words,
    order_sensitive,
    same_bits,
    subnormal,
    words,
)

LEVELS = _core.simd_levels()


def reduce(inputs, op, simd=""):
    out = inputs[0].copy()
    _core.reduce_into(inputs, op, out, simd=simd)
    return out


def at_offset(x, offset):
    """A copy of `x` that starts `offset` bytes after a multiple of 64."""
    memory = np.zeros(x.nbytes + offset + 64, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    moved = memory[start : start + x.nbytes].view(x.dtype)
    moved[...] = x
    return moved


@settings(deadline=None, max_examples=600)
@given(
    pair=st.sampled_from(PAIRS),
    level=st.sampled_from(LEVELS),
    leaves=st.sampled_from([*range(1, 10), 15, 16, 17, 33, 64, 65]),
    count=st.sampled_from([0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000])
    | st.integers(0, 700),
    offset=st.sampled_from([0, 0, 4, 8, 32, 1, 62]),
    in_place=st.booleans(),
    copied=st.sampled_from(["nowhere", "apart", "over a leaf"]),
    inputs=st.sampled_from([order_sensitive, awkward]),
    seed=st.integers(0, 1000),
)
def test_bits_are_the_oracles(pair, level, leaves, count, offset, in_place, copied, inputs, seed):
    dtype, op = pair
    originals = inputs(dtype, leaves, count, seed)
    arrays = [at_offset(x, (offset * (i + 1)) % 64) for i, x in enumerate(originals)]
    mine = seed % leaves
    out = arrays[mine] if in_place else at_offset(np.ones_like(arrays[0]), 3 * offset % 64)
    other = (mine + 1) % leaves
    copy = None
    if copied == "over a leaf" and other != mine:
        copy = arrays[other]
    elif copied != "nowhere":
        copy = at_offset(np.ones_like(out), 7 * offset % 64)
    _core.reduce_into(arrays, op, out, copy, level)
    want = reference.reduce(originals, op)
    assert same_bits(out, want)
    assert copy is None or same_bits(copy, want)
    for array, original in zip(arrays, originals, strict=True):
        assert same_bits(array, original) or array is out or array is copy


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int64"])
@pytest.mark.parametrize("leaves", [511, 513, 4096])
def test_thousands_of_leaves(level, dtype, leaves):
    inputs = order_sensitive(dtype, leaves, 40)
    for op in ("sum", "avg"):
        assert same_bits(reduce(inputs, op, level), reference.reduce(inputs, op))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_bit_pattern_of_sixteen_bit_types(level, dtype):
    """Alone (a leaf comes through as it is, but for NaNs), and in sums and products which round to
    all places: subnormal, normal, infinite."""
    every = from_words(np.arange(1 << 16, dtype=np.uint16), dtype)
    alone = reduce([every], "sum", level)
    assert same_bits(alone, reference.reduce([every]))
    changed = words(alone) != words(every)
    assert np.isnan(every[changed].astype(np.float32)).all()
    with np.errstate(all="ignore"):
        others = np.concatenate([every[77::5003], -every[3::7001]])
    for other in others:
        pair = [every, np.full_like(every, other)]
        for op in ("sum", "prod", "avg", "min", "max"):
            assert same_bits(reduce(pair, op, level), reference.reduce(pair, op))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_pair_of_floats_of_a_byte(level, dtype):
    """Alone, in pairs, and with a third, which takes sums of two to just beside a tie."""
    every = np.arange(256, dtype=np.uint8)
    pair = np.repeat(every, 256), np.tile(every, 256)
    for more in ([], [0x01], [0x81], [0x47], [0x05, 0x82]):
        leaves = [from_words(x, dtype) for x in (*pair, *(np.full(1 << 16, x) for x in more))]
        for op in ("sum", "avg", "prod", "min", "max"):
            assert same_bits(reduce(leaves, op, level), reference.reduce(leaves, op)), op
    alone = from_words(every, dtype)
    assert same_bits(reduce([alone], "sum", level), reference.reduce([alone]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_position_does_not_change_the_bits(level, dtype):
    """Vector body and tail do the same: one column of leaves gives one result everywhere."""
    for leaves in [3, 7, 8, 9, 20]:
        for seed in range(5):
            column = order_sensitive(dtype, leaves, 1, seed)
            for op in ("sum", "avg", "prod"):
                want = words(reference.reduce(column, op))[0]
                rows = [np.repeat(x, 167) for x in column]
                assert (words(reduce(rows, op, level)) == want).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_tie_between_bfloat16_subnormals_goes_to_the_even_one(level):
    """fp32 0x00018000: AVX512_BF16's conversion makes it 0."""
    leaves = [from_words([bits] * 100, "bfloat16") for bits in (1, 2)]
    assert (words(reduce(leaves, "avg", level)) == 0x0002).all()


@pytest.mark.parametrize("level", LEVELS)
def test_averages_are_divisions(level):
    leaves = order_sensitive("float32", 3, 10_000)
    average = reduce(leaves, "avg", level)
    total = reduce(leaves, "sum", level)
    assert same_bits(average, total / np.float32(3))
    assert np.mean(average != total * (np.float32(1) / np.float32(3))) > 0.1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_minus_zero_stay_minus_zero(level, dtype):
    for leaves in [1, 2, 5, 9, 70]:
        minus = np.full(50, -0.0, dtype_of(dtype))
        assert same_bits(reduce([minus] * leaves, "sum", level), minus)


@needs_flushing
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_host_that_flushes_subnormals_changes_nothing(level, dtype):
    leaves = subnormal(dtype, 3, 300)
    want = {op: reference.reduce(leaves, op) for op in ("sum", "avg", "prod", "min", "max")}
    seen = {}

    def flushing_host():
        with flushing():
            seen["host"] = float(np.float32(2.0**-126) * np.float32(0.5))
            seen["got"] = {op: reduce(leaves, op, level) for op in want}
            seen["flushes after"] = flushes()

    thread = threading.Thread(target=flushing_host)  # its state goes with it
    thread.start()
    thread.join()
    assert seen["host"] == 0.0, "the host does not flush: this test shows nothing"
    assert seen["flushes after"], "the host's state was not put back"
    for op, result in want.items():
        assert same_bits(seen["got"][op], result), op


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", ["sum", "min"])
def test_a_term_may_lie_where_the_result_goes(level, op):
    """Also where there are more than a kernel takes at once."""
    leaves = order_sensitive("float32", 12, 100)
    want = reference.reduce(leaves, op)
    for out in range(12):
        terms = [x.copy() for x in leaves]
        steps = recipe((0, 12), [(i, i + 1) for i in range(12)])
        _core.combine_into(terms, steps, 12, op, "float32", terms[out], True, level)
        assert same_bits(terms[out], want)


def test_what_has_no_meaning_is_refused():
    for dtype in DTYPES:
        for op in OPS:
            if (dtype, op) in PAIRS:
                continue
            with pytest.raises(ConfigurationError, match=f"{op} has no meaning for {dtype}"):
                reduce([np.ones(1, dtype_of(dtype))], op)
