"""`pycollective diff`: where two runs part, by their ledgers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pycollective.cli.common import Parsers, add_command


def add(parsers: Parsers) -> None:
    """Declare the command."""
    parser = add_command(parsers, diff, "A B [options]")
    for name in ("A", "B"):
        parser.add_argument(name, type=Path, help="a run's ledger: its folder, or one of the files")
    parser.add_argument(
        "--json", action="store_true", help="print what was found as JSON (default: in words)"
    )


def diff(options: argparse.Namespace) -> int:
    """Name the first step, parameter, leaf and rank in which two runs differ.

    Each run has written a ledger: digests of its gradients and their averages, in
    the folder of PYCOLLECTIVE_LEDGER or LeafSync(ledger=). The runs may have had
    different numbers of ranks, and may have been resumed:

      PYCOLLECTIVE_LEDGER=a pycollective run -n 8 train.py
      PYCOLLECTIVE_LEDGER=b pycollective run -n 3 train.py
      pycollective diff a b

    Exit status 0: both have the same steps with the same bits, 1: they differ, or
    one has steps that the other lacks, 2: they cannot be compared.
    """
    # Here, because the other commands of this program should not wait for it.
    from pycollective.ledger.compare import compare
    from pycollective.ledger.reader import read

    found = compare(read(options.A), read(options.B))
    print(json.dumps(found.described(), indent=1) if options.json else found)
    return 0 if found.same else 1
