"""Which way calls on GPUs' arrays go, as the ranks of a communicator agree: docs/gpu.md.

Each rank makes a mailbox in its GPU's memory, and all tell each other where it is, or why there is
none; each maps all others', and all tell each other whether they could. Then all calls go that way,
or, as before, by way of the host. Two all-gathers of some hundred bytes, over the communicator's
own shared memory, which nobody else can reach.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pycollective import _core, nvrtc
from pycollective.environment import ENV_CUDA_WAY
from pycollective.errors import ConfigurationError

PEER, HOST = "peer", "host"
_TEXT = 384  # bytes of a reason that travel
_CARD = 128


class Way(NamedTuple):
    """How calls on arrays of `device` go: by kernels over "peer" memory, or by the "host"."""

    device: int
    name: str
    reason: str


def number_of(device: str | int, local_rank: int) -> int:
    """The GPU that is meant, as CUDA counts: ``"cuda"`` is one for each rank of a host, in turn.

    Raises:
        ConfigurationError: there is no such GPU, or no CUDA.
    """
    name = f"cuda:{device}" if isinstance(device, int) else device
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdigit() or device == "cuda"):
        raise ConfigurationError(
            f"device {device!r} is not here; give 'cuda', 'cuda:0' and so on, or a GPU's number"
        )
    count = _core.device_count()
    if not number:
        return local_rank % count
    if int(number) >= count:
        raise ConfigurationError(f"device {device!r}: this process has {count} GPU(s)")
    return int(number)


def wished_way() -> str:
    """What PYCOLLECTIVE_CUDA_WAY says: "peer" or "host" alone, or "auto"."""
    wish = os.environ.get(ENV_CUDA_WAY) or "auto"
    if wish not in ("auto", PEER, HOST):
        raise ConfigurationError(f"{ENV_CUDA_WAY}={wish}: it is 'auto', 'peer' or 'host'")
    return wish


def join(communicator: _core.Communicator, device: int, hosts: int, programs: object) -> Way:
    """Agree on a way for calls on arrays of GPU `device`; every rank gives its own.

    Args:
        communicator: of all ranks, which has made no call on a GPU's array yet.
        device: this rank's GPU, as CUDA counts.
        hosts: on which its ranks are.
        programs: pycollective.programs.Programs of this rank.

    Raises:
        ConfigurationError: PYCOLLECTIVE_CUDA_WAY asks for "peer", and that cannot be.
    """
    wish = wished_way()
    mailbox, problem = None, ""
    if wish == HOST:
        problem = f"{ENV_CUDA_WAY}=host"
    elif hosts > 1:
        problem = f"the ranks are on {hosts} hosts"
    else:
        try:
            mailbox = _core.DeviceMailbox(device, nvrtc.folders())
        except (RuntimeError, ConfigurationError) as error:
            problem = str(error)
    cards, problems = _exchange(communicator, mailbox.card if mailbox else b"", problem)
    reason = why_not(cards, problems, forced=wish == PEER)
    if not reason:
        assert mailbox is not None  # else there was a reason
        group, problem = None, ""
        try:
            group = _core.map_devices(communicator, mailbox, cards)
        except (RuntimeError, ConfigurationError) as error:
            problem = str(error)
        reason = _first(_exchange(communicator, b"", problem)[1])
        if not reason:
            assert group is not None
            _core.use_devices(communicator, group, programs)
            return Way(device, PEER, "each GPU maps all others' mailboxes")
    if wish == PEER:
        raise ConfigurationError(f"{ENV_CUDA_WAY}=peer cannot be: {reason}")
    return Way(device, HOST, reason)


def why_not(cards: Sequence[bytes], problems: Sequence[str], *, forced: bool) -> str:
    """Why kernels cannot wait for each other's; empty where they can. The same on all ranks."""
    if reason := _first(problems):
        return reason
    first: dict[bytes, int] = {}
    for rank, card in enumerate(cards):
        other = first.setdefault(_core.gpu_of(card), rank)
        if other != rank and not forced:
            return (
                f"ranks {other} and {rank} share a GPU, where a kernel that waits may keep the one "
                "that it waits for from running"
            )
    return ""


def _first(problems: Sequence[str]) -> str:
    """The first rank's that has one."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")


def _exchange(
    communicator: _core.Communicator, card: bytes, problem: str
) -> tuple[list[bytes], list[str]]:
    """Every rank's card and problem."""
    mine = np.zeros(_TEXT + _CARD, np.uint8)
    text = problem.encode()[:_TEXT]
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    mine[_TEXT : _TEXT + len(card)] = np.frombuffer(card, np.uint8)
    every = np.empty((communicator.size, mine.size), np.uint8)
    communicator.all_gather(every, mine)
    cards = [row[_TEXT:].tobytes() for row in every]
    return cards, [row[:_TEXT].tobytes().rstrip(b"\0").decode(errors="ignore") for row in every]
