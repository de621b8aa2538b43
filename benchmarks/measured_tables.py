"""Writes the tables of targets.md and docs/ from the files of results/.

A table stands between `<!-- BEGIN its name -->` and `<!-- END its name -->`. What is there is
replaced, so that no number of them is written by hand.

Usage: python -m benchmarks.measured_tables [--check]    --check changes nothing, and ends with 1
where a table is not what the files say
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import all as questions
from pycollective.bench.phase import FAR, NEAR
from pycollective.bench.record import Record, Row, read_json

KI, MI = 1 << 10, 1 << 20
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_PEERS = {
    "gloo": "Gloo",
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "openmpi-nocma": "Open MPI without CMA",
    "impi": "Intel MPI",
}
_COMPARED = {"shared": "in arrays of `comm.empty`", **_PEERS}


def all_reduce() -> str:
    """Sizes and types, beside every library."""
    sizes = (KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI, 16 * MI, 64 * MI)
    return _beside_peers(
        "Ranks, type",
        (
            ("2, fp32", "all_reduce_2_ranks", sizes),
            ("2, bf16", "all_reduce_2_ranks_bfloat16", (MI, 64 * MI)),
            ("4, fp32", "all_reduce_4_ranks", (KI, 16 * KI, 256 * KI, 4 * MI, 64 * MI)),
        ),
    )


def others() -> str:
    """The other collectives, fp32, beside every library."""
    sizes = (KI, 64 * KI, MI, 4 * MI, 64 * MI)
    two = [
        (f"{operation}, 2", f"{operation}_2_ranks", sizes)
        for operation in ("reduce_scatter", *questions.MOVING)
    ]
    four = (KI, 16 * KI, 256 * KI, 4 * MI, 64 * MI)
    return _beside_peers(
        "Operation, ranks", [*two, ("reduce_scatter, 4", "reduce_scatter_4_ranks", four)]
    )


def _beside_peers(first: str, runs: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """A row for each size and phase; what was measured in two phases has two."""
    rows = []
    for what, stem, sizes in runs:
        record, named = _record(stem), ""
        for size in sizes:
            for phase, of in _by_phase(record, size).items():
                rows.append(
                    (
                        "" if what == named else what,
                        _size(size),
                        _own_time(of),
                        *(_ratio(of.get(library)) for library in _COMPARED),
                        f"{phase}, {_nanoseconds(record, size, phase)}",
                    )
                )
                named = what
    return _table((first, "Message", "pycollective", *_COMPARED.values(), "Phase"), rows)


def small() -> str:
    """What a call costs, by who calls."""
    record = _record("small_messages")
    sizes = (16, KI, 16 * KI)
    callers = {
        "native": "`pycollective` from C++",
        "pycollective": "`pycollective` from Python",
        "torch": "`dist.all_reduce` over `pycollective`",
        "fake": "`dist.all_reduce` over torch's `fake`, which does nothing",
        **{name: f"{_PEERS[name]} from Python (mpi4py)" for name in questions.MPIS},
    }
    cells = [next(iter(_by_phase(record, size).values())) for size in sizes]
    rows = [(what, *(_own_time(each, name) for each in cells)) for name, what in callers.items()]
    return _table(("", *(_size(size) for size in sizes)), rows)


def machine() -> str:
    """What the runs of one host were measured on, beside what, and in which phases."""
    records = _one_host().values()
    record = _record("all_reduce_2_ranks")
    caches = ", ".join(f"{name} {size}" for name, size in record.machine["caches"].items())
    versions = [record.libraries[peer]["versions"]["library"] for peer in ("gloo", *questions.MPIS)]
    counts = {phase: sum(each.phases[phase] for each in records) for phase in record.phases}
    return (
        f"Measured on {_machine(record.machine)} ({caches}, {record.machine['simd']}), beside "
        f"{', '.join(dict.fromkeys(versions))}. Of all turns {counts[NEAR]:,} were near, "
        f"{counts[FAR]:,} far, and {counts['dropped']:,} were dropped since not every library had "
        "one in their phase.\n"
    )


def targets() -> str:
    """What the project has set itself to reach, and whether it does."""
    head = ("Target", "Phase", "Bound", "Measured", "Where it is worst", "Verdict")
    records = _one_host()
    return _table(head, (questions.verdict(each, records) for each in questions.TARGETS))


def _one_host() -> dict[str, Record]:
    stems = [stem for question in questions.QUESTIONS.values() for stem in question.runs]
    return {stem: _record(stem) for stem in stems}


def two_hosts() -> str:
    """Over a slow link: raw, packed, and what the link alone takes for the raw bytes."""
    record = _two_hosts()
    rows = []
    for name, dtype, sizes in (
        ("fp32", "float32", (KI, MI, 16 * MI)),
        ("bf16", "bfloat16", (MI, 16 * MI)),
    ):
        for size in sizes:
            seconds = _row_of(record, dtype, size, "Gaussian")["seconds"]
            ways = (_time(seconds[way]) for way in ("raw", "exact", "gloo", "link"))
            rows.append((name, _size(size), *ways))
    head = ("Type", "Message", "raw", "packed", "Gloo", "The link alone, raw")
    return _table(head, rows)


def accumulator() -> str:
    """Adding up micro-batches, beside additions in place."""
    ways = (
        *("fp32", "fp32, donated", "torch, e += g of fp32"),
        *("bf16", "torch, e += g of bf16"),
    )
    rows = []
    for size in json.loads((RESULTS / "accumulator.json").read_text())["sizes"]:
        base = size["e += g, us"] / 1e6
        times = (_time(base * size["ratios"][way]) for way in ways)
        rows.append((_size(4 * size["elements"]), _time(base), *times))
    return _table(("fp32 sum of", "NumPy, `e += g`", *ways), rows)


def leaf_step() -> str:
    """Steps of LeafSync beside DistributedDataParallel's, and the memory that it holds."""
    rows = []
    for stem in ("leaf_step", "zen5/leaf_step"):
        record = json.loads((RESULTS / f"{stem}.json").read_text())
        for found in (record[size] for size in ("1.3 M", "9 M")):
            copy = 4 * found["parameters"]
            held = [f"{each / copy:.2f}" for each in [*found["held_bytes"].values()][:2]]
            for row in found["rows"]:
                one, four = row["leaves"] / row["hook"], row["leaves 4"]
                limit = row["hook 4"] + 4 * row["pass"]
                rows.append(
                    (
                        f"{_leaf_machine(record)}, {row['ns']:.0f} ns",
                        f"{found['parameters'] / 1e6:.1f} M",
                        _time(row["hook"]),
                        f"{_time(row['leaves'])}: {_verdict(one, 1.02)}",
                        *(_time(row["hook 4"]), _time(row["pass"])),
                        f"{_time(four)}: {four / limit:.2f} of the goal",
                        *_over_gloo(row),
                        " and ".join(held),
                    )
                )
    head = ("Machine", "Parameters", "One micro-batch a rank: DDP", "LeafSync", "Four: DDP")
    head = (*head, "An addition", "LeafSync", "One, over Gloo: DDP, `ordered.hook`", "LeafSync")
    return _table((*head, "Held for one and four, fp32 copies"), rows)


def _over_gloo(row: Mapping[str, float]) -> tuple[str, str]:
    if "gloo hook" not in row:
        return "", ""
    ratio = row["gloo leaves"] / row["gloo hook"]
    return _time(row["gloo hook"]), f"{_time(row['gloo leaves'])}: {_verdict(ratio, 1.1)}"


def _verdict(ratio: float, bound: float) -> str:
    return f"{ratio:.2f}, {_met(ratio, bound)}"


def _leaf_machine(record: Mapping[str, Any]) -> str:
    return str(record["machine"]["cpu"]).removesuffix(" Processor").replace("(R)", "")


def leaf_balance() -> str:
    """Steps of LeafSync where leaves and ranks are unlike, in three ways."""
    rows = []
    for found in json.loads((RESULTS / "zen5" / "leaf_balance.json").read_text())["trainings"]:
        cells = []
        for way in ("static", "cost", "measured"):
            each = found[way]
            cells += [
                f"{_time(each['busiest'])}: {each['busiest'] / each['ideal']:.2f}",
                f"{each['rows']:.1f}",
            ]
        what = f"{found['ranks']} ranks{', one slow' if found['slow'] else ''}"
        rows.append((what, *cells, _time(found["cost"]["ideal"])))
    head = ("", "Equal runs", "Rows", "By cost", "Rows", "By cost and speed", "Rows", "Ideal")
    return _table(head, rows)


def ledger() -> str:
    """Steps without and with a ledger, and `pycollective diff`."""
    record = json.loads((RESULTS / "zen5" / "ledger.json").read_text())
    kinds = {
        "leaves": "LeafSync, a leaf a rank",
        "leaves 4": "LeafSync, four leaves a rank",
        "hook": "DDP with `all_reduce_hook`",
    }
    rows = []
    for row in record["rows"]:
        for kind, what in kinds.items():
            pair = row[kind], row[f"{kind} ledger"]
            verdict = _verdict(pair[1] / pair[0], 1.05)
            rows.append((f"{what}, {row['ns']:.0f} ns", *map(_time, pair), verdict))
    diff = record["diff"]
    million = f"{diff['gradients'] / 1e6:.1f} M gradients"
    rows += [
        (f"`pycollective diff` of {million} each", "", _time(diff["same"]), ""),
        (f"{million} are written", "", _time(diff["write"]), ""),
    ]
    return _table(("", "Without", "With a ledger", "Ratio"), rows)


def elastic_kills() -> str:
    """What kills cost a training, and that they change no bit of it."""
    record = json.loads((RESULTS / "zen5" / "elastic_kills.json").read_text())
    rows = []
    for name in _KILLED:
        found = record[name]
        kills = f"{found['kills']} in {found['runs'] * found['steps']:,} steps"
        ends = "the same bits" if not found["wrong"] else f"{found['wrong']} other ends"
        parts = ("pause", "noticed", "change", "leaves", "lost_leaves")
        times = [f"{_time(found[each]['median'])}, {_time(found[each]['worst'])}" for each in parts]
        rows.append((name, kills, ends, *times))
    head = ("", "Kills", "Weights and losses", "Pause: median, worst", "Noticed", "Change")
    return _table((*head, "Leaves again", "The lost ones alone"), rows)


_KILLED = ("one host", "8-bit gradients", "two hosts", "two hosts packed")


def elastic_moments() -> str:
    """The moments of the kills, and the pauses after them."""
    record = json.loads((RESULTS / "zen5" / "elastic_kills.json").read_text())
    moments = [
        each for each in _MOMENTS if any(each in record[name]["moments"] for name in _KILLED)
    ]
    rows = []
    for each in moments:
        cells = []
        for name in _KILLED:
            of = record[name]["moments"].get(each)
            spread = f"{of['kills']}: {_time(of['median'])}, {_time(of['worst'])}" if of else "0"
            cells.append(spread)
        rows.append((_MOMENTS[each], *cells))
    return _table(("Kills: median and worst pause", *_KILLED), rows)


_MOMENTS = {
    "forward": "in a forward",
    "backward": "in a backward",
    "exchange": "in the exchange",
    "between": "between steps",
    "joining": "while another joins",
    "shrinking": "while ranks become fewer",
    "state": "while the state is sent",
}


def elastic_cost() -> str:
    """Steps with elastic=True and without, and a newcomer's state beside a broadcast."""
    record = json.loads((RESULTS / "zen5" / "elastic_cost.json").read_text())
    rows = []
    for size in ("8", "1.3 M", "9 M"):
        for row in record[size]["rows"]:
            ratio = row["elastic"] / row["without"]
            rows.append(
                (
                    f"A step, {record[size]['parameters']:,} parameters, {row['ns']:.0f} ns",
                    _time(row["without"]),
                    _time(row["elastic"]),
                    f"{ratio:.3f}" if size == "8" else f"{ratio:.3f}, {_met(ratio, 1.01)}",
                )
            )
    found = record["state"]
    state, new, old = (
        median(row[which] for row in found["rows"])
        for which in ("state", "new memory", "old memory")
    )
    what = f"A newcomer's state, {found['bytes'] / 1e9:.1f} GB, beside a broadcast"
    rows.append((f"{what} into new memory", _time(new), _time(state), _verdict(state / new, 1.5)))
    rows.append((f"{what} into old memory", _time(old), _time(state), _verdict(state / old, 1.5)))
    return _table(("", "Without", "`elastic=True`", "Ratio"), rows)


def _met(ratio: float, bound: float) -> str:
    return "met" if ratio <= bound else "missed"


TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "benchmarks/targets.md": {"targets": targets},
    "docs/measured/speed.md": {
        "machine": machine,
        "all-reduce": all_reduce,
        "small calls": small,
        "other collectives": others,
        "two hosts": two_hosts,
        "accumulator": accumulator,
    },
    "docs/reference/any_number_of_ranks.md": {
        "leaf steps": leaf_step,
        "leaf balance": leaf_balance,
    },
    "docs/reference/ledger.md": {"ledger": ledger},
    "docs/reference/elastic.md": {
        "elastic kills": elastic_kills,
        "elastic moments": elastic_moments,
        "elastic cost": elastic_cost,
    },
}


def filled(document: str, text: str) -> str:
    """The text of a document with its tables as the files have them.

    Raises:
        SystemExit: the document has not exactly one place for each of them.
    """
    for name, make in TABLES[document].items():
        begin, end = f"<!-- BEGIN {name} -->\n", f"<!-- END {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{document} has not one place for the table {name!r}")
        above, _, rest = text.partition(begin)
        text = above + begin + make() + end + rest.partition(end)[2]
    return text


def _record(stem: str) -> Record:
    return read_json(RESULTS / f"{stem}.json")


def _two_hosts() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / "two_hosts.json").read_text())
    return record


def _row_of(record: Mapping[str, Any], dtype: str, size: int, data: str) -> Mapping[str, Any]:
    wanted = {"dtype": dtype, "size": size, "data": data}
    row: Mapping[str, Any] = next(row for row in record["rows"] if wanted.items() <= row.items())
    return row


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores"


def _by_phase(record: Record, size: int) -> dict[str, dict[str, Row]]:
    """Return the rows of a size by phase, near first, and library.

    Raises:
        SystemExit: that was not measured.
    """
    found: dict[str, dict[str, Row]] = {}
    for row in record.rows:
        if row.size == size:
            found.setdefault(row.phase, {})[row.library] = row
    if not found:
        raise SystemExit(f"{record.settings['operation']} of {size} bytes was not measured")
    return found


def _nanoseconds(record: Record, size: int, phase: str) -> str:
    limit = next(each for each in record.limits if (each.size, each.phase) == (size, phase))
    return f"{limit.latency * 1e9:.0f} ns"


def _ratio(row: Row | None) -> str:
    return "" if row is None or row.ratio is None else _times(row.ratio)


def _own_time(rows: Mapping[str, Row], library: str = "pycollective") -> str:
    row = rows[library]
    if row.timing is None or (library == "pycollective" and row.wrong):
        raise SystemExit(f"{row.size} bytes were not measured, or came out wrong")
    return _time(row.timing.median)


def _times(ratio: float) -> str:
    """Two digits, as 4,300 x, 57 x, 9.1 x, 0.74 x."""
    short = float(f"{ratio:.2g}")
    return f"{short:,.{0 if short >= 10 else 1 if short >= 1 else 2}f}\N{NO-BREAK SPACE}x"


def _time(seconds: float) -> str:
    """Three digits, in microseconds, milliseconds or seconds."""
    unit, scaled = ("ms", seconds * 1e3) if seconds >= 1e-3 else ("µs", seconds * 1e6)
    if seconds >= 0.9995:
        unit, scaled = "s", seconds
    return f"{scaled:#.3g}".rstrip(".") + f" {unit}"


def _size(size: int) -> str:
    for unit, name in ((MI, "MiB"), (KI, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if they differ")
    check = parser.parse_args().check
    stale = []
    for document in TABLES:
        path = ROOT / document
        before = path.read_text()
        after = filled(document, before)
        if after != before:
            stale.append(document)
            if not check:
                path.write_text(after)
    if check and stale:
        raise SystemExit(
            f"{', '.join(stale)}: tables are not what benchmarks/results says; "
            "python -m benchmarks.measured_tables writes them"
        )


if __name__ == "__main__":
    main()
