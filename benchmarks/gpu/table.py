"""The table of `make gpu`: a line a step, and below it what it has measured, beside the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.shown import Shown
from benchmarks.gpu.steps import Step

OUTCOMES = ("ok", "failed", "too slow", "not run")
_SAID = 8  # lines of a failed step that are printed
_LABEL = 56  # columns
_VALUE = 12
_UNIT = 10
_TARGET = 18


@dataclass(frozen=True)
class Outcome:
    """What became of a step, one of OUTCOMES, and why."""

    name: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def row(shown: Shown, is_real: bool) -> str:
    """One measurement; where the GPU is not real, no verdict."""
    label = f"    {shown.label:{_LABEL - 4}}"
    if shown.why_not:
        return f"{label} not run: {shown.why_not}"
    verdict = "" if shown.met is None or not is_real else "met" if shown.met else "MISSED"
    value = f"{shown.value:>{_VALUE}} {shown.unit:{_UNIT}} {shown.target:{_TARGET}} {verdict}"
    return f"{label} {value}".rstrip()


def table(steps: Sequence[Step], outcomes: Sequence[Outcome], is_real: bool = True) -> list[str]:
    """Its lines; the last count outcomes and targets."""
    title = f"{'value':>{_VALUE}} {'unit':{_UNIT}} target"
    lines = [f"{'step':{_LABEL}} {title}"]
    targets: list[bool] = []
    for step, each in zip(steps, outcomes, strict=True):
        how = each.outcome if each.outcome == "not run" else f"{each.outcome}, {each.seconds:.1f} s"
        lines.append(f"{each.name:{_LABEL}} {how}{': ' if each.reason else ''}{each.reason}")
        # What a failed step has not come to measure it does not show.
        rows = step.shows(each.measured) if each.measured else []
        lines += [row(shown, is_real) for shown in rows]
        lines += [f"    | {line}" for line in each.said[-_SAID:]]
        targets += [shown.met for shown in rows if shown.met is not None]
    counts = {o: sum(each.outcome == o for each in outcomes) for o in OUTCOMES}
    lines.append(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if is_real:
        lines.append(f"targets: {sum(targets)} met, {len(targets) - sum(targets)} missed")
    else:
        lines.append("targets: none is held against the stand-in for the driver")
    return lines
