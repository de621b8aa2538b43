"""The device path: how calls on GPUs' arrays go, as a communicator's ranks agree (gpu.md).

Each rank makes a mailbox in its GPU's memory, and all tell each other where it is, or why there is
none. Each maps all others', and all tell each other whether they could. If all could, kernels over
peer memory carry out the calls; else these go by way of the host. The ranks talk over the
communicator's own shared memory, which nobody else can reach.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pycollective import _core
from pycollective.agree import MOST_TEXT, Bytes, agree, let_all_hear
from pycollective.config import ENV_DEVICE_PATH
from pycollective.errors import ConfigurationError

PEER, HOST = "peer", "host"
_CHOICES = ("auto", PEER, HOST)


class DevicePath(NamedTuple):
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


def wanted_path() -> str:
    """What PYCOLLECTIVE_DEVICE_PATH says: "peer" or "host" alone, or "auto"."""
    choice = os.environ.get(ENV_DEVICE_PATH) or "auto"
    if choice not in _CHOICES:
        raise ConfigurationError(f"{ENV_DEVICE_PATH}={choice}: it is 'auto', 'peer' or 'host'")
    return choice


def nvrtc_folders() -> list[str]:
    """Where pip's wheels put NVRTC, the compiler of CUDA kernels; that of CUDA 13 before 12."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:  # something called nvidia was made by hand
        return []
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    return [
        str(folder)
        for wheel in ("cu13/lib", "cuda_nvrtc/lib")
        for root in roots
        if (folder := Path(root) / wheel).is_dir()
    ]


def prepare(device: str | int) -> None:
    """Have the kernels for this GPU compiled, where NVRTC has to, before other ranks wait.

    What is wrong with it the ranks are told by `join`, so that nobody waits for who is not coming.

    Args:
        device: as `init` takes it; for ``"cuda"`` all kinds of GPU that this process has.
    """
    with suppress(ConfigurationError):
        number = None if isinstance(device, str) and device == "cuda" else number_of(device, 0)
        if wanted_path() != HOST:
            _core.prepare_kernels(nvrtc_folders(), number)


def join(
    communicator: _core.Communicator,
    device: str | int,
    local_rank: int,
    hosts: int,
) -> DevicePath:
    """Agree on the device path of calls on arrays of GPU `device`; every rank gives its own.

    Args:
        communicator: of all ranks, which has made no call on a GPU's array yet.
        device: this rank's GPU, as `init` takes it.
        local_rank: this rank among those of its host.
        hosts: on which the communicator's ranks are.

    Raises:
        ConfigurationError: on every rank: what some rank was given cannot be, or
            PYCOLLECTIVE_DEVICE_PATH asks for "peer", and that cannot be.
    """
    mailbox = group = None

    def gather(row: Bytes) -> Bytes:
        rows = np.empty((communicator.size, row.size), np.uint8)
        communicator.all_gather(rows, row)
        return rows

    def offer() -> _Offer:
        nonlocal mailbox
        number, choice = number_of(device, local_rank), wanted_path()
        if choice == HOST or hosts > 1:
            return _Offer(number, choice)
        try:
            mailbox = _core.DeviceMailbox(number, nvrtc_folders())
            return _Offer(number, choice, card=mailbox.export(communicator).hex())
        except ConfigurationError as error:
            return _Offer(number, choice, problem=str(error)[:MOST_TEXT])

    def map_all() -> str:
        nonlocal group
        assert mailbox is not None  # else there was a reason
        try:
            cards = [bytes.fromhex(each.card) for each in offers]
            group = _core.map_devices(communicator, mailbox, cards)
        except Exception as error:
            return (str(error) or type(error).__name__)[:MOST_TEXT]
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
                _core.use_devices(communicator, group)
                return DevicePath(number, PEER, "each GPU maps all others' mailboxes")
            kept = _first(agree(gather, "use_device", unmap_all))
        if mailbox is not None and not kept:
            mailbox.take_back(communicator)
    finally:
        # What they hold is for others, also while somebody keeps the error, and with it the frame.
        mailbox = group = None
    if offers[0].choice == PEER:
        let_all_hear(gather)
        raise ConfigurationError(f"{ENV_DEVICE_PATH}=peer cannot be: {reason}")
    return DevicePath(number, HOST, reason)


class _Offer(NamedTuple):
    """What a rank tells the others."""

    number: int  # of its GPU
    choice: str
    problem: str = ""  # for which kernels cannot
    card: str = ""  # of its mailbox, hexadecimal


def why_not(every: Sequence[_Offer]) -> str:
    """Why kernels cannot wait for each other's; empty where they can. The same on all ranks."""
    choice = every[0].choice
    for rank, each in enumerate(every):
        if each.choice != choice:
            return f"{ENV_DEVICE_PATH} is {choice!r} on rank 0 and {each.choice!r} on rank {rank}"
    if choice == HOST:
        return f"{ENV_DEVICE_PATH}=host"
    if reason := _first([each.problem for each in every]):
        return reason
    first: dict[bytes, int] = {}
    for rank, each in enumerate(every):
        other = first.setdefault(_core.gpu_of(bytes.fromhex(each.card)), rank)
        if other != rank and choice != PEER:
            return (
                f"ranks {other} and {rank} share a GPU, where a kernel that waits may keep the one "
                "that it waits for from running"
            )
    return ""


def _first(problems: Sequence[str]) -> str:
    """The first rank's that has one."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
