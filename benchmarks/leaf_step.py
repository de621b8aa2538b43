"""What does a step of LeafSync cost, beside one of DDP?

A byte-level GPT on two ranks, one thread each, pinned; in turns, in the same processes:

- `hook`: DDP with `pycollective.torch.all_reduce_hook`, one micro-batch a rank;
- `leaves`: `LeafSync`, one leaf a rank;
- `hook 4`: DDP with the same hook, four micro-batches a rank, three of them under `no_sync`;
- `leaves 4`: `LeafSync`, four leaves a rank;
- `gloo hook`: DDP over a Gloo group with `pycollective.torch.ordered.hook`, one micro-batch a rank;
- `gloo leaves`: `LeafSync` over a Gloo group, one leaf a rank;
- `pass`: ``+=`` of as many fp32 elements, which is what an accumulator may cost a micro-batch.

`leaves` is to take at most 1.02 times `hook`, `leaves 4` at most `hook 4` and four `pass`, and
`gloo leaves` at most 1.1 times `gloo hook`.

A step is forward and backward of all micro-batches; its time is that of the slowest rank, a figure
the median of turns in one phase of the machine. Afterwards every gradient of each kind of
`LeafSync` is compared with the oracle, bit for bit. Then the ranks count as two hosts, and what
leaves one in a step is counted beside the formula: of two ranks with one node each, half of the
fp32 node and half of the average, so as many bytes as the fp32 gradients have. Memory is what a
`LeafSync` holds after a step, beside a bound: log2(m) + 1 rows of fp32 for m leaves, and averages.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from benchmarks.checked import take_turns_by_phase
from benchmarks.driver import Benchmark, Record, Run

RANKS = 2
ROWS, LENGTH = 4, 64
LEAST = 3  # turns of each that make a row of a phase
BOUND, GLOO_BOUND = 1.02, 1.1
MANY = 4  # leaves of a rank
WIDTHS = {"1.3 M": (160, 4, 4), "9 M": (384, 6, 5)}  # width, heads, layers


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import pycollective as pc
    import pycollective.torch
    from benchmarks.gradients import Gpt, Size, batch_of, corpus, loss_of
    from pycollective import reference
    from pycollective.bench import phase
    from pycollective.bench.measurement import slowest
    from pycollective.cores import cores_of
    from pycollective.torch import LeafSync, ordered

    comm = pc.init(timeout=100)
    torch.set_num_threads(1)
    dist.init_process_group("pycollective")
    width, heads, layers = WIDTHS[run.options["size"]]
    size = Size(width=width, heads=heads, layers=layers)
    text = corpus()
    batches = [
        batch_of(text, np.random.default_rng(leaf), ROWS, LENGTH) for leaf in range(RANKS * MANY)
    ]

    def model() -> Any:
        torch.manual_seed(0)
        return Gpt(size)

    gloo = dist.new_group(backend="gloo")
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    over_gloo = DistributedDataParallel(model(), process_group=gloo)
    over_gloo.register_comm_hook(gloo, ordered.hook)
    kinds = {
        "leaves": (RANKS, None),
        f"leaves {MANY}": (RANKS * MANY, None),
        "gloo leaves": (RANKS, gloo),
    }
    models = {kind: model() for kind in kinds}
    syncs = {
        kind: LeafSync(models[kind], leaves, group=group) for kind, (leaves, group) in kinds.items()
    }

    def hook(ddp: Any, many: int) -> None:
        ddp.zero_grad(set_to_none=True)
        mine = batches[comm.rank * many : (comm.rank + 1) * many]
        with ddp.no_sync():
            for batch in mine[:-1]:
                loss_of(ddp, batch).backward()
        loss_of(ddp, mine[-1]).backward()

    def leaves(kind: str) -> None:
        sync = syncs[kind]
        for leaf in sync.local_leaves:
            with sync.leaf(leaf):
                loss_of(models[kind], batches[leaf]).backward()
        sync.finish()

    numel = sum(each.numel() for each in over_gloo.parameters())
    sums, gradients = torch.zeros(numel), torch.ones(numel)
    calls: dict[str, Any] = {
        "hook": partial(hook, ddp, 1),
        f"hook {MANY}": partial(hook, ddp, MANY),
        "gloo hook": partial(hook, over_gloo, 1),
        "pass": partial(sums.add_, gradients),
        **{kind: partial(leaves, kind) for kind in kinds},
    }
    if run.options["hosts"] == "2":
        many = f"leaves {MANY}"
        before = syncs[many].stats()["sent_raw_bytes"]
        leaves(many)
        sent = syncs[many].stats()["sent_raw_bytes"] - before
        dist.destroy_process_group()
        comm.close()
        return {"sent_bytes": sent} if comm.rank == 0 else None

    cores = cores_of(comm.size)

    def turn(call: Any) -> tuple[float, ...]:
        comm.barrier()
        start = time.perf_counter()
        call()
        return (slowest(comm, time.perf_counter() - start),)

    for call in calls.values():
        call()  # DDP makes its buckets anew after the first step, and starts threads
        call()
    for task in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(task, {cores[comm.rank]})
    looks = partial(phase.look_together, comm, cores)
    rows: list[Record] = []
    for now, seconds, turns, medians in take_turns_by_phase(
        calls, run.rounds, turn, looks, least=LEAST
    ):
        row: Record = {"phase": now, "ns": seconds * 1e9, "turns": turns}
        rows.append({**row, **{name: each[0] for name, each in medians.items()}})

    def flat(of: Any) -> Any:
        return torch.cat([each.grad.ravel() for each in of.parameters()]).numpy()

    wrong, alone = 0, model()
    for kind, sync in syncs.items():
        own = []
        for leaf in sync.local_leaves:
            alone.zero_grad(set_to_none=True)
            loss_of(alone, batches[leaf]).backward()
            own.append(flat(alone))
        every = np.empty((sync.leaves, numel), np.float32)
        comm.all_gather(every, np.stack(own))
        leaves(kind)
        wanted = reference.reduce(list(every), "avg")
        wrong += int(np.count_nonzero(flat(models[kind]).view("u4") != wanted.view("u4")))
    held = {kind: sync.nbytes for kind, sync in syncs.items()}
    wrong = int(comm.all_reduce(np.array([wrong]))[0])
    dist.destroy_process_group()
    comm.close()
    found = {"parameters": numel, "rows": rows, "wrong": wrong, "held_bytes": held}
    return found if comm.rank == 0 else None


def measure(run: Run) -> Record:
    """On two ranks, each size."""
    record: Record = {}
    for size in WIDTHS:
        found: Record = run.ranks_here(RANKS, size=size, hosts="1")
        found |= run.ranks_here(RANKS, f"{RANKS}x1", size=size, hosts="2")
        record[size] = found
        parameters = found["parameters"]
        print(f"{size}: {parameters} parameters")
        for row in found["rows"]:
            one, many = row["leaves"] / row["hook"], row[f"leaves {MANY}"]
            gloo = row["gloo leaves"] / row["gloo hook"]
            limit = row[f"hook {MANY}"] + MANY * row["pass"]
            print(
                f"{row['phase']:5} {row['ns']:4.0f} ns, {row['turns']} turns: hook "
                f"{row['hook'] * 1e3:.2f} ms, leaves {row['leaves'] * 1e3:.2f} ms: {one:.3f}"
                f"{'  met' if one <= BOUND else '  MISSED'}; {MANY} micro-batches: hook "
                f"{row[f'hook {MANY}'] * 1e3:.2f} ms, pass {row['pass'] * 1e3:.2f} ms, leaves "
                f"{many * 1e3:.2f} ms: {many / limit:.3f} of the limit"
                f"{'  met' if many <= limit else '  MISSED'}; over Gloo: hook "
                f"{row['gloo hook'] * 1e3:.2f} ms, leaves {row['gloo leaves'] * 1e3:.2f} ms: "
                f"{gloo:.3f}{'  met' if gloo <= GLOO_BOUND else '  MISSED'}",
                flush=True,
            )
        print(
            f"sent to the other host {found['sent_bytes']} bytes, by the formula {4 * parameters}; "
            f"held {found['held_bytes']} bytes, for 1 and {MANY} leaves at most "
            f"{[2 * 4 * parameters, 4 * 4 * parameters]} by the formula"
        )
    return record


if __name__ == "__main__":
    Benchmark(
        *("leaf_step", __doc__, measure, on_a_rank),
        rounds=12,
        hidden={"size": "", "hosts": ""},
    ).main()
