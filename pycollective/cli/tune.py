"""`pycollective bench --tune`: measure every algorithm, for a table that `init(tuning=)` reads."""

from __future__ import annotations

import sys
from pathlib import Path

from pycollective.bench import tune as measuring
from pycollective.bootstrap import init as bootstrap
from pycollective.errors import CollectiveError
from pycollective.launch.launcher import launch
from pycollective.schedule import Topology


def tune(
    operation: str,
    sizes: list[int],
    dtype: str,
    rounds: int,
    path: Path,
    ranks: int,
    topology: str,
) -> int:
    """Measure in the launch that this process is part of, or start ranks that do; the status.

    Raises:
        ConfigurationError: what was asked for cannot be, or the file not be read or written.
    """
    plan = measuring.Plan.of(operation, sizes, dtype, rounds)
    if not bootstrap.launched():
        plan.check(ranks)
        measuring.check_file(path)
        if topology:
            Topology.parse(topology, ranks)
        # The very same command, of which each rank now takes part in a launch.
        return launch(["-m", "pycollective", *sys.argv[1:]], ranks)
    try:
        measuring.tune(plan, path, topology, lambda line: print(line, flush=True))
    except CollectiveError as error:
        sys.stderr.write(f"pycollective bench: {error}\n")
        return 3
    return 0
