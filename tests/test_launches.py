"""How `init` finds its launch: a store's place, torchrun, torch's variables, or none."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partialmethod
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

import pycollective as pc
from pycollective.bootstrap import init as bootstrap
from pycollective.bootstrap.store import StoreServer
from tests.harness import PerRank, results, run_ranks
from tests.joining import clear_launch, failing, free_place, works
from tests.launchers import run_text

SECRET = {"variables": {"PYCOLLECTIVE_SECRET": "5ec2e7"}}


def close_late(server, close, *args):
    time.sleep(0.1)  # the others are well into their next `init`
    close(server, *args)


def over_tcp(comm, rank, size, place, short):
    if short:
        from pycollective import host_memory

        host_memory.headroom = lambda: host_memory.Headroom(1000, "the limit of a test")
    if rank == 0:
        StoreServer.close = partialmethod(close_late, StoreServer.close)
    threads = threading.active_count()
    answers = []
    for _ in range(1 if short is not None else 8):  # the place is free again each time
        error, _ = failing(
            lambda: works(pc.init(rank=rank, size=size, store=place, timeout=20)) or 1 / 0
        )
        answers.append(error)
    return answers, threading.active_count() - threads


def test_explicit_arguments_over_tcp_again_and_again():
    for answers, threads in results(
        run_ranks(over_tcp, 3, PerRank([1, 2, 0]), 3, free_place(), None, join=False, **SECRET)
    ):
        assert answers == [None] * 8
        assert threads == 0


@pytest.mark.parametrize("short", [0, 1])
def test_a_problem_reaches_all_over_tcp(short):
    shorts = PerRank([rank == short for rank in range(3)])
    for rank, ((error,), threads) in enumerate(
        results(
            run_ranks(
                over_tcp, 3, PerRank([0, 1, 2]), 3, free_place(), shorts, join=False, **SECRET
            )
        )
    ):
        assert isinstance(error, pc.ConfigurationError)
        assert "the limit of a test leaves" in str(error)
        assert str(error).startswith(f"rank {short}: ") == (rank != short)
        assert threads == 0


@pytest.fixture
def no_launch(monkeypatch):
    kept = dict(os.environ)
    clear_launch(kept)
    for name in os.environ.keys() - kept.keys():
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_launch")
def test_alone_is_one_rank(monkeypatch):
    with pc.init() as comm:
        assert (comm.rank, comm.size) == (0, 1)
        assert works(comm)
    with pc.init(rank=0, size=1) as comm:
        assert works(comm)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pc.init() as comm:
        assert comm.size == 1


# What is in the environment, what `init` is given, and what it says.
REFUSED = [
    ({}, {"rank": 0}, "rank, size and store together"),
    ({}, {"size": 2, "store": {}}, "rank, size and store together"),
    ({}, {"rank": 0, "size": 2}, "rank, size and store together"),
    ({}, {"rank": 2, "size": 2, "store": {}}, "rank 2 is not one of 0 to 1"),
    ({}, {"rank": -1, "size": 2, "store": "tcp://localhost:1"}, "rank -1 is not"),
    ({}, {"rank": 0, "size": 0, "store": {}}, "size 0 is not 1 to 4096"),
    ({}, {"rank": 0, "size": 4097, "store": {}}, "size 4097 is not 1 to 4096.*at most 64 on"),
    ({}, {"rank": 0, "size": 2, "store": 5}, "store is 5: give tcp://host:port"),
    ({}, {"rank": 1, "size": 2, "store": "localhost"}, "is not tcp://host:port"),
    *(
        (
            *({}, {"rank": rank, "size": 2, "store": "tcp://localhost:1", "timeout": 1}),
            "wants a secret.*PYCOLLECTIVE_SECRET to .*PYCOLLECTIVE_SECRET_FILE to ",
        )
        for rank in range(2)
    ),
    ({}, {"timeout": 0}, "timeout 0 is not a finite number of seconds above 0"),
    ({}, {"timeout": float("nan")}, "timeout nan is not"),
    ({}, {"timeout": float("inf")}, "timeout inf is not"),
    ({}, {"topology": "2x1"}, "is for 2 ranks, and there are 1"),
    ({}, {"rank": 0, "size": 1, "topology": "2x1"}, "is for 2 ranks, and there are 1"),
    ({}, {"wire": "wet"}, "wire 'wet' is not here; there are 'raw', 'exact'"),
    ({}, {"transport": "pigeon"}, "transport 'pigeon' is not here; there are 'shm'"),
    ({}, {"transport": "mpi"}, "started, and this is one rank without a launcher: start with"),
    # Nobody trains alone by mistake: also where `docker exec -e` did not hand all variables on.
    ({"WORLD_SIZE": "4"}, {}, "4 ranks, and without RANK, MASTER_ADDR, MASTER_PORT this one"),
    ({"WORLD_SIZE": "4", "RANK": "1", "MASTER_PORT": "1"}, {}, "4 ranks, and without MASTER_ADDR "),
    ({"PYCOLLECTIVE_SIZE": "4"}, {}, "without PYCOLLECTIVE_STORE"),
    (
        *({"PYCOLLECTIVE_STORE": "unix:@nowhere", "PYCOLLECTIVE_RANK": "zero"}, {}),
        "PYCOLLECTIVE_RANK is 'zero'",
    ),
    ({"PMI_RANK": "0"}, {}, "mpiexec.*pip install mpi4py"),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(("variables", "arguments", "said"), REFUSED)
def test_what_cannot_be_right_is_refused(monkeypatch, variables, arguments, said):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # whether it is installed here or not
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pc.ConfigurationError, match=said):
        pc.init(**arguments)


@pytest.mark.usefixtures("no_launch")
def test_an_mpi_that_sees_one_rank_is_no_reason_to_train_alone(monkeypatch):
    """srun has started two ranks for one MPI, and mpi4py belongs to another."""
    world = SimpleNamespace(Get_size=lambda: 1)
    other = SimpleNamespace(
        COMM_WORLD=world, Is_finalized=lambda: False, Get_library_version=lambda: "Other MPI 1"
    )
    mpi4py = ModuleType("mpi4py")
    mpi4py.MPI, mpi4py.__spec__ = other, ModuleSpec("mpi4py", None)
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PMIX_RANK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pc.ConfigurationError, match=r"^srun has started 2 .*sees 1.*Other MPI"):
        pc.init(timeout=5)


def join_without_torch(comm, rank, place, more):
    clear_launch(os.environ)
    port = place.rpartition(":")[2]
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(more)
    sys.modules["torch"] = None  # as where it is not installed

    def join_twice():
        assert all(works(pc.init(timeout=20)) for _ in range(2))

    return failing(join_twice)[0]


def test_torchs_variables_where_torch_is_not_installed():
    place, secret = (PerRank([0, 1, 2]), free_place()), {"PYCOLLECTIVE_SECRET": "0123abcd"}
    assert results(run_ranks(join_without_torch, 3, *place, secret, join=False)) == [None] * 3
    # Torchrun's store is its own, and only torch can speak to it.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for more, said in [({}, "wants a secret"), (agent, "torch is not installed here")]:
        (error,) = results(run_ranks(join_without_torch, 1, 0, free_place(), more, join=False))
        assert isinstance(error, pc.ConfigurationError)
        assert said in str(error)


@pytest.mark.usefixtures("no_launch")
def test_rank_0_listens_everywhere_where_torchs_variables_name_no_interface_of_it(monkeypatch):
    served = []

    class Server:
        def __init__(self, address, *_, **__):
            served.append(address)
            raise pc.ConfigurationError("enough")

    monkeypatch.setattr(bootstrap, "StoreServer", Server)
    monkeypatch.setattr(bootstrap, "find_spec", lambda name: None)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "service", "MASTER_PORT": "4242"}
    for name, value in {**variables, "PYCOLLECTIVE_SECRET": "0123abcd"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pc.ConfigurationError, match="enough"):
        pc.init()
    assert served == ["tcp://0.0.0.0:4242"]


TORCH_PROGRAM = """
import sys
import numpy as np
import pycollective as pc

def works(comm):
    x = np.full(1000, comm.rank + 1.0)
    comm.all_reduce(x)
    return x[-1] == comm.size * (comm.size + 1) / 2

one, two = pc.init(timeout=30), pc.init(timeout=30)
assert works(one) and works(two)
import torch
import torch.distributed as dist
dist.init_process_group("gloo")  # through the same store, and disturbed by nothing in it
x = torch.ones(3)
dist.all_reduce(x)
assert x[0] == one.size
three = pc.init(timeout=30)
assert works(three)
sys.stdout.write(f"rank {three.rank} of {three.size} is fine\\n")
dist.destroy_process_group()
"""


def test_torchrun(tmp_path):
    pytest.importorskip("torch")
    done = run_text(tmp_path, "torchrun", TORCH_PROGRAM, 2, "")
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 2 is fine" for r in range(2)]
