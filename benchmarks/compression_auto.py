"""Does `when="auto"` of compression ever cost anything?

Where links are fast, compressing loses, and a state with ``when="auto"`` is to go dense by itself.
Gradients of a 30 M-parameter GPT on two ranks (`large_gradients.py`), handed to DDP's hooks bucket
by bucket as DDP does, in three places: two hosts joined by 10 Gbit/s (network namespaces, Gloo's
sockets below), two ranks that share memory, and the same compressed between ranks
(``between="ranks"``), so that `auto` has to find out there, too.

For each codec four ways take turns in the same processes: `all_reduce_hook`, dense; the same again,
as the control; and the codec's hook with ``when="always"`` and with "auto". A time is that of the
slowest rank for a step's exchange, a figure the median of the rounds. At most 5 % more than the
better of dense and always is asked of auto.

Usage: python -m benchmarks.compression_auto [--out DIR] [--rounds N] [--places 10gbit,memory,ranks]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import large_gradients
from benchmarks.compression_two_hosts import buckets_of
from benchmarks.turns import Call, seconds_of, take_turns
from benchmarks.two_hosts_network import two_hosts, why_not

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "10gbit": "two hosts, 10 Gbit/s",
    "memory": "one host, shared memory",
    "ranks": "one host, shared memory, compressed between ranks",
}
DENSE, AGAIN = "dense", "dense again"
CODECS = ("one_bit", "int8", "top_k by tensor", "top_k by chunk")
MOST_OF_BETTER = 1.05
SETTLED = 8  # steps after which auto has made up its mind


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


def on_a_rank(out: str, rounds: int, between: str) -> None:
    """What each rank runs; rank 0 writes."""
    import torch
    import torch.distributed as dist

    import pycollective as pc
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
        common = {"between": between, "when": when}
        if codec == "one_bit":
            return pct.one_bit_hook, pct.OneBitState(parameters.items(), **common)
        if codec == "int8":
            return pct.int8_hook, pct.Int8State(parameters.items(), **common)
        by = codec.split()[-1]
        return pct.top_k_hook, pct.TopKState(parameters.items(), density=0.01, by=by, **common)

    def restore() -> None:
        for bucket, piece in zip(buckets, pieces, strict=True):
            bucket.whole.copy_(piece)

    def slowest(number: float) -> float:
        tensor = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor.item())

    timed = seconds_of(1, dist.barrier, slowest)

    def turn(call: Call) -> tuple[float, ...]:
        restore()
        return timed(call)

    codecs = {}
    for codec in CODECS:
        (hook, always), (_, auto) = state(codec, "always"), state(codec, "auto")
        calls = {
            DENSE: step_of(pct.all_reduce_hook, None, buckets),
            AGAIN: step_of(pct.all_reduce_hook, None, buckets),
            "always": step_of(hook, always, buckets),
            "auto": step_of(hook, auto, buckets),
        }
        for _ in range(SETTLED):
            restore()
            calls["auto"]()
        measured = take_turns(calls, rounds, turn)
        codecs[codec] = {
            "seconds": {name: seconds for name, (seconds,) in measured.items()},
            "auto": {key: auto.stats()[key] for key in ("way", "why")},
        }
        for each in (auto, always):
            each.close()
    record = {
        "versions": {"torch": torch.__version__, "pycollective": pc.__version__},
        "codecs": codecs,
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(record))
    dist.destroy_process_group()


def measure(place: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Run two ranks there; what rank 0 wrote."""
    out = folder / f"auto-{os.getpid()}.json"
    between = "ranks" if place == "ranks" else "hosts"
    options = ("--on-a-rank", str(out), "--rounds", str(rounds), "--between", between)
    program = ("-m", "benchmarks.compression_auto", *options)
    if place == "10gbit":
        with two_hosts(place) as hosts:
            jobs = [
                subprocess.Popen(
                    host.torchrun(Path(sys.executable), 1, node, *program),
                    env=host.environment(),
                    cwd=ROOT,
                )
                for node, host in enumerate(hosts)
            ]
            codes = [job.wait(timeout=3000) for job in jobs]
    else:
        command = (sys.executable, "-m", "pycollective", "run", "-n", "2", *program)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        codes = [subprocess.run(command, cwd=ROOT, env=environment, timeout=3000).returncode]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    result: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return result


def report(place: str, record: dict[str, Any]) -> None:
    """Print the table, and what is met."""
    print(f"{PLACES[place]}: milliseconds a step's exchange")
    for codec, found in record["codecs"].items():
        dense, again, always, auto = (
            1e3 * found["seconds"][way] for way in (DENSE, AGAIN, "always", "auto")
        )
        ratio = auto / min(always, dense)
        print(
            f"  {codec:16} always {always:7.1f}  dense {dense:7.1f}  again {again:7.1f}  "
            f"auto {auto:7.1f}  "
            f"{ratio:.3f} of the better: {'met' if ratio <= MOST_OF_BETTER else 'MISSED'}  "
            f"({found['auto']['way']}: {found['auto']['why']})"
        )


def main() -> None:
    """Measure, print the tables, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--on-a-rank", help=argparse.SUPPRESS)
    parser.add_argument("--between", default="hosts", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_a_rank:
        on_a_rank(arguments.on_a_rank, arguments.rounds, arguments.between)
        return
    from pycollective.bench.machine import describe_machine

    large_gradients.ensure()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": describe_machine(), "places": {}}
    for place in arguments.places.split(","):
        problem = why_not() if place == "10gbit" else ""
        if problem:
            print(f"{PLACES[place]}: cannot be made here: {problem}")
            continue
        found = measure(place, arguments.rounds, arguments.out)
        record["places"][PLACES[place]] = found
        report(place, found)
    (arguments.out / "compression_auto.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
