"""What do the algorithms cost on one host, beside the direct path and Gloo?

Over shared memory nothing is gained by a ring or a tree; this shows what the engine that carries
out every schedule costs, and that whoever asks for an algorithm by name still has a fast one. All
take turns in the same processes, in place, on the same inputs; a time is that of the slowest rank,
a figure the median of the rounds. `auto` is the direct path here. After each turn the result is
compared with the oracle, bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.checked import Call, Sum, seconds_of, take_turns
from benchmarks.driver import Benchmark, Record, Run
from pycollective.bench.measurement import slowest

KI, MI = 1 << 10, 1 << 20
SIZES = (KI, 16 * KI, 128 * KI, MI, 4 * MI, 16 * MI, 64 * MI)
RANKS = (2, 4)
NAMES = ("auto", "ring", "tree", "halving_doubling", "recursive_doubling", "hierarchical")
JUDGED = ("ring", "tree")
MOST_OF_DIRECT, JUDGED_AT, LEAST_OF_GLOO = 2.0, 16 * MI, 3.0


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist

    import pycollective as pc

    comm = pc.init(timeout=60)
    dist.init_process_group("gloo")

    slowest_of = partial(slowest, comm)
    rows = []
    for size in SIZES:
        repeats = max(1, min(50, 4 * MI // size))
        buffers = Sum.of("float32", size // 4, comm.size, comm.rank, repeats)
        x = torch.from_numpy(buffers.x)
        calls: dict[str, Call] = {
            name: lambda x=x, name=name: comm.all_reduce(x, algorithm=name) for name in NAMES
        }
        calls["gloo"] = lambda x=x: dist.all_reduce(x)
        turn = buffers.turn(seconds_of(repeats, comm.barrier, slowest_of))
        seconds = {name: each[0] for name, each in take_turns(calls, run.rounds, turn).items()}
        wrong = {name: int(slowest_of(each)) for name, each in buffers.wrong(calls).items()}
        of_gloo = wrong.pop("gloo")
        row = {"size": size, "wrong": sum(wrong.values()), "gloo's wrong": of_gloo}
        rows.append({**row, "seconds": seconds})
    versions = {"torch": torch.__version__, "pycollective": pc.__version__}
    rank = comm.rank
    dist.destroy_process_group()
    comm.close()
    return {"versions": versions, "rows": rows} if rank == 0 else None


def report(ranks: int, rows: list[dict[str, Any]]) -> None:
    """Print the table, and what is met."""
    print(f"{ranks} ranks, float32, microseconds")
    for row in rows:
        times = "  ".join(f"{name} {each * 1e6:.1f}" for name, each in row["seconds"].items())
        print(f"{row['size']:9}  {times}  wrong {row['wrong']}")
    for name in JUDGED:
        over_gloo = min(row["seconds"]["gloo"] / row["seconds"][name] for row in rows)
        (at,) = [row["seconds"] for row in rows if row["size"] == JUDGED_AT]
        of_direct = at[name] / at["auto"]
        print(
            f"{name}: {of_direct:.2f} of direct's time at 16 Mi "
            f"({'met' if of_direct <= MOST_OF_DIRECT else 'MISSED'}, at most {MOST_OF_DIRECT:g}); "
            f"over Gloo at its worst size {over_gloo:.1f}x "
            f"({'met' if over_gloo >= LEAST_OF_GLOO else 'MISSED'}, at least {LEAST_OF_GLOO:g}x)"
        )


def measure(run: Run) -> Record:
    """On each number of ranks."""
    record = {}
    for ranks in RANKS:
        record[f"{ranks} ranks"] = run.ranks_here(ranks)
        report(ranks, record[f"{ranks} ranks"]["rows"])
    return record


if __name__ == "__main__":
    Benchmark("algorithms", __doc__, measure, on_a_rank).main()
