"""On what, beside the leaf, the bits of its gradients depend on a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pycollective.errors import ConfigurationError

_WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS repeats itself
_PROPERTIES = 3  # of a library: major, minor, patch level


def conditions(properties: Any, compiled: bool) -> dict[str, Any]:
    """What the ranks of a training must have alike, and its launches: values that JSON has.

    Args:
        properties: of the device, as `torch.cuda.get_device_properties` gives them. torch's random
            kernels cap their grid by the multiprocessors, so dropout draws otherwise on others.
        compiled: whether `torch.compile` has a part in it.
    """
    matmul, cudnn, cuda = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    attention: dict[str, Any] = {
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
    }
    found: dict[str, Any] = {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuBLAS": _cublas(),
        "cuDNN": _said(cudnn.version),
        "TF32 of matmul": _said(lambda: matmul.allow_tf32),
        "TF32 of cuDNN": _said(lambda: cudnn.allow_tf32),
        "float32_matmul_precision": _said(torch.get_float32_matmul_precision),
        "fp16 reductions of reduced precision": _said(
            lambda: matmul.allow_fp16_reduced_precision_reduction
        ),
        "bf16 reductions of reduced precision": _said(
            lambda: matmul.allow_bf16_reduced_precision_reduction
        ),
        "fp16 accumulation": _said(lambda: matmul.allow_fp16_accumulation),
        "split-k reductions of fp16 and bf16": [
            _said(lambda: matmul.allow_fp16_reduced_precision_reduction_split_k),
            _said(lambda: matmul.allow_bf16_reduced_precision_reduction_split_k),
        ],
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE", ""),
        "libraries": [
            _said(lambda: str(cuda.preferred_blas_library())),
            _said(lambda: str(cuda.preferred_linalg_library())),
        ],
        "torch.cuda.tunable": _said(torch.cuda.tunable.is_enabled),
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "attention backends": [name for name, is_on in attention.items() if is_on()],
        "torch.compile": compiled,
        "Triton": _version("triton") if compiled else None,
        "TORCHINDUCTOR_DETERMINISTIC": _inductor_is_deterministic() if compiled else None,
    }
    return found


def refuse(found: dict[str, Any]) -> None:
    """Refuse conditions under which no leaf has bits of its own; those of CPUs have none.

    Raises:
        ConfigurationError: kernels are chosen by a clock.
    """
    if found.get("cudnn.benchmark"):
        raise ConfigurationError(
            "LeafSync: torch.backends.cudnn.benchmark is True: cuDNN then times its kernels and "
            "takes the fastest, so a leaf's gradients differ from rank to rank; set it to False"
        )
    if found.get("torch.cuda.tunable"):
        raise ConfigurationError(
            "LeafSync: torch.cuda.tunable is enabled, which times kernels and takes the fastest: "
            "a leaf's gradients would differ from rank to rank; torch.cuda.tunable.enable(False)"
        )


def warn(found: dict[str, Any], stacklevel: int) -> None:
    """Warn of conditions under which a leaf's gradients may differ from one time to the next."""
    doubtful = []
    if found.get("use_deterministic_algorithms") is False:
        doubtful.append(
            "torch.use_deterministic_algorithms is off: kernels that add by atomics are not named"
        )
    workspace = found.get("CUBLAS_WORKSPACE_CONFIG")
    if workspace is not None and workspace not in _WORKSPACES:
        doubtful.append(
            f"CUBLAS_WORKSPACE_CONFIG is {workspace!r}: set it to "
            f"{_WORKSPACES[0]} before CUDA is first used, or cuBLAS may not repeat itself"
        )
    if found.get("TORCHINDUCTOR_DETERMINISTIC") is False:
        doubtful.append(
            "TORCHINDUCTOR_DETERMINISTIC is not 1: torch.compile may choose kernels by a clock"
        )
    for each in doubtful:
        warnings.warn(
            f"LeafSync: {each} (docs/reference/any_number_of_ranks.md#on-gpus)",
            stacklevel=stacklevel + 1,
        )


def _said(ask: Callable[[], Any]) -> Any:
    """What torch says of a setting; where it refuses to, that."""
    try:
        return ask()
    except AttributeError:  # another torch
        return None
    except RuntimeError as error:  # two ways to set TF32 were mixed
        return str(error).splitlines()[0][:100]


def _driver() -> str:
    """The version of NVIDIA's kernel module, which CUDA does not tell."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if version := re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text):
            return version[1]
    return ""


def _cublas() -> str:
    """The version of the cuBLAS that torch has loaded, which torch does not tell."""
    major = (torch.version.cuda or "").partition(".")[0]
    value, numbers = ctypes.c_int(), []
    with suppress(OSError, AttributeError):  # a torch without it
        library = ctypes.CDLL(f"libcublas.so.{major}")
        for which in range(_PROPERTIES):
            library.cublasGetProperty(which, ctypes.byref(value))
            numbers.append(str(value.value))
    return ".".join(numbers)


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _inductor_is_deterministic() -> bool:
    import torch._inductor.config as config

    return bool(getattr(config, "deterministic", False))
