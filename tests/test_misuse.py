"""What cannot be right raises `ConfigurationError`, whatever the argument; the group works on."""

from __future__ import annotations

import math

import numpy as np
import pytest

import pycollective as pc

# Each operation with its arrays, and what else it needs. Of send and recv the peer is oneself.
OPERATIONS = {
    "all_reduce": (1, {}),
    "reduce": (1, {}),
    "reduce_scatter": (2, {}),
    "all_gather": (2, {}),
    "broadcast": (1, {}),
    "all_to_all": (2, {}),
    "gather": (2, {}),
    "scatter": (2, {}),
    "send": (1, {"dst": 0}),
    "recv": (1, {"src": 0}),
}
BAD = {
    "None": None,
    "a list": [1.0, 2.0],
    "a string": "x",
    "uint16": np.zeros(4, np.uint16),
    "objects": np.zeros(4, object),
    "strings": np.array(["a", "b"]),
}


@pytest.fixture(scope="module")
def alone():
    with pc.init() as comm:
        yield comm


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("name", "position"),
    [(name, position) for name, (arrays, _) in OPERATIONS.items() for position in range(arrays)],
)
def test_what_is_no_array_of_a_known_type_is_refused(alone, name, position, bad):
    arrays, options = OPERATIONS[name]
    arguments = [np.zeros(4, np.float32) for _ in range(arrays)]
    arguments[position] = BAD[bad]
    with pytest.raises(pc.ConfigurationError):
        getattr(alone, name)(*arguments, **options)
    assert alone.failure is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c, x: c.broadcast(x, root=1), "rank 1 is not one of 0 to 0"),
        (lambda c, x: c.broadcast(x, root=-1), "rank -1 is not"),
        (lambda c, x: c.broadcast(x, root=2**70), "is not one of 0 to 0"),
        (lambda c, x: c.all_gather(x, x, counts=[-1]), "entry 0 is no number of elements: -1"),
        (lambda c, x: c.all_gather(x, x, counts=["4"]), "entry 0 is no number of elements: '4'"),
        (lambda c, x: c.all_gather(x, x, counts=[]), "counts is empty"),
        (lambda c, x: c.all_gather(x, x, counts=[2, 2]), "2 entries for 1 ranks"),
        (lambda c, x: c.all_reduce(x, op="mean"), "'mean' is not here"),
        (lambda c, x: c.all_reduce(x, algorithm="rings"), "'rings'; there are direct, ring, tree"),
        (lambda c, x: c.all_to_all(x, x, algorithm="ring"), "done by 'ring'; there are direct"),
        (lambda c, x: c.reduce(x, algorithm="ring"), "done by 'ring'; there are direct, tree"),
        (lambda c, x: c.all_reduce(x, algorithm=7), "algorithm 7 is not the name of one"),
        (lambda c, x: c.send(x, 0, tag=-1), "tag -1 is not one of 0 to 2147483647"),
        (lambda c, x: c.recv(x, 0, tag=2**40), "tag 1099511627776 is not one of"),
        (lambda c, x: c.recv(x), "no other rank"),
        (lambda c, x: c.recv(x, -1), "rank -1 is not one of"),
        (lambda c, x: c.split("a"), "color 'a'"),
        (lambda c, x: c.split(-1), "color -1"),
        (lambda c, x: c.split(0, key=2**63), "key"),
        (lambda c, x: c.split(0, key="a"), "key 'a'"),
        (lambda c, x: setattr(c, "timeout", math.inf), "finite"),
        (lambda c, x: setattr(c, "timeout", 0), "above 0"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(alone, call, said):
    with pytest.raises(pc.ConfigurationError, match=said.replace("'", ".")):
        call(alone, np.zeros(4, np.float32))
    assert alone.failure is None


def test_an_aborted_communicator_keeps_the_cause_and_no_operation():
    with pc.init() as comm:
        comm.abort(reason="enough")
        assert isinstance(comm.failure, pc.CollectiveAborted)
        assert (comm.failure.rank, comm.failure.op, comm.failure.sequence) == (0, "", 0)
        with pytest.raises(pc.CollectiveAborted, match="enough") as raised:
            comm.all_reduce(np.zeros(4, np.float32))
        assert (raised.value.op, raised.value.sequence) == ("all_reduce", 1)
