"""The conformance table: every operation by every algorithm in every dtype, on the user's ranks.

What `pycollective verify` runs on one rank. `selection.py` says what is asked for, `cases.py` which
calls that means, `inputs.py` with which numbers, `places.py` where arrays lie, and `calls.py` what
a call must end with; `tally.py` compares and hashes, `reports.py` tells the other ranks, `table.py`
is what is printed.
"""

from pycollective.verify.places import PLACES
from pycollective.verify.run import Lost, verify
from pycollective.verify.selection import Selection, select

__all__ = ["PLACES", "Lost", "Selection", "select", "verify"]
