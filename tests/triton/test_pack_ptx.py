"""The PTX of exact packing, executed: the CPU's payloads, and the elements again.

`tests/ptx` checks bounds, races and alignment, and counts bytes. A kernel that reads more than a
payload's bytes, or writes outside of the elements, is an error there.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget

from tests.inputs import dtype_of, same_bits
from tests.kernels.test_pack import TYPES
from tests.kernels.test_pack import pack as pack_on_cpu
from tests.ptx.machine import Launch, Memory
from tests.ptx.parser import parse
from tests.triton.compiled import compiled, module
from tests.triton.test_compiled import needs
from tests.triton.test_pack import gradients, hostile, inputs, together, unpacked_by_cpu

PACK = module("pack", interpreted=False)
STORM = pytest.mark.storm
TARGETS = {name: GPUTarget("cuda", int(name), 32) for name in ("80", "90", "100")}
GROUP = PACK.BLOCKS * 128  # elements of a program


@functools.cache
def kernel(name, dtype, target="90", aligned=False, packs=True, wide=False):
    """(parsed, bytes of shared memory, compiled) of a kernel for this type."""
    size = dtype_of(dtype).itemsize
    elements = f"*i{8 * size}"
    types = {"x": elements, "out": elements, "payload": "*u8", "headers": "*i32"}
    types |= {"sums": "*i64", "offsets": "*i64", "length": "*i64"}
    types |= {"refused": "*i32", "n": "i64" if wide else "i32"}
    types |= {"groups": "i32", "steps": "i32"}
    every = {"SIZE": size, "EXPONENT": PACK.EXPONENT[getattr(torch, dtype)], "ALIGNED": aligned}
    every |= {"PACK": packs, "BLOCKS": PACK.BLOCKS, "SUMS": PACK.SUMS}
    function = getattr(PACK, name)
    made = compiled(
        function,
        {each: types[each] for each in function.arg_names if each in types},
        {each: every[each] for each in function.arg_names if each in every},
        PACK.OPTIONS | (PACK.FIND_OFFSETS if name == "find_offsets" else {}),
        [each for each, kind in types.items() if kind.startswith("*")],
        TARGETS[target],
    )
    return parse(made.asm["ptx"]), made.metadata.shared, made


class Device:
    """Memory of a device, and launches over it, of kernels for one type and target."""

    def __init__(self, dtype, n, target="90"):
        self.dtype, self.n, self.target = dtype, n, target
        self.memory = Memory(1 << 20)
        self.groups, steps = PACK.programs(n)
        self.aligned = PACK.aligned(n, dtype_of(dtype).itemsize)
        self.at = {"n": n, "groups": self.groups, "steps": steps}
        self.loads, self.stores, self.reads, self.writes = {}, {}, {}, {}
        self.allocate("sums", 16 * self.groups)
        self.allocate("offsets", 16 * self.groups + 16)

    def allocate(self, name, size):
        self.at[name] = self.memory.allocate(name, size)

    def put(self, name, array):
        self.at[name] = self.memory.read_only(name, array)

    def launch(self, name, blocks, packs=True):
        if not blocks:
            return
        aligned = self.aligned and name in ("write_blocks", "read_blocks")
        code, shared, made = kernel(name, self.dtype, self.target, aligned, packs)
        arguments = [self.at[each] for each in made.src.fn.arg_names if each in self.at]
        arguments += [0] * (len(code.parameters) - len(arguments))
        Launch(code, range(blocks), self.memory, arguments, shared).run()
        self.loads[name], self.stores[name] = self.memory.loads, self.memory.stores
        self.reads[name], self.writes[name] = self.memory.reads, self.memory.writes

    def pack(self, x):
        self.put("x", x)
        self.allocate("payload", x.nbytes)
        self.allocate("length", 8)
        self.allocate("headers", 4 * max(1, self.n // 128))
        self.at["refused"] = self.at["offsets"]
        self.launch("plan_blocks", self.groups)
        self.launch("find_offsets", 1)
        self.launch("write_blocks", self.groups)
        length = int(self.memory.get(self.at["length"], np.empty(1, np.int64))[0])
        return self.memory.get(self.at["payload"], np.empty(length, np.uint8))

    def unpack(self, payload, length=None):
        """(elements or None, whether refused); what lies behind a payload nobody has written."""
        size = self.n * dtype_of(self.dtype).itemsize
        self.allocate("payload", size)
        self.memory.put(self.at["payload"], payload)
        place = self.memory.place(self.at["payload"], size)
        self.memory.flags[place] &= ~np.uint8(4)
        self.put("length", np.array([len(payload) if length is None else length]))
        self.allocate("out", size)
        self.allocate("refused", 4)
        self.memory.put(self.at["refused"], np.zeros(1, np.int32))
        self.launch("measure_blocks", self.groups)
        self.launch("find_offsets", 1, packs=False)
        self.launch("read_blocks", self.groups)
        refused = int(self.memory.get(self.at["refused"], np.empty(1, np.int32))[0])
        if refused:
            return None, refused
        return self.memory.get(self.at["out"], np.empty(self.n, dtype_of(self.dtype))), refused


def usually(usual, others):
    """Cases of the usual run, and those that `make storm` has, too."""
    return [*usual, *(pytest.param(*each, marks=STORM) for each in others if each not in usual)]


@pytest.mark.parametrize(
    ("dtype", "n", "target"),
    usually(
        [("bfloat16", 2048, "90")],
        [
            *(("float16", 2225, "80"), ("float32", 1157, "100")),
            *itertools.product(TYPES, (0, 1, 127, 128, 2048, 5001), TARGETS),
        ],
    ),
)
def test_payloads_are_the_cpus_and_come_back(monkeypatch, dtype, n, target):
    """By programs of some steps. Rows of 2048 elements begin at multiples of 16 bytes."""
    monkeypatch.setattr(PACK, "PROGRAMS", 2)
    x = together(dtype, -(-n // 14))[:n]
    want = pack_on_cpu(x)
    assert same_bits(Device(dtype, n, target).pack(x), want)
    got, refused = Device(dtype, n, target).unpack(want)
    assert not refused
    assert same_bits(got, x)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [pytest.param(dtype, name, marks=STORM) for dtype in TYPES for name in inputs(dtype, 1)],
)
def test_each_class(dtype, name):
    x = inputs(dtype, 1500)[name]
    want = pack_on_cpu(x)
    assert same_bits(Device(dtype, len(x)).pack(x), want)
    got, refused = Device(dtype, len(x)).unpack(want)
    assert not refused
    assert same_bits(got, x)


@pytest.mark.parametrize(
    ("dtype", "seeds"),
    usually([("float32", range(1))], [(dtype, range(30)) for dtype in TYPES]),
)
def test_of_hostile_payloads_nothing_else_is_read(dtype, seeds):
    n = 2 * 128 + 5
    for payload in hostile(dtype, n, seeds):
        want = unpacked_by_cpu(payload, dtype, n)
        got, refused = Device(dtype, n).unpack(payload)
        assert bool(refused) == (want is None)
        assert want is None or same_bits(got, want)


def test_a_payload_without_headers_is_not_read():
    assert Device("float32", 300).unpack(np.zeros(5, np.uint8)) == (None, 1)


def test_more_escaped_than_a_header_says_read_no_other_bytes():
    """The field that says so is each one's, the header has room for one; a block of zeros follows,
    so that the payload is shorter than the elements."""
    fields = np.full(16 * 2, 0x55, np.uint8)
    headers = np.array([127, 2, 1, 0, 0, 0, 0, 0], np.uint8)
    payload = np.concatenate([headers, fields, np.zeros(4, np.uint8)])
    assert Device("float32", 256).unpack(payload) == (None, 1)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 1), ("float32", 3)])
def test_what_is_moved(dtype, most):
    """Elements are read once to plan and once to write; of fixed point, which shares a field
    between words, the latter `most` times. A byte of a payload is written once, rows in vectors of
    16 bytes."""
    x = gradients(dtype, 2048, 4, 0)
    device = Device(dtype, len(x))
    payload = device.pack(x)
    memory, at = device.memory, device.at
    assert same_bits(payload, pack_on_cpu(x))
    assert len(payload) < 0.75 * x.nbytes
    assert device.loads["plan_blocks"][16] == x.nbytes // 16
    assert 16 * device.stores["write_blocks"][16] > 0.8 * len(payload)
    reads = device.reads["write_blocks"][memory.place(at["x"], x.nbytes)]
    assert 1 <= reads.min() <= reads.mean() <= most
    writes = device.writes["write_blocks"][memory.place(at["payload"], x.nbytes)]
    assert (writes[: len(payload)] == 1).all()
    assert (writes[len(payload) :] == 0).all()
    assert same_bits(device.unpack(payload)[0], x)
    assert device.stores["read_blocks"][16] == x.nbytes // 16
    assert 16 * device.loads["read_blocks"][16] > 0.7 * len(payload)
    written = device.writes["read_blocks"][memory.place(at["out"], x.nbytes)]
    assert (written == 1).all()


def put_at(memory, name, address, array):
    """A copy of the array at an address."""
    skew = address % memory.GAP
    begin = memory.BASE + memory.used + memory.GAP
    memory.put(memory.allocate(name, array.nbytes, skew, far=address - skew - begin), array)


def test_offsets_have_64_bits():
    """A group behind 2**31 elements, whose rows and tail lie far behind those of others."""
    dtype, first = "bfloat16", (1 << 31) // GROUP
    groups = first + 64
    n, row, tail, header = groups * GROUP, 16 * 3 * 10**8, 4 * 10**8, 3 * PACK.BLOCKS
    x = inputs(dtype, GROUP)["Gaussian"]
    own = pack_on_cpu(x)
    headers, rows = own[:header], 16 * sum(map(rows_of, own[:header].reshape(-1, 3)))
    parts = [headers, own[header : header + rows], own[header + rows :]]
    length = 3 * PACK.BLOCKS * groups + row + rows + 10**9
    length -= length % 128
    places = [3 * PACK.BLOCKS * first, 3 * PACK.BLOCKS * groups + row, length - tail]
    places[2] -= len(parts[2])
    memory = Memory(1 << 17)

    base = [number << 36 for number in range(1, 7)]
    put_at(memory, "x", base[0] + first * GROUP * 2, x)
    put_at(memory, "headers", base[1] + first * PACK.BLOCKS * 4, np.zeros(PACK.BLOCKS, np.int32))
    put_at(memory, "sum of rows", base[2] + 8 * first, np.zeros(1, np.int64))
    put_at(memory, "sum of tails", base[2] + 8 * (groups + first), np.zeros(1, np.int64))
    put_at(memory, "rows before", base[3] + 8 * first, np.array([row // 16]))
    put_at(memory, "tails before", base[3] + 8 * (groups + first), np.array([tail]))
    put_at(memory, "all", base[3] + 16 * groups, np.array([0, PACK.PACKED.value]))
    for name, place, part in zip(("headers'", "rows", "tail"), places, parts, strict=True):
        put_at(memory, name, base[4] + place, np.zeros_like(part))
    put_at(memory, "length", base[5], np.array([length]))
    put_at(memory, "refused", base[5] + 256, np.zeros(1, np.int32))
    put_at(memory, "out", base[5] + 512 + first * GROUP * 2, np.zeros_like(x))
    at = {"x": base[0], "headers": base[1], "sums": base[2], "offsets": base[3]}
    at |= {"payload": base[4], "length": base[5], "refused": base[5] + 256, "out": base[5] + 512}
    at |= {"n": n, "groups": groups, "steps": 1}
    for name in ("plan_blocks", "write_blocks", "read_blocks"):
        code, shared, made = kernel(name, dtype, aligned=name != "plan_blocks", wide=True)
        arguments = [at[each] for each in made.src.fn.arg_names if each in at]
        arguments += [0] * (len(code.parameters) - len(arguments))
        Launch(code, range(first, first + 1), memory, arguments, shared).run()
    for place, part in zip(places, parts, strict=True):
        assert same_bits(memory.get(base[4] + place, part), part)
    assert memory.get(base[2] + 8 * first, np.empty(1, np.int64))[0] == rows // 16
    assert same_bits(memory.get(base[5] + 512 + first * GROUP * 2, x), x)


@pytest.mark.parametrize("name", [pytest.param("write_blocks", marks=STORM), "read_blocks"])
def test_the_last_of_the_most_elements_of_32_bits_are_not_the_first_programs(name):
    """It has no memory for them: to their number no block's may be added in 32 bits."""
    n, memory = (1 << 31) - 1, Memory(1 << 17)
    groups, steps = PACK.programs(n)
    at = {"n": n, "groups": groups, "steps": steps}
    for each, array in (
        ("x", np.zeros(steps * GROUP, np.int16)),
        ("out", np.zeros(steps * GROUP, np.int16)),
        ("headers", np.zeros(steps * PACK.BLOCKS, np.int32)),
        ("payload", np.zeros(3 * steps * PACK.BLOCKS, np.uint8)),
        ("length", np.array([n // 128 * 3 + n % 128 * 2])),
        ("refused", np.zeros(1, np.int32)),
    ):
        at[each] = memory.allocate(each, array.nbytes)
        memory.put(at[each], array)
    at["offsets"] = 1 << 40
    put_at(memory, "rows before", at["offsets"], np.zeros(1, np.int64))
    put_at(memory, "tails before", at["offsets"] + 8 * groups, np.zeros(1, np.int64))
    whole = np.array([0, PACK.PACKED.value])
    put_at(memory, "all", at["offsets"] + 16 * groups, whole)
    code, shared, made = kernel(name, "bfloat16")
    arguments = [at[each] for each in made.src.fn.arg_names if each in at]
    arguments += [0] * (len(code.parameters) - len(arguments))
    Launch(code, range(1), memory, arguments, shared).run()
    assert memory.get(at["refused"], np.empty(1, np.int32))[0] == 0


def rows_of(header):
    """Of a block of bfloat16, by its header."""
    mode = int(header[1])
    return {0: 0, 255: 16}.get(mode, 8 + mode - 32)


def test_a_payloads_bytes_are_counted_in_64_bits():
    """2**30 elements of 4 bytes each, whose number is of 32 bits: headers of zeros are measured."""
    n, memory = 1 << 30, Memory(1 << 17)
    groups, steps = PACK.programs(n)
    payload = memory.read_only("payload", np.zeros(4 * steps * PACK.BLOCKS, np.uint8))
    length = memory.read_only("length", np.array([n // 128 * 4]))
    rows, tails = 1 << 36, (1 << 36) + 8 * groups
    for address in (rows, tails):
        put_at(memory, "sums", address, np.ones(1, np.int64))
    code, shared, _ = kernel("measure_blocks", "float32")
    Launch(code, range(1), memory, [payload, length, rows, n, groups, steps, 0, 0], shared).run()
    for address in (rows, tails):
        assert memory.get(address, np.empty(1, np.int64))[0] == 0


@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    usually(
        [("plan_blocks", "float32", "90"), ("write_blocks", "float32", "90")],
        itertools.product(
            ("plan_blocks", "measure_blocks", "find_offsets", "write_blocks", "read_blocks"),
            TYPES,
            TARGETS,
        ),
    ),
)
def test_registers_suffice(tmp_path, record_property, name, dtype, target):
    aligned = name in ("write_blocks", "read_blocks")
    registers, spilled = needs(kernel(name, dtype, target, aligned)[2], tmp_path)
    record_property(f"registers {name} {dtype} sm_{target}", registers)
    assert spilled == 0
