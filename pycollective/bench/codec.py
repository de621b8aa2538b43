"""Compares a codec with dense calls, for `pycollective bench --codec`: bytes, time, error.

Runs in the ranks themselves, inside any launch. Each size is one fp32 gradient a rank, Gaussian
with row scales that vary as those of real layers do, another one in every step. The codec and dense
calls in fp32 and bf16 take turns, round after round; a time is the slowest rank's, and what counts
is the median. Where all ranks are on one host, each is taken for a host of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective import bootstrap, reference
from pycollective.bench.problem import numpy_type
from pycollective.bench.sizes import format_size
from pycollective.communicator import Communicator
from pycollective.compression import Int8State, OneBitState, State, TopKState
from pycollective.errors import ConfigurationError

CODECS = ("exact", "one_bit", "int8", "top_k")
_ROW = 1024  # elements of one scale
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Plan:
    """What to compare. Raises `ConfigurationError` when made from what cannot be.

    Attributes:
        codec: of `CODECS`.
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
        """A plan of sizes of at least a row."""
        row = 4 * _ROW
        return cls(codec, tuple(sorted({max(row, s // row * row) for s in sizes})), density, rounds)

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ConfigurationError(f"no codec {self.codec!r}; there are {', '.join(CODECS)}")
        if self.rounds < 1:
            raise ConfigurationError("--rounds must be at least 1")
        if not 1e-4 <= self.density <= 1:
            raise ConfigurationError("--density must be 0.0001 to 1")


@dataclass(frozen=True)
class Way:
    """What one way to average a gradient came to.

    Attributes:
        name: the codec's, or "fp32" or "bf16".
        seconds: a call, the median of the rounds of the slowest rank.
        sent: bytes a call that this rank handed over for other hosts; None if not counted.
        error: of one call's average, relative to it (L2).
    """

    name: str
    seconds: float
    sent: float | None
    error: float


def compare(plan: Plan, topology: str, show: Callable[[str], None]) -> None:
    """Join the launch, measure, and print on rank 0; every rank must call it.

    Args:
        plan: the same on all ranks.
        topology: as in `pycollective.init`; empty for the hosts there are.
        show: called on rank 0, with each line as soon as it is known.

    Raises:
        ConfigurationError: the launch cannot be joined.
        CollectiveError: a rank was lost.
    """
    with bootstrap.init(topology=topology or None) as communicator:
        hosts = max(communicator.host_of) + 1
        show_here = show if communicator.rank == 0 else (lambda line: None)
        between = "hosts" if hosts > 1 else "ranks"
        show_here(
            f"# {plan.codec}"
            + (f", density {plan.density:g}" if plan.codec == "top_k" else "")
            + f": {communicator.size} ranks, {hosts} host(s), compressed between {between}; the "
            f"median of {plan.rounds} rounds"
        )
        show_here(f"{'size':>9} {'':>9} {'ms':>10} {'sent':>12} {'of fp32':>9} {'error':>10}")
        for size in plan.sizes:
            ways = measure(communicator, plan, size, between)
            for way in ways:
                show_here(_row(size, way, ways[1]))
            show_here(_verdict(plan, size, ways))


def measure(communicator: Communicator, plan: Plan, size: int, between: str) -> list[Way]:
    """The codec, dense fp32 and dense bf16; every rank must call it."""
    shape = (size // 4 // _ROW, _ROW)
    bfloat16 = numpy_type("bfloat16")
    state = _state(plan, shape, communicator, between)

    def compressed(x: Floats) -> Floats:
        if state is None:
            communicator.all_reduce(x, "avg", wire="exact")
        else:
            state.all_reduce({"x": x})
        return x

    def dense(x: Floats) -> Floats:
        communicator.all_reduce(x, "avg", wire="raw")
        return x

    def dense_16(x: Any) -> Any:
        communicator.all_reduce(x, "avg", wire="raw")
        return x

    calls: dict[str, Callable[[Any], Any]] = {
        plan.codec: compressed,
        "fp32": dense,
        "bf16": dense_16,
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    sent: dict[str, list[float | None]] = {name: [] for name in calls}
    errors = {}
    for number in range(1 + plan.rounds):  # the first warms up, and is looked at for its error
        x = gradient(communicator.rank, number, shape)
        for name, call in calls.items():
            given = x.astype(bfloat16) if name == "bf16" else x.copy()
            communicator.barrier()
            before = _sent(communicator, state if name == plan.codec else None)
            start = time.perf_counter()
            out = call(given)
            seconds = np.array([time.perf_counter() - start])
            after = _sent(communicator, state if name == plan.codec else None)
            communicator.all_reduce(seconds, "max")
            if number == 0:
                errors[name] = _error(communicator.size, shape, out)
                continue
            taken[name].append(float(seconds[0]))
            sent[name].append(None if after is None or before is None else after - before)
    return [
        Way(name, statistics.median(taken[name]), _median(sent[name]), errors[name])
        for name in calls
    ]


def gradient(rank: int, number: int, shape: tuple[int, int]) -> Floats:
    """A rank's gradient of a step: rows' scales are lognormal, and the same on all ranks."""
    scales = np.exp(np.random.default_rng(number).standard_normal((shape[0], 1)))
    random = np.random.default_rng([number, rank])
    return (random.standard_normal(shape, np.float32) * scales).astype(np.float32)


def _error(ranks: int, shape: tuple[int, int], out: Any) -> float:
    mean = reference.tree(
        [gradient(rank, 0, shape).astype(np.float64) for rank in range(ranks)], np.add
    )
    mean /= ranks
    return float(np.linalg.norm(out.astype(np.float64) - mean) / np.linalg.norm(mean))


def _state(
    plan: Plan, shape: tuple[int, int], communicator: Communicator, between: str
) -> State | None:
    shapes = {"x": shape}
    if plan.codec == "one_bit":
        return OneBitState(shapes, communicator, between=between, compress=_all)
    if plan.codec == "int8":
        return Int8State(shapes, communicator, between=between, compress=_all)
    if plan.codec == "top_k":
        return TopKState(shapes, communicator, density=plan.density, between=between, compress=_all)
    return None


def _all(name: str, shape: tuple[int, ...]) -> bool:
    return True


def _sent(communicator: Communicator, state: State | None) -> float | None:
    """Bytes handed over for other hosts so far."""
    if state is not None:
        return float(state.stats()["payload_bytes"])
    if max(communicator.host_of) == 0:
        return None
    return float(communicator.stats()["sent_bytes"])


def _median(numbers: list[float | None]) -> float | None:
    known = [each for each in numbers if each is not None]
    return statistics.median(known) if known else None


def _row(size: int, way: Way, dense: Way) -> str:
    ratio = f"1/{dense.sent / way.sent:.1f}" if way.sent and dense.sent and way is not dense else ""
    sent = "-" if way.sent is None else f"{way.sent:.0f}"
    return (
        f"{format_size(size):>9} {way.name:>9} {way.seconds * 1e3:10.3f} {sent:>12} {ratio:>9} "
        f"{way.error:10.2e}"
    )


def _verdict(plan: Plan, size: int, ways: list[Way]) -> str:
    codec, *dense = ways
    best = min(dense, key=lambda way: way.seconds)
    factor = best.seconds / codec.seconds
    kept = (
        "no bit lost"
        if plan.codec == "exact"
        else f"{codec.error:.0%} of the average kept for later steps"
    )
    if factor > 1:
        return f"# {format_size(size)}: pays: {factor:.2f}x as fast as dense {best.name}; {kept}"
    return f"# {format_size(size)}: does not pay: dense {best.name} takes {factor:.2f} of its time"
