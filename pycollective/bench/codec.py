"""Compares a codec with dense calls, for `pycollective bench --codec`: bytes, time, error.

Runs in the ranks themselves, inside any launch. Each size is one fp32 gradient a rank, Gaussian
with row scales that vary as those of real layers do, another one in every step. The codec and dense
calls in fp32 and bf16 take turns, round after round; a time is the slowest rank's, and what counts
is the median of turns in one phase of the machine (phase.py). Where all ranks are on one host, each
is taken for a host of its own; exact packing is of what goes to other hosts, and wants some.

The result of each call is checked: dense averages, packed ones too, are the reference's, bit for
bit; a codec's are the same on all ranks, and with what its state keeps they make the averages.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pycollective import reference
from pycollective.bench.measurement import alike, largest, slowest
from pycollective.bench.phase import MIXED, Turn, by_phase, look_together, within_one
from pycollective.bench.settings import format_size
from pycollective.bootstrap import init as bootstrap
from pycollective.communicator import Communicator
from pycollective.compression import CODECS, State
from pycollective.compression.arrays import Floats
from pycollective.cores import cores_together
from pycollective.dtypes import numpy_type
from pycollective.errors import ConfigurationError
from pycollective.typing import Wire

# Of an average (L2), for up to so many calls; an average that is missing is off by 1. What a state
# keeps is rounded in each call, by 6e-8 of what it has grown to: of the same gradients again and
# again, all one way, so that it grows with the square (0.1 % of the elements sent: 7e-5 in 100
# calls, 7e-4 in 400).
_MOST_LOST, _CALLS = 1e-4, 100

_ROW = 1024  # elements of one scale


def _all(name: str, shape: tuple[int, ...]) -> bool:
    return True


COMPARED = ("exact", *CODECS)


@dataclass(frozen=True)
class Plan:
    """What to compare. Raises `ConfigurationError` if that is impossible.

    Attributes:
        codec: of `COMPARED`.
        sizes: bytes of the gradient, rounded down to whole rows of 1,024.
        density: of top-k.
        rounds: turns of each way at each size.
    """

    codec: str
    sizes: tuple[int, ...]
    density: float
    rounds: int

    @classmethod
    def of(cls, codec: str, sizes: Iterable[int], density: float, rounds: int) -> Plan:
        """Return a plan of sizes of at least a row."""
        row = 4 * _ROW
        return cls(codec, tuple(sorted({max(row, s // row * row) for s in sizes})), density, rounds)

    def __post_init__(self) -> None:
        if self.codec not in COMPARED:
            raise ConfigurationError(f"no codec {self.codec!r}; there are {', '.join(COMPARED)}")
        if self.rounds < 1:
            raise ConfigurationError("--rounds must be at least 1")
        if not 1e-4 <= self.density <= 1:
            raise ConfigurationError("--density must be 0.0001 to 1")

    def refuse_one_host(self) -> None:
        """Raise if there is nothing to compare where all ranks are on one host."""
        if self.codec == "exact":
            raise ConfigurationError(
                "--codec exact packs what goes to other hosts, and all ranks are on one: give a "
                "--topology for them to simulate, such as 2x1"
            )


@dataclass(frozen=True)
class Way:
    """The result of one way to average a gradient.

    Attributes:
        name: the codec's; "fp32" and "bf16" are dense.
        seconds: a call of the slowest rank, the median of the turns in one phase.
        sent: bytes a call that this rank handed over for other hosts; None if not counted.
        error: of one call's average, relative to it (L2).
        wrong: whether any call of any rank has made what it should not.
    """

    name: str
    seconds: float
    sent: float | None
    error: float
    wrong: bool


def compare(plan: Plan, topology: str, show: Callable[[str], None]) -> bool:
    """Join the launch, measure, and print on rank 0; every rank must call it.

    Args:
        plan: the same on all ranks.
        topology: as in `pycollective.init`; empty for the hosts there are.
        show: called on rank 0, with each line as soon as it is known.

    Returns:
        Whether all that was made was right; the same on all ranks.

    Raises:
        ConfigurationError: the launch cannot be joined.
        CollectiveError: a rank was lost.
    """
    with bootstrap.init(topology=topology or None) as communicator:
        hosts = max(communicator.host_of) + 1
        show_here = show if communicator.rank == 0 else (lambda line: None)
        if hosts == 1:
            plan.refuse_one_host()
        between = "hosts" if hosts > 1 else "ranks"
        show_here(
            f"# {plan.codec}"
            + (f", density {plan.density:g}" if plan.codec == "top_k" else "")
            + f": {communicator.size} ranks, {hosts} host(s), compressed between {between}; the "
            f"median of {plan.rounds} rounds"
        )
        show_here(
            f"{'size':>9} {'':>10} {'ms':>10} {'sent':>12} {'of fp32':>9} {'error':>10} phase"
        )
        right = True
        for size in plan.sizes:
            for phase, ways in measure(communicator, plan, size, between).items():
                for way in ways.values():
                    show_here(f"{_row(size, way, ways['fp32'])} {phase}")
                for line in _verdicts(plan, size, ways):
                    show_here(line)
                right = right and not any(way.wrong for way in ways.values())
    return right


class _Round:
    """All ranks' gradients of a round, and their averages."""

    def __init__(self, leaves: Sequence[Floats]) -> None:
        self.leaves = leaves
        self._answers: dict[str, Any] = {}

    def answer(self, dtype: str) -> Any:
        """Return the reference's average of the gradients in this type; kept, as several ask."""
        if dtype not in self._answers:
            leaves = [leaf.astype(numpy_type(dtype), copy=False) for leaf in self.leaves]
            self._answers[dtype] = reference.reduce(leaves, "avg")
        return self._answers[dtype]

    def mean(self) -> Any:
        """Return the average in float64, nearer the truth, for the error."""
        total = np.zeros(self.leaves[0].shape)
        for leaf in self.leaves:
            total += leaf
        return total / len(self.leaves)


@dataclass(frozen=True)
class _Call:
    """One way to average.

    Attributes:
        dtype: of the gradient that it takes.
        run: averages it in place.
        sent: bytes handed over for other hosts so far; None if they are not counted.
        is_wrong: whether that is no average of all ranks' gradients; collective.
        lost: whether all averages so far lack what is not kept for later ones, either; collective.
    """

    dtype: str
    run: Callable[[Any], object]
    sent: Callable[[], float | None]
    is_wrong: Callable[[Any, _Round], bool]
    lost: Callable[[], bool] = lambda: False


class _Taken(NamedTuple):
    """A turn: seconds of the slowest rank, bytes for other hosts if counted, and the result."""

    seconds: float
    sent: float | None
    out: Any


@contextmanager
def calls_of(
    communicator: Communicator, plan: Plan, shape: tuple[int, int], between: str
) -> Iterator[dict[str, _Call]]:
    """Yield the codec's ways, then dense fp32 and bf16; collective, also at the end."""

    def sent() -> float | None:
        return float(communicator.stats()["sent_bytes"]) if max(communicator.host_of) else None

    def plain(dtype: str, wire: Wire) -> _Call:
        def is_wrong(out: Any, inputs: _Round) -> bool:
            return not np.array_equal(out.view("u1"), inputs.answer(dtype).view("u1"))

        return _Call(dtype, lambda x: communicator.all_reduce(x, "avg", wire=wire), sent, is_wrong)

    dense = {"fp32": plain("float32", "raw"), "bf16": plain("bfloat16", "raw")}
    if plan.codec == "exact":
        exact = plain("float32", "exact"), plain("bfloat16", "exact")
        yield {"exact fp32": exact[0], "exact bf16": exact[1], **dense}
        return
    make: Callable[..., State] = CODECS[plan.codec]
    more = {"density": plan.density} if plan.codec == "top_k" else {}
    state = make({"x": shape}, communicator, between=between, compress=_all, **more)
    owed = Owed()

    def is_wrong(out: Any, inputs: _Round) -> bool:
        owed.add(inputs.answer("float32"), out)
        # Zeros would pass what is looked at behind all calls: then everything is kept.
        return not alike(communicator, zlib.crc32(out)) or not out.any()

    codec = _Call(
        "float32",
        lambda x: state.all_reduce({"x": x}),
        lambda: float(state.stats()["payload_bytes"]),
        is_wrong,
        lambda: bool(owed.fault(state.flush()["x"])),
    )
    yield {plan.codec: codec, **dense}
    state.close()  # not after an error: the caller's communicator then tells the others


def measure(
    communicator: Communicator, plan: Plan, size: int, between: str
) -> dict[str, dict[str, Way]]:
    """Measure the codec, dense fp32 and dense bf16; every rank must call it.

    Returns:
        The ways by phase of the machine: those in which each had a turn, or mixed, of all turns.
    """
    shape = (size // 4 // _ROW, _ROW)
    with calls_of(communicator, plan, shape, between) as calls:
        return _measure(communicator, plan, shape, calls)


def _measure(
    communicator: Communicator, plan: Plan, shape: tuple[int, int], calls: Mapping[str, _Call]
) -> dict[str, dict[str, Way]]:
    turns: dict[str, list[Turn[_Taken]]] = {name: [] for name in calls}
    wrong = dict.fromkeys(calls, False)
    looks = partial(look_together, communicator, cores_together(communicator))

    def turn(name: str, inputs: _Round) -> _Taken:
        call = calls[name]
        out = inputs.leaves[communicator.rank].astype(numpy_type(call.dtype))
        communicator.barrier()
        before = call.sent()
        start = time.perf_counter()
        call.run(out)
        seconds = time.perf_counter() - start
        after = call.sent()
        wrong[name] |= call.is_wrong(out, inputs)
        sent = None if after is None or before is None else after - before
        return _Taken(slowest(communicator, seconds), sent, out)

    errors = {}
    for number in range(1 + plan.rounds):  # the first warms up, and has the error that is shown
        inputs = _Round([gradient(rank, number, shape) for rank in range(communicator.size)])
        for name in calls:
            if number == 0:
                errors[name] = off(inputs.mean(), turn(name, inputs).out)
            else:
                turns[name].append(within_one(partial(turn, name, inputs), looks))
    found = largest(communicator, [call.lost() or wrong[name] for name, call in calls.items()])
    bad = dict(zip(calls, found, strict=True))
    return {
        phase: {name: _way(name, of, errors[name], bool(bad[name])) for name, of in within.items()}
        for phase, within in (by_phase(turns) or {MIXED: turns}).items()
    }


def _way(name: str, turns: Sequence[Turn[_Taken]], error: float, wrong: bool) -> Way:
    seconds = statistics.median(turn.result.seconds for turn in turns)
    return Way(name, seconds, _median([turn.result.sent for turn in turns]), error, wrong)


def gradient(rank: int, number: int, shape: tuple[int, int]) -> Floats:
    """Return a rank's gradient of a step; rows' scales are lognormal, the same on all ranks."""
    scales = np.exp(np.random.default_rng(number).standard_normal((shape[0], 1)))
    random = np.random.default_rng([number, rank])
    return (random.standard_normal(shape, np.float32) * scales).astype(np.float32)


def _median(numbers: list[float | None]) -> float | None:
    known = [each for each in numbers if each is not None]
    return statistics.median(known) if known else None


def _row(size: int, way: Way, dense: Way) -> str:
    ratio = f"1/{dense.sent / way.sent:.1f}" if way.sent and dense.sent and way is not dense else ""
    sent = "-" if way.sent is None else f"{way.sent:.0f}"
    return (
        f"{format_size(size):>9} {way.name:>10} {way.seconds * 1e3:10.3f} {sent:>12} {ratio:>9} "
        f"{way.error:10.2e}"
    )


def _verdicts(plan: Plan, size: int, ways: Mapping[str, Way]) -> list[str]:
    if bad := [way.name for way in ways.values() if way.wrong]:
        why = "not the averages, or what they lack is not kept"
        return [f"# {format_size(size)}: WRONG: {', '.join(bad)} ({why})"]
    dense = {name: ways[name] for name in ("fp32", "bf16")}
    if plan.codec == "exact":
        return [
            _verdict(f"{format_size(size)} of {name}", ways[f"exact {name}"], each, "no bit lost")
            for name, each in dense.items()
        ]
    codec, best = ways[plan.codec], min(dense.values(), key=lambda way: way.seconds)
    kept = f"{codec.error:.0%} of the average kept for later steps"
    return [_verdict(format_size(size), codec, best, kept)]


def _verdict(what: str, codec: Way, dense: Way, kept: str) -> str:
    factor = dense.seconds / codec.seconds
    if factor > 1:
        return f"# {what}: pays: {factor:.2f}x as fast as dense {dense.name}; {kept}"
    return f"# {what}: does not pay: dense {dense.name} takes {factor:.2f} of its time; {kept}"


def off(mean: Any, out: Any) -> float:
    """Return how far `out` is from `mean`, relative to it (L2): float arrays of one shape."""
    return float(np.linalg.norm(out.astype(mean.dtype) - mean) / np.linalg.norm(mean))


class Owed:
    """What the calls of one state have left out of the averages so far.

    A state of compression gives something else than the average. What it gives and what it then
    keeps make up all averages so far, but for rounding, which has one tight bound for all codecs.
    """

    def __init__(self, worst: float = math.inf) -> None:
        """`worst`: how far off the first call may be."""
        self._worst = worst
        self._first = 0.0
        self._owed: Any = np.float64(0)
        self._mean: Any = None
        self._calls = 0

    def add(self, mean: Floats, out: Floats) -> None:
        """Note every call: what it should have averaged to and what it made, both fp32."""
        if self._mean is None:
            self._first = off(mean, out)
        self._owed = self._owed + mean - out
        self._mean = mean
        self._calls += 1

    def fault(self, held: Floats) -> str:
        """Return what is wrong with the calls so far; empty if nothing is.

        Args:
            held: what the state's `flush` gave, fp32, of the same shape.
        """
        if not self._first <= self._worst:  # so that NaN is wrong
            return f"the first average is {self._first:.2e} off"
        lost = float(np.linalg.norm(self._owed - held) / np.linalg.norm(self._mean))
        most = _MOST_LOST * max(1.0, self._calls / _CALLS) ** 2
        return "" if lost <= most else f"{lost:.2e} of an average is neither given nor kept"
