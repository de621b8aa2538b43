"""The algorithms, a file each."""

from pycollective.schedule.transfer import Algorithm

from .direct import DIRECT
from .halving_doubling import HALVING_DOUBLING
from .hierarchical import HIERARCHICAL
from .recursive_doubling import RECURSIVE_DOUBLING
from .ring import RING
from .tree import TREE

__all__ = ["ALGORITHMS", "Algorithm"]

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (DIRECT, RING, TREE, HALVING_DOUBLING, RECURSIVE_DOUBLING, HIERARCHICAL)
}
