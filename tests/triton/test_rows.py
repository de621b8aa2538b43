"""The messages of ordered reductions, and leaves of a narrow type: by Triton's kernels, interpreted
and as PTX that is executed, and by torch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pycollective.torch.ordered import plain
from pycollective.triton.formats import FORMATS, NARROW, words
from tests.triton.compiled import module
from tests.triton.executed import executed

HEADER = (0x6F726465726564, -5, 1, 7, 3, 1 << 40, -1, 1)
BEHIND = 0x5A  # in rows, before messages are written
TRITON = {way: module("rows", interpreted=way == "interpreted") for way in ("interpreted", "ptx")}


@pytest.fixture(params=["interpreted", "ptx", "torch"])
def way(request):
    with np.errstate(all="ignore"), executed():
        yield plain if request.param == "torch" else TRITON[request.param]


def leaves_of(dtype, count, shift=0):
    """Random bytes, `shift` elements behind what is aligned to 64 bytes."""
    random = np.random.default_rng(count)
    flat = torch.from_numpy(random.integers(0, 256, 64 + (count + shift) * dtype.itemsize, "u1"))
    flat = flat[-flat.data_ptr() % 64 :][: (count + shift) * dtype.itemsize]
    if dtype is torch.bool:
        flat = flat & 1
    return flat.view(dtype)[shift:]


def rows_of(n, size, dtype, skew=0):
    """Memory for messages, which begin `skew` bytes behind a multiple of 64."""
    stride = 64 + -(-size * dtype.itemsize // 64) * 64
    flat = torch.full((n * stride + 128,), BEHIND, dtype=torch.uint8)
    first = -flat.data_ptr() % 64 + skew
    return flat[first : first + n * stride].view(n, stride)


def lay_out(way, leaves, step, size, rows, number, fits=None):
    """Write rows; their header is also this rank's own."""
    own = torch.full((10,), BEHIND)
    way.lay_out(leaves, step, size, rows, HEADER, number, own[1:9], fits)
    assert torch.equal(own[1:9].view(torch.uint8), rows[0, :64])
    assert own[0] == own[9] == BEHIND


def expected(leaves, step, size, rows, number, fits):
    want = np.full(rows.shape, BEHIND, np.uint8)
    data = words(leaves).numpy()
    for i, row in enumerate(want):
        row[:64].view(np.int64)[:] = HEADER[0], number + 1, *HEADER[2:7], fits
        part = data[i * step : i * step + size].view(np.uint8)
        row[64 : 64 + part.size] = part
    return want


BLOCK = 4096  # elements of bfloat16 of a program
CASES = [
    # leaves, rows, step, size
    pytest.param(0, 3, 0, 0, id="of nothing"),
    pytest.param(1, 3, 1, 1, id="last ranks have nothing"),
    pytest.param(10, 3, 4, 4, id="does not divide"),
    pytest.param(24, 3, 8, 8, id="divides"),
    pytest.param(100, 4, 30, 7, id="a piece of each part"),
    pytest.param(7, 1, 0, 7, id="one row"),
    pytest.param(3 * BLOCK, 3, BLOCK, BLOCK, id="whole programs"),
    pytest.param(2 * BLOCK + 24, 2, BLOCK + 16, BLOCK + 16, id="a program and a part"),
    pytest.param(2 * BLOCK + 25, 2, BLOCK + 13, BLOCK + 13, id="steps that are not aligned"),
]


@pytest.mark.parametrize(("count", "n", "step", "size"), CASES)
def test_rows_are_headers_and_leaves(way, count, n, step, size):
    leaves, number = leaves_of(torch.bfloat16, count), torch.tensor([41])
    rows = rows_of(n, size, torch.bfloat16)
    lay_out(way, leaves, step, size, rows, number)
    assert np.array_equal(rows.numpy(), expected(leaves, step, size, rows, 41, HEADER[7]))
    assert number.item() == 41


@pytest.mark.parametrize("fits", [0, 1])
def test_a_header_says_what_the_device_knows(way, fits):
    leaves, rows = leaves_of(torch.int32, 10), rows_of(2, 5, torch.int32)
    lay_out(way, leaves, 5, 5, rows, torch.tensor([0]), torch.tensor([fits]))
    assert np.array_equal(rows.numpy(), expected(leaves, 5, 5, rows, 0, fits))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("skew", [0, 8])
@pytest.mark.parametrize("dtype", [*FORMATS, torch.bool, torch.int64])
def test_leaves_and_rows_begin_anywhere(way, dtype, shift, skew):
    leaves, rows = leaves_of(dtype, 75, shift), rows_of(3, 30, dtype, skew)
    lay_out(way, leaves, 30, 30, rows, torch.tensor([1 << 33]))
    assert np.array_equal(rows.numpy(), expected(leaves, 30, 30, rows, 1 << 33, HEADER[7]))


def test_full_programs_move_16_bytes():
    leaves, rows = leaves_of(torch.bfloat16, 2 * BLOCK + 9), rows_of(2, BLOCK + 8, torch.bfloat16)
    with executed() as launches:
        lay_out(TRITON["ptx"], leaves, BLOCK + 8, BLOCK + 8, rows, torch.tensor([0]))
    moved = launches.accesses["write_rows"]
    assert moved[16] == 2 * 2 * BLOCK * 2 // 16  # loaded and stored
    assert moved[2] == 2 * (8 + 1)


# --- Leaves of a narrow type.


def cast(way, leaves, dtype):
    """The narrow leaves, and whether they are the same numbers."""
    out, fits = torch.empty(leaves.numel(), dtype=dtype), torch.tensor([77])
    way.narrowed(leaves, out, fits)
    return out, fits.item()


@pytest.mark.parametrize("dtype", NARROW)
def test_all_of_a_types_numbers_fit(way, dtype):
    """Subnormals, infinities, zeros of both signs; and NaNs, which become the contract's."""
    bits = 8 * dtype.itemsize
    every = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1))
    if bits == 16:
        every = torch.cat([every[:700], every[-700:], every[32000:33000], every[::53]])
    narrow = every.to(torch.int8 if bits == 8 else torch.int16)
    out, fits = cast(way, narrow.view(dtype).to(torch.float32), dtype)
    nan = narrow.view(dtype).to(torch.float32).isnan()
    assert fits == 1
    assert torch.equal(words(out)[~nan], narrow[~nan])
    assert nan.any()
    assert (words(out)[nan] == FORMATS[dtype].nan).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_one_other_number_is_seen(way, dtype):
    """Anywhere, also where the narrow type overflows, or has but zero."""
    fine = torch.full((1024 + 9,), 1.5)
    assert cast(way, fine, dtype)[1] == 1
    others = [1.0 + 2.0**-20, -(2.0**-140), 3.4e38, float(np.nextafter(np.float32(2), 3))]
    if FORMATS[dtype].greatest & 1 == 0 and dtype is torch.float8_e4m3fn:
        others.append(float("inf"))  # of which it has none
    for place, other in enumerate(others):
        for at in (place, 1023, 1024, 1032):
            x = fine.clone()
            x[at] = other
            out, fits = cast(way, x, dtype)
            assert fits == 0, (other, at)
            assert torch.equal(words(out)[:at], words(fine.to(dtype))[:at])


@pytest.mark.parametrize("dtype", NARROW)
def test_every_way_rounds_and_compares_alike(way, dtype):
    random = np.random.default_rng(5)
    x = torch.from_numpy(random.integers(0, 1 << 32, 3000, np.uint32).view(np.float32))
    x[0] = float("nan")
    out, fits = cast(way, x, dtype)
    want, _ = cast(plain, x, dtype)
    assert fits == 0
    assert torch.equal(words(out), words(want))


def test_no_leaves_fit(way):
    assert cast(way, torch.empty(0), torch.bfloat16)[1] == 1
