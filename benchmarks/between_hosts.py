"""How fast is all-reduce between hosts over MPI, beside MPI's own Allreduce and a bare Sendrecv?

Every rank plays a host of its own, so that all bytes go over MPI. All run in the same processes,
turn by turn, in place, from the same inputs; a time is that of the slowest rank, a figure the
median of turns in one phase of the machine. After each turn the result is compared bit for bit with
the oracle. The bare way (`sendrecv_add.c`, for two ranks) is native: exchange halves, add, exchange
sums.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checked import Call, Sum, seconds_of, take_turns_by_phase
from benchmarks.driver import Benchmark, Record, Run
from benchmarks.mpi_environments import NAMES, ensure

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


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import numpy as np
    from mpi4py import MPI

    import pycollective as pc
    from pycollective.bench import phase
    from pycollective.cores import cores_of

    world = MPI.COMM_WORLD
    comm = pc.init(timeout=60)
    cores = cores_of(comm.size)
    os.sched_setaffinity(0, {cores[comm.rank]})  # this thread; those of the MPI are there already
    looks = partial(phase.look_together, comm, cores)
    rows: list[Record] = []
    for dtype, sizes in (("float32", SIZES), ("float16", (MI, 16 * MI))):
        for size in sizes:
            repeats = max(1, min(50, 4 * MI // size))
            count = size // np.dtype(dtype).itemsize
            buffers = Sum.of(dtype, count, comm.size, comm.rank, repeats)
            x = buffers.x
            calls: dict[str, Call] = {"pycollective": lambda x=x: comm.all_reduce(x)}
            if dtype == "float32":
                calls["mpi"] = lambda x=x: world.Allreduce(MPI.IN_PLACE, x)
                if comm.size == 2:
                    calls["bare"] = bare_way(run.options["library"], x)
            timed = seconds_of(repeats, world.Barrier, lambda took: world.allreduce(took, MPI.MAX))
            found = take_turns_by_phase(calls, run.rounds, buffers.turn(timed), looks)
            wrong = {name: world.allreduce(each) for name, each in buffers.wrong(calls).items()}
            row = {"dtype": dtype, "size": size, "wrong": wrong.pop("pycollective")}
            row |= {f"{name}'s wrong": each for name, each in wrong.items()}
            for now, seconds, turns, medians in found:
                row |= {"phase": now, "ns": seconds * 1e9, "turns": turns}
                rows.append({**row, **{name: each[0] for name, each in medians.items()}})
                row["wrong"] = 0  # of all phases: said once
    comm.close()
    if world.rank != 0:
        return None
    return {"mpi": MPI.Get_library_version().split("\n")[0], "rows": rows}


def ranks_under(run: Run, name: str, ranks: int) -> Record:
    """Run the ranks under one MPI, with the bare way compiled for it; what rank 0 made."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libsendrecv.so"
        compiler = [str(ensure(name) / "bin" / "mpicc"), "-O3", "-march=native", "-shared", "-fPIC"]
        source = Path(__file__).with_name("sendrecv_add.c")
        subprocess.run([*compiler, str(source), "-o", str(library)], check=True)
        found: Record = run.ranks_under(name, ranks, f"{ranks}x1", library=str(library))
        return found


def _verdict(factor: float, least: float | None) -> str:
    if least is None:
        return ""
    return f"  {'met' if factor >= least else 'MISSED'} (>= {least:.2f}x)"


def measure(run: Run) -> Record:
    """Under each MPI."""
    record = {}
    for name in NAMES:
        for ranks in RANKS:
            result = record[f"{name}, {ranks} ranks"] = ranks_under(run, name, ranks)
            for row in result["rows"]:
                own, peer = row["pycollective"], row.get("mpi")
                line = f"{name:8} {ranks} {row['dtype']:8} {row['size']:9} {row['phase']:6} "
                line += f"{own * 1e6:10.1f} us"
                if peer:
                    least = TARGETS[ranks].get(row["size"])
                    line += f"  MPI's own {peer * 1e6:10.1f} us = {peer / own:5.2f}x"
                    line += _verdict(peer / own, least)
                bare = row.get("bare")
                if bare:
                    line += f"  bare {bare * 1e6:10.1f} us = {bare / own:5.2f}x"
                    line += _verdict(bare / own, BARE if MI <= row["size"] <= 16 * MI else None)
                print(f"{line}  wrong {row['wrong']}", flush=True)
    return record


if __name__ == "__main__":
    Benchmark(
        *("between_hosts", __doc__, measure, on_a_rank),
        hidden={"library": ""},
        file="between_hosts_mpi",
    ).main()
