"""Kept launches give the driver what Triton's own launch gives it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from pycollective import order
from pycollective.triton.launching import Launcher
from tests.triton.compiled import module
from tests.triton.driver import Driver, driven

OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}
CONSTANTS = {"WIDTH": 64, "SHAPE": (3, (True, 5)), "TYPE": tl.int32}


def made() -> Any:
    """A kernel that no other test has."""

    @triton.jit(do_not_specialize=["n", "step"])
    def scaled(
        x, n, factor, step, out, WIDTH: tl.constexpr, SHAPE: tl.constexpr, TYPE: tl.constexpr
    ):
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        word = (tl.load(x + at, mask=at < n) * factor).to(TYPE) + step + SHAPE[0]
        tl.store(out + at, word.to(out.dtype.element_ty), mask=at < n)

    return scaled


class Device:
    """A tensor of a GPU that need not be there."""

    def __init__(self, number: int, address: int = 4096, dtype: torch.dtype = torch.int32) -> None:
        self.device = torch.device("cuda", number)
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def get_device(self) -> int:
        return self.device.index


@pytest.fixture
def driver():
    with driven() as found:
        yield found


def given(driver: Driver) -> list[Any]:
    """What the driver was given last, in one list: addresses, None for hooks of which there is
    none."""

    def plain(value: Any) -> list[Any]:
        if isinstance(value, tuple | list):
            return [each for one in value for each in plain(one)]
        if hasattr(value, "data_ptr"):
            return [value.data_ptr()]
        if type(value).__name__ == "LazyDict" or getattr(value, "calls", None) == []:
            return [None]
        return [value]

    return plain(driver.launches.pop())


def check(driver: Driver, kernel: Any, launch: Launcher, args: tuple[Any, ...]) -> None:
    """The first launch, a kept one and Triton's own on the tensors' device are the same."""
    with driver.on(args[0].device.index):
        kernel[7,](*args, **CONSTANTS, **OPTIONS)
    expected = given(driver)
    assert 7 in expected
    assert 1000 + args[0].get_device() in expected
    for _ in range(2):
        launch(7, *args)
        assert given(driver) == expected


def test_kept_launches_are_tritons(driver, monkeypatch):
    """Whatever was launched before, other than in one thing."""
    kernel = made()
    launch = Launcher(kernel, {**CONSTANTS, **OPTIONS})
    first = Device(0), 64, 0.5, 3, Device(0)
    changed = [
        *((0, Device(0, 4100)), (4, Device(0, 4104)), (0, Device(1)), (0, Device(0, 8192))),
        *((0, Device(0, dtype=torch.int16)), (4, Device(0, dtype=torch.int64))),
        *((1, 1), (1, 1 << 31), (1, (1 << 31) - 1), (3, -(1 << 31)), (3, -(1 << 31) - 1)),
        *((3, 1 << 63), (2, 1.0)),
    ]
    check(driver, kernel, launch, first)
    for place, value in changed:
        check(driver, kernel, launch, (*first[:place], value, *first[place + 1 :]))
    # And none of it is Triton's own launch any more.
    monkeypatch.setattr(type(kernel), "run", None)
    for place, value in changed:
        launch(7, *first[:place], value, *first[place + 1 :])
    assert len(driver.launches) == len(changed)
    assert driver.device == -1


def test_none_is_kept(driver, monkeypatch):
    """In place of a tensor, which has another kernel."""

    @triton.jit(do_not_specialize=["n"])
    def moved(x, by, n, out, WIDTH: tl.constexpr, SHAPE: tl.constexpr, TYPE: tl.constexpr):
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        word = tl.load(x + at, mask=at < n).to(TYPE)
        if by is not None:
            word += tl.load(by)
        tl.store(out + at, word, mask=at < n)

    launch = Launcher(moved, {**CONSTANTS, **OPTIONS})
    args = [(Device(0), by, 64, Device(0, 8192)) for by in (None, Device(0, 4100), None)]
    for each in args:
        check(driver, moved, launch, each)
    monkeypatch.setattr(type(moved), "run", None)
    for each in args:
        launch(7, *each)


@pytest.mark.parametrize("divisor", [2, torch.ones(1, dtype=torch.float64)])
def test_reduction_is_kept(driver, monkeypatch, divisor):
    """Of floats, whose words the kernel takes; a result that is not aligned has another kernel."""
    reduce = module("reduce", interpreted=False)
    recipe = order.recipe((0, 2), [(0, 1), (1, 2)])
    terms, out = torch.zeros(2, 64), torch.zeros(65)

    def launched(at: int) -> list[Any]:
        reduce.reduce(terms, out[at : at + 64], "avg", recipe, divisor, torch.float32, True)
        return given(driver)

    first = [launched(0), launched(1)]
    assert first[0] != first[1]
    monkeypatch.setattr(type(reduce.reduce_rows), "run", None)
    assert [launched(0), launched(1)] == first
    begin = first[1].index(terms.data_ptr())
    by = divisor.data_ptr() if isinstance(divisor, torch.Tensor) else None
    assert first[1][begin : begin + 5] == [terms.data_ptr(), out.data_ptr() + 4, 64, 64, by]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("is_chained", [True, False])
def test_hooks_get_what_triton_gives(driver, monkeypatch, hook, is_chained):
    launch = Launcher(made(), {**CONSTANTS, **OPTIONS})
    args = Device(0), 64, 0.5, 3, Device(0)
    launch(7, *args)
    runtime = triton.knobs.runtime
    told = list.append
    if is_chained:
        chain = getattr(runtime, hook)
        monkeypatch.setattr(chain, "calls", [told])
    else:
        monkeypatch.setattr(runtime, hook, told)
    driver.launches.clear()
    launch(7, *args)
    [made_now] = driver.launches
    assert getattr(runtime, hook) in made_now
    [metadata] = [each for each in made_now if type(each).__name__ == "LazyDict"]
    assert metadata.get()["name"] == "scaled"


def test_forked_child_has_no_handles(driver):
    launch = Launcher(made(), {**CONSTANTS, **OPTIONS})
    args = Device(0), 64, 0.5, 3, Device(0)
    launch(7, *args)
    driver.launches.clear()
    child = os.fork()
    if not child:
        try:
            launch(7, *args)
        except RuntimeError as error:
            is_right = "forked" in str(error) and not driver.launches
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_other_targets_are_tritons(driver, monkeypatch):
    """Their launchers may not take numbers for tensors."""
    launches = []

    class Launches:
        def __init__(self, *args: Any) -> None:
            pass

        def __call__(self, *args: Any) -> None:
            launches.append(args)

    monkeypatch.setattr(driver, "get_current_target", lambda: GPUTarget("hip", "gfx942", 64))
    monkeypatch.setattr(driver, "launcher_cls", Launches, raising=False)
    launch = Launcher(made(), {**CONSTANTS, "num_warps": 2})
    tensor = Device(0)
    for _ in range(2):
        launch(7, tensor, 64, 0.5, 3, tensor)
    assert all(tensor in args for args in launches)
    assert len(launches) == 2


@pytest.mark.parametrize("is_interpreted", [True, False])
def test_integers_must_not_be_compiled_in(driver, monkeypatch, is_interpreted):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", is_interpreted)

    @triton.jit(do_not_specialize=["n"])
    def kernel(x, n, step):
        tl.store(x + step, n)

    with pytest.raises(TypeError, match="step is not in kernel's do_not_specialize"):
        Launcher(kernel, OPTIONS)(1, torch.zeros(4), 1, 1)
