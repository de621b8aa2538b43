"""The commands' parser and progress line, and a check that no rank starts ranks.

A mistake is one line and status 2. Help is 80 columns wide, and keeps the paragraphs of a text.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from pycollective.errors import ConfigurationError

WIDTH = 80  # columns of a help page

# What `add_subparsers` gives, whose type has no public name.
Parsers = Any


class Help(argparse.RawDescriptionHelpFormatter):
    """A page of help: `WIDTH` columns, with the paragraphs of a text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH)


class Parser(argparse.ArgumentParser):
    """As argparse's, but for how a mistake and help look."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False,  # an abbreviation would end with the next option of its beginning
            formatter_class=Help,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """End with one line; argparse would print the usage above it."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(
    parsers: Parsers, do: Callable[[argparse.Namespace], int | None], usage: str = ""
) -> Parser:
    """Declare a command, named after the function that does it and described by its docstring.

    Args:
        parsers: of the commands.
        do: takes what was parsed; its result is the exit status, None being 0.
        usage: what follows the command's name.
    """
    text = inspect.getdoc(do) or ""
    name = do.__name__.replace("_", "-")
    parser: Parser = parsers.add_parser(
        name,
        help=text.partition("\n")[0].rstrip("."),
        description=text,
        usage=f"pycollective {name} {usage}".rstrip(),
    )
    parser.set_defaults(do=do, parser=parser)
    return parser


def option(
    group: Any,
    names: str,
    metavar: str,
    text: str,
    default: Any = None,
    kind: Callable[[str], Any] = str,
) -> None:
    """Declare an option that takes a value.

    Args:
        group: the parser, or a group of it.
        names: with spaces between.
        metavar: what the help calls the value.
        text: the help; the default is added unless it says that in words.
        default: the value without the option.
        kind: makes the value of a word.
    """
    if "(default: " not in text:
        text += f" (default: %(default){'g' if kind is float else 's'})"
    group.add_argument(*names.split(), type=kind, default=default, metavar=metavar, help=text)


def refuse_inside_a_launch(what: str, instead: str) -> None:
    """Raise if a launcher has started this process: each of its ranks would start ranks.

    Args:
        what: the option or command that would start them.
        instead: what to do, for the message.

    Raises:
        ConfigurationError: this process is a rank of some launch.
    """
    # Here, because the other commands of this program should not wait for it.
    from pycollective.bootstrap import init as bootstrap

    if bootstrap.launched():
        raise ConfigurationError(
            f"{what} starts ranks of its own, and this process is a rank already, of "
            f"`pycollective run`, torchrun, mpiexec or srun, by its environment: {instead}"
        )


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Show lines on the terminal's last row, each over the one before; nothing without a terminal.

    An empty line clears the row, before something else is printed. No thread refreshes it: it would
    run on a core that is being measured.
    """
    if not sys.stderr.isatty():
        yield lambda line: None
        return

    shown = False

    def show(line: str) -> None:
        nonlocal shown
        if line or shown:  # not what another rank shows
            columns = shutil.get_terminal_size().columns  # a longer line could not be overwritten
            sys.stderr.write(f"\r\x1b[K{line[: columns - 1]}")
            sys.stderr.flush()
        shown = bool(line)

    try:
        yield show
    finally:
        show("")
