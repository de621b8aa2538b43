"""`Communicator.empty`: whose the memory is, and calls on it, bit for bit those on other arrays."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import numpy as np
import pytest

import pycollective as pc
from pycollective import host_memory
from pycollective.dtypes import numpy_type
from pycollective.host_memory import headroom
from pycollective.reference import reduce
from tests.harness import Ranks, await_
from tests.inputs import order_sensitive, same_bits

MIB = 1 << 20
COUNT = 300_007
CALLS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
)


def shared_memory():
    """Bytes of shared memory that this process has touched."""
    with open("/proc/self/status") as lines:
        [line] = [line for line in lines if line.startswith("RssShmem")]
    return int(line.split()[1]) << 10


def on(comm, values, where):
    """An array with these values: its own memory, or shared; whole, or a slice of a larger one."""
    if where == "ordinary":
        return values.copy()
    skip = 3 if where == "slice" else 0
    x = comm.empty(values.size + skip, values.dtype)[skip:]
    x[:] = values
    return x


def call(comm, name, x, out):
    root = 1
    if name == "all_reduce":
        return comm.all_reduce(x)
    if name == "broadcast":
        return comm.broadcast(x, root)
    if name == "gather":
        return comm.gather(out if comm.rank == root else None, x, root)
    if name == "scatter":
        return comm.scatter(out, x if comm.rank == root else None, root)
    return getattr(comm, name)(out, x)


def sizes(name, size):
    """Elements of the input and of the output, or None where the input is the output."""
    whole, shard = COUNT * size, COUNT
    return {
        "all_reduce": (whole, None),
        "broadcast": (COUNT, None),
        "reduce_scatter": (whole, shard),
        "scatter": (whole, shard),
        "all_gather": (shard, whole),
        "gather": (shard, whole),
        "all_to_all": (whole, whole),
    }[name]


def compare(comm, places, seed):
    """Which calls have not the bits that they have on ordinary arrays."""
    wrong = []
    where = places[comm.rank % len(places)]
    for name in CALLS:
        for dtype in ("float32", "bfloat16"):
            given, received = sizes(name, comm.size)
            values = np.resize(order_sensitive(dtype, comm.size, 10_007, seed)[comm.rank], given)
            found = []
            for place in ("ordinary", where):
                x = on(comm, values, place)
                out = None if received is None else np.zeros(received, numpy_type(dtype))
                call(comm, name, x, out)
                found.append(x if out is None else out)
                if out is not None and not same_bits(x, values):
                    wrong.append((name, dtype, "the input"))
            if not same_bits(*found):
                wrong.append((name, dtype, where))
    return wrong


@pytest.mark.parametrize(
    "places",
    [["shared"], ["shared", "slice"], ["ordinary", "shared", "slice"]],
    ids=" and ".join,
)
def test_calls_have_the_bits_that_they_have_on_other_arrays(pool, places):
    for wrong in pool(3).call(compare, places, len(places)):
        assert not wrong


def reduce_into(comm):
    """Sums by the contract: in place, of views, of two arrays one after the other."""
    leaves = [np.resize(x, COUNT) for x in order_sensitive("float32", comm.size, 10_007, 5)]
    right = reduce(leaves, "sum")
    one, other = comm.empty(2 * COUNT), comm.empty((3, COUNT))
    one[COUNT:] = leaves[comm.rank]
    other[2] = leaves[comm.rank]
    comm.all_reduce(one[COUNT:])
    del one
    comm.all_reduce(other[2])
    strided = comm.empty(2 * COUNT)[::2]  # copied first, to memory that is not shared
    strided[:] = leaves[comm.rank]
    comm.all_reduce(strided)
    asynchronous = comm.empty(COUNT)
    asynchronous[:] = leaves[comm.rank]
    work = comm.all_reduce(asynchronous, async_op=True)
    view = weakref.ref(asynchronous)
    del asynchronous
    gc.collect()
    result = work.wait()
    return [same_bits(x, right) for x in (other[2], strided, result)], view() is result


def test_sums_are_the_contracts(pool):
    for same, alive in pool(3).call(reduce_into):
        assert all(same)
        assert alive


def own(comm):
    """The life of arrays: what is touched, freed, and left after close()."""
    with comm.split(comm.rank) as alone:
        before = shared_memory()
        x = alone.empty((4, 16, MIB), np.uint8)
        x[:] = 7
        part = x[1:2, 3]
        y = alone.empty(MIB)
        y[:] = 1
        grown = shared_memory() - before
        del x
        gc.collect()
        kept = shared_memory() - before
        total = int(part.sum())
        del part
        gc.collect()
        freed = shared_memory() - before
    y += 1
    scalar, nothing = comm.empty(()), comm.empty((0, np.int64(3)), "int8")
    line = comm.empty(np.int64(10))
    made = comm.empty((2, 3), numpy_type("bfloat16"))
    return (
        (grown, kept, freed, total, float(y.sum())),
        [(x.shape, str(x.dtype), x.flags.c_contiguous) for x in (scalar, nothing, line, made)],
    )


def test_the_memory_is_the_arrays(pool):
    for (grown, kept, freed, total, rest), made in pool(2).call(own):
        assert 68 * MIB <= grown < 72 * MIB
        assert kept >= 68 * MIB
        assert freed < 8 * MIB
        assert total == 7 * MIB
        assert rest == 2 * MIB
        assert made == [
            ((), "float32", True),
            ((0, 3), "int8", True),
            ((10,), "float32", True),
            ((2, 3), "bfloat16", True),
        ]


def refused(comm):
    said = []
    for shape, dtype in (
        (3, object),
        (3, np.complex64),
        (3, ">f4"),
        (-1, np.int8),
        (headroom().bytes * 2, np.int8),
        ((1 << 40, 1 << 40), np.int8),
    ):
        try:
            comm.empty(shape, dtype)
        except pc.ConfigurationError as error:
            said.append(str(error))
    with comm.split(0) as closed:
        pass
    try:
        closed.empty(3)
    except pc.ConfigurationError as error:
        said.append(str(error))
    return said, comm.all_reduce(np.ones(1))[0]


def test_what_cannot_be_is_refused_and_harms_nothing(pool):
    for said, total in pool(2).call(refused):
        assert len(said) == 7
        assert all(text.startswith("empty") for text in said)
        assert all("dtype" in text for text in said[:3])
        assert "negative" in said[3]
        assert all("MiB of shared memory" in text and "leaves" in text for text in said[4:6])
        assert "closed" in said[6]
        assert total == 2


def looks(comm):
    """How each size of array looks at what memory is left, which takes the most of a call."""
    counts, seen = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "check", lambda *needed: seen.append(needed))
        for pages in (1, 4, 8192, 8193):
            comm.empty(pages << 12, np.int8)
            counts.append(seen[:])
            seen.clear()
    return counts


def test_a_small_array_looks_once_at_what_is_left(pool):
    page, most = 4096, 32 * MIB
    for counts in pool(2).call(looks):
        assert counts[:3] == [[(page, 2)], [(4 * page, 2)], [(most, 2)]]
        assert counts[3] == [(most + page, 1), (most, 2), (page, 2)]


def fork_with_an_array(comm):
    """A child that ends with an array of its parent's, whose memory it does not have."""
    x = comm.empty(MIB)
    x[:] = comm.rank + 1
    child = os.fork()
    if child == 0:
        del x
        gc.collect()
        try:
            comm.empty(3)
        except pc.ConfigurationError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    comm.all_reduce(x)
    return status, float(x[-1])


def test_a_forked_child_frees_nothing(pool):
    assert pool(2).call(fork_with_an_array) == [(0, 3.0)] * 2


def call_until_failure(comm, folder, name):
    given, received = sizes(name, comm.size)
    x = comm.empty(given * 2)
    x[:] = 1
    out = None if received is None else np.empty(received * 2, np.float32)
    while True:
        try:
            call(comm, name, x, out)
            (folder / str(comm.rank)).touch()
        except pc.CollectiveError as error:
            return error


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_the_rank_that_is_read_is_killed(tmp_path, name):
    """Its memory stays mapped, so that nobody crashes; and nobody takes it for a result."""
    with Ranks(3, module=__name__) as ranks:
        pids = ranks.joined().pids

        def kill():
            await_(lambda: len(list(tmp_path.iterdir())) == 3)  # all are at it
            os.kill(pids[1], signal.SIGKILL)

        threading.Thread(target=kill).start()
        outcomes = ranks.call(call_until_failure, tmp_path, name)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for each in outcomes[::2]:
        assert isinstance(each.result, pc.PeerFailure), each
        assert "rank 1 (pid" in str(each.result)
