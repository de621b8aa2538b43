"""What a profiler shows of calls."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
