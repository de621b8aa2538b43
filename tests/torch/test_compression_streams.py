"""Compression on a device waits wherever it must: averages are right though streams work late."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pycollective.compression.feedback import ErrorFeedback
from tests.torch.compressed import HOOKS, Bucket, group_of, ranks_of, state_of
from tests.torch.streams import LateDevice, on_late_device
from tests.torch.test_compression_devices import (
    OPTIONS,
    Model,
    gradients,
    held,
    same_tensors,
)

ranks = ranks_of(__name__, 2)


def late(comm, codec, topology, hooked, seed):
    """What differs between steps on CPUs and on a device that works late."""
    device, group, found = LateDevice(seed), group_of(comm, "gloo"), []
    model, concluded = Model(), []
    cpu = state_of(model, codec, topology, group, **OPTIONS)
    late = on_late_device(device, model, codec, topology, group, **OPTIONS)
    conclude = ErrorFeedback._conclude

    def noted(self, step):
        if self is late._feedback:
            concluded.append(device.current)
        conclude(self, step)

    # A gradient's memory is the same in each step.
    memory = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    averages: list[dict[str, torch.Tensor]] = []
    with device.in_use(), mock.patch.object(ErrorFeedback, "_conclude", noted):
        for step in range(3):
            for name, each in one_not_finite(comm.rank, step).items():
                memory[name].copy_(each)
            if hooked:
                bucket = Bucket(model, memory)
                HOOKS[codec](late, bucket).wait()
                averages.append({"": bucket.buffer().clone()})
            else:
                with late.step():
                    late.all_reduce({"w": memory["w"]})
                    late.all_reduce({name: memory[name] for name in ("b", "z", "v")})
                averages.append({name: each.clone() for name, each in memory.items()})
            if step != 1:  # else the state is the first to wait
                device.current.synchronize()
        stats = late.stats()
    device.synchronize()
    for step, average in enumerate(averages):
        mine = one_not_finite(comm.rank, step)
        if hooked:
            bucket = Bucket(model, mine)
            HOOKS[codec](cpu, bucket).wait()
            mine = {"": bucket.buffer()}
        else:
            with cpu.step():
                cpu.all_reduce({"w": mine["w"]})
                cpu.all_reduce({name: mine[name] for name in ("b", "z", "v")})
        if not same_tensors(mine, average):
            found.append(f"averages of step {step}")
    if not same_tensors(held(cpu), held(late)):
        found.append("residuals")
    wants = cpu.stats()
    if stats["steps"] != 2 or wants["steps_given_up"] != stats["steps_given_up"]:
        found.append(f"steps: {stats}")
    if concluded != device.streams[1:] * 3:
        found.append("the stream on which steps end")
    with device.in_use():
        late.close()
    cpu.close()
    return found


def one_not_finite(rank, step):
    """Gradients, in step 1 with an infinity on one rank."""
    found = gradients(rank, step, torch.float32)
    if (rank, step) == (1, 1):
        found["v"][3] = torch.inf
    return found


@pytest.mark.parametrize(
    ("codec", "topology", "hooked", "seed"),
    [
        ("one_bit", "2x1", False, None),
        ("int8", "2x1", True, 1),
        ("top_k", "2x1", False, 1),
        *(
            pytest.param(codec, "2x1", hooked, seed, marks=pytest.mark.storm)
            for codec in ("one_bit", "int8", "top_k")
            for hooked in (False, True)
            for seed in range(2, 8)
        ),
    ],
)
def test_averages_are_those_of_cpus_though_streams_work_late(ranks, codec, topology, hooked, seed):
    assert ranks(late, codec, topology, hooked, seed) == [[]] * 2
