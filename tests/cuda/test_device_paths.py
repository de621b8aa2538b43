"""The device path of calls on GPUs, as all ranks agree, and why; what one rank is given wrong."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pycollective import (
    CollectiveError,
    ConfigurationError,
)
from tests.cuda import standin
from tests.cuda.arrays import on_its_gpu
from tests.harness import PerRank, Ranks, results
from tests.launchers import launcher

ON_ONE_RANK = """
import os
import pycollective as pc

device = "cuda" if os.environ["PYCOLLECTIVE_RANK"] == "1" else None
try:
    pc.init(device=device, timeout=20)
except pc.ConfigurationError as error:
    print(error)
"""


def test_a_device_on_one_rank_alone_is_refused_while_joining(tmp_path):
    (tmp_path / "program.py").write_text(ON_ONE_RANK)
    done = launcher("run").run(2, str(tmp_path / "program.py"), **standin.environment())
    assert done.stdout.count("rank 0 was given") == 2, done.stdout + done.stderr
    assert "no device and rank 1" in done.stdout


def wrong_on_one_rank(comm, device, path):
    os.environ["PYCOLLECTIVE_DEVICE_PATH"] = path
    return way_of(comm, device)


@pytest.mark.parametrize(
    ("device", "path", "kinds", "text"),
    [
        (PerRank(["cuda", "cuda:99"]), "", "ConfigurationError", "device 'cuda:99'"),
        (PerRank(["cuda", 1.0]), "", "ConfigurationError", "device 1.0"),
        (PerRank(["cuda", "cuda:²"]), "", "ConfigurationError", "device 'cuda:²'"),
        (PerRank([np.int64(0), 1]), "", "peer", "each GPU maps"),
        ("cuda", PerRank(["auto", "any"]), "ConfigurationError", "PYCOLLECTIVE_DEVICE_PATH"),
        ("cuda", PerRank(["host", "auto"]), "host", "'host' on rank 0 and 'auto' on rank 1"),
        ("cuda", PerRank(["auto", "peer"]), "host", "'auto' on rank 0 and 'peer' on rank 1"),
    ],
)
def test_what_one_rank_is_given_wrong_all_are_told(device, path, kinds, text):
    with Ranks(2, module=__name__, variables=standin.environment(devices=8)) as ranks:
        for kind, why, *_ in results(ranks.call(wrong_on_one_rank, device, path)):
            assert kind == kinds
            assert text in why


def way_of(comm, device):
    try:
        comm.use_device(device)
    except CollectiveError as error:
        return type(error).__name__, str(error)
    except ConfigurationError as error:
        return "ConfigurationError", str(error)
    array = on_its_gpu(comm, np.ones(10))
    comm.all_reduce(array)
    return comm.device_path[0], comm.device_path[1], array.to_numpy().tolist()


@pytest.mark.parametrize(
    ("more", "device", "path", "reason"),
    [
        ({"devices": 8}, "cuda", "peer", "each GPU maps"),
        ({"devices": 8}, PerRank([3, "cuda:5"]), "peer", "each GPU maps"),
        ({"devices": 1}, "cuda", "host", "ranks 0 and 1 share a GPU"),
        ({"devices": 8, "peers": 0}, "cuda", "host", "rank 0: "),
    ],
)
def test_ranks_agree_on_a_path_and_know_why(more, device, path, reason):
    with Ranks(2, module=__name__, variables=standin.environment(**more)) as ranks:
        for found, why, values in results(ranks.call(way_of, device)):
            assert found == path, why
            assert reason in why
            assert values == [2.0] * 10


def test_the_environment_says_which():
    env = {**standin.environment(devices=1), "PYCOLLECTIVE_DEVICE_PATH": "peer"}
    with Ranks(2, module=__name__, variables=env) as ranks:  # two processes that share a GPU
        assert [each[0] for each in results(ranks.call(way_of, "cuda"))] == ["peer"] * 2
    env = {**standin.environment(devices=8), "PYCOLLECTIVE_DEVICE_PATH": "host"}
    with Ranks(2, module=__name__, variables=env) as ranks:
        assert [each[0] for each in results(ranks.call(way_of, "cuda"))] == ["host"] * 2
    env = {**standin.environment(devices=8, peers=0), "PYCOLLECTIVE_DEVICE_PATH": "peer"}
    with Ranks(2, module=__name__, variables=env) as ranks:
        for kind, text in results(ranks.call(way_of, "cuda")):
            assert kind == "ConfigurationError"
            assert "PYCOLLECTIVE_DEVICE_PATH=peer cannot be: rank 0: " in text


@pytest.mark.parametrize("device", ["cuda:9", "gpu", "cuda:x", 9, "cuda:"])
def test_a_gpu_that_there_is_not(device):
    with Ranks(1, module=__name__, variables=standin.environment(devices=2)) as ranks:
        [(kind, text)] = results(ranks.call(way_of, device))
        assert kind == "ConfigurationError"
        assert repr(device) in text or str(device) in text
