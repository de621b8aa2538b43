"""What does a copy cost by the addresses of its two arrays, libc's and our two?

13 places behind a page for the destination and as many for the source, and sizes from 64 bytes to
64 MiB. A figure is the best of some turns, so that a neighbour's work does not count. Of each size
the median over the 169 pairs of places, and the worst pair. NumPy's large arrays lie 16 bytes
behind a page, torch's 64.

Usage: python -m benchmarks.copies [--out DIR] [--rounds N]
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics

import numpy as np

from benchmarks.driver import Benchmark, Record, Run
from benchmarks.native_parts import native_part
from pycollective import _core

PLACES = (0, 4, 8, 16, 32, 48, 64, 128, 512, 1024, 2048, 2064, 4032)  # bytes behind a page
SIZES = [1 << n for n in range(6, 27, 2)]
SHOWN = 1 << 18  # bytes, in the picture
LIMITS = {"plain": 1.5, "streaming": 2.0}  # the median over the worst, at most
KINDS = ("libc", *LIMITS)
LEAST_STREAMED = 1 << 14
_PAGE = 4096
_AT_ONCE = 1 << 16  # bytes that a turn copies at least


def _page_of(buffer: np.ndarray) -> int:
    """The address of the first page in a buffer."""
    return -(-buffer.ctypes.data // _PAGE) * _PAGE


def sweep(kind: str, size: int, rounds: int) -> list[list[float]]:
    """GB/s, by place of the destination, then of the source; each copy is compared once."""
    library = ctypes.CDLL(native_part("libcopies.so"))
    library.time_copies.restype = ctypes.c_double
    library.time_copies.argtypes = [
        *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    ]
    to, source = (np.zeros(size + 3 * _PAGE, np.uint8) for _ in range(2))
    source[:] = np.arange(source.size, dtype=np.uint8)
    times = max(1, _AT_ONCE // size)
    best = np.full((len(PLACES), len(PLACES)), np.inf)
    for turn in range(rounds):
        for (i, there), (j, here) in itertools.product(enumerate(PLACES), enumerate(PLACES)):
            at, begin = _page_of(to) + there, _page_of(source) + here
            seconds = library.time_copies(kind.encode(), at, begin, size, times)
            best[i, j] = min(best[i, j], seconds)
            if turn == 0:
                got = to[at - to.ctypes.data :][:size]
                if not np.array_equal(got, source[begin - source.ctypes.data :][:size]):
                    raise AssertionError(f"{kind} of {size} bytes from {here} to {there} is wrong")
    found: list[list[float]] = (size / best / 1e9).tolist()
    return found


def draw(shown: dict[str, list[list[float]]], path: str) -> None:
    """A map of GB/s for each kind of copy."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    most = max(max(row) for rates in shown.values() for row in rates)
    figure, axes = pyplot.subplots(1, len(shown), figsize=(13, 4.6), layout="constrained")
    for axis, (kind, rates) in zip(axes, shown.items(), strict=True):
        image = axis.imshow(rates, vmin=0, vmax=most, cmap="viridis")
        axis.set_title(f"{kind}, {SHOWN >> 10} KiB")
        axis.set_xticks(range(len(PLACES)), map(str, PLACES), rotation=90)
        axis.set_yticks(range(len(PLACES)), map(str, PLACES))
        axis.set_xlabel("source, bytes behind a page")
    axes[0].set_ylabel("destination, bytes behind a page")
    figure.colorbar(image, ax=axes, label="GB/s")
    figure.savefig(path, dpi=110)


def measure(run: Run) -> Record:
    """Each size and kind."""
    load, sizes = os.getloadavg(), []
    shown: dict[str, list[list[float]]] = {}
    for size, kind in itertools.product(SIZES, KINDS):
        if kind == "streaming" and size < LEAST_STREAMED:
            continue
        rates = sweep(kind, size, run.rounds if size < 1 << 24 else 2)
        if size == SHOWN:
            shown[kind] = rates
        median = statistics.median(itertools.chain(*rates))
        worst, i, j = min(
            (rates[i][j], i, j) for i in range(len(PLACES)) for j in range(len(PLACES))
        )
        place = {"destination": PLACES[i], "source": PLACES[j]}
        sizes.append({"bytes": size, "kind": kind, "median": median, "worst": worst, "at": place})
        ratio = median / worst
        verdict = ""
        if kind in LIMITS:
            verdict = "  met" if ratio <= LIMITS[kind] else "  MISSED"
        print(
            f"{size:9} bytes, {kind:9} {median:6.1f} GB/s; at worst {worst:6.1f}, "
            f"{ratio:5.2f} x slower, at {PLACES[i]} from {PLACES[j]}{verdict}",
            flush=True,
        )
    draw(shown, str(run.out / "copies.png"))
    return {"load average": load, "level": _core.simd_level(), "GB/s": sizes}


if __name__ == "__main__":
    Benchmark("copies", __doc__, measure, rounds=6).main()
