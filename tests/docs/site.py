"""The documentation site, built for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness import ROOT

DOCS = ROOT / "docs"


def build(folder: Path, builder: str = "html", *options: str) -> str:
    """Build the site into a folder, as `make docs` does, and return what Sphinx prints.

    Its environment is beside the folder, and another builder reads no page again.
    """
    command = [sys.executable, "-m", "sphinx", "-b", builder, "-d", str(folder.parent / "doctrees")]
    command += ["-W", "--keep-going", *options, str(DOCS), str(folder)]
    env = {name: value for name, value in os.environ.items() if name != "DOCS_INTERSPHINX"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout
