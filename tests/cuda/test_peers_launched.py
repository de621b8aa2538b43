"""Kernels over peer memory where ranks are started otherwise: by torchrun, and by mpiexec."""

from __future__ import annotations

import pytest

from tests.cuda import standin
from tests.launchers import launcher

PROGRAM = """
import sys
import pycollective as pc
from pycollective import _core, reference
from pycollective.testing.inputs import leaves
from pycollective.testing.device_array import DeviceArray

comm = pc.init(device="cuda", timeout=30)
n, r = comm.size, comm.rank
assert comm.device_path[0] == "peer", comm.device_path
stream = _core.DeviceStream(comm.device)
counts = 0, 1, 1021, 300_007  # none, few, an odd number, and more than one-shot takes
for count in counts:
    inputs = leaves("float32", "sum", n, count, count)
    x = DeviceArray.from_numpy(inputs[r], comm.device, stream)
    comm.all_reduce(x)
    assert x.to_numpy().tobytes() == reference.reduce(inputs).tobytes(), count
assert comm.kernel_calls == len(counts)
comm.close()
sys.stdout.write(f"RANK {r} of {n} is right\\n")
"""


# `verify` under torchrun goes the same way, in tests/cli/test_verify.py: each of its ranks imports
# torch.
@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param("torchrun", 2, marks=pytest.mark.storm), ("mpich", 3), ("openmpi", 2)],
)
def test_all_reduce(tmp_path, name, ranks):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launcher(name).run(ranks, str(tmp_path / "program.py"), **standin.environment(devices=4))
    assert done.returncode == 0, done.stdout + done.stderr
    want = [f"RANK {rank} of {ranks} is right" for rank in range(ranks)]
    assert sorted(line for line in done.stdout.split("\n") if line.startswith("RANK")) == want
