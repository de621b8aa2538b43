"""Where pip's wheels put NVRTC, the compiler of CUDA kernels: beside the places the core looks."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def folders() -> list[str]:
    """The folders of NVIDIA's wheels that hold an NVRTC, of CUDA 13 before 12."""
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
