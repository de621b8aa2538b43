"""What the demo says of its results: the table, and the one line that they add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.demo_train import Result

_TITLES = (
    *("backend", "gradients", "bucket_cap_mb", "buckets", "repeat"),
    *("accuracy", "step ms", "exposed ms", "final weights"),
)
_WIDTHS = (12, 9, 13, 7, 6, 8, 8, 10, 16)
_DIGEST_DIGITS = 16


def table(results: Sequence[Result]) -> Iterator[str]:
    """A line a run, ordered so that what should be equal stands together."""
    yield _columns(*_TITLES)
    group = None
    for result in sorted(results, key=_table_order):
        which = result.configuration
        if group not in (None, (which.gradients, which.label)):
            yield ""
        group = (which.gradients, which.label)
        digests = sorted(set(result.digests))
        yield _columns(
            which.label,
            which.gradients,
            f"{which.bucket_cap_mb:g}",
            str(result.buckets),
            str(which.repeat),
            f"{result.accuracy:.1%}",
            f"{result.step_time * 1e3:.2f}",
            f"{result.exposed * 1e3:.2f}",
            " ".join(digest[:_DIGEST_DIGITS] for digest in digests),
        )


def legend() -> Iterator[str]:
    """What the columns mean."""
    yield "step ms        median over the steps of the slowest rank's time"
    yield "exposed ms     communication not hidden behind backward: median time of forward and"
    yield "               backward with gradient sync less that under no_sync(), alternating"
    yield "final weights  SHA-256 of the fp32 master weights, first 16 digits; of all ranks"


@dataclass(frozen=True)
class Verdict:
    """What the results show.

    Attributes:
        line: in words, for a reader.
        shown: whether pycollective kept its promise in runs that could have shown the opposite.
    """

    line: str
    shown: bool


def compressed(results: Sequence[Result]) -> str:
    """What became of the runs with compressed gradients, beside the dense ones in fp32."""
    packed = [r for r in results if r.configuration.codec]
    dense = [
        r.accuracy
        for r in results
        if r.configuration.label == "pycollective" and r.configuration.gradients == "fp32"
    ]
    if not packed or not dense or any(r.sent is None for r in packed):
        return "COMPRESSED: no such run."
    sent = packed[0].sent or (0, 0)
    best = max(r.accuracy for r in packed)
    return (
        f"COMPRESSED: with 8-bit gradients {sent[0] / 1e6:.1f} MB left a rank instead of "
        f"{sent[1] / 1e6:.1f}; test accuracy {best:.1%} (dense {max(dense):.1%}); the final "
        f"weights {_change(packed)}."
    )


def judge(results: Sequence[Result]) -> Verdict:
    """Compare the final weights over bucket sizes, repeats and ranks; say what is seen.

    Compressed runs, whose weights are others by design, are left out.
    """
    results = [r for r in results if not r.configuration.codec]
    vacuous = _why_vacuous(results)
    if vacuous:
        return Verdict(f"NOTHING SHOWN: {vacuous}.", shown=False)
    own = _describe(results, "pycollective")
    gloo = _describe(results, "gloo")
    kept = all(change == _SAME for change in own.values())
    accuracy = [result.accuracy for result in results]
    line = (
        f"{'SHOWN' if kept else 'PROMISE BROKEN'}: "
        f"with Gloo the final weights {_join(gloo)}; with pycollective they {_join(own)} "
        f"({len(results)} runs, test accuracy {min(accuracy):.1%} to {max(accuracy):.1%})."
    )
    return Verdict(line, shown=kept)


_SAME = "were the same bits for every bucket size and repeat"


def _describe(results: Sequence[Result], backend: str) -> dict[str, str]:
    """What became of the final weights, for each dtype of the gradients."""
    chosen = [r for r in results if r.configuration.backend == backend]
    return {
        gradients: _change([r for r in chosen if r.configuration.gradients == gradients])
        for gradients in sorted({r.configuration.gradients for r in chosen})
    }


def _change(results: Sequence[Result]) -> str:
    """How the digests of one backend and dtype differ: by the least excuse first."""
    by_cap: dict[float, set[str]] = {}
    for result in results:
        by_cap.setdefault(result.configuration.bucket_cap_mb, set()).update(result.digests)
    if any(len(set(result.digests)) > 1 for result in results):
        return "differed between the ranks of one run"
    if any(len(digests) > 1 for digests in by_cap.values()):
        return "changed from one repeat to the next"
    distinct = len(set().union(*by_cap.values()))
    if distinct > 1:
        return f"changed with the bucket size ({distinct} results for {len(by_cap)} sizes)"
    return _SAME


def _join(changes: dict[str, str]) -> str:
    """One phrase where all dtypes agree, else one each."""
    if len(set(changes.values())) == 1:
        names = " and ".join(changes)
        return f"{next(iter(changes.values()))}, {names} gradients"
    return " and ".join(f"{change} in {name}" for name, change in changes.items())


def _why_vacuous(results: Sequence[Result]) -> str:
    """Why these runs could not have shown a difference; empty if they could."""
    if any(len(result.digests) < 3 for result in results):
        return "fewer than three ranks, where the order of additions cannot change a sum"
    for gradients in sorted({r.configuration.gradients for r in results}):
        for backend in ("gloo", "pycollective"):
            chosen = [
                r
                for r in results
                if (r.configuration.backend, r.configuration.gradients) == (backend, gradients)
            ]
            if len({r.buckets for r in chosen}) < 2:
                return f"DDP made the same buckets in all {backend} runs with {gradients} gradients"
    if any(loss != loss or loss == float("inf") for r in results for loss in r.losses):
        return "a loss is not finite"
    return ""


def _table_order(result: Result) -> tuple[str, str, float, int]:
    which = result.configuration
    return which.gradients, which.label, which.bucket_cap_mb, which.repeat


def _columns(*texts: str) -> str:
    left = {0, 1, len(texts) - 1}
    cells = (
        text.ljust(width) if index in left else text.rjust(width)
        for index, (text, width) in enumerate(zip(texts, _WIDTHS, strict=True))
    )
    return "  ".join(cells).rstrip()
