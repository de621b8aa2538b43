"""Puts nvcc's images of the kernels under build/gpu, where the native programs take them.

    images/          all modules; PYCOLLECTIVE_CUDA_IMAGES names it, as the native tests have none
    no_abort_look/   the same, whose waits never look at the abort word (abort_look.cpp)
    litmus.fatbin    the litmus loops' kernel

Usage: python3 -m benchmarks.gpu.images [--usual-alone]

--usual-alone: what is in no_abort_look is as usual, which is enough where no GPU runs it.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.steps import BUILT, IMAGES, LITMUS, NO_ABORT_LOOK, ROOT

_EMBED = runpy.run_path(str(ROOT / "csrc" / "cuda" / "embed.py"))


def find_nvcc() -> str | None:
    """Its path, if there is one."""
    found: str | None = _EMBED["find_nvcc"]()
    return found


def put(built: Path, folder: Path) -> None:
    """Copy the images into the folder; `built` keeps what nvcc makes.

    Raises:
        SystemExit: nvcc does not compile the kernels, or there is none.
    """
    images: dict[str, Path] = _EMBED["compile_images"](built, strict=True).images
    if not images:
        raise SystemExit("there is no nvcc: no images of the kernels")
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        shutil.copy(image, folder / f"{name}.fatbin")


def without_abort_look(built: Path) -> Path:
    """The image of programs that never look at the abort word; `built` keeps it.

    Raises:
        subprocess.CalledProcessError: nvcc does not compile it.
    """
    nvcc = _EMBED["find_nvcc"]()
    [module] = [each for each in _EMBED["modules"]() if each.stem == "program"]
    architectures = _EMBED["known_architectures"](nvcc)
    image: Path = _EMBED["compile_image"](
        nvcc, module, built, architectures, ("PYCOLLECTIVE_ABORT_EVERY=0",)
    )
    return image


def put_litmus(image: Path) -> None:
    """That of the litmus loops.

    Raises:
        subprocess.CalledProcessError: nvcc does not compile it.
    """
    nvcc = _EMBED["find_nvcc"]()
    flags = _EMBED["nvcc_flags"](_EMBED["known_architectures"](nvcc))
    source = ROOT / "benchmarks" / "gpu" / "litmus.cu"
    image.parent.mkdir(parents=True, exist_ok=True)
    command = [nvcc, "-fatbin", *flags, "-o", str(image), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Make them all, several at once."""
    kept = ROOT / "build" / "cuda"  # those of the extension's build, if it made any
    usual_alone = sys.argv[1:] == ["--usual-alone"]
    with ThreadPoolExecutor() as pool:
        usual = pool.submit(put, kept, IMAGES)
        has_nvcc = _EMBED["find_nvcc"]() is not None
        litmus = pool.submit(put_litmus, LITMUS) if has_nvcc else None
        other = None
        if has_nvcc and not usual_alone:
            other = pool.submit(without_abort_look, kept / "no_abort_look")
    usual.result()
    if litmus is not None:
        litmus.result()
    shutil.copytree(IMAGES, NO_ABORT_LOOK, dirs_exist_ok=True)
    if other is not None:
        shutil.copy(other.result(), NO_ABORT_LOOK / "program.fatbin")


if __name__ == "__main__":
    BUILT.mkdir(parents=True, exist_ok=True)
    main()
