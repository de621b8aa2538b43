"""The user's cache of shims, a folder that no other user may write to: what is there is run."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from pycollective.config import VERSION
from pycollective.errors import ConfigurationError
from pycollective.shim import compiling

_PACKAGE = Path(__file__).resolve().parents[1]


def folder() -> Path:
    """Its path: ``$XDG_CACHE_HOME/pycollective``, or ``~/.cache/pycollective``."""
    wish = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(wish):  # the XDG specification: a relative one is ignored
        return Path(wish, "pycollective")
    try:
        return Path.home() / ".cache" / "pycollective"
    except RuntimeError as error:
        raise ConfigurationError(f"there is no cache: {error} Set XDG_CACHE_HOME") from error


def csrc() -> str:
    """The folder of the shim's sources: a wheel's, or the checkout's."""
    places = (_PACKAGE / "csrc", _PACKAGE.parent / "csrc")
    for place in places:
        if (place / "torch" / "module.cpp").exists():
            return str(place)
    raise ConfigurationError(f"the torch backend's sources are not at {places[0]}")


def in_a_wheel() -> bool:
    """Whether the sources lie in the package, as those of a wheel do."""
    return (_PACKAGE / "csrc" / "torch" / "module.cpp").exists()


def name(version: str, suffix: str) -> str:
    """The file for this version of torch, of a Python whose extension modules end so.

    The core and the shim share C++ classes, so a digest of the sources tells one build of
    pycollective from another of the same version.
    """
    sources = csrc()
    digest = hashlib.sha256()
    for path in compiling.read(sources):
        digest.update(os.path.relpath(path, sources).encode() + b"\0" + Path(path).read_bytes())
    return f"_torch-{version}-{VERSION}-{digest.hexdigest()[:12]}{suffix}"


def check(path: Path) -> None:
    """Raise ConfigurationError where another user than this one (or root) could have written it."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise ConfigurationError(f"{path} is refused: it is a symbolic link. Remove it")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(f"{path} is refused: it is user {found.st_uid}'s. Remove it")
    if found.st_mode & 0o022:
        raise ConfigurationError(f"{path} is refused: others may write to it. chmod go-w, or rm -r")
