"""The conformance table between played hosts with every message packed that can be."""

from __future__ import annotations

import pytest

from tests.launchers import launcher

# The calls of `pycollective verify`, at two counts of which one is too long to go with a call. Of
# each 1,024 elements half are the table's, with bits of all kinds, and half pack well: so messages
# have packed blocks and raw ones.
TABLE = """
import numpy as np
import pycollective as pc
from pycollective import _core
from pycollective.dtypes import numpy_type
from pycollective.verify import cases as table
from pycollective.verify.calls import Call, Data
from pycollective.schedule import OPERATIONS, algorithms_for

table.counts = lambda ranks, quick: [ranks - 1, 40_009]

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
                packed += sent[0] < 0.9 * sent[1]
                if comm.rank == 0 and (sent[2] or sent[0] >= 0.9 * sent[1]):
                    print("SEEN", dtype, operation, algorithm, *sent, flush=True)
    if comm.rank == 0:
        print("TABLE", combinations, packed, wrong, flush=True)
"""


@pytest.mark.parametrize("name", ["forks", pytest.param("mpich", marks=pytest.mark.storm)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.storm)])
def test_every_operation_and_algorithm_keeps_its_bits_packed(tmp_path, name, dtype):
    (tmp_path / "program.py").write_text(TABLE.format(dtype=dtype))
    program = str(tmp_path / "program.py")
    done = launcher(name).run(4, program, timeout=100, PYCOLLECTIVE_TOPOLOGY="2x2")
    assert done.returncode == 0, done.stdout + done.stderr
    combinations, packed, wrong = map(int, done.stdout.split("TABLE ")[1].split()[:3])
    assert combinations > 25
    assert (packed, wrong) == (combinations, 0), done.stdout
