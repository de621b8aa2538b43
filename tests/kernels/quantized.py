"""wire.md's quantized payloads in NumPy, the kernels between guards, and inputs for both."""

from __future__ import annotations

import inspect

import numpy as np

from pycollective import _core, compression, reference, segments
from tests.inputs import awkward, dtype_of, order_sensitive, subnormal
from tests.kernels.segments import found_for, table_of

FLOAT = np.finfo(np.float32)


# --- The document in NumPy. One chunk's record and what it decodes to; None if it is not finite.


def one_bit_record(c):
    sums = np.zeros(32, np.float32)
    for begin in range(0, len(c), 32):
        part = np.abs(c[begin : begin + 32])
        sums[: len(part)] += part
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    if not np.isfinite(sums[0]):
        return None
    scale = sums[0] / np.float32(len(c))
    data = np.packbits(c < 0, bitorder="little")
    return np.concatenate([scale[None].view(np.uint8), data])


def one_bit_decoded(record, count):
    scale = record[:4].view(np.uint32)[0]
    bits = np.unpackbits(record[4:], bitorder="little")[:count].astype(np.uint32)
    return (scale ^ bits << np.uint32(31)).view(np.float32)


def int8_record(c):
    most = np.abs(c).max()
    if not np.isfinite(most):
        return None
    scale, times = most / np.float32(127), np.float32(127) / most
    scale = min(scale, np.float32(8454659 * 2.0**98))
    if scale < FLOAT.smallest_normal:
        scale = times = np.float32(0)
    q = np.rint(c * times).clip(-127, 127).astype(np.int8)
    return np.concatenate([np.float32(scale)[None].view(np.uint8), q.view(np.uint8)])


def int8_decoded(record, count):
    assert len(record) == 4 + count
    return record[4:].view(np.int8).astype(np.float32) * record[:4].view(np.float32)[0]


def one_bit_bytes(count):
    return 4 + -(-count // 8)


def int8_bytes(count):
    return 4 + count


# Of each codec: a chunk's record, what that decodes to, and its length.
DOCUMENT = {
    "one_bit": (one_bit_record, one_bit_decoded, one_bit_bytes),
    "int8": (int8_record, int8_decoded, int8_bytes),
}
CODECS = list(DOCUMENT)


def usual_chunk(codec):
    return inspect.signature(compression.CODECS[codec]).parameters["chunk"].default


def record_bytes(codec, count):
    return DOCUMENT[codec][2](count)


def payload_bytes(codec, chunk, count):
    return sum(record_bytes(codec, min(chunk, count - at)) for at in range(0, count, chunk))


def sum_of(x, held):
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32)
        return wide if held is None else wide + held


def encode(codec, chunk, c):
    """The payload, and what is left; None if a number is not finite."""
    record_of = DOCUMENT[codec][0]
    with np.errstate(all="ignore"):
        records = [record_of(c[at : at + chunk]) for at in range(0, len(c), chunk)]
        if any(record is None for record in records):
            return None
        payload = np.concatenate([np.zeros(0, np.uint8), *records])
        return payload, c - decode(codec, chunk, payload, len(c))


def decode(codec, chunk, payload, count):
    """Of one payload, in fp32."""
    out, decoded = [np.zeros(0, np.float32)], DOCUMENT[codec][1]
    with np.errstate(all="ignore"):
        for at in range(0, count, chunk):
            here = min(chunk, count - at)
            size = record_bytes(codec, here)
            out.append(decoded(payload[:size], here))
            payload = payload[size:]
    return np.concatenate(out)


def rounded(x, dtype):
    """To the type, every NaN the one of its type."""
    return reference.reduce([x], "sum") if dtype == "float32" else rounded_narrow(x, dtype)


def rounded_narrow(x, dtype):
    with np.errstate(all="ignore"):
        return reference.reduce([x.astype(dtype_of(dtype))], "sum")


# --- The kernels.


def quantize(codec, chunk, x, held=None, simd=""):
    """Payload and what is left, or None; both lie at odd places, between guards."""
    size = _core.quantized_bytes(codec, chunk, len(x))
    messages = np.full(size + 64, 0xA5, np.uint8)
    room = np.full(len(x) + 32, 7.0, np.float32)
    left, found = room[16 : 16 + len(x)], found_for(1)
    table = table_of([{"x": x, "held": held, "left": left, "at": 33, "k": 1}])
    _core.quantize(codec, chunk, table, messages, found, simd=simd)
    assert (messages[:33] == 0xA5).all()
    assert (messages[33 + size :] == 0xA5).all()
    assert (room[:16] == 7).all()
    assert (room[16 + len(x) :] == 7).all()
    return None if found[segments.BAD] else (messages[33 : 33 + size], left)


def dequantize(codec, chunk, messages, at, dtype, count, divisor=1.0, simd=""):
    """The average, which lies between guards; whether it is finite is told as it is."""
    room = np.full(count + 64, 3, dtype_of(dtype))
    out, found = room[31 : 31 + count], found_for(1)
    table = table_of([{"x": out, "at": at, "k": 1}])
    _core.dequantize(codec, chunk, table, messages, divisor, found, simd=simd)
    assert (room[:31] == 3).all()
    assert (room[31 + count :] == 3).all()
    assert found[segments.BAD] == (dtype != "float32" and not np.isfinite(out).all())
    return out


def spikes(dtype, count, seed):
    """Zeros, and a few large numbers."""
    random = np.random.default_rng(seed)
    few = random.random(count) < 0.01
    return np.where(few, random.standard_normal(count) * 1000, 0).astype(dtype_of(dtype))


def lognormal(dtype, count, seed):
    random = np.random.default_rng(seed)
    sign = random.choice([-1.0, 1.0], count)
    return (sign * np.exp(2 * random.standard_normal(count))).astype(dtype_of(dtype))


def huge(dtype, count, seed):
    """Up to the largest number of the type; their chunk's sum of magnitudes need not be finite."""
    random = np.random.default_rng(seed)
    most = float(np.finfo(np.float16).max if dtype == "float16" else FLOAT.max / 2)
    x = random.uniform(-most, most, count)
    x[random.random(count) < 0.5] = 0
    return x.astype(dtype_of(dtype))


def zeros(dtype, count, seed):
    return np.random.default_rng(seed).choice([-0.0, 0.0], count).astype(dtype_of(dtype))


INPUTS = {
    "normal": lambda dtype, count, seed: (
        np.random.default_rng(seed).standard_normal(count).astype(dtype_of(dtype))
    ),
    "lognormal": lognormal,
    "spikes": spikes,
    "huge": huge,
    "zeros": zeros,
    "order sensitive": lambda dtype, count, seed: order_sensitive(dtype, 3, count, seed)[0],
    "subnormal": lambda dtype, count, seed: subnormal(dtype, 1, count)[0],
    "awkward": lambda dtype, count, seed: awkward(dtype, 3, count, seed)[0],
}
FINITE = [kind for kind in INPUTS if kind != "awkward"]
