"""Run every example as its docstring says, in an environment with all they need.

Usage: python examples/run_all.py [PROGRAM ...]
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT = 180  # seconds for a command
_LAUNCHERS = {"torchrun": "torch.distributed.run", "pycollective": "pycollective"}


def programs() -> list[Path]:
    """Return the examples: the files with a command."""
    return sorted(each for each in HERE.glob("*.py") if commands(each))


def commands(program: Path) -> list[str]:
    """Return the commands of a program's docstring, in order."""
    text = ast.get_docstring(ast.parse(program.read_text())) or ""
    return [line for line in text.splitlines() if line.startswith((*_LAUNCHERS,))]


def environment() -> Path:
    """Return the Python of .venv-examples, which is remade when requirements change."""
    folder = ROOT / ".venv-examples"
    requirements = HERE / "requirements.txt"
    wanted = requirements.read_text() + (ROOT / "requirements-dev.txt").read_text()
    installed = folder / ".requirements"  # what was installed last
    python = folder / "bin" / "python"
    if not (installed.exists() and installed.read_text() == wanted):
        print(f"making {folder.name} from {requirements.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "-r", str(requirements)]
        subprocess.run(pip, check=True)
        installed.write_text(wanted)
    return python


def run(python: Path, command: str) -> tuple[bool, str]:
    """Run a command; return whether it succeeded, and its result line or why not."""
    launcher, *words = shlex.split(command)
    words = [str(python), "-m", _LAUNCHERS[launcher], *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return False, f"took more than {LIMIT} s"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return True, lines[-1]
    return False, f"status {done.returncode}\n{done.stdout}{done.stderr}"


def main() -> None:
    """Run all, print how each ended, and exit with 1 if one failed."""
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or programs()
    python = environment()
    passed = failed = 0
    for command in [each for program in chosen for each in commands(program)]:
        begin = time.monotonic()
        good, said = run(python, command)
        seconds = time.monotonic() - begin
        print(f"{'passed' if good else 'FAILED'} {command} ({seconds:.0f} s)\n  {said}", flush=True)
        passed, failed = passed + good, failed + (not good)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
