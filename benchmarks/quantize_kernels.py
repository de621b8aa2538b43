"""How long do 1-bit and 8-bit quantization with error feedback take, beside an addition?

Quantize: x + held, its scales and data, and what is left. Dequantize: one payload, and the sum of
eight. 16.8 million fp32, one thread, each SIMD level; beside them, in the same rounds, NumPy's
`e += g`, twice: how far these two are apart is what the machine adds. Outputs begin with a cache
line, as torch's arrays do; NumPy's begin 16 bytes behind one, and are measured beside.

A time is the thread's time on a core, so that a busy machine shows less; a figure the median of the
rounds' ratios to the two additions of the same round. What is left must be x + held less what is
dequantized.

Usage: python -m benchmarks.quantize_kernels [--out DIR] [--rounds N]
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.checked import check
from benchmarks.driver import Benchmark, Record, Run
from pycollective import _core, segments
from pycollective.compression import CODECS
from tests.kernels.segments import found_for, table_of

COUNT = 1 << 24
CHUNK = {
    codec: inspect.signature(CODECS[codec]).parameters["chunk"].default
    for codec in _core.quantize_codecs()
}
ROWS = 8
MOST = {"quantize": 1.5, "dequantize": 0.5}  # of the time of e += g
TARGETED = ("avx2", "avx512")
Array = NDArray[Any]


def array(count: int, behind: int) -> Array:
    """fp32 zeros, so many bytes behind a cache line's first."""
    room = np.zeros(4 * count + 128, np.uint8)
    start = -room.ctypes.data % 64 + behind
    return room[start : start + 4 * count].view(np.float32)


def calls_of(level: str, behind: int, given: dict[str, Array]) -> dict[str, Callable[[], object]]:
    """All kernels at a SIMD level, with outputs `behind` bytes behind a line's start, by name."""
    left, out = array(COUNT, behind), array(COUNT, behind)
    given |= {f"{name}, {level}, {behind}": each for name, each in (("left", left), ("out", out))}
    # Of addresses: what they are of stays in `given`.
    gradient = table_of([{"x": given["x"], "held": given["held"], "left": left, "k": 1}])
    average = table_of([{"x": out, "k": 1}])
    found = found_for(1)
    calls: dict[str, Callable[[], object]] = {}
    for codec, chunk in CHUNK.items():
        payloads = np.zeros((ROWS, _core.quantized_bytes(codec, chunk, COUNT)), np.uint8)

        def quantize(codec: str = codec, chunk: int = chunk, rows: Array = payloads) -> None:
            _core.quantize(codec, chunk, gradient, rows[0], found, simd=level)
            if found[segments.BAD]:
                raise AssertionError("random numbers are finite")

        def dequantize(rows: Array, codec: str = codec, chunk: int = chunk) -> None:
            _core.dequantize(codec, chunk, average, rows, 1.0, found, simd=level)

        if codec not in given:  # of the first level; the others are to make the same
            quantize()
            dequantize(payloads[:1])
            given.update({codec: payloads[0].copy(), f"{codec} left": left.copy()})
            given[f"{codec} out"] = out.copy()
            if (given["x"] + given["held"] - out).tobytes() != left.tobytes():
                raise AssertionError(f"{codec}: what is left is not what was not sent")
        wanted = given[f"{codec} out"]
        name = f"{codec} at {level}"
        check(name, quantize, [(payloads[0], given[codec]), (left, given[f"{codec} left"])])
        payloads[1:] = payloads[0]
        calls[f"{codec}/quantize"] = quantize
        calls[f"{codec}/dequantize"] = one = partial(dequantize, payloads[:1])
        check(f"{name}, dequantized", one, [(out, wanted)])
        if behind == 0:
            calls[f"{codec}/dequantize, {ROWS} rows"] = many = partial(dequantize, payloads)
            # Doubled is exact.
            check(f"{name}, {ROWS} rows dequantized", many, [(out, ROWS * wanted)])
    where = "" if behind == 0 else f", {behind} bytes behind a line"
    return {f"{name}, {level}{where}": call for name, call in calls.items()}


def ratios(rounds: int) -> Record:
    """Milliseconds of `e += g`, its control's ratio, and the ratios of all kernels."""
    random = np.random.default_rng(0)
    given = {name: random.standard_normal(COUNT, np.float32) for name in ("x", "held", "g")}
    e = given["x"].copy()

    def add() -> None:
        np.add(e, given["g"], out=e)

    calls: dict[str, Callable[[], object]] = {"e += g": add}
    for level in _core.simd_levels():
        for behind in (0, 16):
            calls |= calls_of(level, behind, given)
    calls["e += g, again"] = add
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # warm
            start = time.thread_time()
            call()
            times[name].append(time.thread_time() - start)
    both = zip(times["e += g"], times["e += g, again"], strict=True)
    base = [(first + second) / 2 for first, second in both]
    of_base = {
        name: statistics.median(t / b for t, b in zip(taken, base, strict=True))
        for name, taken in times.items()
    }
    return {"e += g, ms": 1e3 * statistics.median(base), "ratios": of_base}


def measure(run: Run) -> Record:
    """All kernels, beside an addition."""
    record = {"load average": os.getloadavg(), "elements": COUNT, **ratios(run.rounds)}
    print(f"e += g: {record['e += g, ms']:.2f} ms")
    for name, ratio in record["ratios"].items():
        kind, _, level = name.partition("/")[2].partition(", ")
        most = MOST.get(kind) if level in TARGETED else None
        verdict = "" if most is None else f"  {'met' if ratio <= most else 'MISSED'}: {most:g}"
        print(f"{ratio:8.3f}  {name}{verdict}")
    return record


if __name__ == "__main__":
    Benchmark("quantize_kernels", __doc__, measure, rounds=31).main()
