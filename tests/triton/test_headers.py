"""Headers of compressed messages on GPUs are wire.md's, in Triton's interpreter, and as PTX
that is executed."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from pycollective import ConfigurationError, segments
from tests.triton.compiled import module
from tests.triton.executed import executed, ways
from tests.turns import usually

kernels = ways("headers")
CPU = torch.device("cpu")
DIGEST, SCALE = 0xFEDCBA9876543210, 1024.0
GAP = 5  # bytes between messages


def header(items, bits=(), *, digest=DIGEST, scale=SCALE, flags=0, count=None):
    """docs/inside/wire.md, "Compressed messages"; `bits`: of which parameters the bit is 1."""
    fields = struct.pack("<QfIII", digest, scale, flags, items if count is None else count, 0)
    is_set = np.isin(np.arange(items), list(bits))
    return np.frombuffer(fields + np.packbits(is_set, bitorder="little").tobytes(), np.uint8)


def received(heads):
    """A buffer with these headers, and where each begins."""
    length = len(heads[0]) if heads else 0
    buffer = np.full(GAP + (length + GAP) * len(heads), 0xEE, np.uint8)
    offsets = GAP + (length + GAP) * np.random.default_rng(1).permutation(len(heads))
    for at, head in zip(offsets, heads, strict=True):
        buffer[at : at + length] = head
    return torch.from_numpy(buffer), offsets.astype(np.int64)


def words(items, nonzero=(), heads=0):
    """What a call finds, with room for so many headers and a few bytes."""
    size = segments.heads_at(items) + heads * (24 + -(-items // 8))
    found = torch.zeros(size // 4 + 3, dtype=torch.int32)
    found[2:4] = 6
    found[[segments.NONZERO + item for item in nonzero]] = 1
    found.view(torch.uint8)[segments.heads_at(items) :] = 0x77
    return found


class Exchange:
    """A call with reads of these headers; what it finds and writes is checked by `wrote`."""

    def __init__(self, kernels, items, heads, *, nonzero=(), means=False, found=None, to=2):
        self.items, self.heads = items, heads
        count = sum(map(len, heads))
        self.found = words(items, nonzero, count) if found is None else found
        self.length = 24 + -(-items // 8)
        self.messages = torch.full((to, self.length + 9), 0xA5, dtype=torch.uint8)
        reads, at = [], segments.heads_at(items)
        for each in heads:
            reads.append((*received(each), at))
            at += len(each) * self.length
        mine = DIGEST, SCALE, items
        kernels.headers(self.found, mine, reads, self.messages, means, kernels.Tables(CPU))
        copies = self.found.view(torch.uint8).numpy()[segments.heads_at(items) :]
        whole = [np.concatenate(each) for each in heads if each]
        want = np.concatenate([np.zeros(0, np.uint8), *whole])
        assert (copies[: len(want)] == want).all()
        assert (copies[len(want) :] == 0x77).all()
        assert (self.found[2:4] == 6).all()

    @property
    def bad(self):
        return tuple(self.found[[segments.BAD, segments.DIFFERS]].tolist())

    @property
    def zeros(self):
        at = segments.zero_at(self.items)
        return self.found[at : at + self.items].nonzero().flatten().tolist()

    def wrote(self, **fields):
        want = header(self.items, **fields)
        for message in self.messages.numpy():
            assert message[: self.length].tobytes() == want.tobytes()
            assert (message[self.length :] == 0xA5).all()


@pytest.mark.parametrize("items", [1, 8, 9, 1200])
def test_a_header_says_what_is_zero(kernels, items):
    nonzero = {each for each in range(items) if each % 3 == 0}
    made = Exchange(kernels, items, [], nonzero=nonzero)
    made.wrote(bits=set(range(items)) - nonzero)
    assert made.bad == (0, 0)


@pytest.mark.parametrize("ranks", [1, 5, 40])
def test_what_is_zero_on_all_ranks_is_noted(kernels, ranks):
    """And told, with `means`: of the last read alone."""
    items = 21
    zero = {each for each in range(items) if each % 4 == 1} | {20}
    heads = [header(items, zero | {rank % items}) for rank in range(ranks)]
    heads[0] = header(items, zero)
    mine = words(items, heads=3 * ranks)
    mine[segments.zero_at(items) :][:items] = 1  # of before
    for reads in ([heads], [[header(items)] * 2, heads]):
        found = mine.clone()
        made = Exchange(kernels, items, reads, nonzero=zero, means=True, found=found)
        made.wrote(bits=zero)
        assert made.zeros == sorted(zero)
        assert made.bad == (0, 0)


def test_what_was_noted_stays_where_no_means_are_told(kernels):
    mine = words(9, nonzero=[2], heads=2)
    mine[segments.zero_at(9) + 4] = 1
    made = Exchange(kernels, 9, [[header(9, [1])] * 2], found=mine)
    made.wrote(bits={0, 1, 3, 4, 5, 6, 7, 8})
    assert made.zeros == [4]


OTHERS = [
    {"digest": DIGEST ^ 1},
    {"digest": DIGEST ^ 1 << 63},
    {"digest": DIGEST ^ 1 << 31},
    {"scale": -SCALE},
    {"count": 9 + 256},
    {"count": 9 - (1 << 31) + (1 << 32)},
]


@pytest.mark.parametrize(
    ("read", "other"),
    usually(lambda read, other: OTHERS.index(other) % 2 == read, [0, 1], OTHERS),
    ids=str,
)
def test_a_header_that_does_not_fit_is_seen(kernels, read, other):
    """All bits of the digest are flipped from then on, so that others see it, too."""
    heads = [[header(9)] * 2, [header(9)] * 3]
    heads[read][1] = header(9, **other)
    made = Exchange(kernels, 9, heads)
    assert made.bad == (1, 1)
    made.wrote(digest=DIGEST ^ (1 << 64) - 1, flags=1, bits=range(9))
    found = torch.nn.functional.pad(made.found, (0, 100), value=0x77777777)
    found.view(torch.uint8)[segments.heads_at(9) :] = 0x77
    later = Exchange(kernels, 9, [[header(9)]], found=found)
    assert later.bad == (1, 1)
    later.wrote(digest=DIGEST ^ (1 << 64) - 1, flags=1, bits=range(9))


@pytest.mark.parametrize("flags", [1, 0xFF, 2, 0x100])
def test_a_flag_that_something_is_not_finite_goes_on(kernels, flags):
    """Bit 0 alone; others are none yet."""
    made = Exchange(kernels, 3, [[header(3), header(3, flags=flags)]])
    assert made.bad == (flags & 1, 0)
    made.wrote(flags=flags & 1, bits=range(3))


def test_what_this_rank_has_found_goes_on(kernels):
    found = words(3, heads=1)
    found[segments.BAD] = 1
    made = Exchange(kernels, 3, [[header(3)]], found=found)
    made.wrote(flags=1, bits=range(3))
    assert made.bad == (1, 0)


def test_one_launch_reads_and_writes_all():
    compiled = module("headers", interpreted=False)
    with executed(execute=False) as launches:
        found = words(48, heads=5)
        mine = DIGEST, SCALE, 48
        reads = [(*received([header(48)]), segments.heads_at(48))] * 2
        tables = compiled.Tables(CPU)
        compiled.headers(found, mine, reads, torch.zeros(8, 40, dtype=torch.uint8), True, tables)
        compiled.headers(found, mine, [], None, False, tables)
    assert {name: len(each) for name, each in launches.kernels.items()} == {"exchange_headers": 2}


def test_what_is_refused():
    kernels, found = module("headers", interpreted=True), words(9, heads=1)
    tables, mine = kernels.Tables(CPU), (DIGEST, SCALE, 9)
    read = *received([header(9)]), segments.heads_at(9)
    row = torch.zeros(2, 26, dtype=torch.uint8)
    kernels.headers(found, mine, [read], row, True, tables)
    for why, reads, write in (
        ("2 reads at most, not 3", [read] * 3, row),
        ("^found must have at least 257 .* not 40 ones", [(*read[:2], 1000)], row),
        ("at least 26 contiguous bytes", [read], row[:, 1:]),
        ("at least 26 contiguous bytes", [read], torch.zeros(26, 26, dtype=torch.uint8).T),
    ):
        with pytest.raises(ConfigurationError, match=why):
            kernels.headers(found, mine, reads, write, True, tables)
    with pytest.raises(ConfigurationError, match=r"^found must have .* of int32"):
        kernels.headers(found.long(), mine, [], row, False, tables)
