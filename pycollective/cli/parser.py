"""What the commands' parsers have in common: `add` declares a command by the function that does it.

A mistake is one line and status 2; help is 80 columns wide, and keeps the paragraphs of a text.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

WIDTH = 80  # columns of a help page

# What `add_subparsers` gives, whose type has no public name.
Parsers = Any


class Parser(argparse.ArgumentParser):
    """As argparse's, but for how a mistake and help look."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False,  # an abbreviation would end with the next option of its beginning
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=WIDTH),
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """End with one line; argparse would print the usage above it."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(
    parsers: Parsers, do: Callable[[argparse.Namespace], int | None], usage: str = ""
) -> Parser:
    """A command, by the name of the function that does it and described by its docstring.

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
