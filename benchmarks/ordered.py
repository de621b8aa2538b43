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

A time is that of the slowest rank, a figure the median of turns in one phase of the machine.
`ordered` is compared with the oracle after each turn, on every rank.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from functools import partial
from typing import Any

from benchmarks.checked import Sum, seconds_of, take_turns_by_phase
from benchmarks.driver import Benchmark, Record, Run

KI, MI = 1 << 10, 1 << 20
SIZES = (KI, 64 * KI, MI, 4 * MI, 16 * MI, 64 * MI)
PINNED = ("process", "caller")
DTYPES = ("float32", "bfloat16", "float16")
RANKS = (2, 4)
LEAST = 3  # turns of each call that make a row of a phase
BOUND = 1.05


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import numpy as np

    import pycollective as pc
    from pycollective import _core
    from pycollective.bench import phase
    from pycollective.bench.measurement import slowest
    from pycollective.cores import cores_of

    comm = pc.init(timeout=100)
    cpus, cores = os.sched_getaffinity(0), cores_of(comm.size)
    looks = partial(phase.look_together, comm, cores)
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

    def pin(pinned: str) -> None:
        mine = {cores[comm.rank]}
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
            calls["gloo"]()  # starts threads
            pin(pinned)
            timed = buffers.turn(seconds_of(repeats, comm.barrier, partial(slowest, comm)))
            found = take_turns_by_phase(calls, run.rounds, timed, looks, least=LEAST)
            wrong = int(comm.all_reduce(np.array([buffers.wrong(calls)["ordered"]]))[0])
            for now, seconds, turns, medians in found:
                row = {"pinned": pinned, "dtype": dtype, "size": size, "wrong": wrong}
                row |= {"phase": now, "ns": seconds * 1e9, "turns": turns}
                rows.append({**row, **{name: each[0] for name, each in medians.items()}})
                wrong = 0  # which are of all phases
    dist.destroy_process_group()
    comm.close()
    return {"rows": rows} if comm.rank == 0 else None


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
