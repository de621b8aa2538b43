"""Exact packing by Triton kernels, in Triton's interpreter: the CPU's payloads, byte for byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pycollective import ConfigurationError
from tests.inputs import awkward, dtype_of, from_words, order_sensitive, same_bits, subnormal
from tests.kernels.test_pack import (
    BLOCK,
    EXPONENT,
    HEADER,
    REFUSED,
    TYPES,
    gradients,
    read,
    refused_payload,
)
from tests.kernels.test_pack import pack as pack_on_cpu
from tests.kernels.test_pack import unpack as unpack_on_cpu
from tests.kernels.test_pack_choice import multiples, windows
from tests.triton.compiled import module

PACK = module("pack", interpreted=True)
STORM = pytest.mark.storm
OTHERS = 6  # bits of a flag that are not touched


@pytest.fixture(autouse=True)
def large_programs(monkeypatch):
    """A program of the interpreter's takes as long for many blocks as for a few."""
    monkeypatch.setattr(PACK, "BLOCKS", 16)
    monkeypatch.setattr(PACK, "SUMS", 4)


@pytest.fixture
def one_program(monkeypatch):
    monkeypatch.setattr(PACK, "BLOCKS", 1024)


def tensor(array):
    """Of the array's bits."""
    signed = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
    return signed.view(getattr(torch, array.dtype.name))


def room(size):
    """Bytes from a multiple of 16 on, between others; the whole, and these."""
    whole = torch.full((size + 64,), 0xA5, dtype=torch.uint8)
    begin = 16 + -whole.data_ptr() % 16
    return whole, whole[begin : begin + size]


def untouched(whole, part):
    """Whether nothing around the part was written."""
    before = part.storage_offset()
    around = torch.cat([whole[:before], whole[before + len(part) :]])
    return bool((around == 0xA5).all())


def pack(x):
    whole, payload = room(x.nbytes)
    length = torch.zeros(1, dtype=torch.int64)
    PACK.pack(tensor(x), payload, length)
    assert untouched(whole, payload)
    return payload.numpy()[: int(length)].copy()


def unpack(payload, dtype, count, length=None):
    """The elements, or None where the payload is refused."""
    size = count * dtype_of(dtype).itemsize
    _, given = room(max(size, len(payload)))
    given[: len(payload)] = torch.from_numpy(payload)
    whole, out = room(size)
    refused = torch.full((1,), OTHERS, dtype=torch.int32)
    length = torch.tensor([len(payload) if length is None else length])
    PACK.unpack(given, length, out.view(getattr(torch, dtype)), refused)
    assert untouched(whole, out)
    assert int(refused) in (OTHERS, OTHERS | 1)
    return None if int(refused) & 1 else out.numpy().view(dtype_of(dtype)).copy()


def unpacked_by_cpu(payload, dtype, count):
    try:
        return unpack_on_cpu(payload, dtype, count, "portable")
    except ValueError:
        return None


def inputs(dtype, n, seed=0):
    """Elements of each class."""
    random = np.random.default_rng([n, seed])
    kind = dtype_of(dtype)
    size, exponent = kind.itemsize, EXPONENT[dtype]
    word = np.dtype(f"u{size}")
    bits = random.integers(0, 1 << (8 * size), n, np.uint64).astype(word)
    special = (1 << exponent) - 1 << (8 * size - 1 - exponent)
    sign = 1 << (8 * size - 1)
    normal = random.standard_normal(n).astype(np.float32)
    of_one = np.full(n, from_words([0x3C00 if size == 2 else 0x3DCCCCCD], dtype)[0])
    huge = (normal * 0.001).astype(kind)
    huge[n // 2 : n // 2 + 1] = kind.type(60000)
    zeros = from_words(np.where(random.random(n) < 0.1, sign, 0), dtype)
    rare = (normal * 0.01).astype(kind)
    at = random.random(n) < 0.02
    words = rare.view(word)
    words[at] = random.choice(
        np.array([special, special | sign, special | 1, sign, 1], word), at.sum()
    )
    return {
        "Gaussian": normal.astype(kind),
        "sums": gradients(dtype, n, 4, seed),
        "wide": (normal * np.exp2(random.integers(-9, 9, n))).astype(kind),
        "order sensitive": order_sensitive(dtype, 3, n, seed)[0],
        "awkward": awkward(dtype, 3, n, seed)[0],
        "any bits": from_words(bits, dtype),
        "subnormals": subnormal(dtype, 2, n)[0],
        "zeros": np.zeros(n, kind),
        "signed zeros": zeros,
        "NaNs": from_words(bits | word.type(special), dtype),
        "infinities": from_words(np.where(bits & 1, special, special | sign), dtype),
        "one huge": huge,
        "all equal": of_one,
        "few special": rare,
    }


def together(dtype, n, seed=0):
    """All classes in turn, so many of each."""
    return np.concatenate(list(inputs(dtype, n, seed).values()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [0, 1, 127, 128, 2049, pytest.param(7999, marks=STORM)])
def test_payloads_are_the_cpus_and_come_back(dtype, n):
    x = together(dtype, math.ceil(n / 14))[:n]
    payload = pack_on_cpu(x)
    assert same_bits(pack(x), payload)
    assert same_bits(unpack(payload, dtype, n), x)


# In fp32 what takes long is the interpreter.
CASES = [
    pytest.param(seed, dtype, marks=STORM if seed or dtype == "float32" else ())
    for seed in range(8)
    for dtype in TYPES
]


@pytest.mark.parametrize(("seed", "dtype"), CASES)
def test_all_classes(one_program, dtype, seed):
    """Each by itself, of whole blocks, and one after the other in the same ones."""
    parts = list(inputs(dtype, 3 * BLOCK, seed).values())
    for x in (np.concatenate(parts), together(dtype, 150 + seed)):
        payload = pack_on_cpu(x)
        assert len(payload) < x.nbytes
        assert same_bits(pack(x), payload)
        assert same_bits(unpack(payload, dtype, len(x)), x)


def test_of_choices_that_take_as_much_the_documents_is_made():
    """Blocks of fixed point. The one has seven elements whose lowest 1 lies a place lower than
    others', and one where it lies lower still: to mark eight takes as much as to escape one. The
    other has four greater elements: to escape them takes as much as a bit of all fields."""
    odd = np.arange(BLOCK) % 32 * 2 + 1
    depth = np.where(np.arange(BLOCK) < 120, 7, 8)
    depth[127] = 9
    marks = 1 + np.ldexp(odd, -depth).astype(np.float32)
    drops = 1 + np.ldexp(odd, -7).astype(np.float32)
    drops[:4] = 2 + np.ldexp(odd[:4], -6)
    for x, header in ((marks, (127, 10, 1, 0)), (drops, (128, 10, 0, 0))):
        x = x.astype(np.float32)
        payload = pack_on_cpu(x)
        assert tuple(payload[:4]) == header
        assert same_bits(pack(x), payload)


def test_a_payload_of_as_many_bytes_is_the_elements():
    """A header of 3 bytes, 8 planes of rest and 7 of codes, 13 bytes of escaped exponents."""
    exponents = np.repeat([254, 154, 124], [15, 100, 13]).astype(np.uint16)
    x = from_words(exponents << 7 | np.arange(BLOCK, dtype=np.uint16), "bfloat16")
    assert x.nbytes == 3 + 16 * 15 + 13
    assert same_bits(pack_on_cpu(x), x.view(np.uint8))
    assert same_bits(pack(x), x.view(np.uint8))


def test_more_groups_than_are_added_at_once(monkeypatch):
    """Groups of four steps, of which the last has two blocks."""
    for name, value in (("BLOCKS", 1), ("PROGRAMS", 3), ("SUMS", 2)):
        monkeypatch.setattr(PACK, name, value)
    assert PACK.programs(9 * BLOCK + 1) == (3, 4)
    x = inputs("bfloat16", 9 * BLOCK + 1)["Gaussian"]
    payload = pack_on_cpu(x)
    assert same_bits(pack(x), payload)
    assert same_bits(unpack(payload, "bfloat16", len(x)), x)


@pytest.mark.parametrize("name", ["any bits", "all equal"])
@pytest.mark.parametrize("dtype", TYPES)
def test_payloads_of_one_class(dtype, name):
    """What is not shorter is the elements; the others are as short as the CPU's."""
    x = inputs(dtype, 700)[name]
    payload = pack_on_cpu(x)
    assert (len(payload) == x.nbytes) == (name == "any bits")
    assert same_bits(pack(x), payload)
    assert same_bits(unpack(payload, dtype, len(x)), x)


@pytest.mark.parametrize(("seed", "dtype"), CASES)
def test_every_mode(one_program, dtype, seed):
    """Of blocks that are made for one, or lie between two."""
    random = np.random.default_rng(seed)
    blocks = [windows(dtype, 300, random)]
    if dtype == "float32":
        blocks.append(multiples(600, random))
    blocks.append(np.zeros((100, BLOCK), blocks[0].dtype))  # so that the whole is shorter
    x = from_words(np.concatenate(blocks).reshape(-1), dtype)
    payload = pack_on_cpu(x)
    modes = read(payload, dtype, len(x))[1]
    assert modes >= {(0, False), 0xFF, *range(32, 32 + EXPONENT[dtype] - (dtype == "float32"))}
    if dtype == "float32":
        assert modes >= {(width, False) for width in range(3, 24)}
        assert modes >= {(width, True) for width in range(4, 20)}
    assert same_bits(pack(x), payload)
    assert same_bits(unpack(payload, dtype, len(x)), x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_pattern_of_16_bits(one_program, dtype, shuffled):
    """In order, and, with many zeros so that there is something to gain, in any."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if shuffled:
        bits = np.random.default_rng(0).permutation(np.repeat(bits, 1))
        bits = np.concatenate([bits[: 1 << 15], np.zeros(1 << 14, np.uint16), bits[1 << 15 :]])
    x = from_words(bits, dtype)
    payload = pack_on_cpu(x)
    assert len(payload) < x.nbytes
    assert same_bits(pack(x), payload)
    assert same_bits(unpack(payload, dtype, len(x)), x)


@pytest.mark.parametrize("fault", REFUSED)
def test_what_no_encoder_makes_is_refused(fault):
    dtype, payload = refused_payload(fault)
    assert unpack(payload, dtype, 2 * BLOCK) is None


def hostile(dtype, count, seeds):
    """Payloads of which some bytes were changed, the headers' more often than others; and any."""
    for seed in seeds:
        random = np.random.default_rng([seed, count])
        if seed % 4 == 3:
            size = int(random.integers(0, count * dtype_of(dtype).itemsize))
            yield random.integers(0, 256 if seed % 8 == 3 else 40, size).astype(np.uint8)
            continue
        kind = list(inputs(dtype, 1))[seed % 5]
        payload = pack_on_cpu(inputs(dtype, count, seed)[kind]).copy()
        headers = count // BLOCK * HEADER[dtype]
        for _ in range(random.integers(1, 4)):
            end = headers if random.random() < 0.5 else len(payload)
            payload[random.integers(0, end)] = random.integers(0, 256)
        yield payload


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "seeds", [range(12), *(pytest.param(range(s, s + 50), marks=STORM) for s in range(12, 312, 50))]
)
def test_hostile_payloads_are_the_cpus_or_refused(dtype, seeds):
    taken = 0
    for payload in hostile(dtype, 3 * BLOCK + 5, seeds):
        want = unpacked_by_cpu(payload, dtype, 3 * BLOCK + 5)
        got = unpack(payload, dtype, 3 * BLOCK + 5)
        assert (got is None) == (want is None)
        assert want is None or same_bits(got, want)
        taken += want is not None
    assert 0 < taken < len(seeds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_lengths_are_refused(dtype):
    x = inputs(dtype, 300)["Gaussian"]
    payload = pack_on_cpu(x)
    least = 2 * HEADER[dtype] + 44 * x.itemsize
    for length in (-1, 0, least - 1, least, len(payload) - 1, len(payload) + 1, x.nbytes - 1):
        assert unpack(payload, dtype, 300, length) is None, length
    for length in (x.nbytes + 1, 1 << 40, -(1 << 63)):
        assert unpack(payload, dtype, 300, length) is None, length
    assert same_bits(unpack(payload, dtype, 300), x)
    whole = x.view(np.uint8).copy()
    assert same_bits(unpack(whole, dtype, 300), x)


def test_what_is_not_as_said_is_an_error():
    x, length = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    _, payload = room(16)
    for wrong, why in [
        ((x.double(), payload, length), "^x .* float64"),
        ((x[::2], payload, length), "^x .* strided"),
        ((x[:7], payload[1:], length), "^payload must begin at a multiple of 16"),
        ((x, payload[:15], length), "^payload must have at least 16 .* not 15"),
        ((x, payload.view(torch.int8), length), "^payload .* uint8 .* int8"),
        ((x, payload, length.int()), "^length .* int64"),
        ((x, payload, length.to("meta")), "^length .* on cpu, not .* on meta"),
    ]:
        with pytest.raises(ConfigurationError, match=why):
            PACK.pack(*wrong)
    for wrong, why in [
        ((payload, length, x[::2], length.int()), "^out .* strided"),
        ((payload, length, x, length), "^refused .* int32"),
    ]:
        with pytest.raises(ConfigurationError, match=why):
            PACK.unpack(*wrong)
