"""Fixtures: pools of ranks that live as long as the session."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import settings

from tests.cli.in_process import pycollective
from tests.harness import ROOT, RankPool, close_servers
from tests.overtime import OverTime

__all__ = ["pycollective"]  # the fixture


def pytest_configure(config: pytest.Config) -> None:
    """Set what all processes that tests start inherit: signals that a shell's background and nohup
    ignore are taken, NumPy has one thread, and a name server that is silent is asked again after a
    second. No example of Hypothesis has a deadline: one that
    stands still for 200 ms on a busy machine is no finding."""
    settings.register_profile("tests", settings.default, deadline=None)
    settings.load_profile("tests")
    # OpenBLAS's others, which no test needs, cost each of some 150 processes 0.1 s of CPU.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # For each connection torch's stores ask for the name of ::ffff:127.0.0.1. A name server that
    # loses one request in 25 made ten tests and more wait 5 s, glibc's usual time.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(OverTime(config))


# The files that take longest, in order, those that mostly wait beside those that compute. The first
# compiles the stand-in for a GPU's driver, too.
LONGEST = [
    *("cuda/test_device_commands", "torch/test_process_end", "torch/test_ordered"),
    *("cuda/test_ends_in_each_state", "triton/test_reduce", "launch/test_output"),
    *("torch/test_ordered_ddp", "test_mpiexec", "torch/test_compression_devices"),
    *("bootstrap/test_init", "torch/test_compression", "test_pauses", "typing/test_typing"),
    *("test_hosts", "cli/test_verify", "test_conformance", "schedule/test_transfers"),
    *("compression/test_between_steps", "compression/test_steps", "cuda/test_staged"),
    *("torch/test_ordered_failures", "bootstrap/test_mpi", "bench/test_bench_command"),
    *("test_launches", "launch/test_launcher", "cuda/test_make_gpu", "triton/test_quantize"),
    *("triton/test_top_k", "kernels/test_sparse", "compression/test_shards"),
    *("cuda/test_peers", "cuda/test_device_lifetimes", "triton/test_reduce_ptx"),
    *("test_far_making", "cuda/test_device_paths", "cli/test_inside"),
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are found, a fifth of that time: none of them is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give two workers the longest files first (`--no-loadscope-reorder` keeps the order): one that
    begins at the end leaves the other worker idle."""
    for item in items:  # `make test` looks for these in files that say so
        assert not item.get_closest_marker("alone") or "mark.alone" in item.path.read_text(), item
    if hasattr(config, "workerinput"):
        place = {ROOT / "tests" / f"{name}.py": i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Leave what is there by now, as torch and thousands of tests, out of each garbage collection:
    those took an eighth of the time of kernels in Triton's interpreter."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what frees itself at the end, as Triton's does, says what was not


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """`pool(n)`: the session's pool of n ranks."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session", autouse=True)
def servers() -> Iterator[None]:
    """Ends what forked the ranks of tests."""
    yield
    close_servers()
