"""`pycollective bench --codec`: what a codec saves, and whether it pays."""

from __future__ import annotations

import sys

from pycollective.bench import codec as comparing
from pycollective.bootstrap import init as bootstrap
from pycollective.errors import CollectiveError
from pycollective.launch.launcher import launch
from pycollective.schedule import Topology


def compare(
    codec: str, sizes: list[int], density: float, rounds: int, ranks: int, topology: str
) -> int:
    """Compare in the launch that this process is part of, or start ranks that do; the status.

    Raises:
        ConfigurationError: what was asked for cannot be.
    """
    plan = comparing.Plan.of(codec, sizes, density, rounds)
    if not bootstrap.launched():
        if topology:
            Topology.parse(topology, ranks)
        else:
            plan.refuse_one_host()
        # The very same command, of which each rank now takes part in a launch.
        return launch(["-m", "pycollective", *sys.argv[1:]], ranks)
    try:
        right = comparing.compare(plan, topology, lambda line: print(line, flush=True))
    except CollectiveError as error:
        sys.stderr.write(f"pycollective bench: {error}\n")
        return 3
    return 0 if right else 1
