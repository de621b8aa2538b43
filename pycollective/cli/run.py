"""`pycollective run`: start ranks on this host, and end them all when one fails."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from pycollective.cli.common import Parsers, add_command, option
from pycollective.config import ENV_TOPOLOGY
from pycollective.errors import ConfigurationError
from pycollective.launch.launcher import launch
from pycollective.launch.restart_policy import Restarts
from pycollective.schedule.topology import Topology

_WITH_A_VALUE = ("-n", "--ranks", "--log-dir", "--min", "--max-restarts")
# A rank that has died so often does not die by chance, as of a batch that it cannot take.
_RESTARTS_PER_RANK = 10


def add(parsers: Parsers) -> None:
    """Declare the command."""
    parser = add_command(parsers, run, "[options] PROGRAM [argument ...]")
    option(parser, "-n --ranks", "N", "ranks to start (default: 1)", None, int)
    parser.add_argument(
        "--pin",
        action="store_true",
        help="bind each rank to a core of its own, one hardware thread of each physical core first "
        "(default: ranks run where the system puts them)",
    )
    parser.add_argument(
        "--tag-output",
        action="store_true",
        default=None,
        help="begin each line of output with [rank] (default: unless it goes to a terminal)",
    )
    parser.add_argument(
        "--no-tag-output",
        action="store_false",
        dest="tag_output",
        default=None,
        help="leave each line as the rank wrote it",
    )
    option(
        parser,
        "--log-dir",
        "DIR",
        "write what rank R prints to DIR/R/stdout.log and DIR/R/stderr.log too, without "
        "tags; DIR must be new or empty (default: no files)",
        None,
        Path,
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="when a rank dies, go on and start another process in its place (default: a rank's "
        "failure ends the job)",
    )
    option(
        parser,
        "--min",
        "M",
        "end an elastic job when fewer ranks than this are left (default: 1)",
        None,
        int,
    )
    option(
        parser,
        "--max-restarts",
        "N",
        "processes that an elastic job may start in the place of others, for all ranks together "
        f"(default: {_RESTARTS_PER_RANK} for each rank)",
        None,
        int,
    )


def run(options: argparse.Namespace) -> int:
    """Start ranks of a program on this host; if one fails, name it and end the rest.

    PROGRAM is a Python file, -m and a module, or any executable. What follows it is
    passed to it, options too; options of `run` go before it. An -n that follows it
    is refused where none goes before it.

      pycollective run -n 4 train.py --epochs 3
      pycollective run -n 4 -m package.train --epochs 3
      pycollective run -n 4 --log-dir logs/1 python -u train.py

    In each rank `pycollective.init()` joins the others, and so does PyTorch's
    init_process_group() by env://. A line of output arrives whole, up to 64 KiB of
    it, on the stream that the rank wrote it to. Rank 0 reads the standard input, so
    breakpoint() works there; the other ranks find it empty.

    --pin binds ranks as mpiexec -bind-to core does: a rank, its threads and what
    it starts stay on one core. More ranks than cores are refused. Two jobs would
    get the same cores: start the second under `taskset -c` with others. Leave
    --pin out where ranks compute with several threads, as with torch.

    With --elastic the others run on when a rank is killed, or ends with another
    status than 0. Another process takes its place and joins them. It starts at
    once, or after 0.1 to 30 s if the one before has not got as far as joining. It
    has the rank's core, its standard input and its tag; with --log-dir its files
    are DIR/R/stdout.1.log and so on. In it PYCOLLECTIVE_JOINS is 1. The job fails
    when no rank that had joined is left, when a rank fails before the ranks have
    met, and when fewer than --min are left; those that have ended well count, and
    so do places that are still to be filled.

    Exit status: that of the rank that failed first, or 128 and its signal's number;
    2: there is no such program.
    """
    if options.ranks is None:
        _refuse_ranks_behind(options.program)
        options.ranks = 1
    return launch(
        options.program,
        options.ranks,
        pin=options.pin,
        tag_output=options.tag_output,
        log_dir=options.log_dir,
        restarts=_restarts_of(options),
    )


def _restarts_of(options: argparse.Namespace) -> Restarts | None:
    """Return what --elastic and the options that need it ask for; None without it."""
    fewest, limit, ranks = options.min, options.max_restarts, options.ranks
    if not options.elastic:
        for name, value in {"--min": fewest, "--max-restarts": limit}.items():
            if value is not None:
                raise ConfigurationError(f"{name} is for a job that --elastic lets go on: add it")
        return None
    if fewest is not None and not 1 <= fewest <= ranks:
        raise ConfigurationError(f"--min {fewest} is not 1 to {ranks}, the number of ranks")
    if limit is not None and limit < 0:
        raise ConfigurationError(f"--max-restarts {limit} is not 0 or more")
    topology = os.environ.get(ENV_TOPOLOGY)
    if topology and not Topology.parse(topology, ranks).single:
        sys.stderr.write(
            f"pycollective run: no process takes the place of another, since {ENV_TOPOLOGY}="
            f"{topology} has several hosts: the ranks that are left go on\n"
        )
        limit = 0
    return Restarts(fewest or 1, ranks * _RESTARTS_PER_RANK if limit is None else limit)


def _refuse_ranks_behind(program: list[str]) -> None:
    """Raise if -n stands behind the program: it would train on one rank, and may not say so.

    Other options are not checked: a program may have its own --log-dir, and missing tags show.
    """
    for word in program[1:]:
        if re.fullmatch(r"-n\d*|--ranks(=.*)?", word):
            raise ConfigurationError(
                f"{word} stands behind the program, which gets it as its own: put it before "
                f"{program[0]}. If it is meant for the program, put -n 1 before {program[0]}"
            )


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words into the options of `run` and the program with its arguments.

    argparse's own way, REMAINDER, takes a first ``-m`` for an option of `run`.
    """
    at = 1  # after `run`
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        at += 2 if words[at] in _WITH_A_VALUE else 1
    return words[:at], words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
