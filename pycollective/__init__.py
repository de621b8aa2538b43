"""Collective communication for gradient synchronisation: the same bits everywhere, fast::

    import numpy as np
    import pycollective as pc

    with pc.init() as comm:                       # join the job's ranks
        x = np.full(4, comm.rank, np.float32)
        comm.all_reduce(x, op="avg")              # x: the average, the same bits on every rank

``pycollective run -n 4 program.py`` starts such a program on this machine, and so do torchrun,
mpiexec and srun; started alone it is one rank.

`init` makes a `Communicator`, whose methods are the collectives: see ``help(pc.Communicator)``. A
`Work` is a call that is under way. `leaves_of` shares micro-batches out to ranks, and an
`Accumulator` adds up those of a rank; a `Deal` is another share of them. What fails raises
`ConfigurationError`, or a kind of `CollectiveError`. `pycollective.torch` is the backend for
torch.distributed, `pycollective.compression` averages with fewer bytes, and `pycollective.typing`
has the names that annotations need.
"""

from pycollective._core import Work
from pycollective.bootstrap.init import init
from pycollective.communicator import ANY_SOURCE, Communicator
from pycollective.config import VERSION as __version__
from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigurationError,
    PeerFailure,
)
from pycollective.leaves.accumulator import Accumulator
from pycollective.leaves.deal import Deal, leaves_of

__all__ = [
    "ANY_SOURCE",
    "Accumulator",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "ConfigurationError",
    "Deal",
    "PeerFailure",
    "Work",
    "__version__",
    "init",
    "leaves_of",
]
