"""What the instructions of PTX compute that touch registers alone, over NumPy arrays.

Floats are added, multiplied and divided by the processor, one IEEE operation each; a NaN that they
make is the ISA's 0x7fffffff, of fp64 one with an odd payload, which the ISA leaves open. There is
no fused, flushing or approximate operation, and none without `.rn`: ptxas may fuse such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
# Where the ISA leaves open which NaN it is.
OPEN_NAN = {
    16: np.uint16(0xFEBA).view(np.float16),
    32: np.uint32(0xFFC0BAD0).view(np.float32),
}
NAN = {32: np.uint32(0x7FFFFFFF), 64: np.uint64(0xFFF800000000BAD0)}


class Type(NamedTuple):
    """`u32`, `f16`, `pred`: a kind of s, u, b, f or p, and bits."""

    kind: str
    bits: int

    @property
    def numpy(self):
        table = {"s": SIGNED, "f": FLOAT}.get(self.kind, UNSIGNED)
        return table[self.bits]


TYPES = {
    "pred": Type("p", 1),
    **{f"{kind}{bits}": Type(kind, bits) for kind in "sub" for bits in (8, 16, 32, 64)},
    **{f"f{bits}": Type("f", bits) for bits in FLOAT},
}


class Meaning(NamedTuple):
    """`result = function(*sources)`; `wider` says that registers may have more bits than types,
    `together` that the lanes of a warp compute it in one."""

    result: Type
    sources: list[Type]
    function: Callable
    wider: bool = False
    together: bool = False


def of_three(two: Meaning | None) -> Meaning | None:
    """`min` and `max` of three fp32 numbers, of Blackwell, as that of two."""
    if two is None or two.result != TYPES["f32"]:
        return None
    function = two.function
    return Meaning(two.result, [two.result] * 3, lambda x, y, z: function(function(x, y), z))


def meaning(op: str) -> Meaning | None:
    """What an instruction computes; None if it is not known."""
    if op in _PACKED:
        return _of_two(meaning(op.removesuffix("x2")))
    head, *parts = op.split(".")
    rule = _RULES.get(head)
    return rule(parts) if rule else None


# Those of two numbers in one register.
_PACKED = {f"{op}.rn.f32x2" for op in ("add", "sub", "mul")}
_PACKED |= {f"{op}.{kind}16x2" for op in ("add", "min", "max") for kind in "su"}
_PACKED |= {f"{op}.{kind}16x2" for op in ("abs", "neg") for kind in ("f", "bf")}


def _of_two(one: Meaning) -> Meaning:
    word = Type("b", 2 * one.result.bits)

    def both(*words):
        pairs = [word.view(one.result.numpy) for word in map(np.ascontiguousarray, words)]
        return one.function(*pairs).view(word.numpy)

    return Meaning(word, [word] * len(one.sources), both)


def _types(parts: list[str], kinds: str) -> Type | None:
    """The one type that `parts` is, if it is of these kinds, and of no byte: that moves alone."""
    found = TYPES.get(parts[0]) if len(parts) == 1 else None
    return found if found and found.kind in kinds and found.bits != 8 else None


def _canonical(value):
    bits = 8 * value.dtype.itemsize
    return np.where(np.isnan(value), NAN[bits], value.view(UNSIGNED[bits])).view(value.dtype)


def _arithmetic(function):
    """Of integers, wrapping; of fp32 and fp64 with `.rn`."""

    def rule(parts):
        if parts in (["rn", "f32"], ["rn", "f64"]):
            of = TYPES[parts[1]]
            return Meaning(of, [of, of], lambda x, y: _canonical(function(x, y)))
        if parts == ["rn", "f32", "f16"] and function is not np.multiply:  # widened, of Blackwell
            of, half = TYPES["f32"], TYPES["f16"]
            return Meaning(of, [half, of], lambda x, y: _canonical(function(x.astype(of.numpy), y)))
        of = _types(parts, "su")
        return of and Meaning(of, [of, of], function)

    return rule


def _product(parts):
    """`mul` of integers: the low half, the high half, or, `wide`, both."""
    if parts[0] == "rn":
        return _arithmetic(np.multiply)(parts)
    of = _types(parts[1:], "su")
    if of is None or parts[0] not in ("lo", "hi", "wide"):
        return None
    if parts[0] == "lo":
        return Meaning(of, [of, of], np.multiply)
    if parts[0] == "hi":
        return Meaning(of, [of, of], lambda x, y: _high(x, y, of))
    if of.bits == 64:
        return None
    both = TYPES[f"{of.kind}{2 * of.bits}"]
    return Meaning(both, [of, of], lambda x, y: x.astype(both.numpy) * y.astype(both.numpy))


def _high(x, y, of):
    whole = x.astype(object) * y.astype(object) >> of.bits
    return whole.astype(of.numpy)


def _product_and_sum(parts):
    """`mad` of integers."""
    product = _product(parts) if parts[0] in ("lo", "wide") else None
    return product and Meaning(
        product.result,
        [*product.sources, product.result],
        lambda x, y, z: product.function(x, y) + z,
    )


def _division(parts):
    if parts[0] == "rn":
        return _arithmetic(np.divide)(parts)
    of = _types(parts, "su")
    return of and Meaning(of, [of, of], _divided)


def _remainder(parts):
    of = _types(parts, "su")
    return of and Meaning(of, [of, of], lambda x, y: x - _divided(x, y) * y)


def _divided(x, y):
    """Cut towards zero."""
    if (y == 0).any():
        raise ZeroDivisionError("an integer is divided by 0")
    quotient = x // y
    return quotient + ((quotient < 0) & (quotient * y != x)).astype(x.dtype)


def _least(integers, below):
    """`min` or `max`: of floats -0 is below +0; a NaN loses, or, with `.NaN`, wins."""

    def rule(parts):
        if parts and parts[-1] in ("f32", "f64") and parts[:-1] in ([], ["NaN"]):
            of, wins = TYPES[parts[-1]], parts[:-1] == ["NaN"]
            if wins and of.bits == 64:
                return None

            def function(x, y):
                nan = np.isnan(x), np.isnan(y)
                first = below(x, y) | (x == y) & (np.signbit(x) == below(-1, 1))
                chosen = np.where(nan[1] | first & ~nan[0], x, y)
                either = nan[0] | nan[1] if wins else nan[0] & nan[1]
                return _canonical(np.where(either, of.numpy(np.nan), chosen))

            return Meaning(of, [of, of], function)
        if parts == ["relu", "s32"]:  # and not below 0
            of = TYPES["s32"]
            return Meaning(of, [of, of], lambda x, y: np.maximum(integers(x, y), np.int32(0)))
        of = _types(parts, "su")
        return of and Meaning(of, [of, of], integers)

    return rule


def _logic(function, operands=2):
    def rule(parts):
        of = _types(parts, "bp")
        return of and Meaning(of, [of] * operands, function)

    return rule


def _sign(function):
    """`neg` or `abs`; of floats too, where it is open which NaN a NaN becomes."""

    def of_bf16(x):
        made = x ^ 0x8000 if function is np.negative else x & 0x7FFF
        return np.where(x & 0x7FFF > 0x7F80, 0xFFBA, made).astype(np.uint16)

    def rule(parts):
        if parts == ["bf16"]:
            return Meaning(TYPES["b16"], [TYPES["b16"]], of_bf16)
        if parts in (["f16"], ["f32"]):
            of = TYPES[parts[0]]
            nan = OPEN_NAN[of.bits]
            return Meaning(of, [of], lambda x: np.where(np.isnan(x), nan, function(x)))
        of = _types(parts, "s")
        return of and Meaning(of, [of], function)

    return rule


def _shift(left: bool):
    """An amount beyond the width counts as the width."""

    def rule(parts):
        of = _types(parts, "b" if left else "bus")
        if of is None or of.bits == 1:
            return None
        function = np.left_shift if left else np.right_shift

        def shifted(x, amount):
            within = np.minimum(amount, np.uint32(of.bits - 1)).astype(of.numpy)
            out = function(x, within)
            return out if of.kind == "s" else np.where(amount >= of.bits, of.numpy(0), out)

        return Meaning(of, [of, TYPES["b32"]], shifted)

    return rule


def _funnel(parts):
    if len(parts) != 3 or parts[0] not in "lr" or parts[1] not in ("wrap", "clamp"):
        return None
    if parts[2] != "b32":
        return None

    def shifted(low, high, amount):
        amount = amount & np.uint32(31) if parts[1] == "wrap" else np.minimum(amount, np.uint32(32))
        whole = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        by = np.uint64(32) - amount if parts[0] == "l" else amount.astype(np.uint64)
        return (whole >> by).astype(np.uint32)

    return Meaning(TYPES["b32"], [TYPES["b32"]] * 3, shifted)


def _field(parts):
    """`bfe`: bits from a position on; of `s32` the highest of them, or of the word, is the sign."""
    if parts not in (["u32"], ["s32"], ["u64"], ["s64"]):
        return None
    of = TYPES[parts[0]]

    def field(x, position, length):
        position, length = position & np.uint32(255), length & np.uint32(255)
        length = np.minimum(length, np.uint32(of.bits)).astype(np.int64)
        # Of s32 and s64 bits behind the highest are the sign's.
        wide = x.astype(np.int64 if of.kind == "s" else np.uint64)
        wide = wide >> np.minimum(position, np.uint32(63)).astype(wide.dtype)
        wide = np.where((position > 63) & (of.kind == "u"), 0, wide).astype(np.uint64)
        unused = (np.int64(64) - length).astype(np.uint64)
        out = np.where(length == 0, 0, wide << np.minimum(unused, np.uint64(63)))
        if of.kind == "s":
            out = out.view(np.int64)
        return np.where(length == 0, 0, out >> np.minimum(unused, 63).astype(out.dtype)).astype(
            of.numpy
        )

    return Meaning(of, [of, TYPES["b32"], TYPES["b32"]], field)


def _insertion(parts):
    """`bfi`: the low bits of one number in the place of as many of another."""
    if parts != ["b32"]:
        return None

    def inserted(x, into, position, length):
        position, length = position & np.uint32(255), length & np.uint32(255)
        wide = np.minimum(length, np.uint32(32)).astype(np.uint64)
        by = np.minimum(position, np.uint32(32)).astype(np.uint64)
        mask = (np.uint64(1) << wide) - np.uint64(1) << by
        placed = x.astype(np.uint64) << by
        return (placed & mask | into & ~mask).astype(np.uint32)

    return Meaning(TYPES["b32"], [TYPES["b32"]] * 4, inserted)


def _permute(parts):
    """`prmt`: four bytes of eight, or the sign of each."""
    if parts != ["b32"]:
        return None

    def permute(x, y, control):
        both = y.astype(np.uint64) << np.uint64(32) | x.astype(np.uint64)
        out = np.zeros(both.shape, np.uint64)
        for place in range(4):
            select = control.astype(np.uint64) >> np.uint64(4 * place)
            byte = both >> (np.uint64(8) * (select & np.uint64(7))) & np.uint64(255)
            sign = (byte >> np.uint64(7)) * np.uint64(255)
            byte = np.where(select & np.uint64(8) != 0, sign, byte)
            out |= byte << np.uint64(8 * place)
        return out.astype(np.uint32)

    return Meaning(TYPES["b32"], [TYPES["b32"]] * 3, permute)


def _count(function):
    """Of a word's bits, in 32 bits."""

    def rule(parts):
        of = TYPES[parts[0]] if parts in (["b32"], ["b64"]) else None
        return of and Meaning(TYPES["b32"], [of], lambda x: function(_bits(x)).astype(np.uint32))

    return rule


def _reverse(parts):
    of = TYPES[parts[0]] if parts in (["b32"], ["b64"]) else None

    def reversed_(x):
        places = np.arange(of.bits - 1, -1, -1, dtype=of.numpy)
        return (_bits(x).astype(of.numpy) << places).sum(axis=-1, dtype=of.numpy)

    return of and Meaning(of, [of], reversed_)


def _bits(x):
    """(word, bit), the lowest first."""
    places = np.arange(8 * x.itemsize, dtype=x.dtype)
    return x[..., None] >> places & x.dtype.type(1)


def _leading_zeros(bits):
    highest_first = bits[..., ::-1] != 0
    return np.where(highest_first.any(axis=-1), highest_first.argmax(axis=-1), bits.shape[-1])


def _lookup(parts):
    """`lop3`: any function of three bits, as the table of its eight values."""
    if parts != ["b32"]:
        return None

    def lookup(x, y, z, table):
        out = np.zeros(x.shape, np.uint32)
        for row in range(8):
            listed = table >> np.uint32(row) & np.uint32(1)
            term = np.uint32(0) - listed  # all bits, or none
            for number, bits in ((4, x), (2, y), (1, z)):
                term = term & (bits if row & number else ~bits)
            out |= term
        return out

    return Meaning(TYPES["b32"], [TYPES["b32"]] * 4, lookup)


def _select(parts):
    of = _types(parts, "busf")
    of = of and Type("b", of.bits)
    return of and Meaning(of, [of, of, TYPES["pred"]], lambda x, y, chosen: np.where(chosen, x, y))


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _comparison(parts):
    """`setp`: of floats a NaN makes it false, or, with `u`, true; its result with a third, by
    `.and`, `.or` or `.xor`."""
    if len(parts) not in (2, 3) or parts[-1] not in TYPES:
        return None
    how, of, predicate = parts[0], TYPES[parts[-1]], TYPES["pred"]
    compare = _float_comparison(how) if of.kind == "f" else _COMPARE.get(how)
    if compare is None or (of.kind == "b" and how not in ("eq", "ne")) or of.bits < 16:
        return None
    if len(parts) == 2:
        return Meaning(predicate, [of, of], compare)
    joined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(parts[1])
    return joined and Meaning(
        predicate, [of, of, predicate], lambda x, y, third: joined(compare(x, y), third)
    )


def _float_comparison(how):
    def unordered(x, y):
        return np.isnan(x) | np.isnan(y)

    if how in ("num", "nan"):
        return unordered if how == "nan" else lambda x, y: ~unordered(x, y)
    if how in _COMPARE:
        return lambda x, y: _COMPARE[how](x, y) & ~unordered(x, y)
    if how.endswith("u") and how[:-1] in _COMPARE:
        return lambda x, y: _COMPARE[how[:-1]](x, y) | unordered(x, y)
    return None


def _conversion(parts):
    """`cvt`: between integers, of integers to floats, between floats."""
    if parts in (["f32", "f16"], ["f64", "f32"]):
        to, of = TYPES[parts[0]], TYPES[parts[1]]
        return Meaning(to, [of], lambda x: _canonical(x.astype(to.numpy)))
    if parts == ["rn", "f32", "f64"]:
        to, of = TYPES["f32"], TYPES["f64"]
        return Meaning(to, [of], lambda x: _canonical(x.astype(to.numpy)))
    if parts[0] == "rn" and parts[2:] == ["f32"] and parts[1] in _ROUNDED:
        return Meaning(TYPES["b16"], [TYPES["b32"]], _ROUNDED[parts[1]])
    if parts[0] == "rn" and parts[2:] == ["f32"] and parts[1].removesuffix("x2") in _ROUNDED:
        one = _ROUNDED[parts[1].removesuffix("x2")]
        return Meaning(TYPES["b32"], 2 * [TYPES["b32"]], lambda a, b: _paired(one(a), one(b)))
    if parts == ["rn", "f16x2", "e4m3x2"]:
        one = _f16_of_e4m3
        return Meaning(TYPES["b32"], [TYPES["b16"]], lambda x: _paired(one(x >> 8), one(x & 255)))
    if len(parts) == 3 and parts[0] in _WHOLE and parts[1:] == ["s32", "f32"]:
        to, whole = TYPES["s32"], _WHOLE[parts[0]]
        return Meaning(to, [TYPES["f32"]], lambda x: _saturated(whole(x.astype(np.float64)), to))
    if len(parts) == 3 and parts[0] == "rn" and parts[1] in ("f32", "f64"):
        to, of = TYPES[parts[1]], TYPES.get(parts[2])
        if of is None or of.kind not in "su":
            return None
        return Meaning(to, [of], lambda x: x.astype(to.numpy), wider=True)
    if len(parts) != 2 or any(TYPES.get(each, TYPES["pred"]).kind not in "su" for each in parts):
        return None
    to, of = TYPES[parts[0]], TYPES[parts[1]]
    return Meaning(to, [of], lambda x: x.astype(to.numpy), wider=True)


_WHOLE = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _saturated(whole, of):
    """The nearest integer there is; 0 for NaN."""
    least = np.iinfo(of.numpy)
    return np.where(np.isnan(whole), 0, np.clip(whole, least.min, least.max)).astype(of.numpy)


def _f16_of_f32(bits):
    """To the nearest, ties to even, subnormals kept; a NaN is 0x7fff. By integers alone."""
    bits = bits.astype(np.int64)
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    exponent, fraction = magnitude >> 23, magnitude & 0x7FFFFF
    significand = np.where(exponent == 0, fraction, fraction | 0x800000)
    # The result's last place is 2^(e-10) of normals, 2^-24 of what is below 2^-14.
    drop = np.where(exponent >= 113, 13, np.minimum(126 - np.maximum(exponent, 1), 40))
    kept, rest = significand >> drop, significand & ((np.int64(1) << drop) - 1)
    half = np.int64(1) << (drop - 1)
    kept = kept + ((rest > half) | (rest == half) & (kept & 1 == 1))
    out = np.where(exponent >= 113, (exponent - 112 << 10) + kept - 1024, kept)
    out = np.where(magnitude > 0x7F800000, 0x7FFF, sign | np.minimum(out, 0x7C00))
    return out.astype(np.uint16)


def _bf16_of_f32(bits):
    """Likewise."""
    bits = bits.astype(np.int64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, 0x7FFF, rounded).astype(np.uint16)


_ROUNDED = {"f16": _f16_of_f32, "bf16": _bf16_of_f32}


def _f16_of_e4m3(byte):
    """Exact; a NaN is 0x7fff."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.ldexp(
        mantissa + np.where(exponent == 0, 0.0, 8), np.maximum(exponent, 1).astype(int) - 10
    )
    half = value.astype(np.float16).view(np.uint16) | (byte.astype(np.uint16) & 0x80) << 8
    return np.where(byte & 127 == 127, 0x7FFF, half).astype(np.uint16)


def _paired(high, low):
    return high.astype(np.uint32) << 16 | low


def _move(parts):
    if len(parts) != 1 or parts[0] not in TYPES:
        return None
    of = TYPES[parts[0]]
    of = of if of.kind == "p" else Type("b", of.bits)
    return Meaning(of, [of], lambda x: x)


_RULES = {
    "mov": _move,
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _product,
    "mad": _product_and_sum,
    "div": _division,
    "rem": _remainder,
    "min": _least(np.minimum, lambda x, y: x < y),
    "max": _least(np.maximum, lambda x, y: x > y),
    "neg": _sign(np.negative),
    "abs": _sign(np.abs),
    "and": _logic(np.bitwise_and),
    "or": _logic(np.bitwise_or),
    "xor": _logic(np.bitwise_xor),
    "not": _logic(np.invert, operands=1),
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "shf": _funnel,
    "bfe": _field,
    "bfi": _insertion,
    "prmt": _permute,
    "popc": _count(lambda bits: bits.sum(axis=-1)),
    "clz": _count(_leading_zeros),
    "brev": _reverse,
    "lop3": _lookup,
    "selp": _select,
    "setp": _comparison,
    "cvt": _conversion,
}
