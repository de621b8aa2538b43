"""The table of targets must be able to say MISSED."""

from dataclasses import replace

from benchmarks import all as targets
from pycollective.bench.record import Limit, Record, Row, Timing

KI, MI = 1 << 10, 1 << 20
SIZES = (16, KI, 256 * KI, 4 * MI, 16 * MI, 64 * MI)


def _record(ratio, seconds, share, phase="near", torch=3e-6, narrow=1.0):
    """All libraries at every size that a target looks at, all `ratio` times as slow as ours.

    `seconds` are ours, `torch` what a call through torch takes longer, over its fake backend 2 us,
    and `narrow` is of bf16 and fp16.
    """
    libraries = ["pycollective", "torch", "fake", *(peer.name for peer in targets.PEERS)]
    ratios = dict.fromkeys(libraries, ratio) | dict.fromkeys(("bfloat16", "float16"), narrow)
    ratios["shared"] = 1.0
    more = {"torch": torch, "fake": 2e-6}
    rows = [
        Row(
            *(library, size, size // 4),
            Timing(seconds + more.get(library, 0), 1e-7, 1e-7, 1e-5, 10, 10),
            ratio=ratios[library],
            phase=phase,
        )
        for size in SIZES
        for library in ratios
    ]
    limits = [Limit(size, 1e-6, 1e-6, share, 5e-8, phase) for size in SIZES]
    return Record([], {}, {}, {}, {}, rows, limits)


def _both(near, far):
    return replace(near, rows=near.rows + far.rows, limits=near.limits + far.limits)


def _verdicts(record):
    stems = [stem for question in targets.QUESTIONS.values() for stem in question.runs]
    records = dict.fromkeys(stems, record)
    lines = list(targets.table(records))[1:]
    return {
        f"{target.what} {target.phase}".strip(): line
        for target, line in zip(targets.TARGETS, lines, strict=True)
    }


GOOD = {"ratio": 4, "seconds": 0.3e-6, "share": 0.9}


def test_a_library_misses_everything():
    bad = {"ratio": 0.9, "share": 0.5, "torch": 6e-6, "narrow": 1.2}
    far = _record(**bad, seconds=4e-6, phase="far")
    for what, line in _verdicts(_both(_record(**bad, seconds=1e-6), far)).items():
        assert "MISSED by " in line, what


def test_one_slow_size_is_found_and_named_and_lowers_the_mean():
    record = _record(**GOOD)
    record.rows = [
        replace(row, ratio=0.4) if (row.library, row.size) == ("mpich", 4 * MI) else row
        for row in record.rows
    ]
    lines = _verdicts(record)
    # Below 1.1 by 64 %. 4, 4, 0.4, 4, 4: (4^4 x 0.4)^(1/5) is 2.52.
    worst = lines["all_reduce, 2 ranks, each peer near"].split()
    assert worst[-7:] == ["1.1x", "0.40x", "mpich", "4M", "MISSED", "by", "64%"]
    mean = lines["all_reduce, 2 ranks, mean over each but Intel MPI near"].split()
    assert mean[-5:] == ["2.52x", "mpich", "MISSED", "by", "16%"]
    assert lines["all_reduce, 2 ranks, mean over Intel MPI near"].endswith("  met")
    assert lines["gather, each peer, below 4 Mi near"].endswith("  met")
    assert lines["gather, each peer, from 4 Mi near"].endswith("MISSED by 58%")


def test_some_sizes_of_a_phase_are_not_all():
    record = _record(**GOOD)
    far = _record(**{**GOOD, "seconds": 1.2e-6}, phase="far")
    record.rows += [row for row in far.rows if row.size in (256 * KI, 4 * MI)]
    record.rows = [row for row in record.rows if row.size != 4 * MI or row.phase == "far"]
    lines = _verdicts(record)
    # From 1 Ki there are five; near and far have 256 Ki both.
    assert lines["all_reduce, 2 ranks, each peer near"].endswith("  met, 4 of 5 sizes")
    assert lines["all_reduce, each MPI far"].endswith("  met, 2 of 5 sizes")
    over_near = lines["all_reduce, time over near far"]
    assert over_near.endswith("MISSED by 33%, 1 of 5 sizes")
    record.rows = [row for row in record.rows if row.phase == "near"]
    assert _verdicts(record)["all_reduce, each MPI far"].endswith("  not measured")


def test_what_no_phase_had_whole_counts_for_none():
    lines = _verdicts(_record(**GOOD, phase="mixed"))
    assert lines["all_reduce, 2 ranks, each peer near"].endswith("  not measured")
    assert lines["all_reduce, time over fp32's"].endswith("  not measured")
