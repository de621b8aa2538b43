"""Is ``algorithm="auto"`` as good as the best fixed choice?

In one launch the ranks make a table (what `pycollective bench --tune` does), join again with it,
and time ``auto`` beside every algorithm, turn by turn, at each size of the table; between hosts,
over Gloo on this machine, also ``auto`` by the cost model alone. A time is that of the slowest
rank, a figure the median of the rounds. The best fixed choice is that of the least median; a ratio
is the median of the rounds' ratios, so that what slows a whole round down does not count.

Usage: python -m benchmarks.auto_choice [--out DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from pycollective.bench.machine import describe_machine, describe_versions
from pycollective.bench.sizes import format_size, ladder
from pycollective.bench.tune import Plan, tune, turns

ROOT = Path(__file__).resolve().parent.parent
KI, MI = 1 << 10, 1 << 20
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = tuple(ladder(KI, 16 * MI, 0, 4))
DTYPE = "float32"
# (ranks, topology; empty: one host)
PLACES = ((2, ""), (4, ""), (4, "2x2"))
# The most that auto may take, in times of the best fixed choice.
BOUNDS = {"table": 1.10, "model": 1.5}


def on_a_rank(out: str, rounds: int) -> None:
    """What each rank runs; rank 0 writes the rows."""
    import pycollective as pc

    path = f"{out}.table"
    plan = Plan(OPERATIONS, SIZES, DTYPE, rounds)
    tune(plan, path, "", lambda line: print(line, flush=True))
    rows: list[dict[str, Any]] = []
    by_table = pc.init(timeout=120, tuning=path)
    by_model = pc.init(timeout=120, tuning="")
    ways = {"table": by_table}
    if any(by_table.host_of):
        ways["model"] = by_model  # on one host it is not asked
    for operation in OPERATIONS:
        for size in plan.sizes_of(operation, by_table.size):
            for way, comm in ways.items():
                took = turns(comm, operation, size, DTYPE, rounds, extra=("auto",))
                seconds = {name: median(each) for name, each in took.items()}
                best = min((name for name in took if name != "auto"), key=seconds.__getitem__)
                pairs = zip(took["auto"], took[best], strict=True)
                ratio = median(auto / fixed for auto, fixed in pairs)
                row = {"operation": operation, "size": size, "auto by": way, "best": best}
                rows.append({**row, "ratio": ratio, "seconds": seconds})
                if comm.rank == 0:
                    print(
                        f"{operation:14} {format_size(size):>5}  auto by {way} "
                        f"{seconds['auto'] * 1e6:10.1f} us, best {best:18} "
                        f"{seconds[best] * 1e6:10.1f} us: {ratio:.3f}",
                        flush=True,
                    )
    if by_table.rank == 0:
        Path(out).write_text(json.dumps(rows))
    by_table.barrier()
    by_table.close()
    by_model.close()


def run(ranks: int, topology: str, rounds: int) -> list[dict[str, Any]]:
    """Run the ranks; what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        command = [sys.executable, "-m", "pycollective", "run", "-n", str(ranks)]
        command += ["-m", "benchmarks.auto_choice", "--on-a-rank", out, "--rounds", str(rounds)]
        environment = {**os.environ, "PYCOLLECTIVE_TOPOLOGY": topology}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=3600)
        rows: list[dict[str, Any]] = json.loads(Path(out).read_text())
    return rows


def main() -> None:
    """Measure, print the worst ratios against the bounds, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--on-a-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_a_rank:
        on_a_rank(arguments.on_a_rank, arguments.rounds)
        return
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "rounds": arguments.rounds,
        "places": {},
    }
    for ranks, topology in PLACES:
        place = f"{ranks} ranks, {topology or 'one host'}"
        print(f"\n== {place}", flush=True)
        record["places"][place] = run(ranks, topology, arguments.rounds)
    print()
    for place, rows in record["places"].items():
        for way, bound in BOUNDS.items():
            ratios = [row for row in rows if row["auto by"] == way]
            if not ratios:
                continue
            worst = max(ratios, key=lambda row: row["ratio"])
            within = sum(row["ratio"] <= bound for row in ratios)
            print(
                f"{place}, auto by {way}: worst {worst['ratio']:.3f} ({worst['operation']} of "
                f"{format_size(worst['size'])}), {within} of {len(ratios)} within {bound}: "
                f"{'met' if within == len(ratios) else 'MISSED'} (at most {bound})"
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "auto_choice.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
