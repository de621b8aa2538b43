"""What does `LeafSync.steps` gain by a cost, where leaves or ranks are unlike?

A byte-level GPT of 9 M parameters, one text a leaf, 24 leaves a step, on 2 and 3 ranks of one
thread. Texts' lengths are lognormal (sigma 0.8, median 64 bytes). The same steps in turns:

- `static`: as many leaves for each rank;
- `cost`: `steps(cost=)`, the operations of a leaf's texts;
- `measured`: with ``measure_ranks=True`` too.

Without and with a last rank that is slow: it takes 1.5 times as long for every leaf. What a rank
computes is the time of its own thread on a core, for `measure_ranks` too, so that three ranks may
share two. A step's time is that of the rank that has most, and `ideal` is all leaves' work over all
ranks' speeds. Of 2 ranks, each on a core, there is the time by the clock, too, with communication.
Rows are the nodes of the order that a rank sends, on average over ranks and steps. All have one
digest of the final weights, one rank alone included.

Then a deal's own price: a model of 8 elements, whose steps are all communication, 64 leaves on 4
ranks, over 10,000 steps: their time beside steps of equal runs, and memory on the way.

Usage: python -m benchmarks.leaf_balance [--out DIR] [--rounds N]    rounds: steps of each
"""

from __future__ import annotations

import hashlib
import os
import time
from functools import lru_cache
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.driver import Benchmark, Record, Run
from benchmarks.gradients import Gpt, Size, corpus, loss_of

LEAVES = 24
SIZE = Size(width=384, heads=6, layers=5, context=512)
SLOWER = 1.5
WAYS: dict[str, dict[str, Any]] = {
    "static": {},
    "cost": {"cost": lambda samples: sum(map(operations, samples))},
    "measured": {
        "cost": lambda samples: sum(map(operations, samples)),
        "measure_ranks": True,
    },
}
_SAMPLES = 4096
_LEARNT = 11  # steps after which the median of ranks' times is what it stays, and more
_DEALS, _DEALT = 10_000, 64  # steps, leaves


@lru_cache
def lengths() -> Any:
    """Bytes of each text."""
    drawn = np.random.default_rng(0).lognormal(np.log(64), 0.8, _SAMPLES)
    return drawn.clip(8, SIZE.context).astype(int)


def operations(sample: int) -> float:
    """Of a text: multiplications by all weights of a layer, and attention over what is before."""
    length, width = int(lengths()[sample]), SIZE.width
    return length * SIZE.layers * (12 * width**2 + length * width)


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import pycollective as pc

    torch.set_num_threads(1)
    comm = pc.init(timeout=300)
    if comm.size > 1 and (os.cpu_count() or 1) >= comm.size:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank]})
    what = deals if run.options["deals"] == "yes" else trainings
    found = what(comm, run)
    comm.close()
    return found if comm.rank == 0 else None


def trainings(comm: Any, run: Run) -> Record:
    """Steps of all ways, in turns."""
    from pycollective import Deal
    from pycollective.torch import LeafSampler, LeafSync

    text = torch.from_numpy(corpus().copy())
    slower = SLOWER if run.options["slow"] == "yes" and comm.rank == comm.size - 1 else 1.0
    loops: dict[str, Any] = {}
    for way, options in WAYS.items():
        torch.manual_seed(0)
        model = Gpt(SIZE)
        sync = LeafSync(model, LEAVES, group=comm)

        def batch(chosen: list[int]) -> Any:
            [one] = chosen
            begin = one * SIZE.context
            return text[None, begin : begin + int(lengths()[one]) + 1].long()

        sampler = LeafSampler(sync, _SAMPLES, 1)
        loader: Any = DataLoader(range(_SAMPLES), batch_sampler=sampler, collate_fn=batch)
        steps = iter(sync.steps(loader, until=run.rounds, **options))
        loops[way] = model, sync, torch.optim.SGD(model.parameters(), 0.1), steps

    clock_of_leaves = mock.patch("pycollective.torch.leaves.sync.perf_counter", time.thread_time)
    seconds: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    rows: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(run.rounds):
        for way, (model, sync, optimizer, steps) in loops.items():
            comm.barrier()
            start, computed = time.perf_counter(), 0.0
            step = next(steps)
            mine = np.array([sync.local_leaves.start, sync.local_leaves.stop])
            with clock_of_leaves:
                for leaf in step:
                    begin = time.thread_time()
                    loss_of(model, leaf).backward()
                    own = time.thread_time() - begin
                    while time.thread_time() - begin < own * slower:
                        pass
                    computed += own
            clock = time.perf_counter() - start
            optimizer.step()
            each = np.empty((comm.size, 3))
            comm.all_gather(each, np.array([computed, computed * slower, clock]))
            speeds = comm.size - 1 + 1 / (SLOWER if run.options["slow"] == "yes" else 1)
            ideal = each[:, 0].sum() / speeds
            seconds[way].append((each[:, 1].max(), ideal, each[:, 2].max()))
            runs = np.empty((comm.size, 2), mine.dtype)
            comm.all_gather(runs, mine)
            deal = Deal(LEAVES, tuple(((int(lo), int(hi)),) for lo, hi in runs))
            rows[way].append(sum(len(deal.nodes(rank)) for rank in range(comm.size)) / comm.size)
    digests = set()
    for model, sync, _, _ in loops.values():
        sync.close()
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).digest()
        all_digests = np.empty((comm.size, 32), np.uint8)
        comm.all_gather(all_digests, np.frombuffer(digest, np.uint8))
        digests |= {each.tobytes().hex() for each in all_digests}
    found: Record = {"digests": sorted(digests)}
    for way in WAYS:
        busiest, ideal, clock = (median(each) for each in zip(*seconds[way][_LEARNT:], strict=True))
        found[way] = {
            "busiest": busiest,
            "ideal": ideal,
            "clock": clock,
            "rows": sum(rows[way][_LEARNT:]) / len(rows[way][_LEARNT:]),
        }
    return found


def deals(comm: Any, run: Run) -> Record:
    """Steps that are all communication, of one deal and of many."""
    from pycollective.torch import LeafSampler, LeafSync

    costs = np.random.default_rng(1).lognormal(0, 0.8, _SAMPLES).tolist()
    ways: dict[str, dict[str, Any]] = {
        "static": {},
        "cost": {"cost": lambda samples: costs[samples[0]]},
    }
    found: Record = {}
    for way, options in ways.items():
        model = torch.nn.Linear(7, 1)
        sync = LeafSync(model, _DEALT, group=comm)
        sampler = LeafSampler(sync, _SAMPLES, 1)
        data = TensorDataset(torch.ones(_SAMPLES, 7))
        times, held, begins = [], [], []
        start = time.perf_counter()
        for step in sync.steps(DataLoader(data, batch_sampler=sampler), until=_DEALS, **options):
            begins.append(sync.local_leaves.start)
            for (x,) in step:
                model(x).sum().backward()
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
            if (step.number + 1) % (_DEALS // 5) == 0:
                held.append(_resident())
        sync.close()
        each = np.empty((comm.size, _DEALS), np.int64)
        comm.all_gather(each, np.array(begins))
        different = len({*map(tuple, each.T.tolist())})
        found[way] = {"step": median(times), "resident_bytes": held, "deals": different}
    return found


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure(run: Run) -> Record:
    """All counts of ranks, without and with a slow one; then deals."""
    record: Record = {"leaves": LEAVES, "steps": run.rounds, "learnt": _LEARNT, "trainings": []}
    alone = run.ranks_here(1, slow="no", deals="no")
    digests = {*alone["digests"]}
    for ranks in (2, 3):
        for slow in ("no", "yes"):
            found: Record = {"ranks": ranks, "slow": slow == "yes"}
            found |= run.ranks_here(ranks, slow=slow, deals="no")
            digests |= {*found["digests"]}
            record["trainings"].append(found)
            print(f"{ranks} ranks{', one slow' if slow == 'yes' else ''}:")
            for way in WAYS:
                row = found[way]
                clock = f", by the clock {row['clock'] * 1e3:.0f} ms" if ranks == 2 else ""
                print(
                    f"  {way:8} {row['busiest'] * 1e3:.0f} ms, ideal {row['ideal'] * 1e3:.0f} ms: "
                    f"{row['busiest'] / row['ideal']:.2f}{clock}; {row['rows']:.2f} rows",
                    flush=True,
                )
    record["wrong"] = len(digests) - 1
    found = record["tiny"] = run.ranks_here(4, slow="no", deals="yes")
    static, cost = found["static"], found["cost"]
    held = [f"{each / 2**20:.1f}" for each in cost["resident_bytes"]]
    print(
        f"4 ranks, {_DEALS} steps of {cost['deals']} deals: {cost['step'] * 1e6:.0f} us a step, of "
        f"one deal {static['step'] * 1e6:.0f}; resident on the way: {', '.join(held)} MiB"
    )
    return record


if __name__ == "__main__":
    hidden = {"slow": "no", "deals": "no"}
    Benchmark("leaf_balance", __doc__, measure, on_a_rank, rounds=30, hidden=hidden).main()
