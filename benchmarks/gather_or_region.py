"""Top-k between several hosts: by gather or by region?

Ranks of one machine play a host each, so bytes cost next to nothing: what is measured is the price
of region's two more collectives and second selection. It pays where the bytes that it saves take a
link longer than that. One parameter; rounds take turns between both ways; medians of the slowest
rank. The last columns: from which rate of the link down region is faster, and `auto`'s choice.

Usage: python -m pycollective run -n HOSTS python -m benchmarks.gather_or_region [ROUNDS]
"""

import sys

import numpy as np

import pycollective as pc
from benchmarks.turns import seconds_of, take_turns
from pycollective.compression import TopKState
from pycollective.compression.ends import ends_of_communicator
from pycollective.compression.placing import Places
from pycollective.compression.routing import gathers

DENSITY = 0.01
SIZES = tuple(1 << power for power in range(17, 25))


def main() -> None:
    """Print a line for each size."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    comm = pc.init(timeout=300)
    hosts = comm.size
    ends = ends_of_communicator(comm, host_of=range(hosts))

    def slowest(seconds: float) -> float:
        number = np.array([seconds])
        comm.all_reduce(number, "max")
        return float(number[0])

    for size in SIZES:
        x = np.random.default_rng(comm.rank).standard_normal(size, np.float32)
        shapes = {"w": (size // 64, 64)}
        ways = {
            way: TopKState(shapes, ends, density=DENSITY, exchange=way)
            for way in ("gather", "region")
        }
        calls = {
            way: (lambda state=state, x=x: state.all_reduce({"w": x.copy()}))
            for way, state in ways.items()
        }
        taken = take_turns(calls, rounds, seconds_of(1, comm.barrier, slowest))
        # What a rank sends it receives, between as many.
        sent = {}
        for way, state in ways.items():
            stats = state.stats()
            sent[way] = stats["payload_bytes"] / stats["compressed_calls"]
        more = taken["region"][0] - taken["gather"][0]
        fewer = sent["gather"] - sent["region"]
        pays = "up to any rate" if more <= 0 else f"up to {8 * fewer / more / 1e9:.2f} Gbit/s"
        pays = pays if fewer > 0 else "never"
        by_bytes = gathers(round(DENSITY * size), 2, Places(0, tuple(range(hosts))))
        if comm.rank == 0:
            print(
                f"{hosts} hosts, {size:>9} elements:"
                f" gather {1e3 * taken['gather'][0]:7.2f} ms {sent['gather'] / 1024:7.0f} KiB,"
                f" region {1e3 * taken['region'][0]:7.2f} ms {sent['region'] / 1024:7.0f} KiB;"
                f" region pays {pays}; auto: {'gather' if by_bytes else 'region'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
