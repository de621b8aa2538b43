"""What does a ledger cost a step, and how long does `pycollective diff` take?

A byte-level GPT of 9.1 M parameters on two ranks, one thread each, pinned; in turns, in the same
processes, each without and with a ledger:

- `leaves`: `LeafSync`, one leaf a rank;
- `leaves 4`: `LeafSync`, four leaves a rank;
- `hook`: DDP with `pycollective.torch.all_reduce_hook`, one micro-batch a rank.

`check` is what `check_every` takes in a step where it compares. A ledger is to take at most 5 % of
a step.

A step's time is that of the slowest rank, a figure the median of turns in one phase of the machine.
Beside it stands the time on cores, which other programs there disturb less.
Afterwards the averages with and without a ledger are compared, bit for bit, and so is what each
ledger has of the last step with digests made anew.

Then two ledgers of a million gradients each are written, by one rank and by three. They are
compared by `pycollective diff`, a process of its own, when they are the same, and when one leaf's
gradient near the end is not. It is to take at most 2 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.checked import take_turns_by_phase
from benchmarks.driver import Benchmark, Record, Run
from benchmarks.leaf_step import LENGTH, MANY, RANKS, ROWS, WIDTHS
from pycollective.ledger.layout import RESULT, Header, Parameter
from pycollective.ledger.writer import Writer

LEAST = 3  # turns of each that make a row of a phase
BOUND, DIFF_BOUND = 1.05, 2.0
KINDS = ("leaves", f"leaves {MANY}", "hook")
STEPS, LEAVES, PARAMETERS = 500, 24, 84  # of which a million gradients are


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import pycollective as pc
    from benchmarks.gradients import Gpt, Size, batch_of, corpus, loss_of
    from pycollective.bench import phase
    from pycollective.bench.measurement import slowest
    from pycollective.cores import cores_of
    from pycollective.torch import LeafSync, LedgerState, all_reduce_hook

    comm = pc.init(timeout=100)
    torch.set_num_threads(1)
    dist.init_process_group("pycollective")
    width, heads, layers = WIDTHS["9 M"]
    size = Size(width=width, heads=heads, layers=layers)
    text = corpus()
    batches = [
        batch_of(text, np.random.default_rng(leaf), ROWS, LENGTH) for leaf in range(RANKS * MANY)
    ]
    folder = Path(run.options["folder"])
    models: dict[str, Any] = {}
    calls: dict[str, Any] = {}

    def leaves(sync: LeafSync, model: Any) -> None:
        for leaf in sync.local_leaves:
            with sync.leaf(leaf):
                loss_of(model, batches[leaf]).backward()
        sync.finish()

    def hook(ddp: Any) -> None:
        ddp.zero_grad(set_to_none=True)
        loss_of(ddp, batches[comm.rank]).backward()

    for kind in KINDS:
        for name, ledger in ((kind, None), (f"{kind} ledger", folder / kind)):
            torch.manual_seed(0)
            models[name] = Gpt(size)
            if kind == "hook":
                ddp = DistributedDataParallel(models[name])
                ddp.register_comm_hook(LedgerState(ddp, ledger), all_reduce_hook)
                calls[name] = partial(hook, ddp)
            else:
                many = RANKS if kind == "leaves" else RANKS * MANY
                sync = LeafSync(models[name], many, ledger=ledger)
                calls[name] = partial(leaves, sync, models[name])
    torch.manual_seed(0)
    checked = Gpt(size)
    checking = LeafSync(checked, RANKS, check_every=1)
    leaves(checking, checked)

    def check() -> None:
        checking._checking.averaged = True  # type: ignore[union-attr]  # as behind each step
        checking._check_weights()

    calls["check"] = check
    cores = cores_of(comm.size)

    def turn(call: Any) -> tuple[float, ...]:
        comm.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        call()
        cpu, end = time.process_time() - cpu, time.perf_counter()
        return slowest(comm, end - start), slowest(comm, cpu)

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
        row |= {name: each[0] for name, each in medians.items()}
        rows.append({**row, "cpu": {name: each[1] for name, each in medians.items()}})
    wrong = sum(_wrong(folder / kind, models[kind], models[f"{kind} ledger"]) for kind in KINDS)
    wrong = int(comm.all_reduce(np.array([wrong]))[0])
    parameters = sum(each.numel() for each in checked.parameters())
    dist.destroy_process_group()
    comm.close()
    found = {"parameters": parameters, "tensors": len([*checked.parameters()]), "rows": rows}
    return {**found, "wrong": wrong} if comm.rank == 0 else None


def _wrong(folder: Path, plain: Any, noted: Any) -> int:
    """How many averages differ with a ledger, or are not what it says of the last step."""
    import torch
    import xxhash

    from pycollective.ledger.reader import read

    ledger = read(folder)
    last = ledger.records[ledger.records["step"] == ledger.records["step"].max()]
    last = last[last["leaf"] == RESULT]
    names = [each.name for each in ledger.header.parameters]
    said = {(names[each["parameter"]], each["digest"].tobytes()) for each in last}
    wrong = len(names) - len(said)
    for (name, each), other in zip(noted.named_parameters(), plain.parameters(), strict=True):
        digest = xxhash.xxh3_128_digest(each.grad.contiguous().numpy())
        wrong += not torch.equal(each.grad, other.grad) or (name, digest) not in said
    return wrong


def _write(folder: Path, ranks: int, change: tuple[int, int, int] | None = None) -> float:
    """Write a run's ledger; the seconds that it took."""
    names = [Parameter(f"layer{each}.weight", "float32", (each,)) for each in range(PARAMETERS)]
    header = Header(tuple(names), LEAVES, 0)
    start = time.perf_counter()
    for rank in range(ranks):
        writer = Writer(folder, header, rank, ranks)
        for step in range(STEPS):
            for leaf in range(rank * LEAVES // ranks, (rank + 1) * LEAVES // ranks):
                for place in reversed(range(PARAMETERS)):
                    other = "!" if (step, leaf, place) == change else ""
                    writer.gradient(step, leaf, place, f"{step} {leaf} {place}{other}".encode())
                writer.end_leaf()
            for place in reversed(range(PARAMETERS)):
                writer.result(step, place, f"{step} {place}".encode())
            writer.flush()
        writer.close()
    return time.perf_counter() - start


def _diff(rounds: int) -> Record:
    """The time of `pycollective diff`, of ledgers of which it must find what was changed."""
    change = (STEPS - 2, LEAVES - 7, PARAMETERS // 2)
    place = f"step {change[0]}, layer{change[2]}.weight, leaf {change[1]}: "
    wanted = {
        "same": (0, f"{STEPS} steps have the same bits, to step {STEPS - 1}"),
        "differ": (1, f"{place}rank 0 of 1 gave other bits than rank 2 of 3"),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record: Record = {"write": _write(folder / "one", 1), "wrong": 0}
        _write(folder / "same", 3)
        _write(folder / "differ", 3, change)
        record["bytes"] = sum(each.stat().st_size for each in (folder / "one").iterdir())
        record["gradients"] = STEPS * LEAVES * PARAMETERS
        for other, (status, line) in wanted.items():
            seconds = []
            for _ in range(rounds):
                command = ["-m", "pycollective", "diff", str(folder / "one"), str(folder / other)]
                start = time.perf_counter()
                done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
                seconds.append(time.perf_counter() - start)
                said = done.returncode, done.stdout.splitlines()[:1]
                record["wrong"] += said != (status, [line])
            record[other] = median(seconds)
    return record


def measure(run: Run) -> Record:
    """Steps on two ranks, and diff."""
    with tempfile.TemporaryDirectory() as folder:
        found: Record = run.ranks_here(RANKS, folder=folder)
    for row in found["rows"]:
        print(f"{row['phase']:5} {row['ns']:4.0f} ns, {row['turns']} turns, 9.1 M parameters:")
        for kind in KINDS:
            without, beside = row[kind], row[f"{kind} ledger"]
            cpu = row["cpu"][f"{kind} ledger"] / row["cpu"][kind]
            print(
                f"  {kind:9} {without * 1e3:.2f} ms, with a ledger {beside * 1e3:.2f} ms: "
                f"{beside / without:.3f}{'  met' if beside / without <= BOUND else '  MISSED'}; "
                f"of the cores' time {cpu:.3f}"
            )
        print(f"  a check of all weights and averages {row['check'] * 1e3:.2f} ms", flush=True)
    found["diff"] = diff = _diff(max(3, run.rounds // 4))
    slower = max(diff["same"], diff["differ"])
    print(
        f"{diff['gradients']} gradients, {diff['bytes'] / 1e6:.0f} MB: written in "
        f"{diff['write']:.2f} s; diff {diff['same']:.2f} s, and where they differ "
        f"{diff['differ']:.2f} s{'  met' if slower <= DIFF_BOUND else '  MISSED'}"
    )
    return found


if __name__ == "__main__":
    Benchmark(*("ledger", __doc__, measure, on_a_rank), rounds=24, hidden={"folder": ""}).main()
