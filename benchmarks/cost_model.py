"""How well does the cost model price what is measured, and choose by it?

Every algorithm is timed over shared memory (four ranks of one host) and over a link of 1 Gbit/s
(two hosts of two ranks each, `two_hosts_network.py`). For each of the two the model's constants,
`Links`, are fitted by least squares of the relative error, none below 0. Printed and kept: the
error that is left, and how much longer than the fastest the algorithm took that the model chooses,
with the fitted constants and with those that ``algorithm="auto"`` goes by.

Usage: python -m benchmarks.cost_model [--out DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.two_hosts_network import two_hosts, why_not
from pycollective.bench.machine import describe_machine, describe_versions
from pycollective.bench.tune import OPERATIONS, Plan, measure
from pycollective.elements import ELEMENTS
from pycollective.schedule import Topology
from pycollective.schedule.cost import BETWEEN_HOSTS, Link, Links, price
from pycollective.schedule.select import Measurement, Table, choose
from pycollective.tuning import read_table, table_as_json, write_table

ROOT = Path(__file__).resolve().parent.parent
KI, MI = 1 << 10, 1 << 20
SIZES = (KI, 16 * KI, 256 * KI, MI, 4 * MI)
DTYPES = ("float32", "bfloat16")
RANKS = 4
BOUND = 1.5
_NUMBERS = 7


def on_a_rank(out: str, rounds: int) -> None:
    """What each rank runs; rank 0 writes a table of what was measured."""
    import pycollective as pc

    made = []
    with pc.init(timeout=120, tuning="") as comm:
        for dtype in DTYPES:
            for operation in OPERATIONS:
                for size in Plan((operation,), SIZES, dtype).sizes_of(operation, comm.size):
                    made.append(measure(comm, operation, size, dtype, rounds))
        if comm.rank == 0:
            write_table(out, Table({}, tuple(made)))


def over_shared_memory(program: tuple[str, ...]) -> None:
    """Run it in four ranks of this host."""
    command = [sys.executable, "-m", "pycollective", "run", "-n", str(RANKS), *program]
    environment = {k: v for k, v in os.environ.items() if k != "PYCOLLECTIVE_TOPOLOGY"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)


def over_the_link(program: tuple[str, ...]) -> None:
    """Run it in two ranks of each of two hosts."""
    with two_hosts() as hosts:
        jobs = [
            subprocess.Popen(
                host.torchrun(Path(sys.executable), RANKS // 2, node, *program),
                env=host.environment(),
                cwd=ROOT,
            )
            for node, host in enumerate(hosts)
        ]
        codes = [job.wait(timeout=1800) for job in jobs]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


PLACES: dict[str, Callable[[tuple[str, ...]], None]] = {
    "shared memory, 4 ranks": over_shared_memory,
    "1 Gbit/s, 2 hosts of 2 ranks": over_the_link,
}


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
        "choices_of_auto": choices(entries, BETWEEN_HOSTS["c10d"]),
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


def main() -> None:
    """Measure, fit, print, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--on-a-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_a_rank:
        on_a_rank(arguments.on_a_rank, arguments.rounds)
        return
    problem = why_not()
    if problem:
        raise SystemExit(f"two hosts cannot be made here: {problem}")
    record: dict[str, Any] = {"machine": describe_machine(), "versions": describe_versions()}
    with tempfile.TemporaryDirectory() as folder:
        for place, run in PLACES.items():
            out = f"{folder}/table.json"
            options = ("--on-a-rank", out, "--rounds", str(arguments.rounds))
            run(("-m", "benchmarks.cost_model", *options))
            record[place] = report(place, read_table(out).entries)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "cost_model.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
