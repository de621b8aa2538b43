"""Launches of this package's kernels: all go through here.

In each launch Triton looks at every argument to find what it has compiled for such ones, and asks
the driver where each address is. That costs the host several times what the driver's launch does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

_INT32 = 1 << 31


class Launcher:
    """Launches a kernel whose constants are known, on the current stream of its tensors' device.

    What Triton compiles depends, besides the constants, on each argument's type, on whether an
    address is a multiple of 16, and on whether an integer has more than 32 bits. The first launch
    of each such kind, on each device, is Triton's own. What it has compiled is kept, and later
    launches give the driver's launcher addresses and numbers.

    No integer's value is compiled in. Triton would do that with 1, and with multiples of 16, so
    kernels name all their integers in ``do_not_specialize``.

    All launches are Triton's own in its interpreter, on other devices than CUDA's, and while there
    is a launch hook, which gets what Triton gives it. Of Triton's other knobs those of the first
    launch of a kind count.

    Thread-safe.

    Args:
        kernel: of `triton.jit`. Its constexprs are its last parameters.
        constants: its constexprs, and Triton's options, by name.
        views: the dtypes in which the kernel sees tensors, by its parameters' names; others as they
            are.
    """

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, Any],
        views: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._views = dict(views or {})
        self._kept: dict[tuple[object, ...], tuple[Any, ...]] = {}

    def __call__(self, programs: int, *args: Any) -> None:
        """Launch so many programs.

        Args:
            programs: how many.
            args: the kernel's arguments that are no constexprs: tensors, integers and floats; an
                argument is always a tensor or None, or always a number. None is compiled in, as
                Triton does it. The first is a tensor, on the device that works; others may be in
                the host's pinned memory, which has the same addresses there. As for torch's
                operations, memory must not be given to another stream until the device is done.

        Raises:
            TypeError: an integer's value might be compiled in.
        """
        device = args[0].get_device()
        kind: list[object] = [device]  # and what is not an integer of 32 bits
        values: list[int | float | None] = []
        for each in args:
            if type(each) is int:
                if not -_INT32 <= each < _INT32:
                    kind.append((len(values), each >> 63))
                values.append(each)
            elif type(each) is float:
                kind.append((len(values), float))
                values.append(each)
            elif each is None:
                kind.append(None)
                values.append(None)
            else:
                address = each.data_ptr()
                kind.append(each.dtype)
                kind.append(address % 16 == 0)
                values.append(address)
        key = tuple(kind)
        kept = self._kept.get(key)
        if kept is None or _has_hooks():
            self._launch_by_triton(programs, args, key)
            return
        kernel, run, constants = kept
        active = driver.active
        current = active.get_current_device()  # raises in a fork, where no handle is good
        given = (
            *(programs, 1, 1, active.get_current_stream(device), kernel.function),
            *(kernel.packed_metadata, None, None, None, *values, *constants),
        )
        if current == device:
            run(*given)
        else:
            with torch.accelerator.device_index(device):
                run(*given)

    def _launch_by_triton(
        self, programs: int, args: tuple[Any, ...], key: tuple[object, ...]
    ) -> None:
        kernel = self._kernel
        is_compiled = isinstance(kernel, JITFunction)
        variable = kernel.do_not_specialize if is_compiled else kernel.kwargs["do_not_specialize"]
        given = []
        for name, each in zip(kernel.arg_names, args, strict=False):
            if isinstance(each, int) and name not in (variable or ()):
                raise TypeError(f"{name} is not in {kernel.fn.__name__}'s do_not_specialize")
            given.append(each.view(self._views[name]) if name in self._views else each)
        with torch.accelerator.device_index(args[0].device.index):
            compiled = kernel[programs,](*given, **self._constants)
        if isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda":
            constants = [self._constants[name] for name in kernel.arg_names[len(args) :]]
            self._kept[key] = compiled, compiled.run, constants


@functools.cache
def launcher(kernel: Any, **constants: Any) -> Launcher:
    """The one `Launcher` of a kernel with these constants."""
    return Launcher(kernel, constants)


def _has_hooks() -> bool:
    """Whether anyone asked to be told of launches: Triton has chains of hooks, or one's own in
    their place."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
