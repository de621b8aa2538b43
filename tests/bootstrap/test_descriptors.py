"""A process that can open no more files says so at once, and to all: it is no stranger's fault."""

from __future__ import annotations

import itertools
import os
import resource
from contextlib import closing

import pycollective as pc
from pycollective.bootstrap.store import StoreClient, StoreServer
from tests.harness import PerRank, results, run_ranks
from tests.joining import failing, works

MOST = 12


def limit_for(more):
    """The limit under which this process can open so many files more."""
    free = (number for number in itertools.count() if not is_open(number))
    return next(itertools.islice(free, more, None))


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def join_with_few_files(comm, rank, address):
    """How each `init` ends in which rank 0 may open a few files, one more each time."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends = []
    with closing(StoreClient(address, timeout=20)) as store:
        for more in range(1, MOST):
            if rank == 0:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(more), usual[1]))
            ends.append(
                failing(lambda: works(pc.init(rank=rank, size=2, store=store, timeout=20)) or 1 / 0)
            )
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    return ends


def test_a_rank_without_a_descriptor_left_says_so_to_all():
    address = f"unix:@pycollective-test-{os.getpid()}-{os.urandom(6).hex()}"
    with StoreServer(address):
        first, second = results(
            run_ranks(join_with_few_files, 2, PerRank([0, 1]), address, join=False)
        )
    for (here, took), (there, also_took) in zip(first, second, strict=True):
        assert (here is None) == (there is None)
        if here is not None:
            assert isinstance(here, pc.ConfigurationError), here
            assert isinstance(there, pc.ConfigurationError), there
            assert "Too many open files" in str(here)
            assert "raise its limit (ulimit -n)" in str(here)
            assert "rank 0" in str(there)
            assert str(here) in str(there)
        assert max(took, also_took) < 10  # half of the timeout
    said = [str(error) for error, _ in first if error is not None]
    # The kernel has dropped it from the message, which is no error there.
    assert any("for rank 1's memory" in each for each in said), said
    assert first[-1][0] is None  # enough
