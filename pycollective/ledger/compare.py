"""Where two runs part: the first step, parameter and leaf of which their ledgers differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from pycollective.errors import ConfigurationError
from pycollective.ledger.layout import RESULT
from pycollective.ledger.reader import Ledger, Numbers, unlike

Member: TypeAlias = tuple[int, int]  # a rank, and of how many
_Noted: TypeAlias = list[tuple[Member, bytes]]  # who has noted which digest
_OfLeaf: TypeAlias = dict[int, _Noted]  # by parameter, as backward came to them
_OfStep: TypeAlias = dict[int, _OfLeaf]  # by leaf; averages are RESULT's


@dataclass(frozen=True)
class Finding:
    """What differs first. In a step a leaf comes before an average, and one run before two.

    Attributes:
        step: its number.
        parameter: the first of this leaf that differs, in the order of backward.
        leaf: its number; None if it is the average that differs.
        within: the path of the run that differs within itself; None if the two runs differ.
        ranks: who has other bits than those of `against`: the fewer within a run, else of the
            first run.
        against: likewise, the others.
        lacks: whether `against` have this leaf, and no gradient of this parameter in it.
        parameters: how many differ in this leaf, or of the averages.
        leaves: all leaves of this step that differ likewise.
    """

    step: int
    parameter: str
    leaf: int | None
    within: str | None
    ranks: list[Member]
    against: list[Member]
    lacks: bool
    parameters: int
    leaves: list[int]

    def __str__(self) -> str:
        one, other = _named(self.ranks), _named(self.against)
        where = f"step {self.step}, {self.parameter}, "
        where += "average: " if self.leaf is None else f"leaf {self.leaf}: "
        if self.lacks:
            return f"{where}{one} has a gradient of it, and {other} has none"
        if self.within is None:
            return f"{where}{one} {'has' if self.leaf is None else 'gave'} other bits than {other}"
        if self.leaf is None:
            return f"{where}in {self.within} {one} has other bits than {other}"
        return (
            f"leaf {self.leaf} of step {self.step} was computed twice with other bits, in "
            f"{self.within}: {other} and {one}; {self.parameter} is the first parameter"
        )


@dataclass(frozen=True)
class Comparison:
    """What two runs have alike, and what differs first.

    Attributes:
        paths: of the runs.
        steps: of each run its first step, its last, and how many it has.
        agreed: how many steps are the same, of those that both have, before the first that is not.
        last: the last of these; None for none.
        leaves: of a step.
        compared: how many of the leaves of the step that differs both runs have.
        finding: None if no bits differ.
    """

    paths: list[str]
    steps: list[tuple[int, int, int]]
    agreed: int
    last: int | None
    leaves: int
    compared: int
    finding: Finding | None

    @property
    def same(self) -> bool:
        """Whether no bits differ, and both runs have the same steps."""
        return self.finding is None and all(count == self.agreed for *_, count in self.steps)

    def described(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {"same": self.same, **asdict(self)}

    def __str__(self) -> str:
        lines = [] if self.finding is None else [str(self.finding), *self._beside(self.finding)]
        before = "" if self.finding is None else "before that "
        many = "1 step has" if self.agreed == 1 else f"{self.agreed} steps have"
        agreed = f"{many} the same bits, to step {self.last}"
        lines.append(before + (agreed if self.agreed else "no step is in both runs"))
        if self.finding is None and not self.same:
            for path, (first, last, count) in zip(self.paths, self.steps, strict=True):
                lines.append(f"{path} has {count} steps, {first} to {last}")
        return "\n".join(lines)

    def _beside(self, finding: Finding) -> Iterator[str]:
        """What else differs in that step, and what does not."""
        if more := finding.parameters - 1:
            where = "the averages" if finding.leaf is None else "this leaf, later in backward"
            yield f"so do {more} more parameters of {where}"
        if (more := len(finding.leaves) - 1) > 0:
            yield f"so do {more} more of {self.leaves} leaves of this step"
        if finding.leaf is None and finding.within is None and self.leaves:
            yield (
                f"all {self.leaves} leaves have the same bits, and the average differs: the sum or "
                "its order differs"
                if self.compared == self.leaves
                else f"{self.compared} of {self.leaves} leaves are in both, with the same bits"
            )


def compare(first: Ledger, second: Ledger) -> Comparison:
    """Compare two runs.

    A leaf that one of them lacks, as of a process that was killed, is not compared.

    Raises:
        ConfigurationError: they are of different trainings, or have no step in common.
    """
    ledgers = (first, second)
    if other := unlike(first.header, second.header):
        raise ConfigurationError(
            f"{first.path} and {second.path} are of different trainings: {other}"
        )
    steps: list[Numbers] = [np.unique(each.records["step"]) for each in ledgers]
    for each, own in zip(ledgers, steps, strict=True):
        if not len(own):
            raise ConfigurationError(f"{each.path} holds no step")
    spans = [(int(own[0]), int(own[-1]), len(own)) for own in steps]
    common = np.intersect1d(steps[0], steps[1], assume_unique=True)
    step = _first_unlike(ledgers, np.union1d(*steps))
    finding, compared = None, 0
    if step is not None:
        notes = [_notes_of(each, step) for each in ledgers]
        finding = next(_findings(step, ledgers, notes))
        compared = len({*notes[0]} & {*notes[1]} - {RESULT})
    elif not len(common):
        spanned = [f"{own[0]} to {own[1]}" for own in spans]
        raise ConfigurationError(
            f"{first.path} has steps {spanned[0]}, and {second.path} {spanned[1]}: none is in both"
        )
    agreed = common if step is None else common[common < step]
    return Comparison(
        paths=[str(each.path) for each in ledgers],
        steps=spans,
        agreed=len(agreed),
        last=int(agreed[-1]) if len(agreed) else None,
        leaves=first.header.leaves,
        compared=compared,
        finding=finding,
    )


class _Index:
    """A run's records by key: step, leaf and parameter in one number.

    Args:
        ledger: of the run.
        steps: of both runs, ascending.

    Attributes:
        keys: ascending, each once.
        digests: of each key; where records are unlike, the first.
        twice: the keys of which there are records that are unlike.
        width: parameters, by which keys of one leaf are consecutive.
    """

    def __init__(self, ledger: Ledger, steps: Numbers) -> None:
        self.width = len(ledger.header.parameters)
        self.depth = ledger.header.leaves + 1
        if len(steps) * self.depth * self.width >= 1 << 62:
            raise ConfigurationError(f"{ledger.path} has too many steps, leaves and parameters")
        records = ledger.records
        leaves = records["leaf"].astype(np.int64) - RESULT
        groups = np.searchsorted(steps, records["step"]) * self.depth + leaves
        every = groups * self.width + records["parameter"]
        order = np.argsort(every, kind="stable")
        every, digests = every[order], records["digest"][order]
        new = np.diff(every, prepend=-1) != 0
        self.keys, self.digests = every[new], digests[new]
        again = (digests != self.digests[np.cumsum(new) - 1]).any(axis=1)
        self.twice = every[again]

    def groups(self) -> Numbers:
        """The leaves and averages that it has, each once: by step and leaf."""
        return np.unique(self.keys // self.width)

    def of(self, groups: Numbers) -> Numbers:
        """Where in `keys` these leaves and averages are."""
        return np.flatnonzero(np.isin(self.keys // self.width, groups))


def _first_unlike(ledgers: tuple[Ledger, Ledger], steps: Numbers) -> int | None:
    """The first step in which the runs differ, or one within itself."""
    a, b = (_Index(each, steps) for each in ledgers)
    if np.array_equal(a.keys, b.keys):
        between = a.keys[(a.digests != b.digests).any(axis=1)]
    else:
        groups = np.intersect1d(a.groups(), b.groups(), assume_unique=True)
        ours, theirs = a.of(groups), b.of(groups)
        lacking = np.setxor1d(a.keys[ours], b.keys[theirs], assume_unique=True)
        ours = ours[np.isin(a.keys[ours], b.keys[theirs], assume_unique=True)]
        theirs = np.searchsorted(b.keys, a.keys[ours])
        unlike = (a.digests[ours] != b.digests[theirs]).any(axis=1)
        between = np.concatenate([lacking, a.keys[ours][unlike]])
    every = np.concatenate([between, a.twice, b.twice])
    return int(steps[every.min() // (a.width * a.depth)]) if len(every) else None


def _notes_of(ledger: Ledger, step: int) -> _OfStep:
    notes: _OfStep = {}
    for at in np.flatnonzero(ledger.records["step"] == step).tolist():
        record = ledger.records[at]
        rank, size = ledger.ranks[at].tolist()
        noted = notes.setdefault(int(record["leaf"]), {}).setdefault(int(record["parameter"]), [])
        noted.append(((rank, size), record["digest"].tobytes()))
    return notes


def _findings(step: int, ledgers: tuple[Ledger, Ledger], notes: list[_OfStep]) -> Iterator[Finding]:
    """What differs in a step, what points best to the cause first."""
    one, other = notes
    names = [each.name for each in ledgers[0].header.parameters]
    for leaves in (sorted({*one, *other} - {RESULT}), [RESULT]):
        for ledger, of in zip(ledgers, notes, strict=True):
            twice = {leaf: _twice(of[leaf]) for leaf in leaves if leaf in of}
            if found := {leaf: each for leaf, each in twice.items() if each}:
                leaf, parameter = _first(found)
                few, most = _fewer(of[leaf][parameter])
                yield _finding(step, names, found, few, most, within=str(ledger.path))
        both = [leaf for leaf in leaves if leaf in one and leaf in other]
        between = {leaf: _between(one[leaf], other[leaf]) for leaf in both}
        if found := {leaf: each for leaf, each in between.items() if each}:
            leaf, parameter = _first(found)
            who = [_who(each[leaf], parameter) for each in notes]
            if parameter not in one[leaf]:
                who.reverse()
            lacks = not all(parameter in each[leaf] for each in notes)
            yield _finding(step, names, found, who[:1], who[1:], lacks=lacks)


def _finding(
    step: int,
    names: list[str],
    found: dict[int, list[int]],
    ranks: list[Member],
    against: list[Member],
    within: str | None = None,
    lacks: bool = False,
) -> Finding:
    leaf, parameter = _first(found)
    return Finding(
        step=step,
        parameter=names[parameter],
        leaf=None if leaf == RESULT else leaf,
        within=within,
        ranks=ranks,
        against=against,
        lacks=lacks,
        parameters=len(found[leaf]),
        leaves=[each for each in found if each != RESULT],
    )


def _first(found: dict[int, list[int]]) -> tuple[int, int]:
    """The first leaf, and its first parameter."""
    return next((leaf, parameters[0]) for leaf, parameters in found.items())


def _twice(of_leaf: _OfLeaf) -> list[int]:
    """The parameters of which one run has noted digests that are unlike."""
    return [each for each, noted in of_leaf.items() if len({digest for _, digest in noted}) > 1]


def _between(one: _OfLeaf, other: _OfLeaf) -> list[int]:
    """The parameters of which two runs have noted digests that are unlike, or one alone any."""
    digests = [{each: noted[0][1] for each, noted in of_leaf.items()} for of_leaf in (one, other)]
    return [each for each in {**one, **other} if digests[0].get(each) != digests[1].get(each)]


def _fewer(noted: _Noted) -> tuple[list[Member], list[Member]]:
    """Who has other bits than most, and who has those; of two the second, and the first."""
    most, _ = Counter(digest for _, digest in noted).most_common(1)[0]
    few = [who for who, digest in noted if digest != most]
    return few, [who for who, digest in noted if digest == most]


def _who(of_leaf: _OfLeaf, parameter: int) -> Member:
    """Who has noted this parameter first, or, where nobody has, the leaf."""
    noted = of_leaf.get(parameter) or next(iter(of_leaf.values()))
    return noted[0][0]


def _named(members: list[Member]) -> str:
    """Return ranks in words, a few of them."""
    several = [f"rank {rank} of {size}" for rank, size in dict.fromkeys(members)]
    more = f" and {len(several) - 4} more" if len(several) > 4 else ""
    return ", ".join(several[:4]) + more
