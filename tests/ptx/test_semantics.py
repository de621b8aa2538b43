"""The instructions that the machine executes, against facts of the PTX ISA, and what it refuses."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.ptx.machine import Launch, Memory, Trap
from tests.ptx.parser import PtxError, parse

REGISTER = {16: "%rs", 32: "%r", 64: "%rd"}
INFINITY, NAN = 0x7F800000, 0x7FFFFFFF


def kernel(text, parameters):
    """A kernel of these statements, with as many 64-bit parameters: k_param_0, ..."""
    declared = ",\n".join(
        f"\t.param .u64 .ptr .global .align 1 k_param_{number}" for number in range(parameters)
    )
    return parse(f"""
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];

	// .globl	k                       // -- Begin function k
.visible .entry k(
{declared}
)
.reqntid 32
{{
	.reg .pred 	%p<20>;
	.reg .b16 	%rs<20>;
	.reg .b32 	%r<40>;
	.reg .b64 	%rd<40>;
	.loc	1 5 0                           // k.py:5:0
$L__func_begin0:
{text}
	ret;
$L__func_end0:
                                        // -- End function
}}
	.file	1 "k.py"
	.section	.debug_abbrev
	{{
.b8 1                                   // Abbreviation Code
	}}
	.section	.debug_macinfo	{{	}}
""")


def computed(text, bits, columns):
    """`text` with {0}, {1}, ... for its sources and {d} for its result, over lanes that hold the
    columns' numbers. `bits`: of the result, then of each source."""
    count = len(columns[0])
    lanes = -(-count // 32) * 32
    memory = Memory()
    lines = ["mov.u32 %r30, %tid.x;", "mov.u32 %r31, %ctaid.x;"]
    lines += ["mad.lo.s32 %r33, %r31, 32, %r30;"]
    names = {"d": f"{REGISTER[bits[0]]}19"}
    arguments = []
    for number, (width, column) in enumerate(zip(bits[1:], columns, strict=True)):
        words = [int(each) & (1 << width) - 1 for each in column]
        words = np.resize(np.array(words, f"u{width // 8}"), lanes)
        arguments.append(memory.read_only(f"source {number}", words))
        names[str(number)] = f"{REGISTER[width]}{number + 1}"
        lines += [
            f"ld.param.b64 %rd{20 + number}, [k_param_{number}];",
            f"mad.wide.u32 %rd{20 + number}, %r33, {width // 8}, %rd{20 + number};",
            f"ld.global.b{width} {names[str(number)]}, [%rd{20 + number}];",
        ]
    for name, register in names.items():
        text = text.replace(f"{{{name}}}", register)
    result = np.empty(lanes, f"u{bits[0] // 8}")
    arguments.append(memory.allocate("result", result.nbytes))
    lines += [
        *text.split("\n"),
        f"ld.param.b64 %rd39, [k_param_{len(columns)}];",
        f"mad.wide.u32 %rd39, %r33, {bits[0] // 8}, %rd39;",
        f"st.global.b{bits[0]} [%rd39], {names['d']};",
    ]
    Launch(kernel("\n".join(lines), len(arguments)), range(lanes // 32), memory, arguments).run()
    return memory.get(arguments[-1], result)[:count]


def f32(*numbers):
    return [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]


# name: (statements, bits of the result and of the sources, the sources' columns, the results).
CASES = {
    "shl.b32 clamps": (
        "shl.b32 {d}, {0}, {1};",
        (32, 32, 32),
        ([1, 1, 1, 3, 5], [31, 32, 33, -1, 0]),
        [1 << 31, 0, 0, 0, 5],
    ),
    "shr.u64 clamps": (
        "shr.u64 {d}, {0}, {1};",
        (64, 64, 32),
        ([1 << 63] * 4, [63, 64, 256, -1]),
        [1, 0, 0, 0],
    ),
    "shr.u16 clamps": (
        "shr.u16 {d}, {0}, {1};",
        (16, 16, 32),
        ([0x8000] * 3, [15, 16, 64]),
        [1, 0, 0],
    ),
    "shr.s32 fills": (
        "shr.s32 {d}, {0}, {1};",
        (32, 32, 32),
        ([1 << 31, 1 << 30, 1 << 31], [40, 40, 4]),
        [-1, 0, 0xF8000000],
    ),
    "shf.l.wrap.b32": (
        "shf.l.wrap.b32 {d}, {0}, {1}, {2};",
        (32, 32, 32, 32),
        ([0x12345678] * 3, [0x9ABCDEF0] * 3, [8, 0, 36]),
        [0xBCDEF012, 0x9ABCDEF0, 0xABCDEF01],
    ),
    "shf.r.clamp.b32": (
        "shf.r.clamp.b32 {d}, {0}, {1}, {2};",
        (32, 32, 32, 32),
        ([0x12345678] * 3, [0x9ABCDEF0] * 3, [8, 0, 36]),
        [0xF0123456, 0x12345678, 0x9ABCDEF0],
    ),
    "add.s16 wraps": ("add.s16 {d}, {0}, {1};", (16, 16, 16), ([0x7FFF], [1]), [0x8000]),
    "sub.s32": ("sub.s32 {d}, {0}, {1};", (32, 32, 32), ([1, 5], [2, 3]), [-1, 2]),
    "add.s64": ("add.s64 {d}, {0}, -8;", (64, 64), ([4],), [-4]),
    "mul.lo.s16": ("mul.lo.s16 {d}, {0}, {1};", (16, 16, 16), ([-1, 300],) * 2, [1, 24464]),
    "mul.lo.s64": (
        "mul.lo.s64 {d}, {0}, {1};",
        (64, 64, 64),
        ([1 << 63, -1], [3, -1]),
        [1 << 63, 1],
    ),
    "mul.wide.s32": ("mul.wide.s32 {d}, {0}, {1};", (64, 32, 32), ([-1], [8]), [-8]),
    "mul.wide.u32": ("mul.wide.u32 {d}, {0}, {1};", (64, 32, 32), ([-1], [8]), [0xFFFFFFFF * 8]),
    "mul.wide.u16": ("mul.wide.u16 {d}, {0}, {1};", (32, 16, 16), ([-1], [-1]), [0xFFFE0001]),
    "mul.hi.u32": ("mul.hi.u32 {d}, {0}, {1};", (32, 32, 32), ([-1, 3], [-1, 1 << 31]), [-2, 1]),
    "mul.hi.s32": ("mul.hi.s32 {d}, {0}, {1};", (32, 32, 32), ([-1, 3], [7, 1 << 31]), [-1, -2]),
    "mul.hi.s64": ("mul.hi.s64 {d}, {0}, {1};", (64, 64, 64), ([-1, 1 << 62], [7, 8]), [-1, 2]),
    "mul.hi.u64": ("mul.hi.u64 {d}, {0}, {1};", (64, 64, 64), ([-1], [-1]), [-2]),
    "mad.lo.s64": ("mad.lo.s64 {d}, {0}, {1}, 9;", (64, 64, 64), ([1 << 62], [4]), [9]),
    "mad.wide.s32": (
        "mad.wide.s32 {d}, {0}, 8, {1};",
        (64, 32, 64),
        ([-1], [1 << 40]),
        [(1 << 40) - 8],
    ),
    "neg.s64": ("neg.s64 {d}, {0};", (64, 64), ([1 << 63, 1],), [1 << 63, -1]),
    "abs.s32": ("abs.s32 {d}, {0};", (32, 32), ([1 << 31, -1, 7],), [1 << 31, 1, 7]),
    "abs.f32": ("abs.f32 {d}, {0};", (32, 32), (f32(-2, 0.0, -0.0),), f32(2, 0, 0)),
    "abs.f16x2": ("abs.f16x2 {d}, {0};", (32, 32), ([0x8001BC00, 0x3C00],), [0x00013C00, 0x3C00]),
    "neg.f16x2": ("neg.f16x2 {d}, {0};", (32, 32), ([0x8001BC00, 0],), [0x00013C00, 0x80008000]),
    "abs.bf16x2": (
        "abs.bf16x2 {d}, {0};",
        (32, 32),
        ([0x8001BF80, 0xFFC13F80],),
        [0x00013F80, 0xFFBA3F80],
    ),
    "abs.f16x2 of NaNs, which are left open": (
        "abs.f16x2 %r20, {0};\nmov.b32 {%rs1, %rs2}, %r20;\ncvt.f32.f16 %r21, %rs2;\n"
        "setp.nan.f32 %p1, %r21, %r21;\nselp.b32 {d}, 1, 0, %p1;",
        (32, 32),
        ([0x7C010000, 0xFE00FE00],),
        [1, 1],
    ),
    "neg.f32": ("neg.f32 {d}, {0};", (32, 32), (f32(-2, 0.0, -0.0),), f32(2, -0.0, 0)),
    "neg.f32 and abs.f32 of a NaN, which is left open": (
        "neg.f32 %r19, {0};\nabs.f32 %r20, %r19;\nsetp.nan.f32 %p1, %r20, %r20;\n"
        "selp.b32 {d}, 1, 0, %p1;",
        (32, 32),
        ([NAN, 0xFFC00001],),
        [1, 1],
    ),
    "add.s16x2": (
        "add.s16x2 {d}, {0}, {1};",
        (32, 32, 32),
        ([0x0001FFFF], [0xFFFF0002]),
        [0x00000001],
    ),
    "max.s16x2": ("max.s16x2 {d}, {0}, 0;", (32, 32), ([0x0005FFFF],), [0x00050000]),
    "max.u16x2": ("max.u16x2 {d}, {0}, 0;", (32, 32), ([0x0005FFFF],), [0x0005FFFF]),
    "min.s16x2": ("min.s16x2 {d}, {0}, 0;", (32, 32), ([0x0005FFFF],), [0x0000FFFF]),
    "min.s16": ("min.s16 {d}, {0}, {1};", (16, 16, 16), ([0x8000], [1]), [0x8000]),
    "min.u16": ("min.u16 {d}, {0}, {1};", (16, 16, 16), ([0x8000], [1]), [1]),
    "max.s64": ("max.s64 {d}, {0}, {1};", (64, 64, 64), ([1 << 63], [0]), [0]),
    "div.u32": ("div.u32 {d}, {0}, {1};", (32, 32, 32), ([7, -1], [2, 2]), [3, 0x7FFFFFFF]),
    "div.s32 cuts": (
        "div.s32 {d}, {0}, {1};",
        (32, 32, 32),
        ([-7, 7, -7, 6, 1 << 31], [2, -2, -2, 2, 1]),
        [-3, -3, 3, 3, 1 << 31],
    ),
    "div.s64 cuts": ("div.s64 {d}, {0}, 3;", (64, 64), ([-1, -3, -4, 4],), [0, -1, -1, 1]),
    "rem.s32": ("rem.s32 {d}, {0}, {1};", (32, 32, 32), ([-7, 7, -7], [2, -2, -2]), [-1, 1, -1]),
    "rem.u64": ("rem.u64 {d}, {0}, 10;", (64, 64), ([-1],), [5]),
    "and, or, xor": (
        "and.b32 %r20, {0}, {1};\nor.b32 %r21, %r20, 256;\nxor.b32 {d}, %r21, {0};",
        (32, 32, 32),
        ([0b1100], [0b1010]),
        [0b100000100],
    ),
    "not.b64": ("not.b64 {d}, {0};", (64, 64), ([0],), [-1]),
    "lop3.b32": (
        "lop3.b32 {d}, {0}, {1}, {2}, 0xEA;",  # 0xAA is the third, 0xF0 & 0xCC the first two's and
        (32, 32, 32, 32),
        ([0x0F], [0x33], [0x40]),
        [0x43],
    ),
    "lop3.b32 of one row": (
        "lop3.b32 {d}, {0}, {1}, {2}, 0x10;",
        (32, 32, 32, 32),
        ([0xF0], [0xCC], [0xAA]),
        [0x10],
    ),
    "bfe.u32": (
        "bfe.u32 {d}, {0}, {1}, {2};",
        (32, 32, 32, 32),
        ([0x12345678] * 5 + [-1], [8, 24, 28, 40, 4, 0], [8, 8, 8, 8, 0, 32]),
        [0x56, 0x12, 1, 0, 0, -1],
    ),
    "bfe.u64": (
        "bfe.u64 {d}, {0}, {1}, {2};",
        (64, 64, 32, 32),
        ([-1, 0xABCD << 40, -1, 5], [60, 40, 70, 0], [8, 8, 8, 0]),
        [15, 0xCD, 0, 0],
    ),
    "bfe.s64": (
        "bfe.s64 {d}, {0}, {1}, {2};",
        (64, 64, 32, 32),
        ([0xABCD << 40, 1 << 63, 1 << 63, 7 << 61], [40, 60, 80, 0], [8, 8, 8, 64]),
        [0xCD - 256, -8, -1, (7 << 61) - (1 << 64)],
    ),
    "bfe.s32": (
        "bfe.s32 {d}, {0}, {1}, {2};",
        (32, 32, 32, 32),
        ([0x8000F070] * 5, [4, 12, 28, 4, 40], [4, 4, 8, 0, 8]),
        [7, -1, -8, 0, -1],
    ),
    "bfi.b32": (
        "bfi.b32 {d}, {0}, {1}, {2}, {3};",
        (32, 32, 32, 32, 32),
        ([0xABCD] * 5, [0x11111111] * 5, [8, 24, 28, 40, 0], [8, 16, 0, 4, 32]),
        [0x1111CD11, 0xCD111111, 0x11111111, 0x11111111, 0xABCD],
    ),
    "prmt": ("prmt.b32 {d}, {0}, {1}, 0x0123;", (32, 32, 32), ([0x44332211], [0]), [0x11223344]),
    "prmt of both": (
        "prmt.b32 {d}, {0}, {1}, 0x7632U;",
        (32, 32, 32),
        ([0x03020100], [0x07060504]),
        [0x07060302],
    ),
    "prmt's signs": (
        "prmt.b32 {d}, {0}, {1}, 0xB8A0;",
        (32, 32, 32),
        ([0x80FF7F85], [0]),
        [0xFFFFFF85],
    ),
    "mov packs the lowest first": (
        "mov.b32 {d}, {{0}, {1}};",
        (32, 16, 16),
        ([0x1111], [0x2222]),
        [0x22221111],
    ),
    "mov unpacks": (
        "mov.b64 {%r20, %r21}, {0};\nmov.b32 {d}, %r21;",
        (32, 64),
        ([0x1111111122222222],),
        [0x11111111],
    ),
    "mov unpacks to a sink": ("mov.b32 {_, {d}}, {0};", (16, 32), ([0x11112222],), [0x1111]),
    "mov unpacks four": (
        "mov.b64 {_, _, {d}, _}, {0};",
        (16, 64),
        ([0x4444333322221111],),
        [0x3333],
    ),
    "guards": (
        "mov.b32 {d}, 7;\nsetp.eq.s32 %p1, {0}, 1;\n@%p1 mov.b32 {d}, 8;\n"
        "@!%p1 add.s32 {d}, {d}, -2;",
        (32, 32),
        ([1, 2],),
        [8, 5],
    ),
    "predicates are numbers of one bit": (
        "setp.eq.b32 %p1, {0}, 1;\nsetp.lt.u32 %p2, {0}, 3;\nxor.pred %p3, %p1, %p2;\n"
        "not.pred %p4, %p3;\nmov.pred %p5, %p4;\nselp.b32 {d}, 5, 6, %p5;",
        (32, 32),
        ([1, 2, 3],),
        [5, 6, 5],
    ),
    "setp, signed and not": (
        "setp.lt.s32 %p1, {0}, {1};\nselp.b32 %r20, 1, 0, %p1;\n"
        "setp.lt.u32 %p2, {0}, {1};\nselp.b32 {d}, 2, %r20, %p2;",
        (32, 32, 32),
        ([-1, 1], [0, 2]),
        [1, 2],
    ),
    "setp.and": (
        "setp.gt.s32 %p1, {0}, 1;\nsetp.lt.and.s32 %p2, {0}, 3, %p1;\nselp.b16 {d}, 1, 0, %p2;",
        (16, 32),
        ([1, 2, 3],),
        [0, 1, 0],
    ),
    "loops part and meet": (
        "mov.b32 {d}, 0;\nmov.b32 %r20, {0};\n$L1:\nsetp.eq.b32 %p1, %r20, 0;\n@%p1 bra $L2;\n"
        "add.s32 {d}, {d}, %r20;\nadd.s32 %r20, %r20, -1;\nbra.uni $L1;\n"
        "$L2:\nadd.s32 {d}, {d}, 100;",
        (32, 32),
        ([0, 1, 5, 3, 10],),
        [100, 101, 115, 106, 155],
    ),
    "a loop with its test at its end": (
        "mov.b32 {d}, 0;\n$L1:\nadd.s32 {d}, {d}, 3;\nsetp.lt.u32 %p1, {d}, {0};\n@%p1 bra $L1;",
        (32, 32),
        ([0, 4, 7, 3],),
        [3, 6, 9, 3],
    ),
    "cvt.s16.s8": ("cvt.s16.s8 {d}, {0};", (16, 16), ([0x1280, 0xFF7F, -1],), [0xFF80, 0x7F, -1]),
    "cvt.s32.s8": ("cvt.s32.s8 {d}, {0};", (32, 16), ([0x1280, 0xFF7F],), [-128, 127]),
    "cvt.u16.u8": ("cvt.u16.u8 {d}, {0};", (16, 32), ([0x1280],), [0x80]),
    "cvt.u16.u32": ("cvt.u16.u32 {d}, {0};", (16, 32), ([0x12345678, -1],), [0x5678, -1]),
    "cvt.u32.u16": ("cvt.u32.u16 {d}, {0};", (32, 16), ([0x8000, -1],), [0x8000, 0xFFFF]),
    "cvt.u64.u32": ("cvt.u64.u32 {d}, {0};", (64, 32), ([1 << 31],), [1 << 31]),
    "cvt.s64.s32": ("cvt.s64.s32 {d}, {0};", (64, 32), ([1 << 31],), [-(1 << 31)]),
    "cvt.u32.u64": ("cvt.u32.u64 {d}, {0};", (32, 64), ([0x123456789ABCDEF0],), [0x9ABCDEF0]),
    "cvt.rn.f32.s32": (
        "cvt.rn.f32.s32 {d}, {0};",
        (32, 32),
        ([16777217, 16777219, -16777217, 64],),
        f32(16777216, 16777220, -16777216, 64),
    ),
    "cvt.rn.f64.s32": ("cvt.rn.f64.s32 {d}, {0};", (64, 32), ([-3],), [0xC008000000000000]),
    "cvt.rn.f32.u16": ("cvt.rn.f32.u16 {d}, {0};", (32, 16), ([-1],), f32(65535)),
    "cvt.f64.f32": (
        "cvt.f64.f32 {d}, {0};",
        (64, 32),
        (f32(1.5, -0.0, 2**-149),),
        [0x3FF8000000000000, 1 << 63, 0x36A0000000000000],
    ),
    "cvt.rn.f32.f64": (  # ties, subnormals, what is beyond all numbers, NaN
        "cvt.rn.f32.f64 {d}, {0};",
        (32, 64),
        (
            [
                *(0x3FF0000010000000, 0x3FF0000030000000, 0x3FF0000010000001, 0xBFF000000FFFFFFF),
                *(0x3690000000000000, 0x3690000000000001, 0x36A8000000000000, 0xB800000010000000),
                *(0x47EFFFFFEFFFFFFF, 0x47EFFFFFF0000000, 0xFFF0000000000000, 0xFFF8000000000007),
            ],
        ),
        [
            *(0x3F800000, 0x3F800002, 0x3F800001, 0xBF800000),
            *(0, 1, 2, 0x80400000),
            *(0x7F7FFFFF, INFINITY, 0xFF800000, NAN),
        ],
    ),
    "cvt.rn.bf16.f32": (
        "cvt.rn.bf16.f32 {d}, {0};",
        (16, 32),
        (
            [
                *f32(1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-23, -0.0, 2**-134, 3 * 2**-134),
                *(0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000, INFINITY, 0x7F800001, 0xFFC00000),
            ],
        ),
        [
            *(0x3F80, 0x3F82, 0x3F81, 0x8000, 0, 2),
            *(0x7F7F, 0x7F80, 0xFF80, 0x7F80, 0x7FFF, 0x7FFF),
        ],
    ),
    "cvt.rn.bf16x2.f32": (
        "cvt.rn.bf16x2.f32 {d}, {0}, {1};",
        (32, 32, 32),
        (f32(1, -2), f32(-0.0, 3)),
        [0x3F808000, 0xC0004040],
    ),
    "cvt.rn.f16x2.f32": (
        "cvt.rn.f16x2.f32 {d}, {0}, {1};",
        (32, 32, 32),
        (f32(1, 65520), f32(-0.0, 2**-25)),
        [0x3C008000, 0x7C000000],
    ),
    "cvt.rn.f16x2.e4m3x2": (
        "{\ncvt.rn.f16x2.e4m3x2 {d}, {0};\n}",
        (32, 16),
        ([0x0180, 0x7E08, 0x7FFF, 0xB807],),
        [0x18008000, 0x5F002400, 0x7FFF7FFF, 0xBC002300],
    ),
    "cvt.rn.f16.f32": (
        "cvt.rn.f16.f32 {d}, {0};",
        (16, 32),
        (
            [
                *f32(65504, 65519.996, 65520, 2**-24, 2**-25, 2**-25 * (1 + 2**-20), 1.5 * 2**-24),
                *f32(2.5 * 2**-24, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, -65536, 2047 * 2**-25, 3e38),
                *f32(2**-14 * (1 - 2**-12), 1e-45, -1e-45),
                *(INFINITY, 0x7FC00000, 0xFF800001, NAN),
            ],
        ),
        [
            *(0x7BFF, 0x7BFF, 0x7C00, 1, 0, 1, 2),
            *(2, 0x8000, 0x3C00, 0x3C02, 0xFC00, 0x400, 0x7C00),
            *(0x400, 0, 0x8000),
            *(0x7C00, 0x7FFF, 0x7FFF, 0x7FFF),
        ],
    ),
    "cvt.rzi.s32.f32": (
        "cvt.rzi.s32.f32 {d}, {0};",
        (32, 32),
        ([*f32(2.9, -2.9, 3e9, -3e9), NAN, 0xFF800000],),
        [2, -2, (1 << 31) - 1, -(1 << 31), 0, -(1 << 31)],
    ),
    "cvt.rni.s32.f32": ("cvt.rni.s32.f32 {d}, {0};", (32, 32), (f32(2.5, -3.5),), [2, -4]),
    "popc.b64": ("popc.b64 {d}, {0};", (32, 64), ([-1, 0, 5 << 40],), [64, 0, 2]),
    "clz.b32": ("clz.b32 {d}, {0};", (32, 32), ([1, 0, -1, 0x8000],), [31, 32, 0, 16]),
    "brev.b32": ("brev.b32 {d}, {0};", (32, 32), ([1, 0x12345678],), [1 << 31, 0x1E6A2C48]),
    "max.relu.s32": (
        "max.relu.s32 {d}, {0}, {1};",
        (32, 32, 32),
        ([-5, -5, 7], [-9, 3, -1]),
        [0, 3, 7],
    ),
    "min.relu.s32": ("min.relu.s32 {d}, {0}, 4;", (32, 32), ([-5, 3, 7],), [0, 3, 4]),
    "max of three": (
        "max.NaN.f32 %r10, {0}, {1}, {2};\nmax.f32 {d}, {0}, %r10, {2};",
        (32, 32, 32, 32),
        (f32(1, -1, 1), f32(3, -0.0, 2), [*f32(2, 0), NAN]),
        [*f32(3, 0, 1)],
    ),
    "shfl.sync.up.b32": (
        "shfl.sync.up.b32 {d}, {0}, 4, 0, -1;",
        (32, 32),
        (range(64),),
        [lane - 4 if lane % 32 >= 4 else lane for lane in range(64)],
    ),
    "shfl.sync.down.b32": (
        "shfl.sync.down.b32 {d}, {0}, 1, 31, -1;",
        (32, 32),
        (range(32),),
        [*range(1, 32), 31],
    ),
    "shfl.sync.bfly.b32": (
        "shfl.sync.bfly.b32 {d}, {0}, 19, 31, -1;",
        (32, 32),
        (range(32),),
        [lane ^ 19 for lane in range(32)],
    ),
    "shfl.sync.idx.b32 in segments of 8": (  # 31, of each, less 24 for those that are a segment's
        "shfl.sync.idx.b32 {d}, {0}, {1}, 0x181F, -1;",
        (32, 32, 32),
        (range(32), [5] * 32),
        [lane // 8 * 8 + 5 for lane in range(32)],
    ),
    "vote.sync.ballot.b32": (
        "and.b32 %r10, {0}, 3;\nsetp.eq.s32 %p1, %r10, 1;\nvote.sync.ballot.b32 {d}, %p1, -1;",
        (32, 32),
        (range(32),),
        [0x22222222] * 32,
    ),
    "vote.sync.any.pred": (
        "setp.eq.s32 %p1, {0}, 40;\nvote.sync.any.pred %p2, %p1, -1;\nselp.b32 {d}, 1, 0, %p2;",
        (32, 32),
        (range(64),),
        [0] * 32 + [1] * 32,
    ),
    "redux.sync.add.s32": (
        "redux.sync.add.s32 {d}, {0}, -1;",
        (32, 32),
        (range(-40, 24),),
        [sum(range(-40, -8))] * 32 + [sum(range(-8, 24))] * 32,
    ),
    "redux.sync.min.s32": (
        "mov.b32 %r10, -1;\nredux.sync.min.s32 {d}, {0}, %r10;",
        (32, 32),
        (range(-9, 23),),
        [-9] * 32,
    ),
    "redux.sync.max.u32": (
        "redux.sync.max.u32 {d}, {0}, -1;",
        (32, 32),
        (range(-9, 23),),
        [-1] * 32,
    ),
    "redux.sync.xor.b32": (
        "redux.sync.xor.b32 {d}, {0}, -1;",
        (32, 32),
        ([1 << lane for lane in range(32)],),
        [-1] * 32,
    ),
    "redux.sync.max.f32": (
        "redux.sync.max.f32 {d}, {0}, -1;",
        (32, 32),
        ([NAN, *f32(*range(-33, -2))],),
        f32(-3) * 32,
    ),
    "redux.sync.max.NaN.f32": (
        "redux.sync.max.NaN.f32 {d}, {0}, -1;",
        (32, 32),
        ([*f32(*range(31)), 0x7FC12345],),
        [NAN] * 32,
    ),
    "add.rn.f32": (
        "add.rn.f32 {d}, {0}, {1};",
        (32, 32, 32),
        (
            [1, 0x80000001, 0x7F7FFFFF, INFINITY, 1 << 31, 1 << 31, 0x7FC12345, *f32(1, 1)],
            [1, 1, 0x7F7FFFFF, 0xFF800000, 1 << 31, 0, *f32(1, 2**-24, 3 * 2**-24)],
        ),
        [2, 0, INFINITY, NAN, 1 << 31, 0, NAN, *f32(1, 1 + 2**-22)],
    ),
    "sub.rn.f32": ("sub.rn.f32 {d}, {0}, {1};", (32, 32, 32), (f32(1, 1), f32(3, 1)), f32(-2, 0)),
    "add.rn.f32.f16": (
        "add.rn.f32.f16 {d}, {0}, {1};",
        (32, 16, 32),
        ([0x3C00, 0x0001, 0x7C01, 0xFC00], [1, 0x80000000, *f32(1), INFINITY]),
        [*f32(1, 2**-24), NAN, NAN],
    ),
    "add.rn.f64": (
        "add.rn.f64 {d}, {0}, 0d3FF0000000000000;",
        (64, 64),
        ([1, 0x3CA0000000000001],),
        [0x3FF0000000000000, 0x3FF0000000000001],
    ),
    "mul.rn.f32 keeps subnormals": (
        "mul.rn.f32 {d}, {0}, {1};",
        (32, 32, 32),
        ([0x00800000, 3, 0, 1 << 31], f32(0.5, 0.5, float("inf"), 2)),
        [0x00400000, 2, NAN, 1 << 31],
    ),
    "two of fp32 at a time": (
        "add.rn.f32x2 %rd10, {0}, {1};\nmul.rn.f32x2 {d}, %rd10, {0};",
        (64, 64, 64),
        ([f32(1)[0] << 32 | 1], [INFINITY << 32 | f32(2)[0]]),
        [INFINITY << 32 | 2],
    ),
    "a NaN of two": (
        "sub.rn.f32x2 {d}, {0}, {1};",
        (64, 64, 64),
        ([INFINITY << 32 | 7], [INFINITY << 32 | 3]),
        [NAN << 32 | 4],
    ),
    "div.rn.f32": (
        "div.rn.f32 {d}, {0}, {1};",
        (32, 32, 32),
        (f32(1, 1, 0, 2**-126, -1, 5), f32(3, 0, 0, 2, 0, 5)),
        [0x3EAAAAAB, INFINITY, NAN, 0x00400000, 0xFF800000, 0x3F800000],
    ),
    "div.rn.f32 by a constant": (
        "div.rn.f32 {d}, {0}, 0f40400000;",
        (32, 32),
        (f32(1),),
        [0x3EAAAAAB],
    ),
    "div.rn.f64": (
        "div.rn.f64 {d}, {0}, {1};",
        (64, 64, 64),
        ([0x3FF0000000000000], [0x4008000000000000]),
        [0x3FD5555555555555],
    ),
}
_ZEROS = [0, 1 << 31, 1 << 31, 0]
_LEAST = (
    [*_ZEROS, 0x7FC00000, *f32(1, 1), 0x7FC00000],
    [1 << 31, 0, 1 << 31, 0, *f32(1), 0xFFC00000, *f32(2), NAN],
)
for _op, _zeros, _of_two in (("min", [1 << 31] * 3 + [0], 1), ("max", [0, 0, 1 << 31, 0], 2)):
    for _how, _with_nan in ((".NaN", NAN), ("", f32(1)[0])):
        CASES[f"{_op}{_how}.f32"] = (
            f"{_op}{_how}.f32 {{d}}, {{0}}, {{1}};",
            (32, 32, 32),
            _LEAST,
            [*_zeros, _with_nan, _with_nan, *f32(_of_two), NAN],
        )
for _how, _want in {
    **{"eq": [0, 0, 1, 1, 0], "ne": [0, 0, 0, 0, 1], "lt": [0, 0, 0, 0, 1], "gt": [0] * 5},
    **{"num": [0, 0, 1, 1, 1], "nan": [1, 1, 0, 0, 0], "le": [0, 0, 1, 1, 1]},
    **{"neu": [1, 1, 0, 0, 1], "ltu": [1, 1, 0, 0, 1], "equ": [1, 1, 1, 1, 0]},
}.items():
    CASES[f"setp.{_how}.f32"] = (
        f"setp.{_how}.f32 %p1, {{0}}, {{1}};\nselp.b32 {{d}}, 1, 0, %p1;",
        (32, 32, 32),
        ([0x7FC00000, *f32(1, 1, 0.0, 1)], [*f32(1), 0x7FC00000, *f32(1, -0.0, 2)]),
        _want,
    )


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_isas(name):
    text, bits, columns, want = CASES[name]
    got = computed(text, bits, columns)
    assert [hex(each) for each in got] == [hex(int(x) & (1 << bits[0]) - 1) for x in want]


def test_all_of_fp16_to_fp32_and_back():
    half = np.arange(1 << 16, dtype=np.uint16)
    nan = np.isnan(half.view(np.float16))
    wide = np.where(nan, NAN, half.view(np.float16).astype(np.float32).view(np.uint32))
    assert np.array_equal(computed("cvt.f32.f16 {d}, {0};", (32, 16), [half]), wide)
    back = computed("cvt.rn.f16.f32 {d}, {0};", (16, 32), [wide])
    assert np.array_equal(back, np.where(nan, 0x7FFF, half))


def test_fp16_is_rounded_as_numpy_does():
    random = np.random.default_rng(1)
    bits = random.integers(0, 1 << 32, 20000, np.uint32)
    halves = random.integers(0, 1 << 16, 20000, np.uint16).view(np.float16)
    ties = (
        halves.astype(np.float32).view(np.uint32) + random.integers(0, 3, 20000, np.uint32) * 0x1000
    )
    numbers = np.concatenate([bits, ties])
    numbers = numbers[~np.isnan(numbers.view(np.float32))]
    with np.errstate(over="ignore"):
        want = numbers.view(np.float32).astype(np.float16).view(np.uint16)
    assert np.array_equal(computed("cvt.rn.f16.f32 {d}, {0};", (16, 32), [numbers]), want)


# What may change bits, what the machine has no model of, what is not there.
@pytest.mark.parametrize(
    "statement",
    [
        *("add.f32 %r1, %r2, %r3;", "mul.f32 %r1, %r2, %r3;", "add.rn.ftz.f32 %r1, %r2, %r3;"),
        *("fma.rn.f32 %r1, %r2, %r3, %r4;", "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;"),
        *("div.full.f32 %r1, %r2, %r3;", "div.approx.f32 %r1, %r2, %r3;", "rcp.rn.f32 %r1, %r2;"),
        *("add.rz.f32 %r1, %r2, %r3;", "sqrt.rn.f32 %r1, %r2;", "cvt.rz.f16.f32 %rs1, %r2;"),
        *("mul.s16x2 %r1, %r2, %r3;", "mul.rn.f32.f16 %r1, %rs2, %r3;"),
        *("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r2];",),
        *("stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r2], {%r1};",),
        *("redux.sync.add.f32 %r1, %r2, -1;", "match.any.sync.b32 %r1, %r2, -1;"),
        *("atom.global.gpu.relaxed.add.f32 %r1, [%rd1], %r2;", "bar.warp.sync 1;"),
        *("atom.global.gpu.relaxed.exch.b32 %r1, [%rd1], %r2;", "cvt.rmi.ftz.f32.f32 %r1, %r2;"),
        *("ld.global.nc.b32 %r1, [%rd1];", "ld.volatile.global.v2.b32 {%r1, %r2}, [%rd1];"),
        *("atom.global.add.u32 %r1, [%rd1], 1;", "red.global.add.u32 [%rd1], 1;", "bar.sync 1;"),
        *("ld.shared.b32 %r1, [%rd2];", "ld.b32 %r1, [%rd2];", "st.local.b32 [%rd1], %r1;"),
        *("mov.b32 %r1, %laneid;", "mov.b32 %r1, %r40;", "mov.b32 %r1, %rd1;", "mov.b32 %q1, 1;"),
        *("add.s32 %r1, %r2;", "ld.global.v4.b32 {%r1, %r2}, [%rd1];", "add.rn.f32 %r1, %r2, 1;"),
        *("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];", "ld.param.b64 %rd1, [k_param_0+8];"),
        *("shfl.sync.bfly.b32 %r1, %r2, 1, 31;", ".shared .align 16 .b8 s[16];"),
        *("{ .reg .b32 %q; }", "{\n.reg .b32 %q;\n}", "call f, ();"),
    ],
)
def test_what_is_not_known_is_an_error(statement):
    with pytest.raises(PtxError):
        Launch(kernel(statement, 1), range(1), Memory(), [0])


READ = "ld.param.b64 %rd1, [k_param_0];\nmov.b32 %r30, %tid.x;\n"


def launched(text, size=64, skew=0, written=True, writable=True, shared=0, blocks=1):
    """A launch over one buffer, and the memory."""
    memory = Memory()
    if not writable:
        at = memory.read_only("buffer", np.zeros(size, np.uint8), skew)
    else:
        at = memory.allocate("buffer", size, skew)
        if written:
            memory.put(at, np.zeros(size, np.uint8))
    Launch(kernel(READ + text, 1), range(blocks), memory, [at], shared).run()
    return memory


OWN_WORD = "mad.wide.u32 %rd2, %r30, 4, %rd1;\n"
NEXT_WORD = "xor.b32 %r29, %r30, 1;\nmad.wide.u32 %rd3, %r29, 4, %rd1;\n"


OF_ITS_BLOCK = (
    "mov.b32 %r29, %ctaid.x;\nmad.lo.s32 %r28, %r29, 32, %r30;\nmad.wide.u32 %rd2, %r28, 4, %rd1;\n"
)
ATOMIC = "red.global.gpu.relaxed.add.u32 [%rd1], 1;\n"
FIRST_STORES = "setp.eq.b32 %p1, %r30, 0;\n@%p1 st.global.b32 [%rd1], 7;\n"
SAME_BYTES = "mov.b32 %r27, global_smem;\nst.shared.b32 [%r27], 5;\n"
OWN_PLACE = "mov.b32 %r27, global_smem;\nmad.lo.s32 %r28, %r30, 4, %r27;\n"


@pytest.mark.parametrize(
    ("why", "text", "options"),
    [
        ("misaligned load of 16", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+8];", {}),
        ("misaligned load of 32", "ld.global.v4.b64 {%rd2, %rd3, %rd4, %rd5}, [%rd1+16];", {}),
        ("misaligned load of 2", "ld.global.b16 %rs1, [%rd1 + 1];", {}),
        ("misaligned store of 8", "st.global.v2.b32 [%rd1], {%r1, %r2};", {"skew": 4}),
        ("load of 1 bytes", "ld.global.b8 %rs1, [%rd1+64];", {}),
        ("load of 1 bytes", "ld.global.b8 %rs1, [%rd1+-1];", {}),
        ("load of 16 bytes", "ld.global.v2.b64 {%rd2, %rd3}, [%rd1];", {"size": 15}),
        ("far out of bounds", "ld.global.b8 %rs1, [%rd2];", {}),
        ("store of 4 bytes", "st.global.b32 [%rd1], %r1;", {"writable": False}),
        ("load of 4 bytes", "ld.global.b32 %r1, [%rd1];", {"written": False}),
        ("two lanes store", "st.global.b32 [%rd1], %r1;", {}),
        (
            "another lane has loaded",
            f"{OWN_WORD}{NEXT_WORD}ld.global.b32 %r1, [%rd3];\nst.global.b32 [%rd2], %r1;",
            {"size": 128},
        ),
        (
            "another lane has loaded",
            f"{OWN_WORD}ld.global.b32 %r1, [%rd1];\nst.global.b32 [%rd2], %r1;",
            {"size": 128},
        ),
        (
            "another lane has written",
            f"{OWN_WORD}{NEXT_WORD}st.global.b32 [%rd2], %r1;\nld.global.b32 %r1, [%rd3];",
            {"size": 128},
        ),
        (  # a barrier orders nothing of another block's
            "another lane has written in this launch what this one loads",
            f"{OF_ITS_BLOCK}st.global.b32 [%rd2], %r30;\nbar.sync 0;\nld.global.b32 %r1, [%rd1];",
            {"size": 256, "blocks": 2},
        ),
        (
            "part of a block",
            "setp.eq.b32 %p1, %r30, 3;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:\nmov.b32 %r1, 0;",
            {},
        ),
        (
            "a part of a warp",
            "setp.eq.b32 %p1, %r30, 3;\n@%p1 bra $L1;\nbar.warp.sync -1;\n$L1:\nmov.b32 %r1, 0;",
            {},
        ),
        (
            "a part of a warp",
            "setp.eq.b32 %p1, %r30, 3;\n@%p1 shfl.sync.idx.b32 %r1, %r30, 0, 31, -1;",
            {},
        ),
        ("for a part of a warp", "redux.sync.add.s32 %r1, %r30, 1;", {}),
        ("shared of block 0.32. of 32", "st.shared.b8 [global_smem+32], 1;", {"shared": 32}),
        ("not there for it", f"{OWN_PLACE}ld.shared.b32 %r1, [%r28];", {"shared": 128}),
        (
            "another lane has written",
            f"{OWN_PLACE}st.shared.b32 [%r28], %r1;\nld.shared.b32 %r1, [global_smem];",
            {"shared": 128},
        ),
        (
            "another lane has loaded",
            f"{OWN_PLACE}st.shared.b32 [%r28], %r1;\nbar.sync 0;\n"
            "ld.shared.b32 %r1, [global_smem];\nst.shared.b32 [%r28], %r1;",
            {"shared": 128},
        ),
        (
            "misaligned row",
            f"{OWN_PLACE}st.shared.b32 [%r28], %r1;\nbar.sync 0;\n"
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r28];",
            {"shared": 128},
        ),
        (
            "two lanes store",
            "mov.b32 %r27, global_smem;\nst.shared.b32 [%r27], %r30;",
            {"shared": 128},
        ),
        (
            "another lane has written what this one stores",
            f"{OWN_PLACE}st.shared.b32 [%r28], %r30;\nst.shared.b32 [global_smem], 1;",
            {"shared": 128},
        ),
        (
            "another lane has written in this launch what this one loads",
            f"{SAME_BYTES}ld.shared.b32 %r1, [%r27];",
            {"shared": 128},
        ),
        (
            "another lane has written in this launch",
            f"{ATOMIC}ld.global.b32 %r1, [%rd1];",
            {},
        ),
        (
            "another lane has loaded what this one changes",
            f"ld.global.b32 %r1, [%rd1];\n{ATOMIC}",
            {},
        ),
        (
            "another lane has written what this one changes",
            f"{FIRST_STORES}ld.volatile.global.b32 %r1, [%rd1];",
            {},
        ),
        ("another lane has written what this one stores", f"{ATOMIC}st.global.b32 [%rd1], 0;", {}),
        (
            "not there for it",
            f"{OWN_PLACE}atom.relaxed.cta.shared.add.u32 %r1, [%r28], 1;",
            {"shared": 128},
        ),
        ("divided by 0", "div.s32 %r1, %r30, %r30;", {}),
        ("no end", "$L1:\nbra.uni $L1;", {}),
    ],
)
def test_what_a_gpu_would_fault_on_is_a_trap(why, text, options):
    with pytest.raises(Trap, match=why):
        launched(text, **options)


def test_what_is_in_order_is_counted():
    text = (
        f"{OWN_WORD}ld.global.b32 %r1, [%rd2];\nbar.sync 0;\nadd.s32 %r1, %r1, 7;\n"
        "st.global.b32 [%rd2], %r1;\n"
        "setp.lt.u32 %p1, %r30, 2;\nmad.wide.u32 %rd4, %r30, 16, %rd1;\n"
        "@%p1 ld.global.v2.b64 {%rd5, %rd6}, [%rd4 + 128];"
    )
    memory = launched(text, size=160)
    at = memory.buffers[0].address
    assert np.array_equal(memory.get(at, np.empty(32, np.uint32)), np.full(32, 7))
    assert memory.loads == {4: 32, 16: 2}
    assert memory.stores == {4: 32}
    assert (memory.reads[memory.place(at, 160)] == 1).all()
    assert (memory.writes[memory.place(at, 128)] == 1).all()
    assert memory.writes.sum() == 128


DEPOT = ".local .align 1 .b8 __local_depot0[1];\n.reg .b64 %SP;\n.reg .b32 %SPL;\n"


def test_a_stack_may_be_declared_but_not_used():
    memory = launched(f"{DEPOT}{OWN_WORD}st.global.b32 [%rd2], 1;", size=128)
    assert memory.stores == {4: 32}
    for text in ("st.local.b32 [%SP], %r1;", "add.s64 %rd2, %SP, 1;"):
        with pytest.raises(PtxError):
            launched(f"{DEPOT}{text}")


def test_volatile_loads_are_in_order_with_atomic_operations():
    load = "ld.volatile.global.b32 %r1, [%rd1];\n"
    memory = launched(f"{load}{ATOMIC}{load}")
    assert memory.get(memory.buffers[0].address, np.zeros(1, np.uint32)) == 32
    assert memory.loads == {4: 64}
    assert memory.changes == {4: 32}


def test_numbers_of_32_bits_are_parameters_too():
    text = kernel("ld.param.s32 %rd1, [k_param_0];\nld.param.b64 %rd2, [k_param_1];", 2)
    text = text._replace(parameters={"k_param_0": 32, "k_param_1": 64})
    launch = Launch(text, range(1), Memory(), [-3, 1 << 40])
    launch.run()
    assert launch.registers["%rd1"].view(np.int64)[0] == -3
    assert launch.registers["%rd2"][0] == 1 << 40


def test_buffers_may_be_far_apart_and_blocks_far_on():
    text = "mov.u32 %r1, %ctaid.x;\nmad.wide.u32 %rd2, %r1, 1024, %rd1;\nld.global.b32 %r2, [%rd2];"
    memory = Memory()
    at = memory.allocate("far", 2048, far=(1 << 40))
    memory.put(at, np.arange(512, dtype=np.uint32))
    launch = Launch(kernel(READ + text, 1), range(10**6, 10**6 + 2), memory, [at - 1024 * 10**6])
    launch.run()
    assert list(launch.registers["%r2"][::32]) == [0, 256]


def test_lanes_exchange_in_shared_memory():
    """Lane i of each block writes i and 64, and reads what lane 31 - i has written."""
    text = (
        f"{OWN_PLACE}add.s32 %r1, %r30, 64;\nst.shared.v2.b16 [%r28], {{%rs1, %rs2}};\n"
        "bar.sync 0;\nxor.b32 %r2, %r30, 31;\nmad.lo.s32 %r3, %r2, 4, %r27;\n"
        "ld.shared.b16 %r4, [%r3];\nld.shared.b16 %r5, [%r3 + 2];\nadd.s32 %r6, %r4, %r5;"
    ).replace("st.shared", "mov.b32 {%rs1, _}, %r30;\nmov.b32 {%rs2, _}, %r1;\nst.shared")
    launch = Launch(kernel(READ + text, 1), range(2), Memory(), [0], shared=128)
    launch.run()
    assert list(launch.registers["%r6"]) == [2 * (31 - i) + 64 for i in range(32)] * 2


def test_matrices_are_loaded_by_rows():
    """A warp's lanes have written 16 bytes each, which are the rows, the last first."""
    text = (
        "mov.b32 %r27, global_smem;\nmad.lo.s32 %r28, %r30, 16, %r27;\nmul.lo.s32 %r10, %r30, 4;\n"
        "add.s32 %r11, %r10, 1;\nadd.s32 %r12, %r10, 2;\nadd.s32 %r13, %r10, 3;\n"
        "st.shared.v4.b32 [%r28], {%r10, %r11, %r12, %r13};\nbar.sync 0;\n"
        "xor.b32 %r14, %r30, 31;\nmad.lo.s32 %r15, %r14, 16, %r27;\n"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r15];"
    )
    launch = Launch(kernel(READ + text, 1), range(2), Memory(), [0], shared=512)
    launch.run()
    for matrix in range(4):
        row = 31 - 8 * matrix - np.arange(32) // 4
        want = 4 * row + np.arange(32) % 4
        assert list(launch.registers[f"%r{matrix + 1}"]) == [*want, *want]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_stored_by_rows(count):
    """Rows of 16 bytes of lanes' words, and loaded again turned: halves of a column."""
    names = "{" + ", ".join(f"%r{1 + number}" for number in range(count)) + "}"
    turned = "{" + ", ".join(f"%r{11 + number}" for number in range(count)) + "}"
    lines = [
        "mov.b32 %r27, global_smem;\nmad.lo.s32 %r28, %r30, 16, %r27;",
        # The halves of word i are 2 i and 2 i + 1; each matrix has 64 more.
        "mul.lo.s32 %r10, %r30, 0x20002;\nadd.s32 %r1, %r10, 0x10000;",
        *(f"add.s32 %r{1 + number}, %r1, {0x400040 * number};" for number in range(1, count)),
        f"stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%r28], {names};\nbar.sync 0;",
        f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {turned}, [%r28];\nbar.sync 0;",
        f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [%r28], {turned};\nbar.sync 0;",
        f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {names}, [%r28];",
    ]
    launch = Launch(kernel(READ + "\n".join(lines), 1), range(2), Memory(), [0], shared=512)
    launch.run()
    for number in range(count):
        halves = np.arange(64, dtype=np.uint16).reshape(8, 8) + np.uint16(64 * number)
        for register, want in ((1, halves), (11, halves.T)):
            words = np.ascontiguousarray(want).view(np.uint32).reshape(-1)
            assert list(launch.registers[f"%r{register + number}"]) == [*words, *words]


WARPS = 4
IN_WARPS = f"""
mov.b32 %r27, global_smem;
mad.lo.s32 %r28, %r30, 4, %r27;
xor.b32 %r29, %r30, 31;
mad.lo.s32 %r29, %r29, 4, %r27;
xor.b32 %r20, %r30, {32 * WARPS - 1};
mad.lo.s32 %r20, %r20, 4, %r27;
st.shared.b32 [%r28], %r30;
"""


def in_warps(text):
    """A launch of a block of several warps, in which each lane has stored its number."""
    several = kernel(READ + IN_WARPS + text, 1)._replace(threads=32 * WARPS)
    launch = Launch(several, range(1), Memory(), [0], shared=128 * WARPS)
    launch.run()
    return launch.registers


def test_a_barrier_orders_what_a_block_does_in_global_memory():
    """Its lanes load what others have written, and write there after one more barrier."""
    text = (
        f"{OF_ITS_BLOCK}xor.b32 %r27, %r28, 1;\nmad.wide.u32 %rd3, %r27, 4, %rd1;\n"
        "st.global.b32 [%rd2], %r28;\nbar.sync 0;\nld.global.b32 %r1, [%rd3];\n"
        "bar.sync 0;\nst.global.b32 [%rd2], %r1;\nbar.sync 0;\nst.global.b32 [%rd3], %r28;"
    )
    memory = launched(text, 256, blocks=2)
    found = memory.get(memory.buffers[0].address, np.empty(64, np.uint32))
    assert list(found) == list(np.arange(64) ^ 1)


def of_the_last_block(arrives, which=1):
    """Lanes store their numbers, and lane 0 of the last of two blocks (or of the first) loads the
    other block's first, and stores it in place of its own."""
    return launched(
        f"{OF_ITS_BLOCK}st.global.b32 [%rd2], %r28;\nmov.b32 %r1, 9;\n"
        f"setp.eq.b32 %p1, %r30, 0;\n{arrives}\nsetp.eq.b32 %p2, %r1, {which};\n"
        "xor.b32 %r27, %r28, 32;\nmad.wide.u32 %rd3, %r27, 4, %rd1;\n"
        "@%p2 ld.global.b32 %r2, [%rd3];\n@%p2 st.global.b32 [%rd2], %r2;",
        260,
        blocks=2,
    )


ARRIVES = "bar.sync 0;\n@%p1 atom.global.gpu.acq_rel.add.u32 %r1, [%rd1 + 256], 1;"


def test_the_last_block_gets_what_others_did_before_their_barriers():
    memory = of_the_last_block(ARRIVES)
    found = memory.get(memory.buffers[0].address, np.empty(65, np.uint32))
    assert sorted(found[[0, 32]]) in ([0, 0], [32, 32])
    assert found[64] == 2


@pytest.mark.parametrize(
    ("arrives", "which"),
    [
        (ARRIVES.replace("acq_rel", "relaxed"), 1),
        (ARRIVES.replace("bar.sync 0;\n", ""), 1),
        (ARRIVES, 0),
    ],
    ids=["relaxed", "no barrier", "not the last"],
)
def test_no_other_block_gets_it(arrives, which):
    with pytest.raises(Trap, match="written in this launch"):
        of_the_last_block(arrives, which)


def test_a_barrier_of_warps_orders_what_their_own_lanes_do():
    """Also of what several of them have loaded; the block's barrier orders the rest."""
    text = (
        "bar.warp.sync -1;\nld.shared.b32 %r1, [%r29];\nand.b32 %r21, %r28, 0xFFFFFF80;\n"
        "ld.shared.b32 %r2, [%r21];\nbar.warp.sync -1;\nst.shared.b32 [%r29], %r30;\n"
        "bar.sync 0;\nld.shared.b32 %r3, [%r20];"
    )
    found = in_warps(text)
    lane = np.arange(32 * WARPS)
    assert list(found["%r1"]) == list(lane ^ 31)
    assert list(found["%r2"]) == list(lane // 32 * 32)
    assert list(found["%r3"]) == list((32 * WARPS - 1 - lane) ^ 31)


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("written in this launch", "bar.warp.sync -1;\nld.shared.b32 %r1, [%r20];"),
        ("written what this", "bar.warp.sync -1;\nst.shared.b32 [%r20], %r30;"),
        ("written in this launch", "ld.shared.b32 %r1, [%r29];\nbar.warp.sync -1;"),
        (
            "loaded what this",
            "bar.warp.sync -1;\nld.shared.b32 %r1, [%r29];\nst.shared.b32 [%r28], %r30;",
        ),
        (  # by lanes of more than one warp
            "loaded what this",
            "bar.sync 0;\nld.shared.b32 %r1, [%r27];\nbar.warp.sync -1;\n"
            "st.shared.b32 [%r28], %r30;",
        ),
        (  # by a lane of another warp, and then by one of its own
            "loaded what this",
            "bar.sync 0;\nld.shared.b32 %r1, [%r20];\nbar.warp.sync -1;\n"
            "ld.shared.b32 %r1, [%r28];\nbar.warp.sync -1;\nst.shared.b32 [%r28], %r30;",
        ),
    ],
)
def test_a_barrier_of_warps_orders_no_more(why, text):
    with pytest.raises(Trap, match=why):
        in_warps(text)


def test_lanes_may_store_the_same_bytes_to_shared_memory():
    text = f"{SAME_BYTES}bar.sync 0;\nld.shared.b32 %r1, [%r27];"
    launch = Launch(kernel(READ + text, 1), range(2), Memory(), [0], shared=16)
    launch.run()
    assert list(launch.registers["%r1"]) == [5] * 64


def test_atomic_changes_come_one_after_the_other_in_no_order_to_rely_on():
    text = (
        "and.b32 %r2, %r30, 1;\nmad.wide.u32 %rd2, %r2, 4, %rd1;\n"
        "atom.global.gpu.acq_rel.add.u32 %r1, [%rd2], %r30;\n"
        "red.global.sys.relaxed.max.s32 [%rd1 + 8], %r30;"
    )
    memory = Memory()
    at = memory.allocate("counters", 12)
    memory.put(at, np.array([7, 100, 3], np.uint32))
    launch = Launch(kernel(READ + text, 1), range(2), memory, [at])
    launch.run()
    assert list(memory.get(at, np.empty(3, np.uint32))) == [7 + 480, 100 + 512, 31]
    assert memory.changes == {4: 128}
    got = launch.registers["%r1"]
    for place, first in ((0, 7), (1, 100)):
        lanes = [lane for lane in range(64) if lane % 2 == place]
        order = sorted(lanes, key=lambda lane: (got[lane], lane % 32 > 0))
        assert order != lanes
        total = first
        for lane in order:
            assert got[lane] == total
            total += lane % 32


ADDS = "red.global.gpu.relaxed.add.u32 [%rd1 + 260], 1;\n"


def counted_by_the_last_block(arrives):
    """Lanes of two blocks add to a word, which lane 0 of the last block loads, and makes 0."""
    memory = Memory()
    at = memory.allocate("words", 264)
    memory.put(at, np.zeros(66, np.uint32))
    text = (
        f"mov.b32 %r1, 9;\nsetp.eq.b32 %p1, %r30, 0;\n{arrives}\nsetp.eq.b32 %p2, %r1, 1;\n"
        "@%p2 ld.global.b32 %r2, [%rd1 + 260];\n@%p2 st.global.b32 [%rd1], %r2;\n"
        "mov.b32 %r3, 0;\n@%p2 st.global.b32 [%rd1 + 260], %r3;"
    )
    Launch(kernel(READ + text, 1), range(2), memory, [at]).run()
    return memory.get(at, np.empty(66, np.uint32))


def test_the_last_block_gets_what_atomic_operations_changed():
    found = counted_by_the_last_block(ADDS + ARRIVES)
    assert list(found[[0, 64, 65]]) == [64, 2, 0]


@pytest.mark.parametrize(
    "arrives",
    [ADDS + ARRIVES.replace("acq_rel", "relaxed"), ADDS + ARRIVES[11:], f"{ARRIVES}\n{ADDS}"],
    ids=["relaxed", "no barrier", "behind the count"],
)
def test_no_other_block_gets_what_atomic_operations_changed(arrives):
    with pytest.raises(Trap, match="written in this launch"):
        counted_by_the_last_block(arrives)


def test_registers_start_as_garbage():
    text = f"{OWN_WORD}xor.b32 %r1, %r2, %r3;\nst.global.b32 [%rd2], %r1;"
    memory = launched(text, size=128)
    assert len(set(memory.get(memory.buffers[0].address, np.empty(32, np.uint32)))) > 30
