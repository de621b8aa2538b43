"""The PTX of 1-bit and 8-bit quantization, executed: the CPU's bytes, and each moved once.

As `test_reduce_ptx`: what `tests/ptx` does not know, such as a fused or an approximate operation,
is an error.
"""

from __future__ import annotations

import numpy as np
import pytest
from triton.backends.compiler import GPUTarget

from pycollective import _core, segments
from tests.inputs import dtype_of, same_bits
from tests.kernels import quantized as cpu
from tests.ptx.machine import Launch, Memory
from tests.ptx.parser import parse
from tests.triton.compiled import compiled, module, needs

KERNELS = module("quantize", interpreted=False)
TABLE = {"rows": "*i64", "row_of": "*i32", "messages": "*u8"}
STORM = pytest.mark.storm
CHUNK = {codec: cpu.usual_chunk(codec) for codec in cpu.CODECS}
TARGETS = ("80", "90", "100")
FAR = 1 << 31  # elements


def encoder(codec, chunk, dtype="float32", aligned=True, target="90"):
    numbers = ("zero_at", "programs", "stride", "low", "high", "scale", "items")
    number = segments.DTYPES.index(dtype)
    return compiled(
        KERNELS.encode,
        {**TABLE, "found": "*i32", **dict.fromkeys(numbers, "i32")},
        KERNELS.encode_constants(codec, chunk, number, aligned),
        KERNELS.ENCODE,
        target=GPUTarget("cuda", int(target), 32),
    )


def decoder(
    codec,
    chunk,
    rows=1,
    dtype="float32",
    divisor=1.0,
    aligned=True,
    zeros=False,
    floats=0,
    target="90",
):
    numbers = {"stride": "i32", "ranks": "i32", "divisor": "fp32"}
    number = segments.DTYPES.index(dtype)
    return compiled(
        KERNELS.decode,
        {**TABLE, **numbers, "found": "*i32", "zero_at": "i32"},
        KERNELS.decode_constants(
            *(codec, chunk, rows, divisor, True, floats, zeros, number, aligned)
        ),
        KERNELS.decode_options(rows),
        target=GPUTarget("cuda", int(target), 32),
    )


class Launched:
    """A launch with a table of one segment, and the memory.

    The segment has `before` elements more, in front of those that the launch takes: no memory is
    needed for them.
    """

    def __init__(self, memory, made, first_block, blocks, row, arguments):
        self.memory = memory
        table = np.array([[*row, 0]], np.int64)  # the number of its first program
        rows = memory.read_only("rows", table)
        row_of = memory.read_only("row of program", np.zeros(blocks, np.int32))
        self.found = memory.allocate("found", 4 * (segments.NONZERO + 2))
        memory.put(self.found, np.array([0, 0, 6, 6, 0, 0], np.int32))
        given = [rows, row_of - 4 * first_block, *arguments(self.found), 0, 0]
        run = range(first_block, first_block + blocks)
        Launch(parse(made.asm["ptx"]), run, memory, given, made.metadata.shared).run()

    @property
    def finds(self):
        return self.memory.get(self.found, np.empty(segments.NONZERO + 2, np.int32)).tolist()


class Encoded(Launched):
    """What a launch has written; `before` elements lie before the first block."""

    def __init__(self, made, codec, chunk, x, held=None, aligned=True, before=0):
        program = KERNELS.CHUNKS.value * chunk
        memory = Memory(1 << 20)
        skew = 0 if aligned else 1
        size = _core.quantized_bytes(codec, chunk, len(x))
        errors, payload = np.empty(len(x), np.float32), np.empty(size, np.uint8)
        self.x = memory.read_only("x", x, skew * x.itemsize)
        self.held = 0 if held is None else memory.read_only("held", held, 4 * skew)
        self.left = memory.allocate("left", errors.nbytes, 12 * skew)
        self.payload = memory.allocate("payload", size, 5)
        bytes_before = _core.quantized_bytes(codec, chunk, before)
        number = segments.DTYPES.index(x.dtype.name)
        row = [self.x - before * x.itemsize, number, before + len(x), 0, 5 - bytes_before, 1]
        row += [self.held and self.held - 4 * before, self.left - 4 * before, 0]
        first, last = before // program, -(-(before + len(x)) // program)
        super().__init__(
            *(memory, made, first, last - first, row),
            lambda found: [self.payload - 5, found, 0, last, 0, 0, 0, 0, 1],
        )
        self.finite = self.finds[segments.BAD] == 0
        assert self.finds[1:] == [0, 6, 6, int((x != 0).any()), 0]
        self.left_bits = memory.get(self.left, errors)
        self.payload_bytes = memory.get(self.payload, payload)

    def check(self, want):
        """Against what the CPU's kernel gives; None where a number is not finite."""
        assert self.finite == (want is not None)
        if want is None:
            return
        assert same_bits(self.payload_bytes, want[0])
        assert same_bits(self.left_bits, want[1])


def full_and_more(codec, chunk):
    """Elements of two full programs, and what does not fill one: two chunks and a bit of one."""
    return (2 * KERNELS.CHUNKS.value + 2) * chunk + 29


def mixed(codec, chunk, dtype, count):
    """A chunk of each kind of input in turn, where it is finite, and its sum."""
    x = np.empty(count, dtype_of(dtype))
    for number, at in enumerate(range(0, count, chunk)):
        part = x[at : at + chunk]
        part[:] = cpu.INPUTS[cpu.FINITE[number % len(cpu.FINITE)]](dtype, len(part), number)
        if cpu.quantize(codec, chunk, part) is None:
            part[:] = cpu.INPUTS["normal"](dtype, len(part), number)
    return x


ENCODED = [
    ("one_bit", 64, "float32", True, True, "90"),
    ("one_bit", 1088, "float16", False, True, "80"),
    ("int8", 64, "float32", True, True, "90"),
    ("int8", 576, "bfloat16", True, True, "100"),
]
ENCODED_MORE = [
    ("one_bit", 320, "bfloat16", True, False, "100"),
    ("int8", 192, "float16", False, False, "80"),
    *(
        (codec, chunk, dtype, is_held, aligned, TARGETS[(turn + column + is_held) % 3])
        for codec in cpu.CODECS
        for turn, chunk in enumerate((64, 256, 1024, 4096))
        for column, dtype in enumerate(segments.DTYPES)
        for is_held, aligned in ((True, True), (False, False))
    ),
]


@pytest.mark.parametrize(
    ("codec", "chunk", "dtype", "is_held", "aligned", "target"),
    [*ENCODED, *(pytest.param(*each, marks=STORM) for each in ENCODED_MORE if each not in ENCODED)],
)
def test_payloads_are_the_cpus(codec, chunk, dtype, is_held, aligned, target):
    """A number that is not finite sets the flag."""
    made = encoder(codec, chunk, dtype, aligned, target)
    count = full_and_more(codec, chunk)
    awkward = cpu.INPUTS["awkward"](dtype, count, 1)
    held = cpu.INPUTS["lognormal"]("float32", count, 2) if is_held else None
    for x in (mixed(codec, chunk, dtype, count), awkward):
        Encoded(made, codec, chunk, x, held, aligned).check(cpu.quantize(codec, chunk, x, held))


# Bytes an element: gradient and residual read, residual written, and the payload.
@pytest.mark.parametrize(("codec", "most"), [("one_bit", 12.2), ("int8", 13.1)])
def test_an_encoder_moves_each_byte_once(codec, most):
    chunk, count = CHUNK[codec], 2 * KERNELS.CHUNKS.value * CHUNK[codec]
    made = encoder(codec, chunk)
    more = full_and_more(codec, chunk)
    x, held = (cpu.INPUTS["lognormal"]("float32", more, seed) for seed in (1, 2))
    Encoded(made, codec, chunk, x, held).check(cpu.quantize(codec, chunk, x, held))
    full = Encoded(made, codec, chunk, x[:count], held[:count])
    memory, size = full.memory, len(full.payload_bytes)
    for address in (full.x, full.held):
        assert (memory.reads[memory.place(address, 4 * count)] == 1).all()
    for address, length in ((full.left, 4 * count), (full.payload, size)):
        assert (memory.writes[memory.place(address, length)] == 1).all()
    assert 12 * count + size <= most * count
    assert memory.loads[16] == 2 * count // 4
    assert set(memory.loads) == {16, 8, 4}  # those of a table
    assert memory.stores == {16: count // 4, 1: size}


DECODED = [
    ("one_bit", 1024, 1, "float32", True, "90"),
    ("one_bit", 320, 19, "float16", False, "80"),
    ("int8", 256, 5, "bfloat16", True, "100"),
    ("int8", 256, 27, "float32", True, "90"),
]
DECODED_MORE = [
    (codec, chunk, rows, dtype, aligned, TARGETS[(turn + column + aligned) % 3])
    for codec in cpu.CODECS
    for turn, (chunk, rows) in enumerate(((64, 3), (256, 2), (832, 16), (1024, 9), (4096, 70)))
    for column, dtype in enumerate(segments.DTYPES)
    for aligned in (True, False)
]


@pytest.mark.parametrize(
    ("codec", "chunk", "rows", "dtype", "aligned", "target"),
    [*DECODED, *(pytest.param(*each, marks=STORM) for each in DECODED_MORE if each not in DECODED)],
)
def test_sums_are_the_cpus(codec, chunk, rows, dtype, aligned, target):
    """Of payloads of any bytes, and of such whose order shows."""
    count, at = 2 * KERNELS.DECODED.value + 333, 7
    divisor = float(rows)
    made = decoder(codec, chunk, rows, dtype, divisor, aligned, target=target)
    size = _core.quantized_bytes(codec, chunk, count)
    messages = np.random.default_rng(rows).integers(0, 256, (rows, at + size), np.uint8)
    honest = messages.copy()
    for seed, row in enumerate(honest):
        x = cpu.INPUTS["lognormal"]("float32", count, seed)
        row[at:] = cpu.quantize(codec, chunk, x)[0]
    for each in (messages, honest):
        got, _, _ = decoded(made, codec, chunk, each, at, dtype, count, divisor, aligned)
        assert same_bits(got, cpu.dequantize(codec, chunk, each, at, dtype, count, divisor))


def decoded(
    made, codec, chunk, messages, at, dtype, count, divisor, aligned=True, before=0, bytes_before=0
):
    """The result, the memory, and where the messages are in it."""
    memory = Memory(1 << 21)
    like = np.empty(count, dtype_of(dtype))
    source = memory.read_only("messages", messages, 3)
    out = memory.allocate("out", like.nbytes, 0 if aligned else like.itemsize)
    ranks, stride = messages.shape
    number = segments.DTYPES.index(dtype)
    constants = KERNELS.decode_constants(
        *(codec, chunk, ranks, divisor, True, 0, False, number, aligned)
    )
    factor = np.float32(divisor if constants["DIVIDE"] else 1 / divisor)
    row = [out - before * like.itemsize, number, before + count, 0, at - bytes_before, 1, 0, 0, 0]
    first = before // KERNELS.DECODED.value
    blocks = int(KERNELS.programs(before + count, constants["BLOCK"])) - first
    done = Launched(
        *(memory, made, first, blocks, row),
        lambda found: [source, stride, ranks, int(factor.view(np.uint32)), found, 0],
    )
    result = memory.get(out, like)
    with np.errstate(invalid="ignore"):
        is_bad = dtype != "float32" and not np.isfinite(result.astype(np.float32)).all()
    assert done.finds == [int(is_bad), 0, 6, 6, 0, 0]
    return result, memory, source


@pytest.mark.parametrize(("codec", "most"), [("one_bit", 4.2), ("int8", 5.1)])
def test_a_decoder_moves_each_byte_once(codec, most):
    """But for scales: all threads of a program read theirs, out of the cache after the first. So do
    the two threads that share a byte of bits."""
    chunk, count = CHUNK[codec], 4 * KERNELS.DECODED.value
    payload = cpu.quantize(codec, chunk, cpu.INPUTS["lognormal"]("float32", count, 1))[0]
    got, memory, source = decoded(
        decoder(codec, chunk), codec, chunk, payload[None], 0, "float32", count, 1.0
    )
    assert same_bits(got, cpu.dequantize(codec, chunk, payload[None], 0, "float32", count))
    reads = memory.reads[memory.place(source, len(payload))]
    record = _core.quantized_bytes(codec, chunk, chunk)
    assert (reads.reshape(-1, record)[:, 4:] == (2 if codec == "one_bit" else 1)).all()
    assert (reads > 0).all()
    assert int(memory.writes.sum()) == 4 * count
    assert 4 * count + len(payload) <= most * count
    assert (memory.writes <= 1).all()
    assert memory.stores == {16: count // 4}


@pytest.mark.parametrize("codec", cpu.CODECS)
def test_offsets_have_64_bits(codec):
    """Of the last elements of more than 2**31."""
    chunk = 64
    count = full_and_more(codec, chunk)
    x, held = (cpu.INPUTS["lognormal"]("float32", count, seed) for seed in (1, 2))
    want = cpu.quantize(codec, chunk, x, held)
    Encoded(encoder(codec, chunk), codec, chunk, x, held, before=FAR).check(want)
    bytes_before = _core.quantized_bytes(codec, chunk, FAR)
    got, _, _ = decoded(
        *(decoder(codec, chunk), codec, chunk),
        *(want[0][None], 0, "float32", count, 1.0),
        before=FAR,
        bytes_before=bytes_before,
    )
    assert same_bits(got, cpu.dequantize(codec, chunk, want[0][None], 0, "float32", count))


FITTING = [
    *((encoder, "one_bit", 1024), (decoder, "int8", 256, 27, "float32", 27.0)),
    (encoder, "int8", 256),
    (decoder, "one_bit", 1024, 8, "bfloat16", 8.0, True, True, 16),
]
FITTING_MORE = [
    (decoder, "int8", 256, 27, "float32", 27.0, False, True, 1),
    (decoder, "one_bit", 1024, 1),
    *((encoder, codec, chunk) for codec in cpu.CODECS for chunk in (64, 512, 65536)),
    (encoder, "int8", 1024),
    *((decoder, codec, 64, rows) for codec in cpu.CODECS for rows in (8, 256, 1000)),
]


@pytest.mark.parametrize(
    ("case", "target"),
    [
        pytest.param(
            *(case, target),
            id="-".join(map(str, (case[0].__name__, *case[1:], target))),
            marks=() if usual and target == "90" else STORM,
        )
        for cases, usual in ((FITTING, True), (FITTING_MORE, False))
        for case in cases
        for target in TARGETS
    ],
)
def test_nothing_spills(tmp_path, record_property, case, target):
    make, *arguments = case
    registers, spilled = needs(make(*arguments, target=target), tmp_path)
    record_property("registers", registers)
    assert spilled == 0
