"""``pycollective build-torch``: builds the shim for this torch, into the user's cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from pycollective.config import INSTALL_TORCH
from pycollective.errors import ConfigurationError
from pycollective.shim import compiling, loading

_LOOK_EVERY = 0.2  # seconds


def build(say: Callable[[str], None], longest: float = compiling.LONGEST) -> None:
    """Build the shim, unless one can be loaded, and load it.

    Args:
        say: called with lines on what goes on.
        longest: seconds to wait for another process that is building.

    Raises:
        ConfigurationError: something is missing, the compiler failed, or what it made cannot be
            loaded.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"there is no torch: {INSTALL_TORCH}") from error
    except (ImportError, OSError) as error:
        raise ConfigurationError(f"torch cannot be imported: {error}") from error

    if _loads():
        say(f"nothing to do: torch {torch.__version__} has its backend, {loading.described()}")
        return
    _check_needs()
    folder = loading.cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        loading.check_owner(folder)
        with _alone(folder / "lock", longest):
            if not _loads():  # another process may have built it
                say(f"compiling for torch {torch.__version__}: one to five minutes")
                _build(os.path.dirname(torch.__file__), str(torch.__version__), folder)
        loading.load()
    except OSError as error:
        raise ConfigurationError(f"cannot build in {folder}: {error}") from error
    except ImportError as error:
        raise ConfigurationError(str(error)) from error
    say(loading.described())


def _loads() -> bool:
    try:
        loading.load()
    except ImportError:
        return False
    return True


def _check_needs() -> None:
    loading.csrc()
    missing = []
    if not compiling.compiler():
        wish = os.environ.get("CXX")
        missing.append(
            f"the C++ compiler of CXX={wish}" if wish else "a C++ compiler (g++ 10 or clang++ 12)"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        python = f"python{sysconfig.get_python_version()}"
        missing.append(f"Python's headers (of Debian's package {python}-dev, Fedora's -devel)")
    if missing:
        raise ConfigurationError(f"to build the torch backend needs {' and '.join(missing)}")


def _build(torch: str, version: str, folder: Path) -> None:
    for left in folder.glob("building-*"):  # by a build that was killed
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
    made, target = work / "shim", folder / loading.cache_name(version)
    try:
        compiling.compile_shim(loading.csrc(), torch, work, made)
        made.chmod(0o700)
        os.replace(made, target)
    except RuntimeError as error:
        raise ConfigurationError(f"torch {version}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _alone(path: Path, longest: float) -> Iterator[None]:
    """Hold a lock, which ends with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = monotonic() + longest
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if monotonic() > deadline:
                    raise ConfigurationError(
                        f"another process has been building for {longest:g} s: it holds {path}"
                    ) from error
            sleep(_LOOK_EVERY)
        yield
    finally:
        os.close(descriptor)
