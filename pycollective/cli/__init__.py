"""The command line: ``pycollective run``, ``verify``, ``doctor``, ``bench``, ``schedule``,
``diff``, ``build-torch``.

Each command is a module with two functions: `add` declares its arguments, and the one that is
called like the command does it. NumPy is all that they need; pictures need matplotlib.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from pycollective.cli.common import Parser
from pycollective.config import VERSION
from pycollective.errors import ConfigurationError


def main() -> None:
    """Entry point of the ``pycollective`` command."""
    from pycollective.cli.run import split

    words = sys.argv[1:] or ["--help"]
    own, program = split(words) if words[0] == "run" else (words, [])
    options, unknown = make_parser().parse_known_args(own, argparse.Namespace(program=program))
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status = options.do(options)
        print(end="", flush=True)  # here, where it can be said that nobody reads it
    except ConfigurationError as error:
        # One write: lines that `print` writes in pieces may mix with another rank's.
        sys.stderr.write(f"pycollective {options.command}: {error}\n")
        status = 2
    except BrokenPipeError:  # as behind `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        status = 1
    except OSError as error:
        sys.stderr.write(f"pycollective {options.command}: {error}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 2
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.exit(status)


def make_parser() -> Parser:
    """Return the parser of the whole command line."""
    from pycollective.cli import bench, diff, doctor, run, schedule, verify

    parser = Parser(
        prog="pycollective",
        usage="pycollective COMMAND [options]",
        description="Collective communication: start ranks, check and measure them, "
        "see what\nalgorithms send.",
        epilog="Options of a command: pycollective COMMAND --help",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"pycollective {VERSION}",
        help="print the version and exit",
    )
    parsers = parser.add_subparsers(
        prog="pycollective", title="commands", dest="command", metavar="COMMAND", required=True
    )
    commands = (run.add, verify.add, doctor.add, bench.add, schedule.add, diff.add)
    for add in (*commands, doctor.add_build_torch):
        add(parsers)
    return parser
