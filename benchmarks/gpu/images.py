"""Puts nvcc's images of the kernels where PYCOLLECTIVE_CUDA_IMAGES takes them: build/gpu/images.

The native tests have none of their own.
"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from benchmarks.gpu.steps import BUILT, ROOT


def put(built: Path, folder: Path) -> None:
    """Copy the images into the folder; `built` keeps what nvcc makes.

    Raises:
        SystemExit: nvcc does not compile the kernels, or there is none.
    """
    embed = runpy.run_path(str(ROOT / "csrc" / "cuda" / "embed.py"))
    images: dict[str, Path] = embed["compile_images"](built, strict=True).images
    if not images:
        raise SystemExit("there is no nvcc: no images of the kernels")
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        shutil.copy(image, folder / f"{name}.fatbin")


if __name__ == "__main__":
    put(ROOT / "build" / "cuda", BUILT / "images")  # those of the extension's build, if it made any
