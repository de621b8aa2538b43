"""Top-k between several hosts: by gather or by region?

Ranks of one machine play a host each, so bytes cost next to nothing: what is measured is the price
of region's two more collectives and second selection. It pays where the bytes that it saves take a
link longer than that. One parameter; rounds take turns between both ways; medians of the slowest
rank. The last columns: from which rate of the link down region is faster, and `auto`'s choice.

The first call of each way is compared, bit for bit, with what dense all-reduces make of the same
choices; what error feedback makes of the later ones, after each turn, between the ranks.

Usage: python -m benchmarks.gather_or_region [--out DIR] [--rounds N] [--hosts 4,8] [--sizes N,...]
"""

from __future__ import annotations

import inspect
import zlib
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import pycollective as pc
from benchmarks.checked import check
from benchmarks.driver import Benchmark, Record, Run
from benchmarks.turns import Call, seconds_of, take_turns
from pycollective.bench.slowest import alike, slowest
from pycollective.compression import TopKState
from pycollective.compression.groups import groups_of_communicator
from pycollective.compression.partition import Hosts, Partition
from pycollective.compression.sparse import gathers

DENSITY, NAME = 0.01, "w"
CHUNK = inspect.signature(TopKState).parameters["chunk"].default
WAYS = ("gather", "region")
SIZES = tuple(1 << power for power in range(17, 25))
Array = NDArray[Any]


def largest(x: Array, k: int) -> Array:
    """`x` in bf16 where its k largest magnitudes are (of equal ones the first), 0 elsewhere."""
    found = np.zeros_like(x)
    if k == 0:
        return found
    magnitude = np.abs(x)
    least = np.partition(magnitude, -k)[-k]
    above = np.flatnonzero(magnitude > least)
    ties = np.flatnonzero(magnitude == least)[: k - above.size]
    chosen = np.concatenate([above, ties])
    found[chosen] = x[chosen].astype(ml_dtypes.bfloat16)
    return found


def first_averages(comm: pc.Communicator, x: Array, hosts: Hosts) -> dict[str, Array]:
    """What each way is to make of the ranks' `x` in a first call, when nothing is held yet."""
    sent = largest(x, round(DENSITY * x.size))
    sums = sent.copy()
    comm.all_reduce(sums)
    kept = np.zeros_like(sums)
    for start, stop in Partition(hosts, CHUNK).host_shards(NAME, (0, x.size)):
        most = np.array([np.count_nonzero(sent[start:stop])])
        comm.all_reduce(most, "max")
        kept[start:stop] = largest(sums[start:stop], int(most[0]))
    ranks = np.float32(comm.size)
    return {"gather": sums / ranks, "region": kept / ranks}


def on_a_rank(run: Run) -> list[Record] | None:
    """What each rank runs: a row for each size."""
    comm = pc.init(timeout=300)
    rank, hosts = comm.rank, Hosts(comm.rank, tuple(range(comm.size)))
    groups = groups_of_communicator(comm, host_of=hosts.host_of)

    timed = seconds_of(1, comm.barrier, partial(slowest, comm))
    rows: list[Record] = []
    for size in map(int, run.options["sizes"].split(",")):
        x = np.random.default_rng(rank).standard_normal(size, np.float32)
        out = np.empty_like(x)
        shapes = {NAME: (size // 64, 64)}
        states = {way: TopKState(shapes, groups, density=DENSITY, exchange=way) for way in WAYS}

        def average(state: TopKState, x: Array = x, out: Array = out) -> bool:
            out[:] = x
            return state.all_reduce({NAME: out})

        def turn(call: Call, out: Array = out) -> tuple[float, ...]:
            measured = timed(call)
            found = zlib.crc32(out.tobytes())
            if not alike(comm, found):
                raise AssertionError("the ranks have other bits than each other")
            return measured

        calls: dict[str, Call] = {way: partial(average, each) for way, each in states.items()}
        for way, wanted in first_averages(comm, x, hosts).items():
            check(f"{way}, {size} elements", calls[way], [(out, wanted)], True)
        taken = take_turns(calls, run.rounds, turn)
        # What a rank sends it receives, between as many.
        stats = {way: state.stats() for way, state in states.items()}
        sent = {
            way: each["payload_bytes"] / each["compressed_calls"] for way, each in stats.items()
        }
        by_bytes = gathers(round(DENSITY * size), 2, hosts)
        rows.append(
            {
                "size": size,
                "seconds": {way: seconds for way, (seconds,) in taken.items()},
                "bytes": sent,
                "auto": "gather" if by_bytes else "region",
            }
        )
    comm.close()
    return rows if rank == 0 else None


def report(hosts: int, rows: list[Record]) -> None:
    """Print a line for each size."""
    for row in rows:
        seconds, sent = row["seconds"], row["bytes"]
        more = seconds["region"] - seconds["gather"]
        fewer = sent["gather"] - sent["region"]
        pays = "up to any rate" if more <= 0 else f"up to {8 * fewer / more / 1e9:.2f} Gbit/s"
        pays = pays if fewer > 0 else "never"
        each = ", ".join(
            f"{way} {1e3 * seconds[way]:7.2f} ms {sent[way] / 1024:7.0f} KiB" for way in WAYS
        )
        print(
            f"{hosts} hosts, {row['size']:>9} elements: {each}; region pays {pays};"
            f" auto: {row['auto']}",
            flush=True,
        )


def measure(run: Run) -> Record:
    """Between each number of hosts."""
    if any(int(size) < 4096 or int(size) % 64 for size in run.options["sizes"].split(",")):
        raise SystemExit("--sizes are multiples of 64 from 4096 on: less goes densely")
    record = {}
    for hosts in map(int, run.options["hosts"].split(",")):
        record[f"{hosts} hosts"] = run.ranks_here(hosts)
        report(hosts, record[f"{hosts} hosts"])
    return {"rounds": run.rounds, **record}


if __name__ == "__main__":
    options = {"hosts": "4,8", "sizes": ",".join(map(str, SIZES))}
    Benchmark("gather_or_region", __doc__, measure, on_a_rank, 15, options).main()
