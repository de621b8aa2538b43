"""What moves where: algorithms as data. Pure Python; no input, no output, no torch, no native code.

An algorithm says what each rank sends and receives in each step (`algorithms/`, a file each);
`lower` turns this into steps over buffers; `proof` proves them right; `cost` prices them.
"""

from pycollective.schedule.algorithms import ALGORITHMS
from pycollective.schedule.lower import ScheduleError
from pycollective.schedule.operation import OPERATIONS
from pycollective.schedule.schedule import Schedule, algorithms_for, make_schedule
from pycollective.schedule.topology import Topology
from pycollective.schedule.transfer import Transfer

__all__ = [
    "ALGORITHMS",
    "OPERATIONS",
    "Schedule",
    "ScheduleError",
    "Topology",
    "Transfer",
    "algorithms_for",
    "make_schedule",
]
