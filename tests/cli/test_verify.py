"""`pycollective verify`: one digest under every launch, and what it ends with."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pycollective.errors import ConfigurationError
from pycollective.schedule import ALGORITHMS, OPERATIONS
from pycollective.verify import select
from pycollective.verify.reports import header
from tests.cli.test_verify_table import digest_of
from tests.cuda import standin
from tests.harness import ROOT
from tests.inputs import DTYPES
from tests.launch.test_launcher import timed
from tests.launch.test_output import read_to_the_end
from tests.launchers import NAMES, Launcher, find, python

VERIFY = ["-m", "pycollective", "verify"]
RUN = ["-m", "pycollective", "run", "--no-tag-output", "-n", "3"]
# What ranks do does not depend on how they were started; numbers that round, and such that do not.
FEW = ["--quick", "-d", "bfloat16,int32"]


@pytest.fixture(scope="module")
def quick():
    """What three ranks of `pycollective verify -n 3 --quick --table` print."""
    done = python(*VERIFY, "-n", 3, "--quick", "--table")
    assert done.stderr == ""
    return done.stdout


def published():
    """The digests of docs/reference/contract.md: {(command, without ml_dtypes): digest}."""
    page = (ROOT / "docs/reference/contract.md").read_text()
    rows = re.findall(r"^\| `pycollective (verify .*)` \| `(\w{32})` \| `(\w{32})` \|$", page, re.M)
    return {(row[0], lacks): row[1 + lacks] for row in rows for lacks in (False, True)}


@pytest.mark.parametrize("simd", ["portable", ""])
@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        "verify -n 2 --quick",
        "verify -n 4 --quick",
        pytest.param("verify -n 2", marks=pytest.mark.storm),
        pytest.param("verify -n 4", marks=pytest.mark.storm),
    ],
)
def test_the_digests_are_those_that_the_contracts_page_publishes(command, lacks, simd, tmp_path):
    """Whatever the kernels. A digest that changes is a change of bits, or of what is verified."""
    assert len(published()) == 8
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['ml_dtypes'] = None\n" * lacks
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    variables = {"PYCOLLECTIVE_SIMD": simd, "PYTHONPATH": path}
    done = python("-m", "pycollective", *command.split(), **variables)
    digest, _ = digest_of(done.stdout)
    assert ("without bfloat16" in digest) == lacks
    assert digest.partition(": ")[2] == published()[command, lacks]


def test_every_combination_has_a_line(quick):
    lines = [line.split() for line in quick.splitlines() if not line.startswith(("#", "digest"))]
    assert [line[1:4] for line in lines] == [
        [dtype, operation, algorithm]
        for dtype in DTYPES
        for operation in OPERATIONS
        for algorithm in (*ALGORITHMS, "auto")
        if algorithm == "auto" or operation in ALGORITHMS[algorithm].transfers
    ]
    assert {line[0] for line in lines} == {"ok"}
    assert {line[-1] for line in lines} == {"0"}
    digest, algorithms = digest_of(quick)
    assert digest.startswith("digest of 3 ranks, quick: ")
    assert algorithms == f"the same for {len(ALGORITHMS) + 1} algorithms"


@pytest.fixture(scope="module")
def few():
    """The same of a few dtypes."""
    return python(*VERIFY, "-n", 3, *FEW).stdout


def test_without_the_table_there_are_a_verdict_and_the_digest(few):
    title, verdict, digest = few.splitlines()
    assert title.startswith("# pycollective ")
    assert re.fullmatch(r"# \d+ combinations, [\d,]+ calls a rank, [\d.]+ s: all right", verdict), (
        verdict
    )
    assert digest.startswith("digest of 3 ranks, quick, bfloat16 int32: ")


def test_on_a_terminal_it_says_how_far_it_is():
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0):
        with os.fdopen(theirs, "wb", buffering=0):
            subprocess.run(
                [sys.executable, *VERIFY, "-n", "2", *FEW, "--operation", "broadcast"],
                env=Launcher().environment(PYTHONUNBUFFERED="1"),  # as many containers set it
                stdout=theirs,
                stderr=theirs,
                timeout=100,
                check=True,
            )
        *shown, verdict = read_to_the_end(ours).split("\r\x1b[K")
    whole = int(re.match(r"# (\d+) combinations", verdict)[1])
    bars = [each for each in shown if each.startswith("[")]
    assert len(bars) == whole
    assert bars[0].startswith(f"[{'':16}] 0/{whole} bfloat16 broadcast by ")
    assert bars[whole // 2].startswith(f"[{'#' * 8:16}] {whole // 2}/{whole} ")
    assert verdict.splitlines()[-1].startswith("digest of 2 ranks, ")


def test_the_digest_under_pycollective_run(few):
    done = python(*RUN, *VERIFY, *FEW)
    assert digest_of(done.stdout) == digest_of(few)
    assert done.stdout.count("\n") == few.count("\n")  # of one rank


# Without torchrun: cuda/test_device_commands. How torchrun's ranks join: test_launches.
@pytest.mark.storm
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_digest_under_torchrun(few, device):
    """On GPUs, by kernels over peer memory: the digest is that of the CPU."""
    pytest.importorskip("torch")
    gpus = {"PYCOLLECTIVE_DEVICE_PATH": "peer", **standin.environment(devices=4)}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3, "--no-python"]
    done = python(*launch, sys.executable, *VERIFY, *FEW, "--device", device, **gpus)
    assert ("arrays in GPU memory" in done.stdout) == (device == "cuda")
    assert digest_of(done.stdout) == digest_of(few)


@pytest.mark.storm
@pytest.mark.parametrize("name", NAMES)
def test_the_digest_under_mpiexec(few, name):
    done = find(name).run(3, *VERIFY, *FEW, "--timeout", "20")
    assert done.returncode == 0, done.stderr
    assert digest_of(done.stdout) == digest_of(few)


WITH_A_FAULT = """
import sys
from pycollective.bootstrap import init as bootstrap
from tests.cli.test_verify_table import PLANTS
init = bootstrap.init
class Planted(PLANTS[sys.argv.pop(1)]):
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return self._comm.__exit__(*error)
bootstrap.init = lambda **options: Planted(init(**options))
from pycollective.cli import main
main()
"""


def test_a_wrong_result_is_status_1(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WITH_A_FAULT)
    arguments = ["verify", "--quick", "--operation", "reduce_scatter", "-d", "bfloat16"]
    done = python(*RUN, program, "OneBit", *arguments, status=1)
    assert (
        done.stdout.count("WRONG: bfloat16 reduce_scatter by tree: 10 elements on rank(s) 2") == 1
    )
    assert done.stdout.splitlines()[-1].endswith(" (tree)")


def test_a_lost_rank_is_status_3():
    with subprocess.Popen(
        # The others say so however slow they are.
        [*timed("verify", _NOTICE=30), "-n", "3", "--table"],
        env=Launcher().environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not process.stdout.readline().startswith("ok"):
            pass
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 3
        os.kill(int(children[1]), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert re.search(r"^pycollective verify: \w+ \w+ by \w+, .*: .*rank 1", said, re.MULTILINE)


def test_without_ml_dtypes_the_rest_is_verified_and_the_digest_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    selection = select()
    assert "bfloat16" not in selection.dtypes
    assert selection.name == "without bfloat16 float8_e4m3fn float8_e5m2"
    assert "pip install ml_dtypes" in "".join(header(selection, 2))
    with pytest.raises(ConfigurationError, match="pip install ml_dtypes"):
        select(dtypes=["bfloat16"])
