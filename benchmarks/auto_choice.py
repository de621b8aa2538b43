"""Is ``algorithm="auto"`` as good as the best fixed choice?

In one launch the ranks make a table (what `pycollective bench --tune` does), join again with it,
and time ``auto`` beside every algorithm, turn by turn, at each size of the table; between hosts,
over Gloo on this machine, also ``auto`` by the cost model alone. A time is that of the slowest
rank, a figure the median of the rounds. The best fixed choice is that of the least median; a ratio
is the median of the rounds' ratios, so that what slows a whole round down does not count.

Usage: python -m benchmarks.auto_choice [--out DIR] [--rounds N]
"""

from __future__ import annotations

import tempfile
from statistics import median

from benchmarks.driver import Benchmark, Record, Run
from pycollective.bench.settings import format_size, ladder
from pycollective.bench.tune import Plan, tune, turns

KI, MI = 1 << 10, 1 << 20
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = tuple(ladder(KI, 16 * MI, 0, 4))
DTYPE = "float32"
# (ranks, topology; empty: one host)
PLACES = ((2, ""), (4, ""), (4, "2x2"))
# The most that auto may take, in times of the best fixed choice.
BOUNDS = {"table": 1.10, "model": 1.5}


def on_a_rank(run: Run) -> list[Record] | None:
    """What each rank runs."""
    import pycollective as pc

    path, rounds = run.options["table"], run.rounds
    plan = Plan(OPERATIONS, SIZES, DTYPE, rounds)
    tune(plan, path, "", lambda line: print(line, flush=True))
    rows: list[Record] = []
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
    rank = by_table.rank
    by_table.barrier()
    by_table.close()
    by_model.close()
    return rows if rank == 0 else None


def measure(run: Run) -> Record:
    """In each place; prints the worst ratios against the bounds."""
    places = {}
    for ranks, topology in PLACES:
        place = f"{ranks} ranks, {topology or 'one host'}"
        print(f"\n== {place}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            places[place] = run.ranks_here(ranks, topology, table=f"{folder}/table.json")
    print()
    for place, rows in places.items():
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
    return {"rounds": run.rounds, "places": places}


if __name__ == "__main__":
    hidden = {"table": ""}
    Benchmark("auto_choice", __doc__, measure, on_a_rank, rounds=21, hidden=hidden).main()
