"""What do the algorithms cost on one host, beside the direct path and Gloo?

Over shared memory nothing is gained by a ring or a tree; this shows what the engine that carries
out every schedule costs, and that whoever asks for an algorithm by name still has a fast one. All
take turns in the same processes; a time is that of the slowest rank, a figure the median of the
rounds. `auto` is the direct path here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.turns import seconds_of, take_turns

ROOT = Path(__file__).resolve().parent.parent
KI, MI = 1 << 10, 1 << 20
SIZES = (KI, 16 * KI, 128 * KI, MI, 4 * MI, 16 * MI, 64 * MI)
RANKS = (2, 4)
NAMES = ("auto", "ring", "tree", "halving_doubling", "recursive_doubling", "hierarchical")
JUDGED = ("ring", "tree")
MOST_OF_DIRECT, JUDGED_AT, LEAST_OF_GLOO = 2.0, 16 * MI, 3.0


def on_a_rank(out: str, rounds: int) -> None:
    """What each rank runs; rank 0 writes the rows."""
    import torch
    import torch.distributed as dist

    import pycollective as pc
    from pycollective import reference
    from pycollective.bench.problem import leaves

    comm = pc.init(timeout=60)
    dist.init_process_group("gloo")

    def slowest(number: float) -> float:
        tensor = torch.tensor([number], dtype=torch.float64)
        comm.all_reduce(tensor, op="max")
        return tensor.item()

    rows = []
    for size in SIZES:
        x = torch.zeros(size // 4)
        calls: dict[str, Callable[[], object]] = {
            name: lambda x=x, name=name: comm.all_reduce(x, algorithm=name) for name in NAMES
        }
        calls["gloo"] = lambda x=x: dist.all_reduce(x)
        repeats = max(1, min(50, 4 * MI // size))
        turn = seconds_of(repeats, comm.barrier, slowest)
        seconds = {name: each[0] for name, each in take_turns(calls, rounds, turn).items()}
        inputs = leaves("float32", "sum", comm.size, min(len(x), 300_000), size)
        want = reference.reduce(inputs).view("u1")
        wrong = 0
        for name in NAMES:
            mine = inputs[comm.rank].copy()
            comm.all_reduce(mine, algorithm=name)
            wrong += int((mine.view("u1") != want).sum())
        rows.append({"size": size, "wrong": int(slowest(wrong)), "seconds": seconds})
    if comm.rank == 0:
        versions = {"torch": torch.__version__, "pycollective": pc.__version__}
        Path(out).write_text(json.dumps({"versions": versions, "rows": rows}))
    dist.destroy_process_group()
    comm.close()


def measure(ranks: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Run so many ranks; what rank 0 wrote."""
    out = folder / f"algorithms-{os.getpid()}.json"
    run = [sys.executable, "-m", "pycollective", "run", "-n", str(ranks), "-m"]
    program = ["benchmarks.algorithms", "--on-a-rank", str(out), "--rounds", str(rounds)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([*run, *program], env=environment, cwd=ROOT, check=True, timeout=600)
    result: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return result


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


def main() -> None:
    """Measure, print a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--on-a-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_a_rank:
        on_a_rank(arguments.on_a_rank, arguments.rounds)
        return
    from pycollective.bench.machine import describe_machine

    arguments.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": describe_machine(), "python": sys.version.split()[0]}
    for ranks in RANKS:
        record[f"{ranks} ranks"] = measure(ranks, arguments.rounds, arguments.out)
        report(ranks, record[f"{ranks} ranks"]["rows"])
    (arguments.out / "algorithms.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
