"""How fast are the kernels of top-k selection, beside an addition in place?

16.8 M elements of fp32 and as many that are held back. A time is the thread's time on a core, a
figure the median of the rounds, given as a ratio to NumPy's `e += g` in the same rounds; `e += g`
is among the calls a second time, as a control. Beside them what torch would do: add, topk of the
magnitudes, take, and put zeros in their place. What each call makes is compared with torch's.

Usage: python -m benchmarks.sparse_kernels [--out DIR] [--rounds N]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.checked import check, take_turns
from benchmarks.driver import Benchmark, Record, Run
from pycollective import _core
from tests.kernels.segments import found_for, table_of

COUNT = 1 << 24
K = COUNT // 100
CHUNK, K_OF_CHUNK = 4096, 41
# Ratios to `e += g`, AVX2 and AVX-512.
MOST = {"top_k": 2.5, "top_k_chunks": 2.0, "scatter": 0.5}
LEAST_OF_TORCH = 6.0  # times faster than torch's top-k
LEAST_INDICES = 0.3  # G indices/s, packed and unpacked
Array = NDArray[Any]


def seconds(call: Callable[[], object]) -> tuple[float]:
    """One call's time on a core."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start,)


def measure(run: Run) -> Record:
    """All kernels, beside an addition and torch."""
    import torch

    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    x = random.standard_normal(COUNT, np.float32)
    held = random.standard_normal(COUNT, np.float32) / 2
    left, e = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
    again, g = np.zeros(COUNT, np.float32), x.copy()
    indices = np.zeros(K + COUNT // CHUNK, np.uint32)
    taken = np.zeros(len(indices), np.float32)
    out = np.zeros(COUNT, np.float32)
    x_torch, held_torch = torch.from_numpy(x), torch.from_numpy(held)
    rest = torch.zeros(COUNT)

    def with_torch() -> Any:
        torch.add(x_torch, held_torch, out=rest)
        at = torch.topk(rest.abs(), K, sorted=False).indices
        values = rest[at]
        rest[at] = 0
        return at, values

    total = torch.add(x_torch, held_torch)
    sums = total.numpy()
    wanted = np.sort(with_torch()[0].numpy()).astype(np.uint32)
    # Stable, since of equal magnitudes the lower index comes first.
    order = torch.sort(total.abs().view(-1, CHUNK), dim=1, descending=True, stable=True).indices
    begins = torch.arange(0, COUNT, CHUNK)[:, None]
    of_chunks = np.sort((order[:, :K_OF_CHUNK] + begins).flatten().numpy()).astype(np.uint32)
    del order
    values = sums[wanted]
    scattered = torch.zeros(COUNT).scatter_(
        0, torch.from_numpy(wanted.astype(np.int64)), torch.from_numpy(values)
    )
    payload = np.zeros(_core.pack_indices_bound(K, COUNT), np.uint8)
    exact = payload[: _core.pack_indices(wanted, COUNT, payload)].copy()
    unpacked = np.zeros(K, np.uint32)
    # Of each kernel what it writes, with what that is to be, and what it returns.
    made: dict[str, tuple[list[tuple[Array, Array]], object]] = {
        "add": ([(left, sums)], None),
        "scatter": ([(out, scattered.numpy())], None),
        "pack": ([(payload[: len(exact)], exact)], len(exact)),
        "unpack": ([(unpacked, wanted)], None),
    }
    for name, at in {"top_k": wanted, "top_k_chunks": of_chunks}.items():
        rest_of = sums.copy()
        rest_of[at] = 0
        entries = [(indices[: len(at)], at), (taken[: len(at)], sums[at])]
        made[name] = [(left, rest_of), *entries], None
    calls: dict[str, Callable[[], object]] = {
        "e += g": lambda: np.add(e, g, out=e),
        "e += g, again": lambda: np.add(again, g, out=again),
        "torch": with_torch,
    }
    given = {"x": x, "held": held, "left": left}
    whole, by_chunk = (table_of([{**given, "k": k}]) for k in (K, K_OF_CHUNK))
    result = table_of([{"x": out, "k": 1}])
    found, zero, none = found_for(1), np.zeros(1, np.uint8), np.zeros(0, np.uint8)
    for level in _core.simd_levels():
        ours: dict[str, Callable[..., object]] = {
            "add": lambda simd: _core.sparse_add(whole, none, found, simd),
            "top_k": lambda simd: _core.top_k(whole, 0, indices, taken, none, found, simd),
            "top_k_chunks": lambda simd: _core.top_k(
                by_chunk, CHUNK, indices, taken, none, found, simd
            ),
            "scatter": lambda simd: _core.sparse_scatter(
                result, wanted, values, 1, found, zero, simd
            ),
            "pack": lambda simd: _core.pack_indices(wanted, COUNT, payload, simd),
            "unpack": lambda simd: _core.unpack_indices(exact, COUNT, unpacked, simd),
        }
        for name, call in ours.items():
            calls[f"{name}/{level}"] = timed = partial(call, level)
            check(f"{name}/{level}", timed, *made[name])
    times = {name: each[0] for name, each in take_turns(calls, run.rounds, seconds).items()}
    rows = {
        name: {"ms": 1e3 * each, "to_add_in_place": each / times["e += g"]}
        for name, each in times.items()
    }
    for name, row in rows.items():
        kernel, _, level = name.partition("/")
        print(f"{name:24} {row['ms']:9.2f} ms  {row['to_add_in_place']:7.2f} of e += g", end="")
        if kernel in ("top_k", "top_k_chunks"):
            row["times_faster_than_torch"] = times["torch"] / times[name]
            print(f"  {row['times_faster_than_torch']:.0f} times faster than torch", end="")
        if kernel in ("pack", "unpack"):
            row["g_indices_s"] = K / times[name] / 1e9
            print(f"  {row['g_indices_s']:.2f} G indices/s", end="")
        if level in ("avx2", "avx512"):
            met = (
                row["to_add_in_place"] <= MOST.get(kernel, np.inf)
                and row.get("times_faster_than_torch", np.inf) >= LEAST_OF_TORCH
                and row.get("g_indices_s", np.inf) >= LEAST_INDICES
            )
            print("" if met else "  MISSED", end="")
        print()
    bits = 8 * len(exact) / K
    print(f"{bits:.2f} bits an index")
    return {"rounds": run.rounds, "bits an index": bits, "times": rows}


if __name__ == "__main__":
    Benchmark("sparse_kernels", __doc__, measure).main()
