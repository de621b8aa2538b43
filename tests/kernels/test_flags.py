"""Every native file is compiled so that an addition stays an addition.

No kernel has an add beside a multiply today, so without these flags no bit would change, and no
test of bits could notice that they are gone.
"""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math"}


def keeps_ieee(flags: list[str]) -> bool:
    contraction = [flag for flag in flags if flag.startswith("-ffp-contract")]
    return contraction == ["-ffp-contract=off"] and not FORBIDDEN & set(flags)


def test_the_extensions(monkeypatch):
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
    monkeypatch.chdir(ROOT)
    rules = runpy.run_path("setup.py")
    assert given["ext_modules"]
    for extension in given["ext_modules"]:
        for more in [[], *rules["LEVELS"].values()]:
            assert keeps_ieee([*extension.extra_compile_args, *more]), extension.name


@pytest.mark.parametrize("kind", ["check", "sanitize", "native-parts"])
def test_the_native_tests(kind):
    made = subprocess.run(
        ["make", "-n", "-B", "-C", ROOT / "csrc" / "tests", kind],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    compiled = [line.split() for line in made.stdout.splitlines() if " -c " in line]
    assert len(compiled) > 5
    for flags in compiled:
        assert keeps_ieee(flags), flags
