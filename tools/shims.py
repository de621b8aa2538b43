"""Builds the torch shims of a wheel: one for each minor version of torch that the extra allows.

python tools/shims.py [--installed]

They lie in pycollective/torch/shims afterwards, for the Python that runs this. For the torch that
is installed the checkout's own shim is copied. For the others torch's wheel is fetched with pip,
into build/torch-wheels, and what compiling needs of it is kept there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from pycollective.shim import compiling, loading

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "torch-wheels"
# Of a wheel of half a GB to two: the headers, and what a shim is linked with.
NEEDED = ["torch/include/", *(f"torch/lib/lib{name}.so" for name in compiling.LIBRARIES)]


def minors() -> list[str]:
    """The minor versions that the extra ``torch`` allows."""
    extra = re.search(
        r'^torch = \["torch>=2\.(\d+),<2\.(\d+)"\]', (ROOT / "pyproject.toml").read_text(), re.M
    )
    if extra is None:
        raise SystemExit('pyproject.toml: the extra `torch` is not as ["torch>=2.12,<2.15"]')
    return [f"2.{minor}" for minor in range(int(extra[1]), int(extra[2]))]


def fetched(minor: str) -> Path:
    """The folder of that torch's package, with its headers and libraries."""
    folder = WHEELS / minor
    if not folder.exists():
        wheels = WHEELS / f"{minor}-wheel"
        shutil.rmtree(wheels, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*pip, f"torch=={minor}.*"], check=True, timeout=3600)
        (wheel,) = wheels.glob("torch-*.whl")
        unpacked = wheels / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            names = [each for each in archive.namelist() if each.startswith(tuple(NEEDED))]
            archive.extractall(unpacked, names)
        unpacked.rename(folder)
        shutil.rmtree(wheels)
    return folder / "torch"


def make(minor: str, installed: str) -> None:
    """Put a shim into the package, unless the one there is newer than all that it is made of."""
    target = loading.PREBUILT / loading.prebuilt_name(minor)
    target.parent.mkdir(exist_ok=True)
    made = target.with_suffix(".tmp")
    if minor == installed:
        own = loading.PACKAGE / f"_torch{loading.SUFFIX}"
        if loading.minor_of(own) != minor:
            raise SystemExit(f"{own} was not built for torch {minor}: make install")
        shutil.copy(own, made)
    else:
        csrc = str(ROOT / "csrc")
        made_of = [*compiling.read(csrc), compiling.__file__]
        since = max(Path(path).stat().st_mtime for path in made_of)
        if target.exists() and target.stat().st_mtime > since:
            return
        compiling.compile_shim(csrc, str(fetched(minor)), WHEELS / f"{minor}-objects", made)
    made.replace(target)
    print(target.relative_to(ROOT))


def main() -> None:
    """Make those that were asked for; remove those of minors that are not allowed any more."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--installed",
        action="store_true",
        help="only for the torch that is here; others that lie there are removed",
    )
    only = parser.parse_args().installed
    installed = ".".join(version("torch").split(".")[:2])
    allowed = minors()
    wanted = [minor for minor in allowed if not only or minor == installed]
    for path in loading.PREBUILT.glob(f"_torch_*{loading.SUFFIX}"):
        if path.name not in map(loading.prebuilt_name, wanted):
            path.unlink()
    for minor in wanted:
        make(minor, installed)


if __name__ == "__main__":
    main()
