"""What does averaging its gradients cost a step of DDP, when every core computes?

A GPT of 9 M parameters on two ranks, one thread each: no core is left over for the exchange. So
what it costs is how much longer a step takes than one whose hook does nothing. In turns, in the
same processes, with the same buckets:

- `nothing`: the hook returns the bucket as it is; `again`: the same, which shows the noise;
- `ours`: `pycollective.torch.all_reduce_hook`;
- `gloo`: torch's hook over Gloo;
- `buckets`: the same buckets' averages by themselves, after a step whose hook did nothing, so that
  gradients lie as far from the cores as in a step; `warm`: once more at once.

A step of `ours` is to take at most one of `nothing` plus 1.3 times `warm`, the stricter of the two
readings of "the buckets by themselves". How it stands against `buckets` is printed beside.

Either all threads of a rank stay on its core, the library's own among them ("process"), or the one
that calls does, and the others run where they like ("caller").

A step is forward and backward; its time is that of the slowest rank, a figure the median of turns
in one phase of the machine. After each step of ours every gradient is compared with the average of
what `nothing` leaves on the ranks, by the oracle, bit for bit.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

from benchmarks.checked import take_turns_by_phase
from benchmarks.driver import Benchmark, Record, Run

PINNED = ("process", "caller")
RANKS = 2
ROWS, LENGTH = 4, 64
LEAST = 3  # turns of each that make a row of a phase
BOUND = 1.3


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    import pycollective as pc
    import pycollective.torch
    from benchmarks.gradients import Gpt, Size, batch_of, corpus, loss_of
    from pycollective import reference
    from pycollective.bench import phase
    from pycollective.bench.measurement import slowest
    from pycollective.cores import cores_of

    comm = pc.init(timeout=100)
    cpus, cores = os.sched_getaffinity(0), cores_of(comm.size)
    looks = partial(phase.look_together, comm, cores)
    torch.set_num_threads(1)
    dist.init_process_group("pycollective")
    gloo = dist.new_group(backend="gloo")

    torch.manual_seed(0)
    size = Size(width=384, heads=6, layers=5, context=128)
    model = DistributedDataParallel(Gpt(size))
    batch = batch_of(corpus(), np.random.default_rng(comm.rank), ROWS, LENGTH)
    buckets: dict[int, Any] = {}

    def nothing(bucket: Any) -> Any:
        buckets[bucket.index()] = bucket.buffer()
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hooks: dict[str, Any] = {
        "nothing": nothing,
        "again": nothing,
        "ours": partial(pycollective.torch.all_reduce_hook, None),
        "gloo": partial(allreduce_hook, gloo),
    }
    hook = nothing
    model.register_comm_hook(None, lambda _, bucket: hook(bucket))

    def step(name: str) -> None:
        nonlocal hook
        hook = hooks[name]
        model.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()

    def gradients() -> Any:
        return torch.cat([each.grad.ravel() for each in model.parameters()]).numpy()  # type: ignore[union-attr]

    def alone() -> None:
        for each in buckets.values():
            dist.all_reduce(each, op=dist.ReduceOp.AVG)

    for _ in range(3):  # DDP makes its buckets anew after the first
        buckets.clear()
        step("nothing")
    mine = gradients()
    every = np.empty((comm.size, mine.size), np.float32)
    comm.all_gather(every, mine)
    wanted = reference.reduce(list(every), "avg")
    step("gloo")  # starts threads
    wrong = 0

    def timed(call: Any) -> float:
        comm.barrier()
        start = time.perf_counter()
        call()
        return slowest(comm, time.perf_counter() - start)

    def turn(call: Any) -> tuple[float, ...]:
        nonlocal wrong
        if call is alone:
            step("nothing")
            return timed(call), timed(call)
        seconds = timed(call)
        if call is calls["ours"]:
            wrong += int(np.count_nonzero(gradients().view("u4") != wanted.view("u4")))
        return (seconds,)

    calls: dict[str, Any] = {name: partial(step, name) for name in hooks}
    calls["buckets"] = alone
    rows: list[Record] = []
    for pinned in PINNED:
        for task in map(int, os.listdir("/proc/self/task")):
            own = task == threading.get_native_id() or pinned == "process"
            os.sched_setaffinity(task, {cores[comm.rank]} if own else cpus)
        found = take_turns_by_phase(calls, run.rounds, turn, looks, least=LEAST)
        for now, seconds, turns, medians in found:
            row: Record = {"pinned": pinned, "phase": now, "ns": seconds * 1e9, "turns": turns}
            row["warm"] = medians["buckets"][1]
            rows.append({**row, **{name: each[0] for name, each in medians.items()}})
    rows[0]["wrong"] = int(comm.all_reduce(np.array([wrong]))[0])
    sizes = [each.nbytes for each in buckets.values()]
    dist.destroy_process_group()
    comm.close()
    return {"parameters": mine.size, "buckets": sizes, "rows": rows} if comm.rank == 0 else None


def measure(run: Run) -> Record:
    """On two ranks."""
    record: Record = run.ranks_here(RANKS)
    print(f"{record['parameters']} parameters in buckets of {record['buckets']} bytes")
    for row in record["rows"]:
        more = {name: row[name] - row["nothing"] for name in ("again", "ours", "gloo")}
        ratio = more["ours"] / row["warm"]
        print(
            f"{row['pinned']:8} {row['phase']:5} {row['ns']:4.0f} ns  nothing "
            f"{row['nothing'] * 1e3:.1f} ms, buckets {row['buckets'] * 1e3:.1f} ms, warm "
            f"{row['warm'] * 1e3:.1f} ms; more: again {more['again'] * 1e3:.1f} ms, Gloo "
            f"{more['gloo'] * 1e3:.1f} ms, ours {more['ours'] * 1e3:.1f} ms: "
            f"{more['ours'] / row['buckets']:.2f} of the buckets, {ratio:.2f} of warm ones"
            f"{'  met' if ratio <= BOUND else '  MISSED'}",
            flush=True,
        )
    return record


if __name__ == "__main__":
    Benchmark("ddp_step", __doc__, measure, on_a_rank, rounds=15).main()
