"""A driver of GPUs that need not be there: Triton compiles and launches, and nothing runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel


class Driver:
    """CUDA's driver, as far as Triton's launcher for CUDA asks it.

    Attributes:
        device: the current one; -1 is where the CPU's tensors are.
        launches: of each launch what the driver was given.
    """

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.device = -1
        self.launches: list[list[Any]] = []
        self._process = os.getpid()
        handles = itertools.count(1)
        self.utils = SimpleNamespace(
            launch=self.launch,
            build_signature_metadata=tuple,
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            load_binary=lambda *args: (next(handles), (self.device, next(handles)), 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def launch(self, *args: Any) -> None:
        self.launches.append([self.device, *args])

    def get_current_device(self) -> int:
        if os.getpid() != self._process:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 1000 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.device)

    @contextmanager
    def on(self, device: int | None) -> Iterator[None]:
        """As `torch.accelerator.device_index`."""
        before = self.device
        self.device = before if device is None else device
        try:
            yield
        finally:
            self.device = before


@contextmanager
def driven() -> Iterator[Driver]:
    """Triton launches by a `Driver` meanwhile.

    Kernels must be used nowhere else: they keep handles of it.
    """
    made = Driver()
    with ExitStack() as stack:

        def patch(owner: Any, **attributes: Any) -> None:
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))

        # Triton 3.9's launcher describes arguments by these; 3.6's compiles a module a signature.
        kinds = {"ARG_CONSTEXPR": 0, "ARG_KERNEL": 1, "ARG_TUPLE": 2}
        patch(nvidia, PyKernelArg=lambda nested_tuple, type: (nested_tuple, type), **kinds)
        patch(nvidia, compile_module_from_src=lambda **more: made.utils, library_dirs=list)
        patch(triton.runtime.driver, _active=made)
        patch(torch.accelerator, device_index=made.on)
        kernels = []
        load = CompiledKernel._init_handles

        def loaded(kernel: CompiledKernel) -> None:
            load(kernel)
            kernels.append(kernel)

        patch(CompiledKernel, _init_handles=loaded)
        yield made
        for each in kernels:
            each.module = None  # so it is not unloaded, by whichever driver there is
