"""Every way in which people end a process, with the statuses that it may end with.

Each way is a function of a rank, the number of ranks and the path of a file for their store. What
it leaves for the interpreter's end is what it is about.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time

import numpy as np
import torch
import torch._dynamo  # DDP does, in each fork unless it is there
import torch.distributed as dist

import pycollective as pc
import pycollective.torch
from pycollective.torch import backend
from tests.harness import thread_names

# A daemon thread that torch calls Python in, as DDP's hooks are, ends the process with SIGABRT if
# that ends meanwhile ("terminate called without an active exception"): seldom here, and in both
# rounds that were run with Gloo and a hook of torch's own.
TORCHS_OWN = -signal.SIGABRT


def join_torch(rank, size, path):
    """The default process group; what waits for peers that never come waits a short time."""
    backend._EXIT_GRACE = 0.3
    store = dist.FileStore(path, size)
    dist.init_process_group("pycollective", store=store, rank=rank, world_size=size)
    # Idle threads of the lowest class are preempted in the middle of what ends an operation.
    for _ in range(5):  # it may be that the first ended on this thread, and there is none yet
        dist.all_reduce(torch.ones(100_000), async_op=True).wait()
        for thread, name in thread_names().items():
            if name == "pycollective":
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    # Else one that ends now might abort what another, on a busy machine, has yet to see done.
    store.set(f"joined by {rank}", "")
    store.wait([f"joined by {each}" for each in range(size)])


def join_plain(rank, size, path):
    return pc.init(rank=rank, size=size, store=dist.FileStore(path, size), timeout=30)


def chained():
    """Futures with a callback each, the last of which has come."""
    futures = [
        dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda done: done)
        for _ in range(5)
    ]
    futures[-1].wait()
    return futures


def in_a_daemon(act):
    """`act` blocks in a thread that nobody waits for."""
    started = threading.Event()

    def run():
        started.set()
        act()

    threading.Thread(target=run, daemon=True).start()
    started.wait()
    time.sleep(0.02)


def destroyed(rank, *place):
    join_torch(rank, *place)
    chained()
    dist.destroy_process_group()


def futures_left(rank, *place):
    join_torch(rank, *place)
    global kept
    kept = chained()


def not_waited_for(rank, *place):
    join_torch(rank, *place)
    for _ in range(5):
        dist.all_reduce(torch.ones(1000), async_op=True)
        dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda done: done)


def trained(rank, *place):
    join_torch(rank, *place)
    model = torch.nn.Linear(32, 10).to(torch.bfloat16)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    ddp(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
    if rank % 2:
        dist.destroy_process_group()


def compressed(rank, *place):
    join_torch(rank, *place)
    model = torch.nn.Linear(100, 100)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    state = pycollective.torch.OneBitState(ddp, between="ranks")
    ddp.register_comm_hook(state, pycollective.torch.one_bit_hook)
    for _ in range(2):
        ddp(torch.randn(8, 100)).sum().backward()
    if rank % 2:
        dist.destroy_process_group()


def daemon_compresses(rank, *place):
    join_torch(rank, *place)
    state = pycollective.torch.Int8State([("w", torch.zeros(80, 90))], between="ranks")

    def average():
        while True:
            state.all_reduce({"w": torch.ones(80, 90)})

    threading.Thread(target=average, daemon=True).start()
    time.sleep(0.05)


def compressed_exception(rank, *place, backend="pycollective"):
    """Rank 0 leaves between two buckets; the others say by their status what backward raised."""
    join_torch(rank, *place)
    group = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=20))
    layers = [torch.nn.Linear(100, 100, bias=False) for _ in range(3)]
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.01, process_group=group
    )
    state = pycollective.torch.OneBitState(ddp, between="ranks", group=group)
    ddp.register_comm_hook(state, pycollective.torch.one_bit_hook)
    ddp(torch.randn(8, 100)).sum().backward()
    if rank == 0:

        def fail(_):
            raise ValueError("a bad batch")

        layers[0].weight.register_hook(fail)  # the last gradient: the other buckets have gone
    try:
        ddp(torch.randn(8, 100)).sum().backward()
    except RuntimeError as error:
        typed = isinstance(error, pc.CollectiveError if backend == "pycollective" else RuntimeError)
        sys.exit(4 if typed else 5)
    sys.exit(5)


def compressed_exception_over_gloo(rank, *place):
    compressed_exception(rank, *place, backend="gloo")


def daemon_trains(rank, *place):
    """The process ends while hooks are under way."""
    join_torch(rank, *place)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300), bucket_cap_mb=0.01)
    state = pycollective.torch.OneBitState(ddp, between="ranks")
    ddp.register_comm_hook(state, pycollective.torch.one_bit_hook)

    def train():
        while True:
            ddp(torch.ones(1, 300)).sum().backward()

    threading.Thread(target=train, daemon=True).start()
    time.sleep(0.05)


def exception(rank, *place):
    join_torch(rank, *place)
    dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda done: done)
    if rank == 0:
        raise ValueError("a bad batch")
    for _ in range(1000):
        dist.all_reduce(torch.ones(1000))


def exit_in_the_middle(rank, *place):
    join_torch(rank, *place)
    chained()
    if rank == 0:
        sys.exit(3)
    for _ in range(1000):
        dist.all_reduce(torch.ones(1000))


def groups_left(rank, size, path):
    join_torch(rank, size, path)
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
    dist.destroy_process_group(groups[0])


def slow_callback(rank, *place):
    join_torch(rank, *place)

    def callback(done):
        time.sleep(0.6)  # longer than the time that is given to operations
        print("the callback has run", flush=True)
        return done

    dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(callback)


def daemons_wait(rank, *place):
    """In a collective, for a work and for a future."""
    join_torch(rank, *place)
    groups = [dist.new_group() for _ in range(3)]
    if rank == 0:
        ones = torch.ones(1000)
        works = [dist.all_reduce(ones, group=group, async_op=True) for group in groups[:2]]
        in_a_daemon(lambda: dist.all_reduce(ones, group=groups[2]))
        in_a_daemon(works[0].wait)
        in_a_daemon(works[1].get_future().wait)


def plain_daemon_loop(rank, *place):
    """It comes and goes while the interpreter ends."""
    comm = join_plain(rank, *place)

    def loop():
        while True:
            try:
                comm.all_reduce(np.ones(10))
            except (pc.CollectiveError, pc.ConfigurationError):
                continue

    in_a_daemon(loop)


# Each way, and the statuses with which its ranks may end. (With 1 where a peer left or aborted.)
WAYS = {
    destroyed: {0},
    futures_left: {0},
    not_waited_for: {0},
    trained: {0},
    compressed: {0},
    daemon_compresses: {0},
    compressed_exception: {1, 4},
    compressed_exception_over_gloo: {1, 4},
    daemon_trains: {0, TORCHS_OWN},
    exception: {1},
    exit_in_the_middle: {1, 3},
    groups_left: {0},
    slow_callback: {0},
    daemons_wait: {0},
    plain_daemon_loop: {0},
}
