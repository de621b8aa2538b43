"""Help pages and mistakes, as a user reads them; and what the command line needs."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

from pycollective.cli import make_parser
from pycollective.cli.common import WIDTH
from pycollective.config import VERSION
from tests.launch.test_launcher import environment

COMMANDS = ("run", "verify", "doctor", "bench", "schedule", "diff", "build-torch")


def parsers():
    """The parser of each command, by its name."""
    (commands,) = [
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return commands.choices


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_a_help_page_is_80_columns_wide(pycollective, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    done = pycollective(*filter(None, [command]), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    # A text that was wrapped twice has lines of a word or two within its paragraphs.
    for paragraph in done.stdout.split("\n\n")[1:-1]:
        if paragraph[0].isupper():
            assert min(map(len, paragraph.splitlines()[:-1]), default=WIDTH) > 50, paragraph


def test_the_commands_are_named_and_described(pycollective):
    said = pycollective().stdout  # with nothing to do, as with --help
    for command in COMMANDS:
        assert re.search(rf"^    {command}\s", said, re.M)
    assert list(parsers()) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_its_default_and_its_unit(command):
    for action in parsers()[command]._actions:
        takes_a_value = action.option_strings and action.nargs is None
        if takes_a_value:
            assert "(default: " in action.help or action.required, action.option_strings
            assert action.metavar, action.option_strings
        assert not action.help.endswith("."), action.option_strings


def test_the_same_option_has_the_same_names_everywhere():
    for name, letters in {"--ranks": "-n", "--dtype": "-d", "--root": "-r"}.items():
        for command, parser in parsers().items():
            for action in parser._actions:
                both = {name, letters}
                assert not both & {*action.option_strings} or both == {*action.option_strings}, (
                    command
                )
    having = {
        command
        for command, parser in parsers().items()
        if any("--ranks" in action.option_strings for action in parser._actions)
    }
    assert having == {"run", "verify", "bench", "schedule"}


def test_the_version(pycollective):
    assert pycollective("--version").stdout == f"pycollective {VERSION}\n"


# Nothing but NumPy and what Python has; and no reader of what is printed.
BARE = """
import sys
import numpy
before = {name.partition(".")[0] for name in sys.modules}
from pycollective.cli import main
sys.argv = ["pycollective", "schedule", "ring", "-n", "40", "--plan", "--rank", "all"]
try:
    main()
finally:
    names = {name.partition(".")[0] for name in sys.modules} - before
    print(sorted(names - {*sys.stdlib_module_names, "pycollective"}), file=sys.stderr)
"""


def test_it_needs_numpy_alone_and_a_reader_that_goes_is_no_traceback():
    with subprocess.Popen(
        [sys.executable, "-c", BARE],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(60) == 1
    assert said == "[]\n"
