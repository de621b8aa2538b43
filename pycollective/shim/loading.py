"""Finds the shim for the torch that is here, and loads it as ``pycollective._torch``.

The first that fits is taken, of

1. the sources' own, in the package's folder: an editable install builds it;
2. in a wheel the prebuilt ones, one for each minor version of torch;
3. what ``pycollective build-torch`` has built into the user's cache.

Nothing is built here.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from pycollective.config import BUILD_TORCH_BACKEND
from pycollective.errors import ConfigurationError
from pycollective.shim import cache

NAME = "pycollective._torch"
SUFFIX = EXTENSION_SUFFIXES[0]  # of this Python
PACKAGE = Path(__file__).resolve().parents[1]
PREBUILT = PACKAGE / "torch" / "shims"
# csrc/torch/module.cpp puts it into the file.
_STAMP = re.compile(rb"pycollective's shim for torch (\d+\.\d+)\.")

_one_at_a_time = threading.Lock()


def load() -> ModuleType:
    """Load the shim, if that has not been done.

    Raises:
        ImportError: none fits; says what there is and how one is built.
    """
    with _one_at_a_time:
        return sys.modules.get(NAME) or _load()


def described() -> str:
    """Which shim has been loaded."""
    path = Path(load().__file__ or "")
    if path.parent == PREBUILT:
        return f"prebuilt for torch {minor_of(path)}"
    if path.parent == PACKAGE:
        return f"this checkout's own, for torch {minor_of(path)}"
    return f"built by {BUILD_TORCH_BACKEND}: {path}"


def prebuilt_name(minor: str) -> str:
    """The file of a wheel for a minor version of torch, such as ``2.13``."""
    return f"_torch_{minor.replace('.', '_')}{SUFFIX}"


def _load() -> ModuleType:
    import torch

    version = str(torch.__version__)
    reasons = []
    for find in (_own, _prebuilt, _cached):
        try:
            if (path := find(version)) is not None:
                return _loaded(path, version)
        except (ConfigurationError, ImportError, OSError) as error:
            reasons.append(str(error))
    raise ImportError(
        f"pycollective has no torch backend for torch {version} and Python "
        f"{platform.python_version()}: {'; '.join([*reasons, _what_is_prebuilt()])}. To build one: "
        f"{BUILD_TORCH_BACKEND}"
    )


def _own(version: str) -> Path | None:
    path = PACKAGE / f"_torch{SUFFIX}"
    return path if path.exists() else None


def _prebuilt(version: str) -> Path | None:
    # A version before a release, as 2.14.0a0 or 2.14.0.dev20260101, may be unlike the release.
    minor = re.match(r"(\d+\.\d+)\.\d+(\+|$)", version)
    path = PREBUILT / prebuilt_name(minor[1]) if minor else None
    # Beside a checkout they may be of older sources: `make shims` has put them there for a wheel.
    if path is None or not path.exists() or not cache.in_a_wheel():
        return None
    return path


def _cached(version: str) -> Path | None:
    folder = cache.folder()
    if not folder.exists():
        return None
    path = folder / cache.name(version, SUFFIX)
    if not path.exists():
        return None
    cache.check(folder)
    cache.check(path)
    return path


def _what_is_prebuilt() -> str:
    files = PREBUILT.glob(f"_torch_*{SUFFIX}") if cache.in_a_wheel() else []
    minors = [file.name.removesuffix(SUFFIX).removeprefix("_torch_") for file in files]
    minors.sort(key=lambda minor: [int(number) for number in minor.split("_")])
    names = ", ".join(minor.replace("_", ".") for minor in minors)
    return f"prebuilt for this Python: {f'torch {names}' if names else 'none'}"


def minor_of(path: Path) -> str:
    """The minor version of torch that a shim was built for."""
    stamp = _STAMP.search(path.read_bytes())
    if stamp is None:
        raise ImportError(f"{path} does not say for which torch it was built")
    return stamp[1].decode()


def _loaded(path: Path, version: str) -> ModuleType:
    minor = minor_of(path)
    if version.split(".")[:2] != minor.split("."):
        raise ImportError(f"{path} was built for torch {minor}")
    loader = ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} cannot be loaded")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:  # what the loader says names the file, or a symbol
        raise ImportError(f"{path} does not fit this torch ({error})") from error
    sys.modules[NAME] = module
    sys.modules["pycollective"]._torch = module  # type: ignore[attr-defined]
    return module
