"""What the command line refuses: each line of refusals.txt."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.test_help import COMMANDS

LINES = (Path(__file__).parent / "refusals.txt").read_text().splitlines()
REFUSALS = [tuple(line.split(" => ", 1)) for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize(("command", "refusal"), REFUSALS, ids=[each[0] for each in REFUSALS])
def test_a_refusal_is_one_line_and_status_2(pycollective, tmp_path, command, refusal):
    def filled(text):
        return text.replace("{tmp}", str(tmp_path)).replace("{file}", __file__)

    done = pycollective(*shlex.split(filled(command)))
    assert (done.returncode, done.stdout) == (2, "")
    first = command.split()[0]
    who = f"pycollective {first}: " if first in COMMANDS else "pycollective: "
    whole = re.escape(who + filled(refusal)).replace(r"\.\.\.", ".*") + "\n"
    assert re.fullmatch(whole, done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []
