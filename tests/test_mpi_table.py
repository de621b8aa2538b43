"""The whole conformance table under mpiexec, by every algorithm: the digests of one host.

`make test-mpi` runs it; `make test` has a short form of it in test_hosts.py.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.launchers import NAMES, find, launcher

pytestmark = [pytest.mark.whole_table, pytest.mark.timeout(400)]

HOSTS = {
    2: ("1x2", "2x1"),
    3: ("1x3", "2,1"),
    4: ("1x4", "2x2", "4x1"),
    7: ("1x7", "3,4", "2,4,1"),
}

VERIFY = """
import sys
from pycollective.verify import select, verify

sys.exit(not verify(select(), 60.0, lambda line: print(line, flush=True)))
"""


def digest(text: str) -> str:
    found = re.search(r"digest of \d+ ranks: ([0-9a-f]{16,})", text)
    assert found, text
    return found[1]


@pytest.fixture(scope="module")
def on_one_host():
    made: dict[int, str] = {}

    def of(ranks: int) -> str:
        if ranks not in made:
            done = launcher("run").run(ranks, "-m", "pycollective", "verify", timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
            made[ranks] = digest(done.stdout)
        return made[ranks]

    return of


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("ranks", "topology"), [(ranks, each) for ranks, several in HOSTS.items() for each in several]
)
def test_the_whole_table(tmp_path, on_one_host, name, ranks, topology):
    (tmp_path / "program.py").write_text(VERIFY)
    program = str(tmp_path / "program.py")
    done = find(name).run(ranks, program, timeout=300, PYCOLLECTIVE_TOPOLOGY=topology)
    assert done.returncode == 0, done.stdout + done.stderr
    assert digest(done.stdout) == on_one_host(ranks)
    print(f"{name}, {ranks} ranks, {topology}: {digest(done.stdout)}", file=sys.stderr)
