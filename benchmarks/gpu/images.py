"""Puts nvcc's images of the kernels under build/gpu, where the native programs take them.

    images/          the kernels; PYCOLLECTIVE_CUDA_IMAGES names it, as the native tests have none
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


def main() -> None:
    """Make them all at once; what nvcc does not compile is an error."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("there is no nvcc: no images of the kernels")
    architectures = _EMBED["known_architectures"](nvcc)
    kept = ROOT / "build" / "cuda"  # those of the extension's build, if it made any

    def put(folder: Path, built: Path, *defines: str) -> None:
        image = _EMBED["compile_image"](nvcc, built, architectures, defines)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, folder / "program.fatbin")

    def put_litmus() -> None:
        source = ROOT / "benchmarks" / "gpu" / "litmus.cu"
        flags = _EMBED["nvcc_flags"](architectures)
        command = [nvcc, "-fatbin", *flags, "-o", str(LITMUS), str(source)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    BUILT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(put, IMAGES, kept), pool.submit(put_litmus)]
        if sys.argv[1:] != ["--usual-alone"]:
            no_look = (kept / "no_abort_look", "PYCOLLECTIVE_ABORT_EVERY=0")
            made.append(pool.submit(put, NO_ABORT_LOOK, *no_look))
    try:
        for each in made:
            each.result()
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.stderr or str(error)) from error
    if len(made) == 2:
        shutil.copytree(IMAGES, NO_ABORT_LOOK, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
