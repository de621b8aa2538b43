"""What do the contract's bits cost over Gloo, beside Gloo's own collectives?

All-reduces in place, on 2 and 4 pinned ranks of this host, turn by turn in the same processes:

- `ordered`: `pycollective.torch.ordered.all_reduce`;
- `bound`: the least that the same way costs by Gloo's collectives: all_to_all_single, one pass over
  the leaves, and an all-gather. The target is 1.05 times that, from 1 Mi up;
- `gloo`: Gloo's own all-reduce, whose bits depend on the size. In bf16 and fp16 `ordered` is to be
  faster from 1 Mi up.

Each rank has a core. Either all its threads stay there, Gloo's own among them ("process"), or the
one that calls does, and the others run where they like ("caller"). Gloo's thread spins while
another holds a connection's lock; on the same core it may keep that one from letting go.

A time is that of the slowest rank, a figure the median of turns in one phase of the machine (near
or far: below or above 110 ns from core to core, before and after the turn). `ordered` is compared
with the oracle after each turn, on every rank.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
import warnings
from typing import Any

from benchmarks.checked import Sum
from benchmarks.driver import Benchmark, Record, Run

KI, MI = 1 << 10, 1 << 20
SIZES = (KI, 64 * KI, MI, 4 * MI, 16 * MI, 64 * MI)
PINNED = ("process", "caller")
DTYPES = ("float32", "bfloat16", "float16")
RANKS = (2, 4)
BOUND = 1.05
NEAR = 110e-9  # seconds from core to core


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import numpy as np

    import pycollective as pc
    from pycollective import _core

    comm = pc.init(timeout=100)
    cpus = sorted(os.sched_getaffinity(0))
    import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
    import torch
    import torch.distributed as dist

    from pycollective.torch import ordered

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    port = np.zeros(1, np.int64)
    if comm.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, comm.size, is_master=True, wait_for_workers=False)
        port[0] = store.port
    comm.broadcast(port)
    if comm.rank > 0:
        store = dist.TCPStore("127.0.0.1", int(port[0]), comm.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    def latency() -> float:
        comm.barrier()
        seconds = np.zeros(1)
        if comm.rank == 0 and len(cpus) > 1:
            seconds[0] = _core.core_to_core_latency(cpus[0], cpus[1], 3000)
        comm.broadcast(seconds)
        return float(seconds[0])

    def pin(pinned: str) -> None:
        mine = {cpus[comm.rank % len(cpus)]}
        for task in map(int, os.listdir("/proc/self/task")):
            calls = task == threading.get_native_id()
            os.sched_setaffinity(task, mine if calls or pinned == "process" else cpus)

    rows: list[Record] = []
    for pinned, dtype in itertools.product(PINNED, DTYPES):
        for size in SIZES:
            count = size // np.dtype(dtype).itemsize // comm.size * comm.size
            repeats = max(1, min(20, MI // size))
            buffers = Sum.of(dtype, count, comm.size, comm.rank, repeats)
            word = buffers.x.view(f"i{buffers.x.itemsize}")
            x = torch.from_numpy(word).view(getattr(torch, dtype))
            leaves = torch.empty_like(x).view(comm.size, -1)
            part = torch.empty_like(leaves[0])

            def bound(x: Any = x, leaves: Any = leaves, part: Any = part) -> None:
                dist.all_to_all_single(leaves.view(-1), x)
                _core.reduce_into(list(leaves), "sum", part)
                dist.all_gather_into_tensor(x, part)

            calls = {
                "ordered": lambda x=x: ordered.all_reduce(x),
                "bound": bound,
                "gloo": lambda x=x: dist.all_reduce(x),
            }
            seen: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}

            def timed(call: Any, repeats: int = repeats) -> tuple[float, float]:
                before = latency()
                comm.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                took = np.array([(time.perf_counter() - start) / repeats])
                comm.all_reduce(took, "max")
                after = latency()
                return float(took[0]), after if (before < NEAR) == (after < NEAR) else float("nan")

            turn = buffers.turn(timed)
            calls["gloo"]()  # starts threads
            pin(pinned)
            for _ in range(run.rounds):
                for name, call in calls.items():
                    call()  # warm
                    seen[name].append(turn(call))  # type: ignore[arg-type]
            wrong = int(comm.all_reduce(np.array([buffers.wrong(calls)["ordered"]]))[0])
            rows += [
                {"pinned": pinned, "dtype": dtype, "size": size, "wrong": wrong, **row}
                for row in _by_phase(seen)
            ]
    dist.destroy_process_group()
    comm.close()
    return {"rows": rows} if comm.rank == 0 else None


def _by_phase(seen: dict[str, list[tuple[float, float]]]) -> list[Record]:
    """A row for each phase in which every call has had three turns or more."""
    rows = []
    for phase in ("near", "far"):
        turns = {
            name: [(took, ns) for took, ns in each if ns == ns and (ns < NEAR) == (phase == "near")]
            for name, each in seen.items()
        }
        if min(map(len, turns.values())) >= 3:
            medians = {
                name: statistics.median(took for took, _ in each) for name, each in turns.items()
            }
            ns = statistics.median(ns for each in turns.values() for _, ns in each)
            rows.append({"phase": phase, "ns": ns * 1e9, "turns": len(turns["ordered"]), **medians})
    return rows


def measure(run: Run) -> Record:
    """On 2 ranks and on 4."""
    record: Record = {}
    for ranks in RANKS:
        result = record[f"{ranks} ranks"] = run.ranks_here(ranks)
        for row in result["rows"]:
            own, bound, gloo = (row[name] for name in ("ordered", "bound", "gloo"))
            verdict = ""
            if row["size"] >= MI:
                met = own <= BOUND * bound and (row["dtype"] == "float32" or own < gloo)
                verdict = "  met" if met else "  MISSED"
            print(
                f"{ranks} ranks {row['pinned']} {row['dtype']:8} {row['size']:9} {row['phase']:4} "
                f"{row['ns']:4.0f} ns  {own * 1e6:9.0f} us  {own / bound:5.2f} of the bound  "
                f"{gloo / own:5.2f}x Gloo's own{verdict}  wrong {row['wrong']}",
                flush=True,
            )
    return record


if __name__ == "__main__":
    Benchmark("ordered", __doc__, measure, on_a_rank, rounds=15).main()
