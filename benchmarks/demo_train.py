"""What one rank of the demo runs: the same training, once for every configuration it is given.

All that could vary is fixed: seeds, the order of the images, each rank's part of a batch, one
thread a rank, deterministic kernels. What is left is the communication.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.digits import SEED, Digits, Network
from benchmarks.leaf_training import train, train_by_ddp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAVES = 12  # micro-batches of a step, where ranks share them
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Configuration:
    """One training run.

    Attributes:
        backend: of torch.distributed, "gloo" or "pycollective".
        gradients: dtype of the parameters and so of what DDP sends, a key of `DTYPES`.
        bucket_cap_mb: DDP's, in MiB; the first bucket's size too, because it is given.
        repeat: number of the repeat, from 1; each runs in processes of its own.
        codec: "int8", which takes each rank for a host; "" for dense gradients.
    """

    backend: str
    gradients: str
    bucket_cap_mb: float
    repeat: int
    codec: str = ""

    @property
    def label(self) -> str:
        """The backend, or the codec on top of it."""
        return "8-bit" if self.codec else self.backend


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Attributes:
        ranks: processes, all on this host.
        steps: optimizer steps of a run.
        rank_batch: images a rank and step.
        pairs: how often a backward with and one without synchronisation are timed.
        timeout: seconds that a rank waits for the others before it fails.
    """

    ranks: int = 4
    steps: int = 44
    rank_batch: int = 32
    pairs: int = 5
    timeout: float = 60.0


@dataclass(frozen=True)
class Result:
    """What came of a run. Times are seconds.

    Attributes:
        buckets: how many DDP sends a step, after it has rebuilt them in the first one.
        losses: of each step, the mean over the ranks.
        step_times: of each step, the slowest rank's.
        exposed: communication that backward does not hide: the median time of a forward and
            backward with synchronisation less that without (`no_sync`), slowest rank, alternating.
        accuracy: share of the test images that are named rightly at the end.
        digests: of each rank, SHA-256 over the bytes of its final weights.
        sent: of a compressed run, bytes that rank 0 sent, and what they would have been in fp32.
    """

    configuration: Configuration
    buckets: int
    losses: list[float]
    step_times: list[float]
    exposed: float
    accuracy: float
    digests: list[str]
    sent: tuple[int, int] | None = None

    @property
    def step_time(self) -> float:
        """Median of a step, without the first tenth, in which buffers and buckets are made."""
        return statistics.median(self.step_times[len(self.step_times) // 10 :])

    @classmethod
    def from_json(cls, data: dict) -> Result:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**data, "configuration": Configuration(**data["configuration"])})


class Trainer:
    """A replica under DDP, with float32 master weights whatever the gradients' dtype."""

    def __init__(self, configuration: Configuration) -> None:
        torch.manual_seed(SEED)
        self.network = Network()
        # The optimizer works on these; the network's own parameters are their copy, rounded to
        # its dtype. Training in bf16 without them would lose most updates to rounding.
        self.masters = [p.detach().clone() for p in self.network.parameters()]
        self.optimizer = torch.optim.Adam(self.masters, lr=3e-3)
        self.network.to(DTYPES[configuration.gradients])
        self.replica = DistributedDataParallel(
            self.network, bucket_cap_mb=configuration.bucket_cap_mb
        )
        self.state: Any = None
        if configuration.codec:
            from pycollective.torch import Int8State, int8_hook

            self.state = Int8State(self.replica, between="ranks")
            self.replica.register_comm_hook(self.state, int8_hook)
        elif configuration.backend == "pycollective":
            from pycollective.torch import all_reduce_hook

            # Without a hook DDP multiplies each gradient by 1/ranks in its own dtype before the
            # backend sees it: one rounding too many unless ranks is a power of two.
            self.replica.register_comm_hook(None, all_reduce_hook)

    def forward_backward(self, images: Tensor, labels: Tensor) -> float:
        """Leave the gradients in the parameters; return this rank's loss."""
        loss = F.cross_entropy(self.replica(images), labels)
        loss.backward()
        return loss.item()

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Train on one batch; return this rank's loss."""
        loss = self.forward_backward(images, labels)
        parameters = list(self.network.parameters())
        for master, parameter in zip(self.masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, parameters, strict=True):
                parameter.copy_(master)
        self.replica.zero_grad()
        return loss

    def buckets(self) -> int:
        """How many buckets DDP uses: those it rebuilt, once it has."""
        data = self.replica._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return len(sizes.split(","))

    def accuracy(self, digits: Digits) -> float:
        """Share of the test images that are named rightly."""
        with torch.no_grad():
            named = self.network(digits.test_images).argmax(dim=1)
        return (named == digits.test_labels).double().mean().item()

    def digest(self) -> str:
        """SHA-256 of the master weights' bytes."""
        weights = hashlib.sha256()
        for master in self.masters:
            weights.update(master.numpy().tobytes())
        return weights.hexdigest()


def run_rank(
    rank: int, settings: Settings, configurations: list[Configuration], folder: Path
) -> None:
    """Run all configurations on this rank; rank 0 adds a line of JSON a run to results.jsonl.

    `folder` is shared by the ranks and holds nothing of another launch.
    """
    with _on_a_rank(rank):
        for number, configuration in enumerate(configurations):
            result = _run(rank, settings, configuration, folder / f"store-{number}")
            if rank == 0:
                with (folder / "results.jsonl").open("a") as results:
                    results.write(json.dumps(dataclasses.asdict(result)) + "\n")


def run_counts(rank: int, settings: Settings, folder: Path) -> None:
    """Train on 1, 3 and all ranks, by LeafSync and by torch over Gloo; rank 0 writes counts.json.

    It has the digests of the ranks' final weights, by backend and the number of ranks.
    """
    found: dict[str, dict[int, list[str]]] = {}
    with _on_a_rank(rank):
        for backend, way in (("pycollective", train), ("gloo", train_by_ddp)):
            _join(backend, rank, settings, folder / f"store-{backend}")
            for count in (1, 3, settings.ranks):
                group = dist.new_group(range(count))
                if rank >= count:
                    continue
                digest = way("digits", "fp32", LEAVES, settings.steps, group).digest
                digests: list = [None] * count
                dist.all_gather_object(digests, digest, group)
                found.setdefault(backend, {})[count] = digests
            dist.destroy_process_group()
    if rank == 0:
        (folder / "counts.json").write_text(json.dumps(found))


@contextlib.contextmanager
def _on_a_rank(rank: int) -> Iterator[None]:
    """Fix all that could vary, and say what fails."""
    # The demo ends its ranks itself; this is for when it was killed and cannot.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except Exception:
        # Said here and at once: the launcher hears of one failed rank, which may have failed only
        # because this one did.
        print(f"\nrank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        sys.exit(1)


def _join(backend: str, rank: int, settings: Settings, store: Path) -> None:
    if backend == "pycollective":
        import pycollective.torch  # noqa: F401  (registers the backend)
    dist.init_process_group(
        backend,
        store=dist.FileStore(os.fspath(store), settings.ranks),
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.timeout),
    )


def _run(rank: int, settings: Settings, configuration: Configuration, store: Path) -> Result:
    """Train in a process group of this run's own."""
    _join(configuration.backend, rank, settings, store)
    result = _train(rank, settings, configuration)
    dist.destroy_process_group()
    return result


def _train(rank: int, settings: Settings, configuration: Configuration) -> Result:
    digits = Digits.load()
    trainer = Trainer(configuration)
    losses, times = [], []
    for step in range(settings.steps):
        images, labels = digits.batch(step, rank, settings.ranks, settings.rank_batch)
        started = time.perf_counter()
        losses.append(trainer.step(images, labels))
        times.append(time.perf_counter() - started)
    digest, accuracy = trainer.digest(), trainer.accuracy(digits)
    stats = trainer.state.stats() if trainer.state is not None else None

    per_rank: list = [None] * settings.ranks
    dist.all_gather_object(per_rank, (losses, times, digest))
    rank_losses, rank_times, digests = zip(*per_rank, strict=True)
    return Result(
        configuration,
        buckets=trainer.buckets(),
        losses=[math.fsum(step) / settings.ranks for step in zip(*rank_losses, strict=True)],
        step_times=[max(step) for step in zip(*rank_times, strict=True)],
        exposed=_exposed_communication(trainer, digits, rank, settings),
        accuracy=accuracy,
        digests=list(digests),
        sent=(stats["payload_bytes"], stats["dense_bytes"]) if stats else None,
    )


def _exposed_communication(
    trainer: Trainer, digits: Digits, rank: int, settings: Settings
) -> float:
    """Seconds a step, by `Result.exposed`; the weights stay as they are."""
    images, labels = digits.batch(0, rank, settings.ranks, settings.rank_batch)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(settings.pairs):
        for synchronised in (True, False):
            dist.barrier()
            started = time.perf_counter()
            with contextlib.nullcontext() if synchronised else trainer.replica.no_sync():
                trainer.forward_backward(images, labels)
            times[synchronised].append(time.perf_counter() - started)
            trainer.replica.zero_grad()
    per_rank: list = [None] * settings.ranks
    dist.all_gather_object(per_rank, times)
    with_sync, without = (
        statistics.median(max(pair) for pair in zip(*(one[kind] for one in per_rank), strict=True))
        for kind in (True, False)
    )
    return with_sync - without
