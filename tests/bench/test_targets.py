"""The table of targets must be able to say MISSED."""

from dataclasses import replace

import pytest

from benchmarks import all as targets
from pycollective.bench.record import Limit, Record, Row, Timing

KI, MI = 1 << 10, 1 << 20


def _record(ratio, latency=50e-9, share=0.9, microseconds=1.0):
    """All libraries at every size that a target looks at, all `ratio` times as slow as ours."""
    timing = Timing(microseconds * 1e-6, 1e-7, 1e-7, 1e-5, 10, 10)
    sizes = (16, KI, 4 * KI, 64 * KI, MI, 64 * MI)
    libraries = ("pycollective", "native", "torch", "gloo", "mpich", "openmpi", "openmpi-nocma")
    rows = [
        Row(library, size, size // 4, timing, 1.0, 1.0, 0, ratio)
        for size in sizes
        for library in libraries
    ]
    limits = [Limit(size, 1e-6, 1e-6, share, latency) for size in sizes]
    return Record([], {}, {}, {}, {}, rows, limits)


def _verdicts(record):
    records = {target.stem: record for target in targets.TARGETS}
    lines = list(targets.table(records))[1:]
    return {
        target.what + target.phase: line
        for target, line in zip(targets.TARGETS, lines, strict=True)
    }


@pytest.mark.parametrize(
    ("verdict", "how"),
    [
        ("met", {"ratio": 100, "microseconds": 0.4}),
        ("MISSED", {"ratio": 0.9, "share": 0.5, "microseconds": 8}),
    ],
)
def test_a_library_meets_or_misses_everything_in_its_phase(verdict, how):
    lines = _verdicts(_record(**how))
    for target in targets.TARGETS:
        says = "not measured" if target.phase == "far" else verdict
        assert lines[target.what + target.phase].endswith(says)


def test_one_slow_size_is_found_and_named():
    record = _record(ratio=100)
    record.rows = [
        replace(row, ratio=1.9) if (row.library, row.size) == ("mpich", 64 * KI) else row
        for row in record.rows
    ]
    line = _verdicts(record)["2 ranks, over MPICHnear"]
    assert line.split()[-4:] == ["2x", "1.90x", "64K", "MISSED"]


def test_some_sizes_of_a_phase_are_not_all():
    record = _record(ratio=100, microseconds=0.4)
    record.limits[3] = replace(record.limits[3], latency=260e-9)  # 64 Ki
    lines = _verdicts(record)
    # From 1 Ki: 64 Ki is one of five. To 64 Ki: one of three.
    assert lines["2 ranks, over MPICHnear"].endswith("  met, 4 of 5 sizes")
    assert lines["2 ranks, over MPICHfar"].endswith("  met, 1 of 5 sizes")
    assert lines["2 ranks, over Gloo, to 64 Kinear"].endswith("  met, 2 of 3 sizes")
    assert lines["2 ranks, over Gloo, to 1 Minear"].endswith("  met")
    assert lines["4 ranks, over MPICH"].endswith("  met")  # of both phases
    record.rows = [replace(row, ratio=0.5) if row.ratio else row for row in record.rows]
    assert _verdicts(record)["2 ranks, over MPICHfar"].endswith("  MISSED, 1 of 5 sizes")
