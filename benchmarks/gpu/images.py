"""Puts nvcc's images of the kernels where PYCOLLECTIVE_CUDA_IMAGES takes them: build/gpu/images.

The native tests have none of their own.
"""

from __future__ import annotations

import runpy
import shutil

from benchmarks.gpu.steps import BUILT, ROOT


def main() -> None:
    """Those that the extension's build has made are taken as they are."""
    embed = runpy.run_path(str(ROOT / "csrc" / "cuda" / "embed.py"))
    folder = BUILT / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in embed["compile_images"](ROOT / "build" / "cuda", strict=True).images.items():
        shutil.copy(image, folder / f"{name}.fatbin")


if __name__ == "__main__":
    main()
