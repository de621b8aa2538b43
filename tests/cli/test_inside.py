"""What would start ranks in each rank of a launch is refused there, and says what to do."""

from __future__ import annotations

import pytest

from tests.launchers import NAMES, launcher

COMMANDS = {
    "verify": (["verify", "-n", "2", "--quick"], "leave -n out to verify the ranks of this launch"),
    "bench": (["bench", "all_reduce", "-b", "1K", "-e", "1K"], "with --tune alone does it join"),
}


# One function knows the launchers, another thing than what each command says: the one by which
# ranks join, too, under torchrun as elsewhere.
@pytest.mark.parametrize(
    ("name", "command"),
    [
        *(("run", command) for command in COMMANDS),
        *zip(NAMES, COMMANDS, strict=True),
        pytest.param("torchrun", "bench", marks=pytest.mark.storm),
    ],
)
def test_ranks_are_not_started_in_ranks(name, command):
    if name == "torchrun":
        pytest.importorskip("torch")
    arguments, says = COMMANDS[command]
    arguments = ["-m", "pycollective", *arguments]
    done = launcher(name).run(2, *arguments)
    assert done.returncode != 0, done.stdout
    if name == "run":
        assert done.returncode == 2
    assert done.stdout.count("ok") == 0
    line = next(line for line in done.stderr.splitlines() if "pycollective " + command in line)
    assert "starts ranks of its own, and this process is a rank already" in line
    assert says in line
