"""Adam whose second moment is held."""

from __future__ import annotations

import copy

import pytest
import torch

import pycollective.torch as pct
from pycollective.errors import ConfigurationError

KINDS = [torch.optim.Adam, torch.optim.AdamW]
BETAS, EPS, RATE = (0.9, 0.99), 1e-8, 0.01


def parameters(count=2):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(30, dtype=torch.float64)) for _ in range(count)]


def step(optimizer, number, count=2):
    """With gradients that depend on the step's number alone."""
    random = torch.Generator().manual_seed(number)
    for parameter in optimizer.param_groups[0]["params"][:count]:
        parameter.grad = torch.randn(30, generator=random, dtype=torch.float64)
    optimizer.step()


def moment(optimizer, parameter):
    state = optimizer.state[parameter]
    return state["exp_avg_sq"] / (1 - BETAS[1] ** float(state["step"]))


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_adams_first_after_the_held_moment(kind):
    of = parameters(1)
    optimizer = kind(of, RATE, BETAS, EPS, weight_decay=0.0)
    for number in range(5):
        step(optimizer, number, 1)
    held = moment(optimizer, of[0])
    first = optimizer.state[of[0]]["exp_avg"].clone()
    pct.hold_second_moment(optimizer)
    for number in range(5, 12):
        before = of[0].detach().clone()
        step(optimizer, number, 1)
        first = BETAS[0] * first + (1 - BETAS[0]) * of[0].grad
        second = BETAS[1] * held * (1 - BETAS[1] ** number) + (1 - BETAS[1]) * of[0].grad ** 2
        denominator = (second / (1 - BETAS[1] ** (number + 1))).sqrt() + EPS
        expected = before - RATE * first / (1 - BETAS[0] ** (number + 1)) / denominator
        torch.testing.assert_close(of[0].detach(), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(moment(optimizer, of[0]), held, rtol=1e-12, atol=0.0)


def test_it_goes_on_after_a_checkpoint_and_when_removed():
    of, again = parameters(), parameters()
    optimizer, other = (torch.optim.AdamW(each, RATE, BETAS, EPS) for each in (of, again))
    for number in range(4):
        step(optimizer, number)
    handle = pct.hold_second_moment(optimizer)
    step(optimizer, 4)
    for mine, theirs in zip(of, again, strict=True):
        theirs.data.copy_(mine)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other_handle = pct.hold_second_moment(other)
    for number in range(5, 9):
        step(optimizer, number)
        step(other, number)
    for mine, theirs in zip(of, again, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0.0)
    held = moment(optimizer, of[0])
    handle.remove()
    other_handle.remove()
    step(optimizer, 9)
    assert not torch.allclose(moment(optimizer, of[0]), held)


def test_a_parameter_that_steps_later_is_held_from_then_on():
    of = parameters()
    optimizer = torch.optim.Adam(of, RATE, BETAS, EPS)
    step(optimizer, 0, count=1)
    pct.hold_second_moment(optimizer)
    step(optimizer, 1)
    held = moment(optimizer, of[1])
    step(optimizer, 2)
    torch.testing.assert_close(moment(optimizer, of[1]), held, rtol=1e-12, atol=0.0)


def test_what_cannot_be_held_is_refused():
    of = parameters()
    for optimizer, message in (
        (torch.optim.SGD(of), "SGD is not torch's Adam or AdamW"),
        (torch.optim.Adam(of), "has not made a step"),
        (torch.optim.Adam(of, amsgrad=True), "not with amsgrad"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            pct.hold_second_moment(optimizer)
