"""`pycollective verify`: every operation by every algorithm in every dtype, on the user's ranks.

`cases.py` says which calls are made and what each must end with, `reports.py` compares, hashes,
tells the other ranks and prints, and `run.py` runs it all on one rank.
"""

from pycollective.testing.places import PLACES
from pycollective.verify.cases import Selection, select
from pycollective.verify.run import Lost, verify

__all__ = ["PLACES", "Lost", "Selection", "select", "verify"]
