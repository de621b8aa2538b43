"""How fast is all-reduce between two hosts, beside the link's own speed and Gloo's all-reduce?

Two hosts of two ranks each and a link of 1 Gbit/s (`driver.py`). All take turns in the same
processes: pycollective raw, packed, raw once more as the control, and by each algorithm; Gloo's own
all-reduce of a copy; and the link alone, with as many bytes each way over plain TCP as hierarchical
sends. Tensors are random, of a normal distribution, or gradients (`gradients.py`).

The interface counts what leaves each host, with all headers; the schedule says what should.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checked import Call, Sum, Turn, seconds_of, take_turns_by_phase
from benchmarks.driver import ADDRESSES, Benchmark, Record, Run, require_two_hosts
from benchmarks.gradients import KEPT, load
from pycollective.bench.measurement import slowest

KI, MI = 1 << 10, 1 << 20
TOPOLOGY = "2x2"
SIZES = (KI, 64 * KI, MI, 4 * MI, 16 * MI)
GAUSSIAN, GRADIENTS = "Gaussian", "gradients"
CASES = (
    *(("float32", size, GAUSSIAN) for size in SIZES),
    *(("bfloat16", size, data) for size in (MI, 16 * MI) for data in (GAUSSIAN, GRADIENTS)),
    ("float32", 16 * MI, GRADIENTS),
)
STEP = 20  # of whose gradients
WIRES = ("raw", "exact")
ALGORITHMS = ("ring", "direct", "halving_doubling", "tree", "recursive_doubling")
JUDGED = ("float32", 16 * MI, GAUSSIAN)
MOST_OF_LINK, LEAST_OF_GLOO, BYTES_WITHIN = 1.12, 1.3, 0.03
JUDGED_PACKED = tuple(("bfloat16", 16 * MI, data) for data in (GAUSSIAN, GRADIENTS))
LEAST_OF_GLOO_PACKED = 1.5
AGAIN = " again"  # behind the name of what is measured a second time
_PORT = 29512


def bytes_across(algorithm: str, dtype: str, size: int) -> float:
    """Bytes that each of the two hosts sends to the other, as the schedule says."""
    from pycollective.planning.tuning_table import ELEMENTS
    from pycollective.schedule import Topology
    from pycollective.schedule.cost import counts

    element = ELEMENTS[dtype]
    wide = element.accumulator / element.size
    phases = counts("all_reduce", algorithm, Topology.parse(TOPOLOGY, 4))
    loads = [phase.across for phase in phases]
    return size * sum(load.leaves + load.results + load.nodes * wide for load in loads)


def _elements(data: str, rank: int, count: int) -> Any:
    """A rank's, in fp32."""
    import torch

    if data == GAUSSIAN:
        return torch.randn(count, generator=torch.Generator().manual_seed(rank)).numpy()
    of = load()[KEPT.index(STEP)]
    # Rank r's, then those of the next: no two ranks have the same in one place.
    whole = np.concatenate([of[(rank + each) % len(of)] for each in range(len(of))])
    return np.resize(whole, count)


class Wire:
    """A TCP connection between the first ranks of both hosts, for the link's own speed."""

    def __init__(self, rank: int) -> None:
        self._socket: socket.socket | None = None
        if rank == 0:
            with closing(socket.create_server((ADDRESSES[0], _PORT))) as server:
                self._socket = server.accept()[0]
        elif rank == 2:
            while self._socket is None:
                try:
                    self._socket = socket.create_connection((ADDRESSES[0], _PORT))
                except ConnectionRefusedError:
                    time.sleep(0.05)

    def both_ways(self, size: int) -> None:
        """Send and receive `size` bytes at once; the other ranks do nothing."""
        wire = self._socket
        if wire is None:
            return
        sending = threading.Thread(target=wire.sendall, args=(bytes(size),))
        sending.start()
        into, left = bytearray(MI), size
        while left:
            left -= wire.recv_into(into, min(left, MI))
        sending.join()


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist

    import pycollective as pc
    from pycollective.bench import phase
    from pycollective.cores import cores_of
    from pycollective.dtypes import numpy_type

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    comm = pc.init(timeout=60)
    wire = Wire(rank)
    (interface,) = [name for name in os.listdir("/sys/class/net") if name != "lo"]
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")

    slowest_of = partial(slowest, comm)
    looks = partial(phase.look_together, comm, cores_of(comm.size))
    rows: list[Record] = []
    for dtype, size, data in CASES:
        element = numpy_type(dtype)
        every = [
            _elements(data, each, size // element.itemsize).astype(element)
            for each in range(comm.size)
        ]
        # The bucket filter lets half a MiB pass at once: enough calls to empty it first.
        repeats = max(1, min(50, 4 * MI // size))
        buffers = Sum(every, rank, repeats, apart=True)
        x, y = (
            torch.from_numpy(each.view(f"i{element.itemsize}")).view(getattr(torch, dtype))
            for each in (buffers.x, buffers.out)
        )
        expected = bytes_across("hierarchical", dtype, size)
        calls: dict[str, Call] = {}
        for name in (*WIRES, "raw" + AGAIN):
            way = name.removesuffix(AGAIN)
            calls[name] = lambda x=x, y=y, way=way: comm.all_reduce(x, out=y, wire=way)
        for name in ALGORITHMS:
            calls[name] = lambda x=x, y=y, name=name: comm.all_reduce(
                x, out=y, algorithm=name, wire="raw"
            )
        calls["gloo"] = lambda x=x, y=y: dist.all_reduce(y.copy_(x))
        calls["link"] = lambda expected=expected: wire.both_ways(int(expected))
        timed = seconds_of(repeats, dist.barrier, slowest_of)

        def turn(call: Call, timed: Turn = timed, repeats: int = repeats) -> tuple[float, ...]:
            before = int(counter.read_text())
            seconds = timed(call)
            return (*seconds, (int(counter.read_text()) - before) / repeats)

        found = take_turns_by_phase(calls, run.rounds, buffers.turn(turn), looks)
        wrong = {name: int(slowest_of(each)) for name, each in buffers.wrong(calls).items()}
        wrong.pop("link")  # which adds nothing up
        of_gloo = wrong.pop("gloo")
        for now, latency, turns, medians in found:
            rows.append(
                {
                    "dtype": dtype,
                    "size": size,
                    "data": data,
                    "phase": now,
                    "ns": latency * 1e9,
                    "turns": turns,
                    # Of all phases: said once.
                    "wrong": sum(wrong.values()) if now == found[0].phase else 0,
                    "gloo's wrong": of_gloo,
                    "seconds": {name: each[0] for name, each in medians.items()},
                    "bytes_sent": {name: each[1] for name, each in medians.items()},
                    "bytes_of_schedule": expected,
                }
            )
    comm.close()
    dist.destroy_process_group()
    versions = {"torch": torch.__version__, "pycollective": pc.__version__}
    return {"versions": versions, "rows": rows} if rank == 0 else None


def _case(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["dtype"], row["size"], row["data"]


def report(rows: list[dict[str, Any]]) -> None:
    """Print the table, and what is met."""
    for row in rows:
        seconds = row["seconds"]
        own = seconds["exact"]
        print(
            f"{row['dtype']:8} {row['size']:9} {row['data']:9} {row['phase']:6}  "
            + "  ".join(f"{name} {value * 1e3:.2f} ms" for name, value in seconds.items())
            + f"  over gloo {seconds['gloo'] / own:.2f}x  bytes {row['bytes_sent']['exact']:.0f}, "
            + f"raw {row['bytes_sent']['raw']:.0f} of {row['bytes_of_schedule']:.0f}"
            + f"  wrong {row['wrong']}"
        )
        print(f"    raw over itself {seconds['raw' + AGAIN] / seconds['raw']:.3f}")
    for row in rows:
        if _case(row) == JUDGED:
            _judge(row)
        elif _case(row) in JUDGED_PACKED:
            of_gloo = row["seconds"]["gloo"] / row["seconds"]["exact"]
            met = "met" if of_gloo >= LEAST_OF_GLOO_PACKED else "MISSED"
            print(
                f"16 Mi bfloat16, {row['data']}, packed, {row['phase']}: at least "
                f"{LEAST_OF_GLOO_PACKED} over Gloo: {of_gloo:.3f} {met}"
            )


def _judge(row: dict[str, Any]) -> None:
    seconds = row["seconds"]
    of_link, of_gloo = seconds["raw"] / seconds["link"], seconds["gloo"] / seconds["raw"]
    bytes_off = abs(row["bytes_sent"]["raw"] / row["bytes_of_schedule"] - 1)
    for text, value, met in (
        (f"time over the link's own, at most {MOST_OF_LINK}", of_link, of_link <= MOST_OF_LINK),
        (f"faster than Gloo, at least {LEAST_OF_GLOO}", of_gloo, of_gloo >= LEAST_OF_GLOO),
        (f"bytes off the schedule, at most {BYTES_WITHIN}", bytes_off, bytes_off <= BYTES_WITHIN),
    ):
        verdict = "met" if met else "MISSED"
        print(f"16 Mi float32, raw, {row['phase']}: {text}: {value:.3f} {verdict}")


def measure(run: Run) -> Record:
    """On two hosts."""
    require_two_hosts()
    load()  # makes the gradients, where they are not there yet
    record = {"link": "1 Gbit/s each way", "topology": TOPOLOGY, **run.ranks_on_two_hosts(2)}
    report(record["rows"])
    return record


if __name__ == "__main__":
    Benchmark("two_hosts", __doc__, measure, on_a_rank, rounds=7).main()
