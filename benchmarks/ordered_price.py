"""What does the host do for an ordered call on a device, beside what the exchanges take?

There is no device. Tensors are the CPU's, on torch's `fake` backend, whose exchanges are left out.
Kernels are compiled for an H100 and launched by Triton's own launcher, up to the driver's call.
Streams and events are there, and do nothing. What is left is Python: a call's arguments, its work,
its header, two launches. NCCL's own time and the driver's, which are not ours, come on top.

A time is the median of a block's calls. A figure is the least of the rounds, in which all take
turns: what else runs on the machine can only add. The calls:

- `sync`: the call; `async`: with ``async_op=True``, and the work's `wait`; `hook`: what the thread
  of autograd does for a bucket of DDP;
- `torch`: `all_to_all_single` and `all_gather_into_tensor` of a line of bytes for each rank, which
  the backend copies: what torch itself takes for the exchanges of an all-reduce.

Launches and exchanges of each call of ours are counted first: they must be as in `WANTED`.

Usage: python -m benchmarks.ordered_price [--out DIR] [--rounds N]
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.driver import Benchmark, Record, Run
from pycollective.cores import used_by_others
from pycollective.torch import ordered
from pycollective.torch.ordered import calls, reduction
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.layout import Layout
from pycollective.torch.streams import Streams
from pycollective.triton import reduce, rows
from tests.triton.driver import Driver, driven

RANKS = (2, 8, 64)
BYTES = 2 << 20
CALLS = 50  # of a block
MOST = 60.0  # us
MOST_APART = 10.0  # us, of one call on different numbers of ranks
CPU = torch.device("cpu")
# Launches and exchanges of a call.
WANTED = {"1 element": (2, 1), "all_reduce": (2, 2), "reduce_scatter": (2, 1), "hook": (2, 2)}


class Stream:
    """Of a device that does nothing."""

    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


class Event:
    """One that has come."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Module:
    """Of the device, as `Streams` asks it."""

    Stream, Event = Stream, Event
    _current, _entered = Stream(), contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> Any:
        return self._current

    def stream(self, stream: Any) -> Any:
        return self._entered


class Exchanges:
    """Stands for the backend's collectives, which are done at once, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return None


@contextlib.contextmanager
def no_device() -> Iterator[tuple[Driver, Exchanges]]:
    """The CPU's tensors go the way of a device's meanwhile."""

    made = Exchanges()
    kernels = {"reduce": reduce, "rows": rows}
    backend = type(dist.group.WORLD._get_backend(CPU))
    with driven() as driver, contextlib.ExitStack() as stack:
        for owner, name, value in [
            (reduction, "_triton", lambda name, device_type: kernels[name]),
            (torch, "get_device_module", lambda device: Module()),
            (backend, "alltoall_base", made),
            (backend, "_allgather_base", made),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield driver, made


def cases(ranks: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of so many ranks."""
    group = dist.new_group(range(ranks))
    # A rank a host: the fake backend tells no other names than this rank's.
    made = OrderedGroup(group, CPU, Streams(CPU, "ordered"))
    made._layout = Layout(0, tuple((rank,) for rank in range(ranks)))
    calls._groups[group] = {CPU: made}
    one = torch.zeros(1, dtype=torch.bfloat16)
    many = torch.zeros(BYTES // 2, dtype=torch.bfloat16)
    part = torch.zeros(many.numel() // ranks, dtype=torch.bfloat16)
    bucket: Any = SimpleNamespace(buffer=lambda: many)
    lines, received = torch.zeros(2, 64 * ranks, dtype=torch.uint8)

    def of_torch() -> None:
        dist.all_to_all_single(received, lines, group=group)
        dist.all_gather_into_tensor(received, lines[:64], group=group)

    yield "1 element, sync", lambda: ordered.all_reduce(one, "sum", group)
    yield "1 element, async", lambda: ordered.all_reduce(one, "sum", group, True).wait()
    yield "all_reduce, sync", lambda: ordered.all_reduce(many, "sum", group)
    yield "all_reduce, async", lambda: ordered.all_reduce(many, "sum", group, True).wait()
    yield "reduce_scatter, sync", lambda: ordered.reduce_scatter(part, many, "avg", group)
    yield (
        "reduce_scatter, async",
        lambda: ordered.reduce_scatter(part, many, "avg", group, True).wait(),
    )
    yield "hook", lambda: ordered.hook(group, bucket)
    yield "torch", of_torch


def microseconds(call: Callable[[], Any]) -> float:
    """The median of a block's calls."""
    call()  # warm
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def measure(run: Run) -> Record:
    """All calls on all numbers of ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(RANKS))
    try:
        with no_device() as (driver, exchanges):
            every = {(name, ranks): call for ranks in RANKS for name, call in cases(ranks)}
            for (name, ranks), call in every.items():
                call()  # compiles
                driver.launches.clear()
                exchanges.count = 0
                call()
                made = len(driver.launches), exchanges.count
                wanted = WANTED.get(name.partition(",")[0], (0, 0))
                if made != wanted:
                    raise AssertionError(f"{name} on {ranks} ranks makes {made}, not {wanted}")

            used = used_by_others()
            times = dict.fromkeys(every, math.inf)
            for _ in range(run.rounds):
                for case, call in every.items():
                    driver.launches.clear()
                    times[case] = min(times[case], microseconds(call))
    finally:
        dist.destroy_process_group()
    rows = []
    for name in dict.fromkeys(name for name, _ in every):
        us = {str(ranks): times[name, ranks] for ranks in RANKS}
        row: Record = {"call": name, "us": us}
        if name != "torch":
            apart = max(us.values()) - min(us.values())
            met = max(us.values()) <= MOST and apart <= MOST_APART
            row["verdict"] = "met" if met else "MISSED"
        rows.append(row)
        each = "".join(f"{value:8.1f}" for value in us.values())
        print(f"{name:24}{each} us on {RANKS} ranks  {row.get('verdict', '')}")
    return {"rounds": run.rounds, "used_by_others": used, "rows": rows}


if __name__ == "__main__":
    Benchmark("ordered_price", __doc__, measure, rounds=50).main()
