"""Two ranks on one GPU, or another number, over NCCL.

NCCL refuses ranks of one host that share a GPU. So each names a host of its own (NCCL_HOSTID), and
their messages go over sockets of this machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
TIMEOUT = 110.0  # seconds, fewer than those of the step (steps.py)
_OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_DEBUG": "WARN"}
_WIDTH = 200  # of what NCCL says


def of_two_ranks(
    module: str,
    on_a_rank: Callable[[int, torch.device], dict[str, Any]],
    usual: int,
    ranks: int = RANKS,
) -> dict[str, Any] | None:
    """Run a program's ranks on one GPU; its arguments are a number and --cpu.

    Args:
        module: the program, whose main calls this, also on a rank.
        on_a_rank: takes the number, and the GPU, or the CPU, where all goes over Gloo. It finds
            a default process group: NCCL for the GPU, Gloo for the CPU.
        usual: the number where none is given.
        ranks: how many.

    Returns:
        What rank 0's call returned, or {"refused": words} if NCCL takes no such ranks. None on a
        rank.

    Raises:
        SystemExit: a rank failed.
    """
    if "--rank" in sys.argv:
        number, device, port, size = sys.argv[2:6]
        store = dist.TCPStore(
            *("127.0.0.1", int(port), int(size)),
            is_master=os.environ["RANK"] == "0",
            wait_for_workers=False,
        )
        measured = _on_a_rank(on_a_rank, int(number), torch.device(device), store, int(size))
        if os.environ["RANK"] == "0":
            print(json.dumps(measured), flush=True)
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    numbers = [each for each in sys.argv[1:] if each != "--cpu"] or [str(usual)]
    device = "cpu" if "--cpu" in sys.argv else "cuda:0"
    command = [sys.executable, "-m", module, "--rank", numbers[0], device, port, str(ranks)]
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * ranks)]
        processes = [
            subprocess.Popen(
                command,
                env={
                    **os.environ,
                    **_OVER_SOCKETS,
                    "RANK": str(rank),
                    "NCCL_HOSTID": f"rank{rank}",
                },
                stdout=outputs[2 * rank],
                stderr=outputs[2 * rank + 1],
            )
            for rank in range(ranks)
        ]
        end = time.monotonic() + TIMEOUT
        for each in processes:
            with suppress(subprocess.TimeoutExpired):
                each.wait(max(0.0, end - time.monotonic()))
        for each in processes:
            each.kill()
            each.wait()
        for output in outputs:
            output.seek(0)
        written = [output.read() for output in outputs]
    said = list(zip(written[::2], written[1::2], strict=True))
    if any(each.returncode for each in processes):
        for out, err in said:
            print(out, err, file=sys.stderr)
        sys.exit(1)
    print(said[0][1], file=sys.stderr)
    found: dict[str, Any] = json.loads(said[0][0].strip().splitlines()[-1])
    return found


def _on_a_rank(
    on_a_rank: Any, number: int, device: torch.device, store: dist.Store, ranks: int
) -> dict[str, Any]:
    """Call it with a default process group."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=60)
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        dist.all_reduce(torch.zeros(1, device=device))  # in which NCCL connects, or refuses
    except dist.DistBackendError as error:
        return {"refused": str(error).strip().splitlines()[-1][:_WIDTH]}
    found: dict[str, Any] = on_a_rank(number, device)
    dist.destroy_process_group()
    return found
