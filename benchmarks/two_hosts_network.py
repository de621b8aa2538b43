"""Two hosts on one machine: network namespaces joined by a link of a given rate.

A namespace has its own interfaces, so ranks in different ones share no memory and reach each other
through the link alone. Needs root (or CAP_NET_ADMIN) and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.231.77.1", "10.231.77.2")
_PORT = 29511


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
