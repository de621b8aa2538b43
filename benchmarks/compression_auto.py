"""Does `when="auto"` of compression ever cost anything?

Where links are fast, compressing loses, and a state with ``when="auto"`` is to go dense by itself.
Gradients of a 30 M-parameter GPT on two ranks (`large_gradients.py`), handed to DDP's hooks bucket
by bucket as DDP does, in three places: two hosts joined by 10 Gbit/s (network namespaces, Gloo's
sockets below), two ranks that share memory, and the same compressed between ranks
(``between="ranks"``), so that `auto` has to find out there, too.

For each codec four ways take turns in the same processes: `all_reduce_hook`, dense; the same again,
as the control; and the codec's hook with ``when="always"`` and with "auto". A time is that of the
slowest rank for a step's exchange, a figure the median of the rounds. At most 5 % more than the
better of dense and always is asked of auto. What each call has made is compared: of dense calls
with the oracle, of all between the ranks, bit for bit. The first of a state has a bound on its
error, and all that it has given, and what it then keeps, must make up the averages.

Usage: python -m benchmarks.compression_auto [--out DIR] [--rounds N] [--places 10gbit,memory,ranks]
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import large_gradients
from benchmarks.checked import check_owed
from benchmarks.compression_two_hosts import WORST, buckets_of
from benchmarks.driver import Benchmark, Record, Run
from benchmarks.turns import Call, seconds_of, take_turns
from benchmarks.two_hosts_network import why_not
from pycollective.bench.owed import Owed
from pycollective.bench.slowest import alike, slowest

PLACES = {
    "10gbit": "two hosts, 10 Gbit/s",
    "memory": "one host, shared memory",
    "ranks": "one host, shared memory, compressed between ranks",
}
DENSE, AGAIN = "dense", "dense again"
CODECS = ("one_bit", "int8", "top_k 1 % by tensor", "top_k 1 % by chunk")
MOST_OF_BETTER = 1.05
DECIDED = 8  # steps after which auto has made up its mind


@dataclass(frozen=True)
class Bucket:
    """What a hook needs of DDP's `GradBucket`."""

    number: int
    of: int
    whole: Any
    named: list[Any]

    def index(self) -> int:
        """Which of the step it is."""
        return self.number

    def is_last(self) -> bool:
        """Whether the step ends with it."""
        return self.number == self.of - 1

    def buffer(self) -> Any:
        """The gradients, one after another."""
        return self.whole

    def parameters(self) -> list[Any]:
        """Theirs."""
        return self.named


def step_of(hook: Callable[..., Any], state: Any, buckets: list[Bucket]) -> Call:
    """A backward's worth of calls: all are posted, then all are waited for."""

    def step() -> None:
        for future in [hook(state, bucket) for bucket in buckets]:
            future.wait()

    return step


def on_a_rank(run: Run) -> Record | None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist

    import pycollective as pc
    from pycollective import reference
    from pycollective import torch as pct

    torch.set_num_threads(1)
    dist.init_process_group("pycollective")
    parameters = {
        name: torch.empty(shape, requires_grad=True)
        for name, shape in large_gradients.shapes().items()
    }
    named = buckets_of({name: each.numel() for name, each in parameters.items()})
    x = torch.from_numpy(large_gradients.load()[dist.get_rank()].copy())
    pieces = x.split([sum(parameters[name].numel() for name in bucket) for bucket in named])
    buckets = [
        Bucket(number, len(named), piece.clone(), [parameters[name] for name in names])
        for number, (piece, names) in enumerate(zip(pieces, named, strict=True))
    ]

    def state(codec: str, when: str) -> tuple[Any, Any]:
        common = {"between": run.options["between"], "when": when}
        if codec == "one_bit":
            return pct.one_bit_hook, pct.OneBitState(parameters.items(), **common)
        if codec == "int8":
            return pct.int8_hook, pct.Int8State(parameters.items(), **common)
        by = codec.split()[-1]
        return pct.top_k_hook, pct.TopKState(parameters.items(), density=0.01, by=by, **common)

    def restore() -> None:
        for bucket, piece in zip(buckets, pieces, strict=True):
            bucket.whole.copy_(piece)

    comm = pc.init(timeout=300)
    timed = seconds_of(1, dist.barrier, partial(slowest, comm))
    mean = reference.reduce(list(large_gradients.load()), "avg")
    dense = step_of(pct.all_reduce_hook, None, buckets)
    again = step_of(pct.all_reduce_hook, None, buckets)

    owed: dict[Call, Owed] = {}

    def check(call: Call) -> None:
        """What the call has just made; then the gradients are there again."""
        found = torch.cat([bucket.whole for bucket in buckets]).numpy()
        same = call in owed or found.tobytes() == mean.tobytes()
        if not alike(comm, zlib.crc32(found)) or not same:
            raise AssertionError("the ranks have other bits than they should")
        if call in owed:
            owed[call].add(mean, found)
        restore()

    def turn(call: Call) -> tuple[float, ...]:
        check(call)  # the warm one
        measured = timed(call)
        check(call)
        return measured

    counts = {name: parameters[name].numel() for bucket in named for name in bucket}
    codecs = {}
    for codec in CODECS:
        (hook, always), (_, auto) = state(codec, "always"), state(codec, "auto")
        calls = {
            DENSE: dense,
            AGAIN: again,
            "always": step_of(hook, always, buckets),
            "auto": step_of(hook, auto, buckets),
        }
        owed |= {calls[way]: Owed(WORST[codec][0]) for way in ("always", "auto")}
        for _ in range(DECIDED):
            calls["auto"]()
            check(calls["auto"])
        measured = take_turns(calls, run.rounds, turn)
        codecs[codec] = {
            "seconds": {name: seconds for name, (seconds,) in measured.items()},
            "auto": {key: auto.stats()[key] for key in ("way", "why")},
        }
        for way, each in (("auto", auto), ("always", always)):
            check_owed(owed.pop(calls[way]), each, counts)
            each.close()
    rank = dist.get_rank()
    comm.close()
    dist.destroy_process_group()
    versions = {"torch": torch.__version__, "pycollective": pc.__version__}
    return {"versions": versions, "codecs": codecs} if rank == 0 else None


def report(place: str, record: dict[str, Any]) -> None:
    """Print the table, and what is met."""
    print(f"{PLACES[place]}: milliseconds a step's exchange")
    for codec, found in record["codecs"].items():
        dense, again, always, auto = (
            1e3 * found["seconds"][way] for way in (DENSE, AGAIN, "always", "auto")
        )
        ratio = auto / min(always, dense)
        print(
            f"  {codec:20} always {always:7.1f}  dense {dense:7.1f}  again {again:7.1f}  "
            f"auto {auto:7.1f}  "
            f"{ratio:.3f} of the better: {'met' if ratio <= MOST_OF_BETTER else 'MISSED'}  "
            f"({found['auto']['way']}: {found['auto']['why']})"
        )


def measure(run: Run) -> Record:
    """In each place that can be had here."""
    large_gradients.ensure()
    places = {}
    for place in run.options["places"].split(","):
        problem = why_not() if place == "10gbit" else ""
        if problem:
            print(f"{PLACES[place]}: cannot be made here: {problem}")
            continue
        if place == "10gbit":
            found = run.ranks_on_two_hosts(1, place)
        else:
            found = run.ranks_here(2, between="ranks" if place == "ranks" else "hosts")
        places[PLACES[place]] = found
        report(place, found)
    return {"places": places}


if __name__ == "__main__":
    Benchmark(
        *("compression_auto", __doc__, measure, on_a_rank, 11),
        options={"places": ",".join(PLACES)},
        hidden={"between": "hosts"},
    ).main()
