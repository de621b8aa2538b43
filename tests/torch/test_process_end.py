"""The end of a process, in every way that people bring it about: no crash, no hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness import ROOT
from tests.launchers import OwnLauncher, Torchrun
from tests.torch.process_ends import WAYS

PAGES = "".join((ROOT / name).read_text() for name in ("README.md", "docs/start/numpy.md"))
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGES, re.M | re.S)
# One of each kind; all of WAYS in `make storm`.
USUAL = [
    *("futures_left", "exception", "slow_callback", "plain_daemon_loop", "ordered_left"),
    *("ordered_trained", "device_side_left"),
]


def end_processes(names, rounds, limit, loops, options=()):
    """Each way so often, beside so many busy loops; two ways at a time, since many wait."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]

    def end(ways):
        program = [sys.executable, "-m", "tests.torch.process_ends", *options]
        done = subprocess.run(
            [*program, "--rounds", str(rounds), *ways],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=limit,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert not answer["bad"], json.dumps(answer["bad"], indent=1)
        return answer["ends"]

    try:
        with ThreadPoolExecutor(2) as both:
            return sum(both.map(end, (names[::2], names[1::2])))
    finally:
        for loop in busy:
            loop.kill()
            loop.wait()


@pytest.mark.timeout(320)
def test_processes_end_in_every_way_without_a_crash():
    assert end_processes(USUAL, rounds=1, limit=300, loops=0, options=["--frozen"]) == len(USUAL)


@pytest.mark.storm
@pytest.mark.timeout(4 * 3600)
def test_processes_end_in_every_way_two_hundred_times():
    cores = len(os.sched_getaffinity(0))
    names = [way.__name__ for way in WAYS]
    assert end_processes(names, rounds=200, limit=4 * 3500, loops=cores) == 200 * len(names)


@pytest.mark.storm
@pytest.mark.parametrize("launcher", [OwnLauncher(), Torchrun()])
@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_the_readmes_examples_end_well(launcher, example, tmp_path):
    program = tmp_path / "example.py"
    program.write_text(EXAMPLES[example])
    done = launcher.run(4, str(program), timeout=100)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
