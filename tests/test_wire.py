"""What goes to other hosts raw or packed: the same bits, fewer bytes, one choice of all ranks."""

from __future__ import annotations

from functools import partial

import pytest

from tests.launchers import run_text

DIFFERENT = """
import numpy as np
import pycollective as pc

comm = pc.init(timeout=10)
try:
    comm.all_reduce(np.ones(100_000), wire=("raw", "exact")[comm.rank % 2])
except pc.CollectiveMismatch as error:
    assert "wire exact" in str(error) and "wire raw" in str(error), error
else:
    raise AssertionError("no mismatch")
"""

DEFAULTS = """
import os

import numpy as np
import pycollective as pc

with pc.init(timeout=30, wire="exact") as comm:
    assert comm.wire == "exact" and comm.split(0).wire == "exact"
    before = comm.stats()
    comm.all_reduce(np.random.default_rng(comm.rank).standard_normal(100_000).astype(np.float32))
    after = comm.stats()
    sent, raw = (after[key] - before[key] for key in ("sent_bytes", "sent_raw_bytes"))
    assert 0 < sent < raw
    comm.wire = "raw"
    before = comm.stats()
    comm.all_reduce(np.ones(100_000, np.float32))
    after = comm.stats()
    assert after["sent_bytes"] - before["sent_bytes"] == (
        after["sent_raw_bytes"] - before["sent_raw_bytes"])
with pc.init(timeout=30) as comm:
    assert comm.wire == os.environ.get("PYCOLLECTIVE_WIRE", "raw")
"""


@pytest.fixture(params=["forks", pytest.param("mpich", marks=pytest.mark.storm)])
def run(request, tmp_path):
    return partial(run_text, tmp_path, request.param)


def test_ranks_that_ask_for_different_wires_are_told(run):
    run(DIFFERENT, 2, "2x1")


def test_where_the_wire_comes_from(run):
    run(DEFAULTS, 2, "2x1", PYCOLLECTIVE_WIRE="exact")
    run(DEFAULTS, 2, "2x1")


def test_a_wire_that_is_not_there():
    import numpy as np

    import pycollective as pc

    with pytest.raises(pc.ConfigurationError, match="wire 'zip' is not here; there are 'raw'"):
        pc.init(wire="zip")
    with pc.init() as comm:
        with pytest.raises(pc.ConfigurationError, match="wire 'zip'"):
            comm.all_reduce(np.ones(3), wire="zip")
        with pytest.raises(pc.ConfigurationError, match="wire 3"):
            comm.wire = 3
        assert comm.stats() == {"sent_messages": 0, "sent_bytes": 0, "sent_raw_bytes": 0}


# The calls of `pycollective verify`, at few counts, the last too long to go with a call.
# Of each 1,024 elements half are the table's, with bits of all kinds, and half pack well: so
# messages have packed blocks and raw ones. Then messages of several chunks, whose slots are used
# again, each with its own window of the inputs: another call's result would not pass.
TABLE = """
import numpy as np
import pycollective as pc
from pycollective import reference
from pycollective.dtypes import numpy_type
from pycollective.verify import cases as table
from pycollective.verify.cases import Call, Data
from pycollective.schedule import OPERATIONS, algorithms_for

table.counts = lambda ranks, quick: [0, ranks - 1, 40_009]

class Mixed(Data):
    def inputs(self, reduce_op):
        if reduce_op not in self.made:
            self.made[reduce_op] = [each.copy() for each in super().inputs(reduce_op)]
            for rank, each in enumerate(self.made[reduce_op]):
                easy = np.random.default_rng(rank).standard_normal(len(each))
                at = np.arange(len(each)) % 1024 < 512
                each[at] = (np.rint(easy * 256) / 256).astype(each.dtype)[at]
        return self.made[reduce_op]

with pc.init(timeout=60, wire="exact") as comm:
    combinations = wrong = packed = 0
    for dtype in [{dtype!r}]:
        made = {{name: list(table.cases(name, dtype, comm.size, True)) for name in OPERATIONS}}
        longest = max(case.start + case.count for calls in made.values() for case in calls)
        data = Mixed(dtype, comm.size, longest)
        data.made = {{}}
        for operation, calls in made.items():
            for algorithm in algorithms_for(operation):
                before = comm.stats()
                bad = 0
                for case in calls:
                    for check in Call(comm, algorithm, case, data).make(operation):
                        bad += check.got.tobytes() != check.want.tobytes()
                after = comm.stats()
                sent = np.array([after[key] - before[key]
                                 for key in ("sent_bytes", "sent_raw_bytes")] + [bad])
                comm.all_reduce(sent)
                combinations += 1
                wrong += sent[2] != 0
                packed += sent[0] < {most} * sent[1]
                assert sent[0] == sent[1] or dtype in ("bfloat16", "float16", "float32")
                if comm.rank == 0 and (sent[2] or sent[0] >= {most} * sent[1]):
                    print("SEEN", dtype, operation, algorithm, *sent, flush=True)
    inputs = np.random.default_rng(7).standard_normal((comm.size, 2_500_003), np.float32)
    inputs = (100 * inputs).astype(numpy_type({dtype!r}))
    whole = reference.reduce(inputs)
    for place, algorithm in enumerate(("halving_doubling", "hierarchical", "ring")):
        window = slice(place, place + 2_500_001)
        x = inputs[comm.rank, window].copy()
        comm.all_reduce(x, algorithm=algorithm)
        assert x.tobytes() == whole[window].tobytes(), algorithm
    if comm.rank == 0:
        print("TABLE", combinations, packed, wrong, flush=True)
"""


@pytest.mark.parametrize(
    ("name", "ranks", "topology", "dtype"),
    [
        ("forks", 4, "2x2", "bfloat16"),
        ("forks", 4, "2x2", "float64"),  # nothing of it is packed
        *(
            pytest.param(*each, marks=pytest.mark.storm)
            for each in [
                ("forks", 4, "2x2", "float32"),
                ("forks", 4, "2x2", "float8_e5m2"),
                ("mpich", 4, "2x2", "bfloat16"),
                ("mpich", 3, "2,1", "float32"),
                ("mpich", 3, "3x1", "float16"),
            ]
        ),
    ],
)
def test_every_operation_and_algorithm_keeps_its_bits_packed(
    tmp_path, name, ranks, topology, dtype
):
    program = TABLE.format(dtype=dtype, most=0.98 if dtype == "float16" else 0.9)
    done = run_text(tmp_path, name, program, ranks, topology)
    combinations, packed, wrong = map(int, done.stdout.split("TABLE ")[1].split()[:3])
    assert combinations > 25
    assert wrong == 0, done.stdout
    assert packed == (combinations if dtype in ("bfloat16", "float16", "float32") else 0)
