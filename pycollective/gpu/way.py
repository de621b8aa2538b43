"""Which way calls on GPUs' arrays go, as the ranks of a communicator agree: docs/gpu.md.

Each rank makes a mailbox in its GPU's memory, and all tell each other where it is, or why there is
none; each maps all others', and all tell each other whether they could. Then all calls go that way,
or, as before, by way of the host. They tell it over the communicator's own shared memory, which
nobody else can reach.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.agree import agree, let_all_hear
from pycollective.config import ENV_CUDA_WAY
from pycollective.errors import ConfigurationError
from pycollective.gpu import nvrtc

PEER, HOST = "peer", "host"
_WISHES = ("auto", PEER, HOST)


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
    name = device if isinstance(device, str) else ""
    if not isinstance(device, str):
        with suppress(TypeError):
            name = f"cuda:{operator.index(device)}"
    kind, _, number = name.partition(":")
    if kind != "cuda" or not ((number.isascii() and number.isdigit()) or name == "cuda"):
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
    if wish not in _WISHES:
        raise ConfigurationError(f"{ENV_CUDA_WAY}={wish}: it is 'auto', 'peer' or 'host'")
    return wish


def prepare(device: str | int) -> None:
    """Have the kernels for this GPU compiled, where NVRTC has to, before other ranks wait.

    What is wrong with it the ranks are told by `join`, so that nobody waits for who is not coming.

    Args:
        device: as `init` takes it; for ``"cuda"`` all kinds of GPU that this process has.
    """
    with suppress(ConfigurationError):
        number = None if isinstance(device, str) and device == "cuda" else number_of(device, 0)
        if wished_way() != HOST:
            _core.prepare_kernels(nvrtc.folders(), number)


def join(
    communicator: _core.Communicator,
    device: str | int,
    local_rank: int,
    hosts: int,
    programs: object,
) -> Way:
    """Agree on a way for calls on arrays of GPU `device`; every rank gives its own.

    Args:
        communicator: of all ranks, which has made no call on a GPU's array yet.
        device: this rank's GPU, as `init` takes it.
        local_rank: this rank among those of its host.
        hosts: on which the communicator's ranks are.
        programs: pycollective.planning.programs.Programs of this rank.

    Raises:
        ConfigurationError: on every rank: what some rank was given cannot be, or
            PYCOLLECTIVE_CUDA_WAY asks for "peer", and that cannot be.
    """
    mailbox = group = None

    def gather(row: NDArray[np.uint8]) -> NDArray[np.uint8]:
        rows = np.empty((communicator.size, row.size), np.uint8)
        communicator.all_gather(rows, row)
        return rows

    def offer() -> _Offer:
        nonlocal mailbox
        number, wish = number_of(device, local_rank), wished_way()
        if wish == HOST or hosts > 1:
            return _Offer(number, wish)
        try:
            mailbox = _core.DeviceMailbox(number, nvrtc.folders())
            return _Offer(number, wish, card=mailbox.lend(communicator).hex())
        except ConfigurationError as error:
            return _Offer(number, wish, problem=str(error))

    def map_all() -> str:
        nonlocal group
        assert mailbox is not None  # else there was a reason
        try:
            cards = [bytes.fromhex(each.card) for each in offers]
            group = _core.map_devices(communicator, mailbox, cards)
        except ConfigurationError as error:
            return str(error)
        return ""

    def unmap_all() -> str:
        if group is not None and not group.unmap():
            return "the driver does not unmap a peer's mailbox"
        return ""

    try:
        try:
            offers = [_Offer(*each) for each in agree(gather, "use_device", offer)]
        except ConfigurationError:
            if mailbox is not None:
                mailbox.take_back(communicator)
            raise
        number = offers[communicator.rank].number
        reason = f"the ranks are on {hosts} hosts" if hosts > 1 else why_not(offers)
        kept = ""  # why mailboxes stay until the communicator is closed
        if not reason:
            reason = _first(agree(gather, "use_device", map_all))
            if not reason:
                assert group is not None
                _core.use_devices(communicator, group, programs)
                return Way(number, PEER, "each GPU maps all others' mailboxes")
            kept = _first(agree(gather, "use_device", unmap_all))
        if mailbox is not None and not kept:
            mailbox.take_back(communicator)
    finally:
        # What they hold is for others, also while somebody keeps the error, and with it the frame.
        mailbox = group = None
    if offers[0].wish == PEER:
        let_all_hear(gather)
        raise ConfigurationError(f"{ENV_CUDA_WAY}=peer cannot be: {reason}")
    return Way(number, HOST, reason)


class _Offer(NamedTuple):
    """What a rank tells the others."""

    number: int  # of its GPU
    wish: str
    problem: str = ""  # for which kernels cannot
    card: str = ""  # of its mailbox, hexadecimal


def why_not(every: Sequence[_Offer]) -> str:
    """Why kernels cannot wait for each other's; empty where they can. The same on all ranks."""
    wish = every[0].wish
    for rank, each in enumerate(every):
        if each.wish != wish:
            return f"{ENV_CUDA_WAY} is {wish!r} on rank 0 and {each.wish!r} on rank {rank}"
    if wish == HOST:
        return f"{ENV_CUDA_WAY}=host"
    if reason := _first([each.problem for each in every]):
        return reason
    first: dict[bytes, int] = {}
    for rank, each in enumerate(every):
        other = first.setdefault(_core.gpu_of(bytes.fromhex(each.card)), rank)
        if other != rank and wish != PEER:
            return (
                f"ranks {other} and {rank} share a GPU, where a kernel that waits may keep the one "
                "that it waits for from running"
            )
    return ""


def _first(problems: Sequence[str]) -> str:
    """The first rank's that has one."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
