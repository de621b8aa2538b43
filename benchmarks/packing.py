"""How small does exact packing make what crosses between hosts, and how fast is it?

Real gradients (`gradients.py`), random ones, zeros, random bits (the worst case: nothing is
gained), and the benchmarks' own cancelling inputs; of each a leaf in bf16, fp16 and fp32, and fp32
nodes: sums of bf16 leaves in the library's order. Beside the codecs memcpy, zstd 1, blosc2, and
ZipNN where it is installed (it is built on the spot, so it is not among the pinned tools).

A time is the process's time on cores: ZipNN works on a thread of its own. Arrays are so long that
neither caches nor branch predictors keep them from one call to the next.

Usage: python -m benchmarks.packing [--out DIR] [--rounds N]
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.checked import take_turns
from benchmarks.driver import Benchmark, Record, Run
from benchmarks.gradients import KEPT, load
from benchmarks.native_parts import pack_into, unpack_into
from pycollective import _core, reference
from pycollective.bench.machine import describe_versions
from pycollective.testing.inputs import leaves

COUNT = 1 << 22
RANKS = 8
NODES = (2, 4, 8)
LOSS_SCALE = 1024  # of fp16's leaves, as GradScaler does
# What is timed of each distribution; the bits of the rest are counted.
TIMED = ("gradients, step 20", "Gaussian", "random bits")
LEAST_PACK, LEAST_UNPACK = 2.0, 3.0  # GB/s of unpacked bytes, one core, AVX2 and AVX-512
PEERS = ("zstandard", "blosc2", "zipnn")  # packages
Array = NDArray[Any]


def distributions() -> dict[str, Callable[[], list[Array]]]:
    """Eight fp32 leaves of each."""

    def random(draw: Callable[[np.random.Generator], Array]) -> Callable[[], list[Array]]:
        return lambda: [
            draw(np.random.default_rng(rank)).astype(np.float32) for rank in range(RANKS)
        ]

    spread = np.exp(np.random.default_rng(99).standard_normal(COUNT))

    def real(step: int) -> list[Array]:
        """Longer leaves: every second rank's gradients one after another, from rank r on."""
        ranks = load()[KEPT.index(step)]
        pieces = [[(r + s) % RANKS for s in range(0, RANKS, 2)] for r in range(RANKS)]
        return [np.concatenate(ranks[piece]) for piece in pieces]

    found: dict[str, Callable[[], list[Array]]] = {
        f"gradients, step {step}": lambda step=step: real(step) for step in KEPT
    }
    found["Gaussian"] = random(lambda r: r.standard_normal(COUNT))
    found["Student t, 3"] = random(lambda r: r.standard_t(3, COUNT))
    found["Gaussian x lognormal"] = random(lambda r: r.standard_normal(COUNT) * spread)
    found["zeros"] = lambda: [np.zeros(COUNT, np.float32)] * RANKS
    found["random bits"] = random(
        lambda r: r.integers(0, 1 << 32, COUNT, np.uint32).view(np.float32)
    )
    found["cancelling"] = lambda: [
        leaf.astype(np.float32) for leaf in leaves("bfloat16", "sum", RANKS, COUNT, 0)
    ]
    return found


def kinds(of: list[Array]) -> dict[str, Array]:
    """What is packed: leaves, and nodes of bf16 leaves."""
    rounded = [leaf.astype(ml_dtypes.bfloat16).astype(np.float32) for leaf in of]
    with np.errstate(over="ignore"):
        scaled = (of[0] * np.float32(LOSS_SCALE)).astype(np.float16)
    return {
        "bf16": rounded[0].astype(ml_dtypes.bfloat16),
        "fp16": scaled,
        "fp32": of[0],
        **{f"sum of {n} bf16": reference.tree(rounded[:n], np.add) for n in NODES},
    }


class Peer:
    """One way to make bytes fewer: `pack` keeps what came out, and `unpack` puts it into `back`."""

    def __init__(self, pack: Callable[[], Any], unpack: Callable[[Any], object]) -> None:
        self._pack, self._unpack = pack, unpack
        self.packed: Any = None

    def pack(self) -> None:
        """Pack."""
        self.packed = self._pack()

    def unpack(self) -> None:
        """Unpack the last."""
        self._unpack(self.packed)

    def round_trip(self, name: str, x: Array, back: Array) -> float:
        """Bits an element, after a round trip that lost none."""
        self.pack()
        back.view(np.uint8)[:] = 0
        self.unpack()
        if back.tobytes() != x.tobytes():
            raise AssertionError(f"{name} lost bits")
        return 8 * float(len(self.packed)) / x.size


def ours(x: Array, back: Array, level: str) -> Peer:
    """The library's codec for the type of `x`."""
    out = np.empty(x.nbytes, np.uint8)
    return Peer(
        lambda: out[: pack_into(x, out, level)],
        lambda payload: unpack_into(payload, back, level),
    )


def peers(x: Array, back: Array) -> dict[str, Peer]:
    """All ways, by name."""
    import blosc2
    import zstandard

    raw, raw_back = x.view(np.uint8), back.view(np.uint8)
    copied = np.empty_like(raw)
    packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def copy() -> Array:
        copied[:] = raw
        return copied

    def put(data: bytes) -> None:
        raw_back[:] = np.frombuffer(data, np.uint8)

    def blosc(codec: Any, level: int, filters: list[Any]) -> Peer:
        settings = {"codec": codec, "clevel": level, "filters": filters}
        return Peer(
            lambda: blosc2.compress2(raw, typesize=x.itemsize, nthreads=1, **settings),
            lambda data: blosc2.decompress2(data, dst=raw_back, nthreads=1),
        )

    found = {
        "memcpy": Peer(copy, lambda data: raw_back.__setitem__(slice(None), data)),
        **{f"exact, {level}": ours(x, back, level) for level in _core.simd_levels()},
        "zstd 1": Peer(lambda: packer.compress(raw), lambda data: put(unpacker.decompress(data))),
        "blosc2, shuffle, zstd 1": blosc(blosc2.Codec.ZSTD, 1, [blosc2.Filter.SHUFFLE]),
        "blosc2, bitshuffle, lz4 1": blosc(blosc2.Codec.LZ4, 1, [blosc2.Filter.BITSHUFFLE]),
    }
    if _there("zipnn"):
        import zipnn

        coder = zipnn.ZipNN(input_format="byte", bytearray_dtype=x.dtype.name, threads=1)
        # It reorders in place what it is given: what is to be kept is copied first, which counts.
        found["ZipNN"] = Peer(
            lambda: coder.compress(bytearray(raw)), lambda data: put(coder.decompress(data))
        )
    return found


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def seconds(call: Callable[[], object]) -> tuple[float]:
    """One call's time on cores."""
    start = time.process_time()
    call()
    return (time.process_time() - start,)


def time_all(x: Array, rounds: int) -> dict[str, dict[str, float]]:
    """Bits an element and GB/s of every way, and the speeds' ratios to memcpy's."""
    back = np.empty_like(x)
    ways = peers(x, back)
    bits = {name: peer.round_trip(name, x, back) for name, peer in ways.items()}
    calls: dict[str, Callable[[], object]] = {}
    for name, peer in ways.items():
        calls |= {f"{name}/pack": peer.pack, f"{name}/unpack": peer.unpack}
    speed = {
        name: x.nbytes / taken[0] / 1e9
        for name, taken in take_turns(calls, rounds, seconds).items()
    }
    return {
        name: {
            "bits": bits[name],
            **{f"{way}_gb_s": speed[f"{name}/{way}"] for way in ("pack", "unpack")},
            **{
                f"{way}_to_memcpy": speed[f"{name}/{way}"] / speed[f"memcpy/{way}"]
                for way in ("pack", "unpack")
            },
        }
        for name in ways
    }


def report_times(rows: dict[str, dict[str, float]]) -> None:
    """A table, and whether the targets are met."""
    for name, row in rows.items():
        print(
            f"    {name:26} {row['bits']:6.2f} bits  pack {row['pack_gb_s']:6.2f} GB/s "
            f"({row['pack_to_memcpy']:.3f} of memcpy)  unpack {row['unpack_gb_s']:6.2f} GB/s "
            f"({row['unpack_to_memcpy']:.3f})"
        )
        if name in ("exact, avx2", "exact, avx512"):
            met = row["pack_gb_s"] >= LEAST_PACK and row["unpack_gb_s"] >= LEAST_UNPACK
            print(f"      {'met' if met else 'MISSED'}: {LEAST_PACK:g} and {LEAST_UNPACK:g} GB/s")


def measure(run: Run) -> Record:
    """Every distribution, in every type."""
    bits: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, Any]] = {}
    for name, make in distributions().items():
        of = kinds(make())
        bits[name] = {
            kind: ours(x, back := np.empty_like(x), "").round_trip("exact", x, back)
            for kind, x in of.items()
        }
        print(name, {kind: round(each, 2) for kind, each in bits[name].items()}, flush=True)
        for kind, x in of.items() if name in TIMED else ():
            times.setdefault(name, {})[kind] = rows = time_all(x, run.rounds)
            print(f"  {kind}, {x.nbytes / 1e6:.1f} MB")
            report_times(rows)
    return {
        "versions": describe_versions()
        | {package: metadata.version(package) for package in PEERS if _there(package)},
        "bits an element": bits,
        "times": times,
    }


if __name__ == "__main__":
    Benchmark("packing", __doc__, measure).main()
