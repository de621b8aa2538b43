"""What a run of the table is asked to cover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pycollective.bench.problem import ALIASES, DTYPES, numpy_type
from pycollective.errors import ConfigurationError
from pycollective.schedule import ALGORITHMS, OPERATIONS, algorithms_for

AUTO = "auto"
# What stands in, in an algorithm's digest, for operations that it cannot do: it can do all.
STAND_IN = "direct"


def can_do(operation: str, algorithm: str) -> bool:
    """Whether an algorithm, or ``auto``, can do an operation."""
    return algorithm == AUTO or algorithm in algorithms_for(operation)


@dataclass(frozen=True)
class Selection:
    """Which part of the table to run; each tuple in the table's order.

    Attributes:
        operations: collectives.
        algorithms: those to give a digest for.
        dtypes: element types.
        quick: few counts.
        missing: what was left out because this installation lacks it, in words; empty if nothing.
    """

    operations: tuple[str, ...]
    algorithms: tuple[str, ...]
    dtypes: tuple[str, ...]
    quick: bool = False
    missing: str = ""

    def algorithms_for(self, operation: str) -> tuple[str, ...]:
        """The algorithms to run for an operation, the stand-in for others among them."""
        wanted = {a if can_do(operation, a) else STAND_IN for a in self.algorithms}
        return tuple(a for a in (*ALGORITHMS, AUTO) if a in wanted)

    @property
    def name(self) -> str:
        """What the digest covers, for people to compare like with like; empty if the whole table.

        Algorithms are not in it: each has a digest of its own, of the same results.
        """
        parts = ["quick"] if self.quick else []
        if self.operations != tuple(OPERATIONS):
            parts.append(" ".join(self.operations))
        if self.dtypes != tuple(DTYPES):
            parts.append(" ".join(self.dtypes))
        return ", ".join(parts)


def select(
    operations: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    quick: bool = False,
) -> Selection:
    """The part of the table that names pick out; an empty list picks all there are.

    Raises:
        ConfigurationError: there is no such name, or an algorithm can do none of the operations, or
            a type of ml_dtypes' is asked for and that is missing.
    """
    chosen = _choose("operation", operations, tuple(OPERATIONS))
    how = _choose("algorithm", algorithms, (*ALGORITHMS, AUTO))
    able = tuple(a for a in how if any(can_do(operation, a) for operation in chosen))
    if algorithms and able != how:
        there = [a for a in (*ALGORITHMS, AUTO) if any(can_do(each, a) for each in chosen)]
        raise ConfigurationError(
            f"{', '.join(chosen)}: cannot be done by {', '.join(a for a in how if a not in able)}; "
            f"there are {', '.join(there)}"
        )
    kinds = _choose("dtype", [ALIASES.get(name, name) for name in dtypes], tuple(DTYPES))
    missing = []
    for kind in kinds:
        try:
            numpy_type(kind)
        except ConfigurationError as error:
            if dtypes:
                raise
            kinds = tuple(each for each in kinds if each != kind)
            missing.append(str(error))
    return Selection(chosen, able, kinds, quick, "; ".join(missing))


def _choose(what: str, names: Sequence[str], there: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `there` that are named, in its order; all if none is."""
    for name in names:
        if name not in there:
            raise ConfigurationError(f"unknown {what} {name!r}; there are {', '.join(there)}")
    return tuple(name for name in there if name in names) if names else there
