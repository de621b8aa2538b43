"""What the demo says of its results: a table, the one line that they add up to, and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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


def judge_counts(counts: Mapping[str, Mapping[int, Sequence[str]]]) -> Verdict:
    """Compare the final weights over the number of ranks: digests by backend and that number."""
    own, gloo = (
        {digest for digests in counts[backend].values() for digest in digests}
        for backend in ("pycollective", "gloo")
    )
    numbers = sorted(counts["pycollective"])
    if len(numbers) < 2 or len(gloo) < 2:
        return Verdict("NOTHING SHOWN: torch's own weights are the same, too.", shown=False)
    ranks = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]} ranks"
    if len(own) > 1:
        return Verdict(f"PROMISE BROKEN: {ranks} ended with {len(own)} weights.", shown=False)
    return Verdict(
        f"ANY NUMBER OF RANKS: {ranks} ended with the same weights, {own.pop()[:_DIGEST_DIGITS]}, "
        f"by LeafSync; by DDP with no_sync over Gloo with {len(gloo)} different ones.",
        shown=True,
    )


def judge_kills(found: Mapping[str, Any]) -> Verdict:
    """Compare the weights and losses of a training whose ranks were killed with one in peace.

    Args:
        found: as `elastic_kills.summary` has it.
    """
    kills = found["kills"]
    if not kills:
        return Verdict("NOTHING SHOWN: no rank was killed.", shown=False)
    if found["wrong"] or found["left"]:
        return Verdict(
            f"PROMISE BROKEN: a training with {kills} kills ended with other weights or losses, or "
            f"left something: {found['left']}.",
            shown=False,
        )
    [weights] = found["weights"]
    return Verdict(
        f"KILLED: in a training with {kills} kills the other ranks had the next step within "
        f"{found['pause']['worst']:.1f} s, and all ended with the weights and losses of the same "
        f"without one, {weights[:_DIGEST_DIGITS]}.",
        shown=True,
    )


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
    for gradients in sorted({r.configuration.gradients for r in results}):
        for backend in ("gloo", "pycollective"):
            chosen = [
                r
                for r in results
                if (r.configuration.backend, r.configuration.gradients) == (backend, gradients)
            ]
            if len({r.buckets for r in chosen}) < 2:
                return f"DDP made the same buckets in all {backend} runs with {gradients} gradients"
    if not all(math.isfinite(loss) for result in results for loss in result.losses):
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


# Apart for colour-blind readers too (Okabe and Ito); the same as in the benchmarks' plots.
_COLOURS = {"gloo": "#D55E00", "pycollective": "#0072B2"}
_PALE = {"gloo": "#EDBD9D", "pycollective": "#9DC6DF"}
_NAMES = {"gloo": "Gloo", "pycollective": "pycollective"}
_STYLES = {"fp32": "-", "bf16": (0, (4, 1.5))}
_INK, _MUTED, _FAINT = "#222222", "#666666", "#dddddd"


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw all results into `path` (PNG)."""
    # Without pyplot: no global state and no display.
    figure = Figure(figsize=(11, 7.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, gridspec_kw={"hspace": 0.08, "wspace": 0.06})
    panels[1, 1].sharey(panels[1, 0])
    _draw_loss(panels[0, 0], results)
    _draw_spread(panels[0, 1], results)
    for axes, gradients in zip(panels[1], _STYLES, strict=True):
        _draw_step_times(axes, results, gradients)
    panels[1, 0].margins(y=0.3)  # room for the legends
    for axes in panels.flat:
        _dress(axes)
    figure.savefig(path)


def _draw_loss(axes: Any, results: Sequence[Result]) -> None:
    """Every run's loss: that they lie on each other is why bits must be looked at."""
    for backend, colour in _COLOURS.items():
        for gradients, style in _STYLES.items():
            for index, result in enumerate(_select(results, backend, gradients)):
                axes.plot(
                    range(1, len(result.losses) + 1),
                    result.losses,
                    color=colour,
                    linestyle=style,
                    linewidth=1.1,
                    alpha=0.75,
                    label=f"{_NAMES[backend]}, {gradients}" if index == 0 else None,
                )
    for index, result in enumerate(_select(results, "8-bit", "fp32")):
        label = "8-bit gradients, pycollective" if index == 0 else None
        steps = range(1, len(result.losses) + 1)
        axes.plot(steps, result.losses, color=_INK, linestyle=":", linewidth=1.1, label=label)
    axes.set_title("Training loss of every run")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)


def _draw_spread(axes: Any, results: Sequence[Result]) -> None:
    """Largest less smallest loss over all bucket sizes and repeats, step by step."""
    spreads = {
        (backend, gradients): _spread(_select(results, backend, gradients))
        for backend in _COLOURS
        for gradients in _STYLES
    }
    positive = [value for spread in spreads.values() for value in spread if value > 0]
    # Zero has no place on a logarithmic axis: it gets a line of its own, below all else.
    floor = min(positive, default=1e-7) / 10
    for (backend, gradients), spread in spreads.items():
        axes.plot(
            range(1, len(spread) + 1),
            [value if value > 0 else floor for value in spread],
            color=_COLOURS[backend],
            linestyle=_STYLES[gradients],
            linewidth=2.4 if backend == "pycollective" else 1.3,
            label=f"{_NAMES[backend]}, {gradients}",
        )
    axes.set_yscale("log")
    axes.set_ylim(floor / 10, max(positive, default=1e-3) * 100)
    axes.minorticks_off()
    axes.annotate(
        "this line is exactly 0",
        (0.99, floor),
        xycoords=("axes fraction", "data"),
        xytext=(0, -12),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=_MUTED,
    )
    axes.set_title("How far the loss spreads over bucket sizes and repeats")
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")


def _draw_step_times(axes: Any, results: Sequence[Result], gradients: str) -> None:
    """A bar a backend and bucket size; the upper, pale part is exposed communication."""
    chosen = [r for r in results if r.configuration.gradients == gradients]
    caps = sorted({r.configuration.bucket_cap_mb for r in chosen})
    for offset, (backend, colour) in zip((-0.2, 0.2), _COLOURS.items(), strict=True):
        for position, cap in enumerate(caps):
            runs = [r for r in _select(chosen, backend, gradients, cap)]
            total = statistics.median(r.step_time for r in runs) * 1e3
            # The two are measured apart, so noise may make the part more than the whole.
            exposed = min(max(statistics.median(r.exposed for r in runs) * 1e3, 0.0), total)
            place = position + offset
            label = _NAMES[backend] if position == 0 else None
            axes.bar(place, total - exposed, 0.36, color=colour, label=label)
            axes.bar(place, exposed, 0.36, bottom=total - exposed, color=_PALE[backend])
            axes.text(place, total, f"{total:.1f}", ha="center", va="bottom", fontsize=9)
    buckets = [_select(chosen, "pycollective", gradients, cap)[0].buckets for cap in caps]
    axes.set_xticks(
        range(len(caps)),
        [
            f"{cap:g} MiB\n{count} bucket{'s' if count > 1 else ''}"
            for cap, count in zip(caps, buckets, strict=True)
        ],
    )
    axes.set_ylabel("ms")
    axes.set_title(f"Step time, {gradients} gradients")
    title = "pale: communication not hidden by backward"
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right", title=title)


def _select(
    results: Sequence[Result], backend: str, gradients: str, cap: float | None = None
) -> list[Result]:
    return [
        result
        for result in results
        if (result.configuration.label, result.configuration.gradients) == (backend, gradients)
        and cap in (None, result.configuration.bucket_cap_mb)
    ]


def _spread(results: Sequence[Result]) -> list[float]:
    """Of each step, the largest loss less the smallest."""
    return [
        max(step) - min(step) for step in zip(*(result.losses for result in results), strict=True)
    ]


def _dress(axes: Any) -> None:
    axes.title.set(fontsize=11, fontweight="bold", color=_INK)
    axes.title.set_horizontalalignment("left")
    axes.title.set_x(0)
    axes.grid(True, axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, length=0, labelsize=9)
