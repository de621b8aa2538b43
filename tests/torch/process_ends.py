"""Ends processes in every way that people do; `python -m tests.torch.process_ends --help`.

One process imports torch once; each rank of each round is a fork of it, which joins, does what the
way says, and then ends as any program does: with the whole end of the interpreter. So a round costs
a second or two, and hundreds of them can be had. What a way leaves for the interpreter's end is
what it is about.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # DDP does, in each fork unless it is there
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import pycollective as pc
import pycollective.torch
from pycollective.torch import backend, ordered
from tests.harness import thread_names
from tests.torch import device_side  # noqa: F401  registers "on_device"

ROUND_LIMIT = 60.0  # seconds until it counts as a hang, and is aborted
ABORT_LIMIT = 5.0  # from then until it is killed
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


def join_gloo(rank, size, path):
    """Gloo's process group, over which ordered calls go."""
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    ordered.all_reduce(torch.ones(3))


def join_device_side(rank, size, path):
    """The backend as tensors of devices see it."""
    store = dist.FileStore(path, size)
    dist.init_process_group("on_device", store=store, rank=rank, world_size=size)
    dist.all_reduce(torch.ones(3))


# Each way, and the statuses with which its ranks may end. (With 1 where a peer left or aborted.)
WAYS = {}


def way(*statuses, join=join_torch):
    """Of a function of a rank and the number of ranks: once they have joined."""

    def add(act):
        def joined(rank, size, path):
            join(rank, size, path)
            act(rank, size)

        joined.__name__ = act.__name__
        WAYS[joined] = {*statuses}
        return act

    return add


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


@way(0)
def destroyed(rank, size):
    chained()
    dist.destroy_process_group()


@way(0)
def futures_left(rank, size):
    global kept
    kept = chained()


@way(0)
def not_waited_for(rank, size):
    for _ in range(5):
        dist.all_reduce(torch.ones(1000), async_op=True)
        dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda done: done)


@way(0)
def trained(rank, size):
    model = torch.nn.Linear(32, 10).to(torch.bfloat16)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(None, pycollective.torch.all_reduce_hook)
    ddp(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
    if rank % 2:
        dist.destroy_process_group()


@way(0)
def compressed(rank, size):
    model = torch.nn.Linear(100, 100)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    state = pycollective.torch.OneBitState(ddp, between="ranks")
    ddp.register_comm_hook(state, pycollective.torch.one_bit_hook)
    for _ in range(2):
        ddp(torch.randn(8, 100)).sum().backward()
    if rank % 2:
        dist.destroy_process_group()


@way(0)
def daemon_compresses(rank, size):
    state = pycollective.torch.Int8State([("w", torch.zeros(80, 90))], between="ranks")

    def average():
        while True:
            state.all_reduce({"w": torch.ones(80, 90)})

    threading.Thread(target=average, daemon=True).start()
    time.sleep(0.05)


@way(1, 4)
def compressed_exception(rank, size, backend="pycollective"):
    """Rank 0 leaves between two buckets; the others say by their status what backward raised."""
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


@way(1, 4)
def compressed_exception_over_gloo(rank, size):
    compressed_exception(rank, size, backend="gloo")


@way(0, TORCHS_OWN)
def daemon_trains(rank, size):
    """The process ends while hooks are under way."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300), bucket_cap_mb=0.01)
    state = pycollective.torch.OneBitState(ddp, between="ranks")
    ddp.register_comm_hook(state, pycollective.torch.one_bit_hook)

    def train():
        while True:
            ddp(torch.ones(1, 300)).sum().backward()

    threading.Thread(target=train, daemon=True).start()
    time.sleep(0.05)


@way(1)
def exception(rank, size):
    dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda done: done)
    if rank == 0:
        raise ValueError("a bad batch")
    for _ in range(1000):
        dist.all_reduce(torch.ones(1000))


@way(1, 3)
def exit_in_the_middle(rank, size):
    chained()
    if rank == 0:
        sys.exit(3)
    for _ in range(1000):
        dist.all_reduce(torch.ones(1000))


@way(0)
def groups_left(rank, size):
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
    dist.destroy_process_group(groups[0])


@way(0)
def slow_callback(rank, size):

    def callback(done):
        time.sleep(0.6)  # longer than the time that is given to operations
        print("the callback has run", flush=True)
        return done

    dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(callback)


@way(0)
def daemons_wait(rank, size):
    """In a collective, for a work and for a future."""
    groups = [dist.new_group() for _ in range(3)]
    if rank == 0:
        ones = torch.ones(1000)
        works = [dist.all_reduce(ones, group=group, async_op=True) for group in groups[:2]]
        in_a_daemon(lambda: dist.all_reduce(ones, group=groups[2]))
        in_a_daemon(works[0].wait)
        in_a_daemon(works[1].get_future().wait)


@way(0, join=join_gloo)
def ordered_left(rank, size):
    global kept
    kept = [ordered.all_reduce(torch.ones(9_000), async_op=True) for _ in range(50)]


@way(0, join=join_gloo)
def ordered_alone(rank, size):
    """Calls that the other rank does not make."""
    for _ in range(3 if rank == 0 else 0):
        ordered.all_reduce(torch.ones(9_000), async_op=True)


@way(0, join=join_gloo)
def ordered_destroyed(rank, size):
    for _ in range(50):
        ordered.all_reduce(torch.ones(9_000), async_op=True)
    dist.destroy_process_group()


@way(0, join=join_gloo)
def ordered_trained(rank, size):
    model = torch.nn.Linear(32, 10).to(torch.bfloat16)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(None, ordered.hook)
    ddp(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
    if rank % 2:
        dist.destroy_process_group()


@way(0, join=join_device_side)
def device_side_left(rank, size):
    """Works and futures of Python's in the hands of C++, and a group that nobody destroys."""
    global kept
    works = [dist.all_reduce(torch.ones(9_000), async_op=True) for _ in range(20)]
    works.append(dist.broadcast(torch.ones(9), 0, async_op=True))
    functional.all_reduce(torch.ones(9), "avg", dist.group.WORLD)  # torch's own registry has it
    kept = works, [each.get_future() for each in works]


@way(0, join=join_device_side)
def device_side_trained(rank, size):
    """A hook's works end on the threads of autograd."""
    model = torch.nn.Linear(32, 10).to(torch.bfloat16)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(None, ordered.hook)
    ddp(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
    if rank % 2:
        dist.destroy_process_group()


def plain_daemon_loop(rank, size, path):
    """It comes and goes while the interpreter ends."""
    comm = pc.init(rank=rank, size=size, store=dist.FileStore(path, size), timeout=30)

    def loop():
        while True:
            try:
                comm.all_reduce(np.ones(10))
            except (pc.CollectiveError, pc.ConfigurationError):
                continue

    in_a_daemon(loop)


WAYS[plain_daemon_loop] = {0}


def start(act, rank, size, path, log):
    """The pid of a rank. The rank itself returns, and ends as the program does."""
    pid = os.fork()
    if pid:
        return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()  # for whoever is still there at the limit
    act(rank, size, path)
    return 0


def statuses_of(pids):
    """How each ended, and which had not by the limit: they are killed."""
    deadline = time.monotonic() + ROUND_LIMIT
    statuses, hung = {}, set()
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline and pid not in hung:
                    hung.add(pid)
                    os.kill(pid, signal.SIGABRT)  # tells where Python is, if it still can
                elif time.monotonic() > deadline + ABORT_LIMIT:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids], sorted(hung)


def main():
    """Runs the rounds, and prints what went wrong. Returns in each rank too, which then ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--frozen", action="store_true", help="seek no garbage in what is imported")
    parser.add_argument("ways", nargs="*", help="all of them unless given")
    given = parser.parse_args()
    if given.frozen:
        gc.freeze()
    chosen = [act for act in WAYS if not given.ways or act.__name__ in given.ways]
    bad = []
    folder = tempfile.mkdtemp()  # not in a `with`: a rank returns through here as well
    for turn in range(given.rounds):
        for act in chosen:
            place = f"{folder}/{turn}-{act.__name__}"
            logs = [Path(f"{place}-{rank}") for rank in range(given.ranks)]
            pids = []
            for rank, log in enumerate(logs):
                pids.append(start(act, rank, given.ranks, place, log))
                if not pids[-1]:
                    return
            began = time.monotonic()
            statuses, hung = statuses_of(pids)
            texts = [log.read_text(errors="replace") for log in logs]
            right = not hung and set(statuses) <= WAYS[act]
            if act.__name__ == "daemon_trains":
                right = right and all(
                    status == 0 or "terminate called without an active exception" in text
                    for status, text in zip(statuses, texts, strict=True)
                )
            if act.__name__ == "slow_callback":
                right = right and all("the callback has run" in text for text in texts)
            if not right:
                took = round(time.monotonic() - began, 1)
                bad.append({"way": act.__name__, "round": turn, "seconds": took, "hung": hung})
                bad[-1] |= {"statuses": statuses, "said": texts, "load": os.getloadavg()}
                print(json.dumps(bad[-1]), file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    print(json.dumps({"ends": given.rounds * len(chosen), "bad": bad}), flush=True)


if __name__ == "__main__":
    main()
