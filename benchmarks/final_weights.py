"""Do a training's final weights depend on the size of buckets, or on the number of ranks?

A small network learns scikit-learn's digits, in fp32, from the same 12 micro-batches a step. First
by DistributedDataParallel on three ranks, with buckets of several sizes: over Gloo, and over
pycollective with `all_reduce_hook`. Then on several numbers of ranks: by DistributedDataParallel
with `no_sync` over Gloo, and by `LeafSync`. Each training ends with a digest of its weights and
their loss on images that it has not seen. `front_page.py` draws them.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.driver import Benchmark, Record, Run
from benchmarks.leaf_training import train, train_by_ddp

CAPS = (0.01, 0.03, 0.1, 0.5, 25.0)  # bucket_cap_mb
RANKS = (1, 2, 3, 4, 8)
RANKS_OF_CAPS = 3  # two numbers have one sum in any order
LEAVES = 12
STEPS = 150


def on_a_rank(run: Run) -> Record | None:
    """All trainings of a backend, each on the first so many ranks."""
    import torch.distributed as dist

    import pycollective.torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    backend = run.options["backend"]
    own = backend == "pycollective"
    dist.init_process_group(backend)
    groups = {count: dist.new_group(range(count)) for count in RANKS}
    found: Record = {"buckets": [], "ranks": []}

    def keep(table: str, count: int, **what: float) -> None:
        """Train on `count` ranks; all must end alike."""
        if dist.get_rank() < count:
            arguments: tuple[Any, ...] = ("digits", "fp32", LEAVES, STEPS, groups[count])
            if own and table == "ranks":
                result = train(*arguments)
            else:
                hook = pycollective.torch.all_reduce_hook if own else None
                result = train_by_ddp(*arguments, what.get("bucket_cap_mb", 1), hook)
            digests: list[Any] = [None] * count
            dist.all_gather_object(digests, result.digest, groups[count])
            assert set(digests) == {result.digest}, digests
            row = {**what, "digest": result.digest, "test_loss": result.test_loss}
            found[table].append(row)
            if dist.get_rank() == 0:
                print(f"{backend:12} {table:7} {row}", flush=True)
        dist.barrier()

    for cap in CAPS:
        keep("buckets", RANKS_OF_CAPS, bucket_cap_mb=cap)
    for count in RANKS:
        keep("ranks", count, ranks=count)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return found if rank == 0 else None


def measure(run: Run) -> Record:
    """Both backends. Ours must have one digest for all buckets, and one for all counts of ranks."""
    found = {
        backend: run.ranks_here(max(RANKS), backend=backend) for backend in ("gloo", "pycollective")
    }
    own = found["pycollective"].values()
    return {
        "settings": {"leaves": LEAVES, "steps": STEPS, "ranks_of_buckets": RANKS_OF_CAPS},
        "backends": found,
        "wrong": sum(len({row["digest"] for row in rows}) - 1 for rows in own),
    }


if __name__ == "__main__":
    hidden = {"backend": ""}
    Benchmark("final_weights", __doc__, measure, on_a_rank, rounds=0, hidden=hidden).main()
