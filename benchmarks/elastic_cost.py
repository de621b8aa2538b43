"""What does `LeafSync(elastic=True)` cost where nobody dies, and a newcomer's state?

A byte-level GPT of 1.3 M and 9 M parameters on two ranks, one thread each, pinned, one leaf a rank;
steps of `LeafSync.steps` with `elastic=True` and without in turns, in the same processes. Figures
are medians of turns in one phase of the machine; elastic is to take at most 1.01 times as long. The
same for a model of 8 elements, whose steps are all communication: what is added by itself. All
averages are compared, bit for bit.

Then a model of 100 M parameters with Adam on two ranks under `pycollective run --elastic`, of which
one ends itself, so that another joins: from the newcomer's invitation to its first leaf, at most
1.5 times a broadcast of the same bytes from the same rank in the same run. The broadcast fills
memory that is new, as the newcomer's is, or that was written before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.checked import take_turns_by_phase
from benchmarks.driver import Benchmark, Record, Run
from benchmarks.leaf_step import LENGTH, ROWS, WIDTHS

RANKS = 2
LEAST = 3  # turns of each that make a row of a phase
BOUND, STATE_BOUND = 1.01, 1.5
NEWCOMERS = 7
TINY, TINY_STEPS = "8", 200  # steps of a turn
_WIDTH, _LAYERS = 2048, 24  # 100.7 M parameters


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import torch

    torch.set_num_threads(1)
    return joins(run) if run.options["size"] == "state" else steps(run)


def steps(run: Run) -> Record | None:
    """Steps with and without `elastic`, in turns."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import pycollective as pc
    from benchmarks.gradients import Gpt, Size, batch_of, corpus, loss_of
    from pycollective.bench import phase
    from pycollective.bench.measurement import slowest
    from pycollective.cores import cores_of
    from pycollective.torch import LeafSampler, LeafSync

    comm = pc.init(timeout=100)
    tiny = run.options["size"] == TINY
    texts = batch_of(corpus(), np.random.default_rng(0), 64 * ROWS, LENGTH)
    data = TensorDataset(torch.ones(len(texts), 7) if tiny else texts)
    models: dict[str, torch.nn.Module] = {}
    numbers: dict[str, int] = {}  # of the last step

    def loop(name: str) -> Iterator[Any]:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Linear(7, 1)
        if not tiny:
            width, heads, layers = WIDTHS[run.options["size"]]
            model = Gpt(Size(width=width, heads=heads, layers=layers))
        models[name] = model
        sync = LeafSync(model, RANKS, group=pc.init(timeout=100), elastic=name == "elastic")
        sampler = LeafSampler(sync, len(data), 1 if tiny else ROWS)
        for step in sync.steps(DataLoader(data, batch_sampler=sampler)):
            for (batch,) in step:
                (model(batch).sum() if tiny else loss_of(model, batch)).backward()
            numbers[name] = step.number
            yield step

    def turn(call: Callable[[], object]) -> tuple[float, ...]:
        comm.barrier()
        start = time.perf_counter()
        for _ in range(TINY_STEPS if tiny else 1):
            call()
        seconds = time.perf_counter() - start
        return (slowest(comm, seconds) / (TINY_STEPS if tiny else 1),)

    calls = {name: loop(name).__next__ for name in ("without", "elastic")}
    for call in calls.values():
        call()
    cores = cores_of(comm.size)
    for task in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(task, {cores[comm.rank]})
    rows: list[Record] = []
    looks = partial(phase.look_together, comm, cores)
    for now, seconds, turns, medians in take_turns_by_phase(
        calls, run.rounds, turn, looks, least=LEAST
    ):
        row: Record = {"phase": now, "ns": seconds * 1e9, "turns": turns}
        rows.append({**row, **{name: each[0] for name, each in medians.items()}})
    while numbers["without"] != numbers["elastic"]:
        calls[min(numbers, key=lambda name: numbers[name])]()
    pairs = zip(*(model.parameters() for model in models.values()), strict=True)
    wrong = sum(
        int((one.grad.view(torch.int32) != other.grad.view(torch.int32)).sum())
        for one, other in pairs
    )
    parameters = sum(each.numel() for each in models["elastic"].parameters())
    found = {"parameters": parameters, "rows": rows, "wrong": wrong}
    return found if comm.rank == 0 else None


def joins(run: Run) -> Record | None:
    """A rank ends itself and another joins, again and again; then broadcasts of what it got."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from pycollective.bootstrap.membership import Membership
    from pycollective.torch import LeafSampler, LeafSync

    called: dict[str, float] = {}
    join = Membership.join

    def noted(*args: Any, **options: Any) -> Any:
        called["join"] = time.perf_counter()
        return join(*args, **options)

    Membership.join = noted
    layers = (torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))
    model = torch.nn.Sequential(*layers)
    sync = LeafSync(model, RANKS, elastic=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    sync.state(optimizer=optimizer)
    data = TensorDataset(torch.ones(RANKS, _WIDTH))
    loader = DataLoader(data, batch_sampler=LeafSampler(sync, RANKS, 1))
    rows: list[Record] = []
    ranks = None
    for step in sync.steps(loader):
        for (x,) in step:
            called.setdefault("leaf", time.perf_counter())
            model(x).square().mean().backward()
        optimizer.step()
        if sync.communicator is ranks or sync.communicator.size < RANKS:
            continue
        ranks = sync.communicator
        if step.number:  # rank 1 has joined
            state = [each.detach() for each in model.parameters()]
            for of in optimizer.state.values():
                state += [of["exp_avg"], of["exp_avg_sq"]]
            into = state if ranks.rank == 0 else [torch.empty_like(each) for each in state]
            seconds = [called["leaf"] - called.get("join", 0.0), float(len(rows))]
            for _ in ("into new memory", "into what was written"):
                ranks.barrier()
                begin = time.perf_counter()
                for each in into:
                    ranks.broadcast(each)
                seconds.append(time.perf_counter() - begin)
            of_all = np.empty((RANKS, len(seconds)))
            ranks.all_gather(of_all, np.array(seconds))
            state_s, _, new, old = of_all[1].tolist()
            rows.append({"state": state_s, "new memory": new, "old memory": old})
            wrong = sum(not torch.equal(*pair) for pair in zip(into, state, strict=True))
            assert not wrong
            if of_all[0, 1] == NEWCOMERS - 1:
                break
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    sync.close()
    nbytes = sum(each.nbytes for each in state)
    return {"bytes": nbytes, "rows": rows} if ranks.rank == 0 else None


def measure(run: Run) -> Record:
    """Steps of each size, then the state."""
    record: Record = {}
    for size in (TINY, *WIDTHS):
        found = record[size] = run.ranks_here(RANKS, size=size)
        for row in found["rows"]:
            ratio = row["elastic"] / row["without"]
            added = (row["elastic"] - row["without"]) * 1e6
            print(
                f"{found['parameters']} parameters, {row['phase']} {row['ns']:.0f} ns, "
                f"{row['turns']} turns: without {row['without'] * 1e3:.3f} ms, elastic "
                f"{row['elastic'] * 1e3:.3f} ms: {ratio:.4f}, {added:+.0f} us",
                flush=True,
            )
    found = record["state"] = run.ranks_here(RANKS, more=["--elastic"], size="state")
    for row in found["rows"]:
        ratio = row["state"] / row["new memory"]
        print(
            f"state of {found['bytes'] / 1e6:.0f} MB: {row['state']:.3f} s, a broadcast into new "
            f"memory {row['new memory']:.3f} s: {ratio:.2f}, into old {row['old memory']:.3f} s",
            flush=True,
        )
    return record


if __name__ == "__main__":
    hidden = {"size": ""}
    Benchmark("elastic_cost", __doc__, measure, on_a_rank, rounds=50, hidden=hidden).main()
