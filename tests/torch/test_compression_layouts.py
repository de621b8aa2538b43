"""Parameters that lie in memory otherwise than in their shape's order: no element takes another's.

Also those without elements.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from pycollective import ConfigurationError
from tests.torch.compressed import HOOKS, Convolution, digest_of, group_of, ranks_of, state_of

ranks = ranks_of(__name__, 2)


def normal(rank, step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + rank))


class Gapped(Convolution):
    """Given gradients of a weight that is half the columns of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(128, 256)[:, :128])


class Overlapping(Convolution):
    """The same of one whose rows are one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 128).expand(128, 128))


def off(comm, codec, kind):
    """How far delivered and held are from what was put in; what is said of a gradient with gaps."""
    state = state_of(kind(), codec, "2x1", group_of(comm, "pycollective"))
    delivered = put_in = torch.zeros(128, 128, dtype=torch.float64)
    for step in range(3):
        every = [normal(rank, step, 128, 128) for rank in range(2)]
        put_in = put_in + sum(each.double() for each in every) / 2
        assert state.all_reduce({"weight": every[comm.rank]})
        delivered = delivered + every[comm.rank].double()
    saved = state.state_dict()
    state.load_state_dict(saved)
    same = all(
        torch.equal(each, state.state_dict()["residuals"][kind]["weight"])
        for kind, of in saved["residuals"].items()
        for each in of.values()
    )
    held = state.flush()["weight"]
    wide, said = torch.ones(128, 256), ""
    try:
        state.all_reduce({"weight": wide[:, :128]})
    except ConfigurationError as error:
        said = str(error)
    error = float((delivered + held.double() - put_in).abs().max())
    compressed = float((delivered - put_in).abs().max())
    return error, compressed, same, tuple(held.shape), said, bool((wide == 1).all())


@pytest.mark.parametrize("kind", [Gapped, Overlapping])
@pytest.mark.parametrize("codec", HOOKS)
def test_a_parameter_with_gaps_goes_in_its_shapes_order(ranks, codec, kind):
    for error, compressed, same, shape, said, untouched in ranks(off, codec, kind):
        assert error < 1e-5
        assert compressed > 1e-3, "it was not compressed"
        assert same
        assert shape == (128, 128)
        assert "contiguous" in said
        assert untouched


def in_ddp(comm, codec, kind):
    """The same through DDP's bucket: the worst error, what each step gave, and the layout."""
    group = group_of(comm, "pycollective")
    model = DistributedDataParallel(kind(), process_group=group)
    state = state_of(model, codec, "2x1", group)
    model.register_comm_hook(state, HOOKS[codec])
    shape = model.module.weight.shape
    total, given = torch.zeros(shape, dtype=torch.float64), []
    for step in range(3):
        every = [normal(rank, step, *shape) for rank in range(2)]
        mine = torch.empty_like(model.module.weight).copy_(every[comm.rank])
        model(mine).backward()
        total += model.module.weight.grad.double() - sum(each.double() for each in every) / 2
        given.append(digest_of([model.module.weight.grad]))
        model.zero_grad()
    held = state.flush()["weight"]
    same_layout = kind is Gapped or held.stride() == model.module.weight.stride()
    return float((total + held.double()).abs().max()), given, same_layout


@pytest.mark.parametrize("kind", [Gapped, Convolution])  # in the bucket: shape's order, memory's
@pytest.mark.parametrize("codec", HOOKS)
def test_each_element_of_a_bucket_keeps_its_error(ranks, codec, kind):
    first, second = ranks(in_ddp, codec, kind)
    assert max(first[0], second[0]) < 1e-5
    assert first[1] == second[1]
    assert first[2]
    assert second[2]


def shards(comm, codec):
    """The same of shards of a weight that lies channels last: flushed, and flushed when loaded."""
    group = group_of(comm, "pycollective")
    state, other = (state_of(Convolution(), codec, "2x1", group) for _ in range(2))
    out, count = torch.empty(2700), 2700
    total = torch.zeros(count, dtype=torch.float64)
    for step in range(3):
        every = [normal(rank, step, 20, 30, 3, 3) for rank in range(2)]
        assert state.reduce_scatter(out, every[comm.rank].clone(), "weight")
        mean = sum(each.double() for each in every).reshape(-1) / 2
        total += out.double() - mean[comm.rank * count :][:count]
    other.load_state_dict(state.state_dict())
    errors = []
    for each in (state, other):
        held = each.flush()["weight"].reshape(-1)[comm.rank * count :][:count]
        errors.append(float((total + held.double()).abs().max()))
    return errors


@pytest.mark.parametrize("codec", HOOKS)
def test_shards_of_channels_last_weights_keep_each_elements_error(ranks, codec):
    for flushed, loaded in ranks(shards, codec):
        assert flushed < 1e-5
        assert loaded < 1e-5


def empty(comm, codec):
    """What is held with a parameter of no elements that `compress` wants, through a round trip."""
    shapes = {"w": (80, 90), "none": (0, 4)}
    pairs = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    group = group_of(comm, "pycollective")
    state = state_of(pairs, codec, "2x1", group, compress=lambda name, shape: True)
    mine = {name: normal(comm.rank, 0, *shape) for name, shape in shapes.items()}
    assert state.all_reduce(mine)
    state.load_state_dict(state.state_dict())
    return sorted(state.flush()), state.stats()["dense_parameters"]


@pytest.mark.parametrize("codec", HOOKS)
def test_a_parameter_without_elements_is_dense(ranks, codec):
    assert ranks(empty, codec) == [(["w"], ["none"])] * 2


# Weights with a side of length 1, whose stride means nothing, and may be any: how one was laid out,
# and how its gradient.
ONE_CHANNEL = {
    "of one image": (
        lambda: torch.zeros(1, 30, 16, 16).to(memory_format=torch.channels_last),
        lambda x: x.permute(0, 2, 3, 1).contiguous()[0].permute(2, 0, 1).unsqueeze(0),
    ),
    "of one column": (
        lambda: torch.zeros(20, 30, 16, 1).to(memory_format=torch.channels_last),
        lambda x: x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1),
    ),
    "of one input": (
        lambda: torch.zeros(20, 1, 16, 16).to(memory_format=torch.channels_last),
        lambda x: x.clone().as_strided(x.shape, (256, 7, 16, 1)),
    ),
}


def of_one_channel(comm, what, differs):
    """What is delivered and held but the mean; rank 1's weight may be laid out otherwise."""
    weight, laid_out = ONE_CHANNEL[what]
    mine = weight() if comm.rank == 0 or not differs else laid_out(weight())
    every = [normal(rank, 0, *mine.shape) for rank in range(2)]
    pairs = [("weight", torch.nn.Parameter(mine))]
    state = state_of(pairs, "int8", "2x1", group_of(comm, "pycollective"))
    gradient = laid_out(every[comm.rank])
    assert state.all_reduce({"weight": gradient})
    held = state.flush()["weight"]
    return float((gradient + held - (every[0] + every[1]) / 2).abs().max())


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("what", ONE_CHANNEL)
def test_strides_of_sides_of_one_element_mean_nothing(ranks, what, differs):
    assert max(ranks(of_one_channel, what, differs)) < 1e-5
