"""FSDP2 over Gloo with compressed gradients: what a state gives for the same tensors, and steps."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # so that forks need not import it for fully_shard
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pycollective import ConfigurationError
from pycollective.torch import (
    CompressedReduceScatter,
    compressed_reduce_scatter,
    fsdp_parameters,
)
from tests.torch.compressed import digest_of, group_of, ranks_of, state_of
from tests.torch.groups import Gradient
from tests.torch.on_devices import as_on_a_device

ranks = ranks_of(__name__, 4)

OPTIONS = {"chunk": 64, "compress": lambda name, shape: name != ""}


class Layer(torch.nn.Module):
    """Its gradients are what it is given: rows that four ranks cannot share evenly, and few."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(21, 30))
        self.b = torch.nn.Parameter(torch.zeros(3))

    def forward(self, gradients):
        return sum(Gradient.apply(p, gradients[n]) for n, p in self.named_parameters())


class Model(torch.nn.Module):
    """A sharded layer, and what is left for the model itself."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()
        self.scale = torch.nn.Parameter(torch.zeros(5))

    def forward(self, gradients):
        return self.layer(gradients) + Gradient.apply(self.scale, gradients["scale"])


class Noted(CompressedReduceScatter):
    """Keeps what torch wants reduced, by module."""

    def __init__(self, state, key, seen):
        super().__init__(state, key)
        self._seen = seen

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self._seen.append((self._key, input_tensor.clone()))
        super().__call__(output_tensor, input_tensor, group, op, async_op)


class Twins(torch.nn.Module):
    """Two layers, which are sharded as one."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Layer(), Layer()

    def forward(self, gradients):
        return self.one(gradients) + self.two(gradients)


def sharded(group, make, codec, seen, kind=Model):
    model = kind()
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model.layer if kind is Model else [model.one, model.two], mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = make(fsdp_parameters(model), codec, "2x2", group, **OPTIONS)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(Noted(state, name, seen))
    return model, state


def gradients(rank, step):
    random = torch.Generator().manual_seed(10 * step + rank)
    shapes = {name: p.shape for name, p in [*Layer().named_parameters(), ("scale", torch.zeros(5))]}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def trained(comm, on_device, codec, kind):
    """Whether three steps give what a state on CPUs gives for the same tensors; its steps."""
    group, seen, same = group_of(comm, "gloo"), [], []
    make = as_on_a_device if on_device else state_of
    model, state = sharded(group, make, codec, seen, kind)
    of_names = {"layer": ["layer"], "": [""]} if kind is Model else {"two": ["one", "two"]}
    direct = state_of(fsdp_parameters(model), codec, "2x2", group, **OPTIONS)
    for step in range(3):
        mine = gradients(comm.rank, step)
        if step == 1 and comm.rank == 2:
            mine["w"][4, 4] = torch.nan
        seen.clear()
        model.zero_grad()
        with state.step():
            model(mine).backward()
        wants = {}
        with direct.step():
            for name, x in seen:
                wants[name] = torch.empty(x.numel() // 4)
                compressed_reduce_scatter(wants[name], x, direct, name)
        for name, those in of_names.items():
            modules = [model.get_submodule(each) for each in those]
            parameters = [p for module in modules for p in module.parameters(recurse=False)]
            parts = [p.grad.to_local() for p in parameters]
            found = torch.cat([each.reshape(-1) for each in parts])
            # A rank's shards lie one behind the other, with padding behind each.
            rows = [-(-p.shape[0] // 4) * p.shape[1:].numel() for p in parameters]
            cut = zip(wants[name].split(rows), parts, strict=True)
            want = torch.cat([row[: part.numel()] for row, part in cut])
            same.append(digest_of([found]) == digest_of([want]))
    counts = [each.stats()["steps"] for each in (state, direct)]
    with pytest.raises(ConfigurationError, match="made over ranks"):
        state.check_ranks([0, 1])
    state.close()
    direct.close()
    return all(same), len(seen), counts


@pytest.mark.parametrize(
    ("on_device", "codec", "kind"),
    [
        pytest.param(False, "one_bit", Model, marks=pytest.mark.storm),
        (True, "one_bit", Model),
        (True, "top_k", Model),
        (False, "one_bit", Twins),
    ],
)
def test_fsdp_gives_what_the_state_gives(ranks, on_device, codec, kind):
    tensors = 2 if kind is Model else 1
    assert ranks(trained, on_device, codec, kind) == [(True, tensors, [2, 2])] * 4


def on_meta(comm):
    """Where a state is made whose parameters have no memory yet."""
    with torch.device("meta"):
        model = Model()
    fully_shard(model, mesh=DeviceMesh.from_group(group_of(comm, "gloo"), "cpu"))
    return [(name, str(each.device)) for name, each in fsdp_parameters(model)]


def test_parameters_without_memory_are_where_the_mesh_is(ranks):
    assert ranks(on_meta) == [[("", "cpu")]] * 4


def refused(comm):
    model, state = sharded(group_of(comm, "gloo"), state_of, "int8", [])
    model.layer.set_gradient_divide_factor(2.0)
    with pytest.raises(ConfigurationError) as raised, state.step():
        model(gradients(comm.rank, 0)).backward()
    return str(raised.value)


def test_what_is_no_average_is_refused(ranks):
    for said in ranks(refused):
        assert "CompressedReduceScatter averages" in said
