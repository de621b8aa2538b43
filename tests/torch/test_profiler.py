"""What a profiler shows of calls."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import pycollective.torch
from tests.torch.groups import standing_group


def calls(asynchronous: bool):
    ones = torch.ones(2, 3)
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    send, receive = (dist.isend, dist.irecv) if asynchronous else (dist.send, dist.recv)
    how = {"async_op": asynchronous}
    transposed = torch.ones(3, 2).t()
    yield "all_reduce", [[2, 3]], lambda: dist.all_reduce(ones, **how)
    yield "all_reduce", [[2, 3]], lambda: dist.all_reduce(transposed, **how)
    yield "broadcast", [[2, 3]], lambda: dist.broadcast(ones, 0, **how)
    yield "reduce", [[2, 3]], lambda: dist.reduce(ones, 0, **how)
    outputs = [torch.empty(2, 3) for _ in range(2)]
    yield "all_gather", [[2, 3]], lambda: dist.all_gather(outputs, ones, **how)
    yield "reduce_scatter", [[2, 3]] * 2, lambda: dist.reduce_scatter(ones, outputs, **how)
    yield "barrier", [], lambda: dist.barrier(**how)
    first, second = (send, receive) if rank == 0 else (receive, send)
    for call in (first, second):
        name = "send" if call is send else "recv"
        yield name, [[2, 3]], lambda call=call: call(ones, peer)


def profiled(comm):
    """For each call: how it was shown, and how it should have been."""
    standing_group(comm)
    shown = []
    for asynchronous in (False, True):
        for name, shapes, call in calls(asynchronous):
            with torch.autograd.profiler.profile(record_shapes=True) as profile:
                work = call()
                if asynchronous:
                    work.wait()
            events = [e for e in profile.function_events if e.name.startswith("pycollective:")]
            seen = [(e.name, e.input_shapes, e.is_async) for e in events]
            shown.append((seen, [("pycollective:" + name, shapes, True)]))
    return shown


def test_calls_are_shown_with_their_shapes(pool):
    for shown in pool(2).call(profiled):
        assert len(shown) == 18
        for seen, expected in shown:
            assert seen == expected


def trace_of(recorded):
    """By prefix, the events of its Chrome trace: name, end, arguments."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        found = json.loads(file.read_text())["traceEvents"]
    return {
        prefix: [
            (e["name"].removeprefix(prefix), e["ts"] + e["dur"], e["args"])
            for e in sorted(found, key=lambda e: e.get("ts", 0))
            if e["ph"] == "X" and e["name"].startswith(prefix) and e["cat"] == "user_annotation"
        ]
        for prefix in ("gloo:", "pycollective:", "test:")
    }


def traced(comm, backend, hook):
    """Of a step of DDP and of calls that are waited for: events, and whether none is too long."""
    standing_group(comm)
    group = dist.new_group(backend=backend)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.1)
    if hook:
        ddp.register_comm_hook(group, pycollective.torch.all_reduce_hook)

    def step():
        with record_function("test:step"):
            ddp(torch.ones(4, 256)).sum().backward()

    step()  # buckets are formed anew after the first
    step()
    ones = torch.ones(10_000)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
        for _ in range(30):
            with record_function("test:wait"):
                dist.all_reduce(ones, group=group, async_op=True).wait()
        dist.barrier(group=group)
    trace = trace_of(recorded)
    calls = [event for event in trace[f"{backend}:"] if event[0] == "all_reduce"]
    steps = [end for name, end, _ in trace["test:"] if name == "step"]
    waits = [end for name, end, _ in trace["test:"] if name == "wait"]
    buckets = len(calls) - len(waits)
    bounds = steps * buckets + waits
    late = [
        (end - bound, args)
        for (_, end, args), bound in zip(calls, bounds, strict=True)
        if "finished" in args or end > bound + 1  # microseconds
    ]
    return [args["Input Dims"] for *_, args in calls], late


def test_a_trace_of_ddp_is_as_with_gloo_and_no_call_outlasts_its_wait(pool):
    with_gloo = pool(2).call(traced, "gloo", False)
    for shapes, _ in with_gloo:
        assert len(shapes) == 2 + 30
    for hook in (False, True):
        outcomes = pool(2).call(traced, "pycollective", hook)
        assert [late for _, late in outcomes] == [[]] * 2
        assert [shapes for shapes, _ in outcomes] == [shapes for shapes, _ in with_gloo]


def stopped_amid(comm):
    """A call that ends after its profiler has, and while the next one runs."""
    standing_group(comm)
    ones = torch.ones(100_000)
    if comm.rank == 1:
        comm.barrier()  # the other's profiler has stopped
        dist.all_reduce(ones)
        return None
    with profile(activities=[ProfilerActivity.CPU]) as first:
        work = dist.all_reduce(ones, async_op=True)
    with profile(activities=[ProfilerActivity.CPU]) as second:
        comm.barrier()
        work.wait()
    (call,) = trace_of(first)["pycollective:"]
    return (
        call[2].get("finished"),
        trace_of(second)["pycollective:"],
        ones.tolist() == [2] * 100_000,
    )


def test_a_call_may_end_after_its_profiler(pool):
    assert pool(2).call(stopped_amid)[0] == (False, [], True)


SIZES = [1 << n for n in range(6, 20)] + [300_000]


def stopped_before_the_futures_end(comm):
    """The results of calls whose futures were taken while a profiler ran that stops before."""
    standing_group(comm)
    sums = []
    for _ in range(6):
        ones = torch.ones(1 << 20)
        if comm.rank == 1:
            comm.barrier()  # the other's profiler has stopped
            dist.all_reduce(ones)
            continue
        recorded = profile(activities=[ProfilerActivity.CPU])
        recorded.start()
        for _ in range(50):
            torch.ones(3) + 1
        work = dist.all_reduce(ones, async_op=True)
        future = work.get_future()
        recorded.stop()
        taken = [bytearray(size) for size in SIZES for _ in range(4)]  # what the profiler has freed
        comm.barrier()
        while not future.done():  # a thread of the core's ends it
            time.sleep(0.1)
        work.wait()
        sums.append((ones[0].item(), any(map(any, taken))))
    return sums


def test_a_future_may_end_after_the_profiler(pool):
    assert pool(2).call(stopped_before_the_futures_end)[0] == [(2.0, False)] * 6
