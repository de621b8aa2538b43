"""What moves where: algorithms as data. Pure Python; no input, no output, no torch, no native code.

An algorithm says which rank hands a shard to which in each step (`algorithm.py`, a file each);
`lower` turns this into plain steps over buffers, by way of partials; `verify` proves them right;
`cost` prices them.
"""

from pycollective.schedule.lower import Move, ScheduleError
from pycollective.schedule.operation import OPERATIONS
from pycollective.schedule.schedule import ALGORITHMS, Schedule, algorithms_for, make_schedule
from pycollective.schedule.topology import Topology

__all__ = [
    "ALGORITHMS",
    "OPERATIONS",
    "Move",
    "Schedule",
    "ScheduleError",
    "Topology",
    "algorithms_for",
    "make_schedule",
]
