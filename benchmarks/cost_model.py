"""How well does the cost model price what is measured, and choose by it?

Every algorithm is timed over shared memory (four ranks of one host) and over a link of 1 Gbit/s
(two hosts of two ranks each, `two_hosts_network.py`). For each of the two the model's constants,
`Links`, are fitted by least squares of the relative error, none below 0. Printed and kept: the
error that is left, and how much longer than the fastest the algorithm took that the model chooses,
with the fitted constants and with those that ``algorithm="auto"`` goes by.

Usage: python -m benchmarks.cost_model [--out DIR] [--rounds N]
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.driver import Benchmark, Record, Run, require_two_hosts
from pycollective.bench.tune import OPERATIONS, Plan
from pycollective.bench.tune import measure as measure_all
from pycollective.planning.elements import ELEMENTS
from pycollective.planning.tuning_table import table_as_json, table_from_json
from pycollective.schedule import Topology
from pycollective.schedule.cost import BETWEEN_HOSTS, Link, Links, price
from pycollective.schedule.select import Measurement, Table, choose

KI, MI = 1 << 10, 1 << 20
SIZES = (KI, 16 * KI, 256 * KI, MI, 4 * MI)
DTYPES = ("float32", "bfloat16")
RANKS = 4
BOUND = 1.5
_NUMBERS = 7


def on_a_rank(run: Run) -> Any:
    """What each rank runs; rank 0 has a table of what was measured."""
    import pycollective as pc

    made = []
    with pc.init(timeout=120, tuning="") as comm:
        for dtype in DTYPES:
            for operation in OPERATIONS:
                for size in Plan((operation,), SIZES, dtype).sizes_of(operation, comm.size):
                    made.append(measure_all(comm, operation, size, dtype, run.rounds))
        return table_as_json(Table({}, tuple(made))) if comm.rank == 0 else None


def links_of(numbers: list[float]) -> Links:
    """`Links` from seven numbers."""
    return Links(Link(*numbers[:3]), Link(*numbers[3:6]), numbers[6])


def priced(entry: Measurement, algorithm: str, links: Links) -> float:
    """What the model says that it takes, seconds."""
    where = Topology.parse(entry.topology, RANKS)
    element = ELEMENTS[entry.dtype]
    return price(entry.operation, algorithm, where, entry.bytes, element, links)


def fit(entries: tuple[Measurement, ...]) -> Links:
    """The constants with the least squares of the relative errors; what is not used is 0."""
    units = [links_of([float(i == one) for i in range(_NUMBERS)]) for one in range(_NUMBERS)]
    # The price is linear in the constants. Each row divided by what was measured should give 1.
    rows = np.array(
        [
            [priced(entry, name, unit) / seconds for unit in units]
            for entry in entries
            for name, seconds in entry.seconds.items()
        ]
    )
    solution, _ = nnls(rows, np.ones(len(rows)))
    return links_of([float(each) for each in solution])


def errors(entries: tuple[Measurement, ...], links: Links) -> dict[str, float]:
    """Median and largest of |priced / measured - 1|."""
    off = [
        abs(priced(entry, name, links) / seconds - 1)
        for entry in entries
        for name, seconds in entry.seconds.items()
    ]
    return {"median": statistics.median(off), "worst": max(off)}


def choices(entries: tuple[Measurement, ...], links: Links) -> dict[str, float]:
    """How much longer than the fastest the model's choice took."""
    ratios = []
    for entry in entries:
        where = Topology.parse(entry.topology, RANKS)
        name = choose(entry.operation, where, entry.bytes, ELEMENTS[entry.dtype], links)
        ratios.append(entry.seconds[name] / min(entry.seconds.values()))
    return {
        "cases": len(ratios),
        "within": sum(ratio <= BOUND for ratio in ratios),
        "worst": max(ratios),
    }


def report(place: str, entries: tuple[Measurement, ...]) -> dict[str, Any]:
    """Fit, print and return what came out."""
    links = fit(entries)
    numbers = {
        "measured": table_as_json(Table({}, entries))["entries"],
        "fitted": asdict(links),
        "error": errors(entries, links),
        "choices": choices(entries, links),
        "choices_of_auto": choices(entries, BETWEEN_HOSTS["gloo"]),
    }
    print(f"\n== {place}")
    for name, link in (("within a host", links.local), ("between hosts", links.across)):
        if link != Link(0, 0, 0):
            rate = f"{1 / link.byte / 1e9:.3g} GB/s" if link.byte else "no limit found"
            print(
                f"{name}: step {link.latency * 1e6:.3g} us, message {link.message * 1e6:.3g} us, "
                f"{rate}"
            )
    if links.add:
        print(f"additions: {1 / links.add / 1e9:.3g} GB/s")
    error = numbers["error"]
    print(f"error of the price: median {error['median']:.0%}, worst {error['worst']:.0%}")
    for whose in ("choices", "choices_of_auto"):
        found = numbers[whose]
        constants = "fitted" if whose == "choices" else "auto's"
        print(
            f"choices with the {constants} constants: {found['within']} of {found['cases']} within "
            f"{BOUND}x of the fastest, worst {found['worst']:.2f}x"
        )
    return numbers


def measure(run: Run) -> Record:
    """Over shared memory, and over the link."""
    require_two_hosts()
    tables = {
        "shared memory, 4 ranks": run.ranks_here(RANKS),
        "1 Gbit/s, 2 hosts of 2 ranks": run.ranks_on_two_hosts(RANKS // 2),
    }
    return {place: report(place, table_from_json(made).entries) for place, made in tables.items()}


if __name__ == "__main__":
    Benchmark("cost_model", __doc__, measure, on_a_rank).main()
