"""Finds the shim for the torch that is here, and loads it as ``pycollective._torch``.

The first that fits is taken, of

1. the sources' own, in the package's folder: an editable install builds it;
2. in a wheel the prebuilt ones, one for each minor version of torch;
3. what ``pycollective build-torch`` has built into the user's cache, a folder that no other user
   may write to: what is there is run.

Nothing is built here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import stat
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pycollective.config import BUILD_TORCH_BACKEND, VERSION
from pycollective.errors import ConfigurationError
from pycollective.shim import compiling

NAME = "pycollective._torch"
SUFFIX = EXTENSION_SUFFIXES[0]  # of this Python
PACKAGE = Path(__file__).resolve().parents[1]
PREBUILT = PACKAGE / "torch" / "shims"
# csrc/torch/module.cpp puts it into the file.
_STAMP = re.compile(rb"pycollective's shim for torch (\d+\.\d+)\.")

_one_at_a_time = threading.Lock()


def load() -> ModuleType:
    """Load the shim, unless it is loaded.

    Raises:
        ImportError: none fits; says what there is and how one is built.
    """
    with _one_at_a_time:
        return loaded() or _load()


def loaded() -> Any:
    """Return the shim, or None: then no process group has pycollective's backend."""
    return sys.modules.get(NAME)


def described() -> str:
    """Return which shim has been loaded, in words."""
    path = Path(load().__file__ or "")
    if path.parent == PREBUILT:
        return f"prebuilt for torch {minor_of(path)}"
    if path.parent == PACKAGE:
        return f"this checkout's own, for torch {minor_of(path)}"
    return f"built by {BUILD_TORCH_BACKEND}: {path}"


def prebuilt_name(minor: str) -> str:
    """Return the file of a wheel for a minor version of torch, such as ``2.13``."""
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
    if path is None or not path.exists() or not in_a_wheel():
        return None
    return path


def _cached(version: str) -> Path | None:
    folder = cache_folder()
    if not folder.exists():
        return None
    path = folder / cache_name(version)
    if not path.exists():
        return None
    check_owner(folder)
    check_owner(path)
    return path


def _what_is_prebuilt() -> str:
    files = PREBUILT.glob(f"_torch_*{SUFFIX}") if in_a_wheel() else []
    minors = [file.name.removesuffix(SUFFIX).removeprefix("_torch_") for file in files]
    minors.sort(key=lambda minor: [int(number) for number in minor.split("_")])
    names = ", ".join(minor.replace("_", ".") for minor in minors)
    return f"prebuilt for this Python: {f'torch {names}' if names else 'none'}"


def minor_of(path: Path) -> str:
    """Return the minor version of torch that a shim was built for."""
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


def cache_folder() -> Path:
    """Return the cache's path: ``$XDG_CACHE_HOME/pycollective``, or ``~/.cache/pycollective``."""
    wish = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(wish):  # the XDG specification: a relative one is ignored
        return Path(wish, "pycollective")
    try:
        return Path.home() / ".cache" / "pycollective"
    except RuntimeError as error:
        raise ConfigurationError(f"there is no cache: {error} Set XDG_CACHE_HOME") from error


def csrc() -> str:
    """Return the folder of the shim's sources: a wheel's, or the checkout's."""
    places = (PACKAGE / "csrc", PACKAGE.parent / "csrc")
    for place in places:
        if (place / "torch" / "module.cpp").exists():
            return str(place)
    raise ConfigurationError(f"the torch backend's sources are not at {places[0]}")


def in_a_wheel() -> bool:
    """Return whether the sources lie in the package, as those of a wheel do."""
    return (PACKAGE / "csrc" / "torch" / "module.cpp").exists()


def cache_name(version: str) -> str:
    """Return the file in the cache for this version of torch and this Python.

    The core and the shim share C++ classes, so a digest of the sources tells one build of
    pycollective from another of the same version.
    """
    sources = csrc()
    digest = hashlib.sha256()
    for path in compiling.read(sources):
        digest.update(os.path.relpath(path, sources).encode() + b"\0" + Path(path).read_bytes())
    return f"_torch-{version}-{VERSION}-{digest.hexdigest()[:12]}{SUFFIX}"


def check_owner(path: Path) -> None:
    """Raise ConfigurationError if a user other than this one (or root) could have written it."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise ConfigurationError(f"{path} is refused: it is a symbolic link. Remove it")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(f"{path} is refused: it is user {found.st_uid}'s. Remove it")
    if found.st_mode & 0o022:
        raise ConfigurationError(f"{path} is refused: others may write to it. chmod go-w, or rm -r")
