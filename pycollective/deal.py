"""`pycollective.leaves.deal`, by the name that it had; for one release."""

from pycollective.leaves.deal import Deal, leaves_of

__all__ = ["Deal", "leaves_of"]
