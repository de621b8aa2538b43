"""Arrays in GPUs' memory between hosts, played on one: by way of the host, and MPI or Gloo."""

from __future__ import annotations

import pytest

from tests.cuda import standin
from tests.launchers import launcher

# Rank 1's arrays are in the host's memory.
PROGRAM = """
import sys
import numpy as np
import pycollective as pc
from pycollective import _core, reference
from pycollective.testing.inputs import leaves
from pycollective.testing.device_array import DeviceArray
from pycollective.schedule import algorithms_for

comm = pc.init(timeout=30)
n, r = comm.size, comm.rank
stream = None if r == 1 else _core.DeviceStream(r % 2)
put = lambda x: x.copy() if r == 1 else DeviceArray.from_numpy(x, r % 2, stream)
get = lambda x: x if r == 1 else x.to_numpy()
inputs = leaves("float16", "sum", n, 200_003, 1)
want = reference.reduce(inputs)
for algorithm in algorithms_for("all_reduce"):
    inputs, want = [np.roll(x, 7) for x in inputs], np.roll(want, 7)  # no call is like the last
    arrays = [put(np.roll(inputs[r], call)) for call in range(4)]
    works = [comm.all_reduce(x, async_op=True, algorithm=algorithm) for x in arrays[:-1]]
    comm.all_reduce(arrays[-1], algorithm=algorithm)
    for work in works:
        work.wait(timeout=30)
    for call, x in enumerate(arrays):
        assert get(x).tobytes() == np.roll(want, call).tobytes(), algorithm
got = put(np.zeros_like(inputs[0]))
sending = comm.send(put(inputs[r]), (r + 1) % n, async_op=True)
comm.recv(got, (r - 1) % n)
sending.wait(timeout=30)
assert get(got).tobytes() == inputs[r - 1].tobytes()
comm.close()
sys.stdout.write(f"RANK {r} is right\\n")
"""


# By forks, which have torch's Gloo, and not by a launcher: this is about what a program does.
@pytest.mark.parametrize("name", [pytest.param("mpich", marks=pytest.mark.storm), "forks"])
def test_any_algorithm_between_hosts(tmp_path, name):
    (tmp_path / "program.py").write_text(PROGRAM)
    more = {"PYCOLLECTIVE_TOPOLOGY": "2x2", **standin.environment()}
    done = launcher(name).run(4, str(tmp_path / "program.py"), **more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")[:4]) == [f"RANK {r} is right" for r in range(4)]
