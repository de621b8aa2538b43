"""`pycollective.leaves.accumulator`, by the name that it had; for one release."""

from pycollective.leaves.accumulator import Accumulator

__all__ = ["Accumulator"]
