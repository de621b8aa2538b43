"""srun's tasks are ranks, by the variables that it gives them; batch scripts and shells are one."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

import pytest

import pycollective as pc
from pycollective.bootstrap import slurm
from pycollective.bootstrap.store import StoreClient, StoreServer
from tests.harness import PerRank, results, run_ranks
from tests.joining import clear_launch, failing, free_place, works

JOB = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "3", "SLURM_NPROCS": "3"}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}


def step(size, number, nodes=1, node_list="node7", **more):
    return {
        **JOB,
        "SLURM_STEP_ID": str(number),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": node_list,
        **more,
    }


def task(rank, node=0, local=None):
    place = rank if local is None else local
    return {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(place)}


def join(comm, variables, timeout=20, times=1):
    """As `init` finds it with these variables: the error, or rank, size and whether it works."""
    clear_launch(os.environ)
    os.environ.update(variables)
    sys.modules["mpi4py"] = None  # whether it is installed here or not
    joined = []

    def init():
        with pc.init(timeout=timeout) as made:
            joined.append((made.rank, made.size, works(made)))

    for _ in range(times):
        error, _ = failing(init)
        if error is not None:
            return error
    return joined


def join_all(variables, **options):
    return results(
        run_ranks(join, len(variables), PerRank(variables), *options.values(), join=False)
    )


def test_the_tasks_of_a_step_on_one_node():
    alike = step(3, 0)
    answers = join_all([{**alike, **task(rank)} for rank in range(3)], timeout=20, times=3)
    assert answers == [[(rank, 3, True)] * 3 for rank in range(3)]


def test_the_tasks_of_several_nodes_whose_first_rank_is_not_on_the_first():
    """What `srun --distribution=arbitrary` does."""
    port = free_place().rpartition(":")[2]
    secret = {"PYCOLLECTIVE_SECRET": "0123abcd", "PYCOLLECTIVE_PORT": port}
    alike = step(3, 1, 2, "localhost,node[2-3]", **secret)
    tasks = [task(0, 1, 0), task(1, 0, 0), task(2, 1, 1)]
    answers = join_all([{**alike, **each} for each in tasks], timeout=20, times=2)
    assert answers == [[(rank, 3, True)] * 2 for rank in range(3)]


def test_the_first_task_of_the_first_node_serves_at_a_port_of_its_step(monkeypatch):
    def find(number, rank, node, local):
        alike = step(4, number, 2, "node[1-2]", PYCOLLECTIVE_SECRET="0123abcd")
        for name, value in {**alike, **task(rank, node, local)}.items():
            monkeypatch.setenv(name, value)
        return slurm.find_step()

    monkeypatch.delenv("PYCOLLECTIVE_PORT", raising=False)
    places = [(0, 1, 0), (1, 0, 1), (2, 0, 0), (3, 1, 1)]
    steps = [find(0, *place) for place in places]
    assert [bool(each.listen) for each in steps] == [False, False, True, False]
    assert {each.address for each in steps} == {steps[0].address}
    assert find(1, *places[0]).address != steps[0].address


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({**step(2, 2, 2), **task(1)}, r"export PYCOLLECTIVE_SECRET=\$\(openssl rand -hex 16\)"),
        ({**step(2, 2), **task(2)}, "rank 2 of 2: ranks count from 0"),
        ({**step(2, 2), **task(1), "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x'"),
        (
            {**step(2, 2, 2, "", PYCOLLECTIVE_SECRET="0123abcd"), **task(0)},
            "SLURM_STEP_NODELIST is '', which names no node",
        ),
    ],
)
def test_a_step_that_cannot_be_right_is_refused(monkeypatch, variables, said):
    clear_launch(kept := dict(os.environ))
    for name in os.environ.keys() - kept.keys():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pc.ConfigurationError, match=said):
        slurm.find_step()


def test_a_port_that_is_taken_is_named_with_the_variable_that_names_another():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        secret = {"PYCOLLECTIVE_SECRET": "0123abcd", "PYCOLLECTIVE_PORT": str(port)}
        (error,) = join_all([{**step(2, 3, 2, "localhost,node2", **secret), **task(0)}])
    assert isinstance(error, pc.ConfigurationError)
    assert f":{port}" in str(error)
    assert "PYCOLLECTIVE_PORT" in str(error)


def test_a_step_that_does_not_come_is_no_rank_alone():
    (error,) = join_all([{**step(2, 4), **task(1)}], timeout=0.5)
    assert isinstance(error, pc.CollectiveTimeout)


@pytest.mark.parametrize(
    "variables",
    [BATCH, JOB, {**step(1, 4294967290), **task(0)}],
    ids=["batch script", "salloc shell", "one task"],
)
def test_batch_scripts_shells_and_single_tasks_are_one_rank(variables):
    assert join_all([variables]) == [[(0, 1, True)]]


def test_srun_gives_variables_of_pmi_too_and_mpiexec_those_of_its_own():
    alike = step(2, 5)
    pmi = [{"PMI_RANK": str(rank), "PMI_SIZE": "2"} for rank in range(2)]
    answers = join_all([{**alike, **task(rank), **pmi[rank]} for rank in range(2)])
    assert answers == [[(rank, 2, True)] for rank in range(2)]
    # mpiexec has started four ranks on each of two nodes, by a step of two tasks.
    for mine in ({"PMI_RANK": "5", "PMI_SIZE": "8"}, {"OMPI_COMM_WORLD_RANK": "5"}):
        (error,) = join_all([{**alike, **task(1), **mine}])
        assert isinstance(error, pc.ConfigurationError)
        assert "mpi4py" in str(error)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node3", "node3"),
        ("node03,node04", "node03"),
        ("node[03-05,7],other[1-2]", "node03"),
        ("node[9,12]", "node9"),
        ("rack[1-2]node[04-05]", "rack1node04"),
        ("a-b.c[001-100]-x,d", "a-b.c001-x"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert slurm.first_node(nodes) == first


def talk_as_another_user(comm, name):
    """What a stranger is answered who asks by hand, and why a rank of theirs does not ask."""
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(10)
        asking.connect("\0" + name)
        answered = b""
        with suppress(ConnectionError):  # closed before that was read, or sent
            asking.sendall(b" check a2V5 \n")
            answered = asking.recv(100)
    error, _ = failing(StoreClient, f"unix:@{name}", timeout=5)
    return answered, error


def test_a_name_that_another_user_took_is_refused_on_both_sides():
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    name = f"pycollective-test-{os.urandom(6).hex()}"
    with StoreServer(f"unix:@{name}"):
        ((answered, error),) = results(run_ranks(talk_as_another_user, 1, name, join=False))
    assert answered == b""
    assert isinstance(error, pc.ConfigurationError)
    assert f"user 0 listens at unix:@{name}, and this process is of user 65534" in str(error)
