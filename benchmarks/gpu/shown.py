"""The table of `make gpu`: a line a step, and below it what it has measured, beside the targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Measured = dict[str, Any]


@dataclass(frozen=True)
class Shown:
    """A line of the table below its step's.

    Attributes:
        label: what it is.
        value: as it is printed; empty where there is none.
        unit: behind it.
        target: in words, if there is one.
        met: whether it is.
        why_not: in place of a value.
    """

    label: str
    value: str
    unit: str = ""
    target: str = ""
    met: bool | None = None
    why_not: str = ""


Shows = Callable[[Measured], list[Shown]]


def number(value: float) -> str:
    """Of four figures, or of all that are before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def at_least(label: str, value: float, bound: float, unit: str) -> Shown:
    """A measurement with a lower bound."""
    return Shown(label, number(value), unit, f"at least {bound:g} {unit}", value >= bound)


def at_most(label: str, value: float, bound: float, unit: str) -> Shown:
    """A measurement with an upper bound."""
    return Shown(label, number(value), unit, f"at most {bound:g} {unit}", value <= bound)


def is_none(label: str, value: int, unit: str) -> Shown:
    """A count of what may not be."""
    return Shown(label, number(value), unit, f"0 {unit}", value == 0)


def nothing(measured: Measured) -> list[Shown]:
    """That it came through is all."""
    return []


def skipped(measured: Measured) -> list[Shown]:
    """Of a native test: the cases that it has left out, and why."""
    return [Shown(case, "", why_not=why) for case, why in measured.items()]


def peer_kernels(m: Measured) -> list[Shown]:
    """Of peer_kernels; two-shot is held to its target where a rank has 64 MiB or more."""
    rows = [Shown("bare launch", number(m["bare_launch_us"]), "us")]
    for ranks, took in m["one_shot_us"].items():
        rows.append(Shown(f"one-shot, 4 Ki float32, {ranks} ranks", number(took), "us"))
    for name, row in m.items():
        if not isinstance(row, dict) or "share_of_copy" not in row:
            continue
        label = name.replace("direct", "two-shot").replace("65536 KiB", "64 MiB")
        label = label.replace("262144 KiB", "256 MiB") + ", of the copy"
        rows.append(at_least(label, 100 * row["share_of_copy"], 80, "%"))
    return rows


def litmus(m: Measured) -> list[Shown]:
    """Of litmus; words are of those that a thread each has compared."""
    rows = []
    for where, loops in m.items():
        for name, loop in loops.items():
            if not isinstance(loop, dict):
                continue
            label = f"{where}: {name}"
            wrong = loop["stale"] + loop["overwritten"]
            rows.append(Shown(label, number(loop["exchanges"]), "exchanges"))
            if name.startswith("early"):
                rows.append(Shown("  seen too early", number(wrong), "words", "some", wrong > 0))
            elif "relaxed" in name:
                rows.append(Shown("  wrong", number(wrong), "words", "(as it comes)"))
            else:
                rows.append(is_none("  wrong", wrong, "words"))
    return rows


def resident_limit(m: Measured) -> list[Shown]:
    """Of resident_limit."""
    waited, wanted = m["waited_at_once"], 3 * m["blocks_of_a_rank"]
    return [
        Shown("blocks that fit", number(m["blocks_that_fit"]), "blocks"),
        Shown(
            *("waited at once for the fourth rank", number(waited), "blocks"),
            *(f"all {wanted}", waited == wanted),
        ),
    ]


def abort_look(m: Measured) -> list[Shown]:
    """Of abort_look; the target is that of one-shot."""
    rows = []
    for name, row in m.items():
        if not isinstance(row, dict):
            continue
        rows.append(Shown(f"{name}, 4 Ki float32", number(row["us"]), "us"))
        rows.append(Shown("  without the look", number(row["without_us"]), "us"))
        if name.startswith("one-shot"):
            rows.append(at_most("  the look", row["look_us"], 1, "us"))
        else:
            rows.append(Shown("  the look", number(row["look_us"]), "us"))
        rows.append(Shown("  the same twice", number(row["noise_us"]), "us"))
    return rows


def symmetric_memory(m: Measured) -> list[Shown]:
    """Of symmetric_memory."""
    rows = [Shown("pycollective, 2 processes, 4 Ki float32", number(m["ours_us"]), "us")]
    label = "PyTorch's symmetric memory"
    if "torch_us" in m:
        return [*rows, Shown(label, number(m["torch_us"]), "us")]
    return [*rows, Shown(label, "", why_not=m["torch"])]


def triton_kernels(m: Measured) -> list[Shown]:
    """Of reduce and quantized."""
    rows = []
    for name, row in m.items():
        rows.append(Shown(f"{name}, {row['bytes'] >> 20:,} MiB", number(row["us"]), "us"))
        rows.append(at_least("  of the copy", 100 * row["share_of_copy"], 85, "%"))
        rows.append(is_none("  wrong", row["wrong"], "elements"))
    return rows


def triton_sparse(m: Measured) -> list[Shown]:
    """Of sparse: by chunk is held to a copy, by tensor to torch's own selection."""
    rows = []
    for name, row in m.items():
        rows.append(Shown(f"{name}, {row['bytes'] >> 20:,} MiB", number(row["us"]), "us"))
        share = 100 * row["share_of_copy"]
        if name == "by chunk":
            rows.append(at_least("  of a copy's rate", share, 70, "%"))
        else:
            rows.append(Shown("  of a copy's rate", number(share), "%"))
        if "torch_over_ours" in row:
            rows.append(at_least("  torch takes", row["torch_over_ours"], 10, "times as long"))
        if "wrong" in row:
            rows.append(is_none("  wrong", row["wrong"], "bytes"))
    return rows


def over_nccl(m: Measured) -> list[Shown]:
    """Of ordered."""
    if "refused" in m:
        return [Shown("NCCL with ranks that share a GPU", "", why_not=m["refused"])]
    rows = []
    for name, row in ((name, row) for name, row in m.items() if isinstance(row, dict)):
        rows.append(Shown(f"{name}, ordered", number(row["ordered_us"]), "us"))
        rows.append(Shown(f"{name}, {m['backend']}'s own", number(row["own_us"]), "us"))
        rows.append(is_none("  wrong", row["wrong"], "elements"))
    return rows


def bits_over_nccl(m: Measured) -> list[Shown]:
    """Of ordered_bits, and of what else says how many cases were wrong, and what a call costs."""
    if "refused" in m:
        return [Shown("NCCL with ranks that share a GPU", "", why_not=m["refused"])]
    rows = []
    for kind, row in m.items():
        rows.append(Shown(kind, number(row["cases"]), "cases"))
        wrong = f"  wrong{': ' if row['first'] else ''}{row['first']}"
        rows.append(is_none(wrong, row["wrong"], "cases"))
        if "us" in row:
            rows.append(Shown("  the host, a small all-reduce", number(row["us"]), "us"))
            rows.append(Shown("  NCCL's own", number(row["own_us"]), "us"))
    return rows


_LARGE = 64 << 20  # bytes, from which on a call's whole time has a target
# How much of DDP's own time the host may take with each hook.
_DDP_AT_MOST = {"ordered": 1.25, "1 bit": 1.5, "top-k by tensor": 2, "top-k by chunk": 2}


def price(m: Measured) -> list[Shown]:
    """Of price: calls are held to the bare exchange of as many bytes, hooks to DDP's own."""
    if "refused" in m:
        return [Shown("NCCL with ranks that share a GPU", "", why_not=m["refused"])]
    rows = []
    for name, row in m["calls"].items():
        host, whole = row["ordered_host_us"], row["ordered_whole_us"]
        rows.append(Shown(f"{name}, the host", number(host), "us"))
        rows.append(at_most("  of the bare exchange's", host / row["bare_host_us"], 1.3, "times"))
        label = f"{name}, the whole"
        if row["bytes"] >= _LARGE and "copy_us" in row:
            bound = 1.05 * row["bare_whole_us"] + 3 * row["copy_us"]
            rows.append(at_most(label, whole, round(bound), "us"))
        else:
            rows.append(Shown(label, number(whole), "us"))
        rows.append(is_none("  wrong", row["wrong"], "elements"))
    if "refused" in m["DDP"]:
        return [*rows, Shown("48 parameters under DDP", "", why_not=m["DDP"]["refused"])]
    own = m["DDP"]["own"]["host_us"]
    for name, row in m["DDP"].items():
        label = f"48 parameters under DDP, {name}"
        rows.append(Shown(label, number(row["host_us"]), "us"))
        if name in _DDP_AT_MOST:
            share, bound = row["host_us"] / own, _DDP_AT_MOST[name]
            rows.append(at_most("  of DDP's own", share, bound, "times"))
        alike = row["alike"]
        rows.append(Shown("  all ranks have the same", "yes" if alike else "no", "", "yes", alike))
    return rows


def trained_over_nccl(m: Measured) -> list[Shown]:
    """Of ddp and fsdp: what ours give is held to what CPUs give; NCCL's own promise nothing."""
    if "refused" in m:
        return [Shown("NCCL with ranks that share a GPU", "", why_not=m["refused"])]
    rows = []
    for name, row in m.items():
        if "refused" in row:
            rows.append(Shown(name, "", why_not=row["refused"]))
            continue
        same = row["digest"] == row["cpu_digest"]
        rows.append(Shown(f"{name}: a step", number(row["ms"]), "ms"))
        if not name.startswith("own"):
            target = f"{row['cpu_digest']} as on CPUs"
            rows.append(Shown("  weights", row["digest"], "", target, same))
    return rows


def leaves(m: Measured) -> list[Shown]:
    """Of leaves: one digest of LeafSync, steps beside DDP's, and launches beside a copy."""
    rows = []
    first = next((row["LeafSync"] for row in m.values() if "LeafSync" in row), "")
    for name, row in m.items():
        if "refused" in row:
            rows.append(Shown(name, "", why_not=row["refused"]))
        elif "LeafSync" in row:
            same = row["LeafSync"] == first
            rows.append(Shown(name, row["LeafSync"], "", f"{first} on any number", same))
            rows.append(Shown("  under DDP", row["DDP"]))
        else:
            rows += triton_kernels({name: row})
        if times := row.get("step_ms"):
            ours, theirs = times["LeafSync"], times["DDP with ordered.hook"]
            rows.append(Shown("  a step, a leaf a rank", number(ours), "ms"))
            rows.append(at_most("  over DDP's with ordered.hook", ours / theirs, 1.05, "times"))
    return rows


def bench(m: Measured) -> list[Shown]:
    """Rows of `pycollective bench`, by library and size."""
    rows = []
    for name, row in m.items():
        library, size = name.rsplit(" ", 1)
        kibibytes = int(size) >> 10
        amount = f"{kibibytes >> 10} MiB" if kibibytes >= 1024 else f"{kibibytes} KiB"
        label = f"{library}, {amount}"
        if isinstance(row, str):
            rows.append(Shown(label, "", why_not=row))
            continue
        rows.append(Shown(label, row["us"], "us"))
        if row["wrong"] != "n/a":
            rows.append(is_none("  wrong", int(row["wrong"]), "elements"))
    return rows


def ending(m: Measured) -> list[Shown]:
    """Of peer_processes."""
    if "wrong" in m:
        return [is_none("wrong results of replays", m["wrong"], "arrays")]
    return [
        at_most(f"told by {m['told']}", m["seconds"], m["bound"], "s"),
        Shown("context works on", "yes" if m["context"] else "no", "", "yes", m["context"]),
    ]


def arrays(m: Measured) -> list[Shown]:
    """Of arrays."""
    return [Shown(library, became) for library, became in m.items()]


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


def heading(each: Outcome) -> str:
    """A step, and what became of it."""
    how = each.outcome if each.outcome == "not run" else f"{each.outcome}, {each.seconds:.1f} s"
    return f"{each.name:{_LABEL}} {how}{': ' if each.reason else ''}{each.reason}"


def row(shown: Shown, is_real: bool) -> str:
    """One measurement; where the GPU is not real, no verdict."""
    label = f"    {shown.label:{_LABEL - 4}}"
    if shown.why_not:
        return f"{label} not run: {shown.why_not}"
    verdict = "" if shown.met is None or not is_real else "met" if shown.met else "MISSED"
    value = f"{shown.value:>{_VALUE}} {shown.unit:{_UNIT}} {shown.target:{_TARGET}} {verdict}"
    return f"{label} {value}".rstrip()


def table(shows: Sequence[Shows], outcomes: Sequence[Outcome], is_real: bool = True) -> list[str]:
    """Its lines; the last count outcomes and targets. `shows` has what each step's rows are."""
    title = f"{'value':>{_VALUE}} {'unit':{_UNIT}} target"
    lines = [f"{'step':{_LABEL}} {title}"]
    targets: list[bool] = []
    for show, each in zip(shows, outcomes, strict=True):
        lines.append(heading(each))
        # What a failed step has not come to measure it does not show.
        rows = show(each.measured) if each.measured else []
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
