"""The results of a run, and the file that keeps them with all that explains them.

Times are seconds, sizes bytes, bandwidths GB/s (1e9 bytes).
"""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "pycollective-bench/1"
# Of the libraries' names.
_OURS = ("pycollective", "native", "shared", "bfloat16", "float16", "torch")


@dataclass(frozen=True)
class Timing:
    """Summary of a row's samples, in seconds a call.

    A sample is a block of back-to-back calls: the slowest rank's time, divided by the calls. The
    median is that of the rounds' medians; the other figures are over all samples.
    """

    median: float
    minimum: float
    lower_quartile: float
    upper_quartile: float
    samples: int
    calls: int

    @classmethod
    def of(cls, rounds: list[list[float]], calls: int) -> Timing:
        """Summarise the samples of each round; every block had `calls` calls."""
        samples = sorted(sample for one in rounds for sample in one)
        lower, _, upper = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        return cls(
            median=statistics.median(statistics.median(one) for one in rounds),
            minimum=samples[0],
            lower_quartile=lower,
            upper_quartile=upper,
            samples=len(samples),
            calls=calls,
        )


@dataclass(frozen=True)
class Row:
    """One library on one size.

    Attributes:
        library: its name in the table.
        size: bytes of the whole message; `count`: elements of it, or of a shard.
        timing: None where the library cannot do this, and `note` says why.
        algbw, busbw: by nccl-tests' definitions, from the median.
        wrong: elements, over all ranks, whose bits are not the reference's; None if not checked.
        ratio: its median over this library's; above 1 is slower.
        phase: of the machine in all its turns: near, far or single (bench/phase.py); mixed where
            no phase had a turn of every library: then of all turns. "" in older files.
        sent, sent_raw: bytes a call that all ranks together sent to other hosts, and what they
            would have been unpacked: the mean of the timed calls; None on one host, and where the
            library does not count them.
    """

    library: str
    size: int
    count: int
    timing: Timing | None
    algbw: float | None = None
    busbw: float | None = None
    wrong: int | None = None
    ratio: float | None = None
    note: str = ""
    sent: float | None = None
    sent_raw: float | None = None
    phase: str = ""


@dataclass(frozen=True)
class Limit:
    """The machine's limit for one size (bench/machine.py).

    Attributes:
        stream: seconds to stream every rank's buffer, all ranks at once.
        copy: seconds to copy what has to reach a rank from core to core.
        share: the slower of them over this library's median: 1 is the limit.
        latency: seconds one way between two cores, while this size was measured.
        phase: as a row's.
    """

    size: int
    stream: float
    copy: float
    share: float
    latency: float
    phase: str = ""

    @property
    def seconds(self) -> float:
        """The slower of the two: what counts."""
        return max(self.stream, self.copy)


@dataclass
class Record:
    """A run: what was measured, on what, and what came out.

    `phases` counts turns: by their phase, how often one was ``repeated`` since its looks disagreed,
    and how many were ``dropped``, because not every library had one in that phase. Empty in older
    files.
    """

    command: list[str]
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    libraries: dict[str, dict[str, Any]]
    rows: list[Row] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)

    def row(self, library: str, size: int) -> Row | None:
        """Return the row of `library` at `size`, or None; of two phases that of near."""
        return next((r for r in self.rows if r.library == library and r.size == size), None)

    @property
    def wrong(self) -> int:
        """Wrong elements of this library's rows; what a peer does differently is no mistake."""
        rows = [row for row in self.rows if row.library in _OURS]
        # Rows of one size in two phases have the same count.
        return sum({(row.library, row.size): row.wrong or 0 for row in rows}.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with its schema's name; an infinite copy rate (one core) is None."""
        rate = self.machine["copy_rate"]
        return {
            "schema": SCHEMA,
            "command": self.command,
            "settings": self.settings,
            "machine": {**self.machine, "copy_rate": rate if math.isfinite(rate) else None},
            "versions": self.versions,
            "libraries": self.libraries,
            "phases": self.phases,
            "rows": [asdict(row) for row in self.rows],
            "limits": [asdict(limit) for limit in self.limits],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """The inverse of `to_json`.

        Raises:
            ValueError: the data follows another schema.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a {SCHEMA} file: schema is {data.get('schema')!r}")
        fields = {name: data[name] for name in data if name not in ("schema", "rows", "limits")}
        rate = data["machine"]["copy_rate"]
        fields["machine"] = {**data["machine"], "copy_rate": math.inf if rate is None else rate}
        rows = [
            Row(**{**row, "timing": Timing(**row["timing"]) if row["timing"] else None})
            for row in data["rows"]
        ]
        return cls(**fields, rows=rows, limits=[Limit(**limit) for limit in data["limits"]])


def write_json(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the file in one step: a reader sees the old one or the new one, whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    partial.write_text(json.dumps(record.to_json(), indent=1, allow_nan=False) + "\n")
    partial.replace(target)


def read_json(path: str | os.PathLike[str]) -> Record:
    """Read what `write_json` wrote."""
    return Record.from_json(json.loads(Path(path).read_text()))
