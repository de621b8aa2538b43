"""What the compilers made of the kernels, as text, and what may not stand in it."""

from __future__ import annotations

import functools
import os
import re
import runpy
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pycollective import _core
from pycollective.gpu import nvrtc

ROOT = Path(__file__).resolve().parents[2]
EMBED = runpy.run_path(str(ROOT / "csrc" / "cuda" / "embed.py"))
ARCHITECTURES = ["80", "90", "100"]

_CASES = [f"{dtype.name}_{op}" for dtype in _core.dtypes() for op in dtype.reduce_ops]
# By module.
KERNELS = {
    "program": [*(f"program_{case}" for case in _CASES), "program_move"],
}

# In PTX, anywhere: {what it would do: its pattern}.
FORBIDDEN_IN_PTX = {
    "a fused operation": r"\b(fma|mad)\.\S*f(16|32|64)",
    "subnormals flushed": r"\.ftz\b",
    "an approximation": r"\.approx\b",
    "a load past the caches' coherence": r"\bld\.global\S*\.nc\b",
    "a trap": r"\btrap\b|\bbrkpt\b",
    "a fence": r"\bfence\b|\bmembar\b",
    "a flag for less than the system": r"\b(ld|st)\S*\.(acquire|release|relaxed)\.(?!sys)",
    "a volatile access": r"\b(ld|st)\S*\.volatile\b",
}
# In machine code, anywhere,
FORBIDDEN_IN_SASS = {
    "local memory": r"\b(LDL|STL)\b",
    "a load past the caches' coherence": r"\bLDG\S*\.CONSTANT\b",
    "a trap": r"\bBPT\b",
}
# and in what does not divide: a division is made of fused operations, and looks at NaNs so. (A
# half-precision one with two zeros is how a register is set, and an integer that is made of a float
# belongs to a division of integers.)
FORBIDDEN_IN_SASS_OF_SUMS = {
    "a fused operation": r"\b[FD]FMA\b|\bHFMA2(?!\S* \S+, -RZ, RZ,)",
    "subnormals flushed": r"\b(?!F2I\b)[A-Z]\w*\.(\w+\.)*FTZ\b",
}


def violations(text: str, rules: dict[str, str]) -> list[str]:
    """Each rule's first violation, with its line."""
    found = []
    for what, pattern in rules.items():
        if hit := re.search(pattern, text):
            line = text[text.rfind("\n", 0, hit.start()) + 1 :].partition("\n")[0]
            found.append(f"{what}: {line.strip()}")
    return found


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on the path, beside nvcc, or of NVIDIA's wheels."""
    nvcc = EMBED["find_nvcc"]()
    beside = [Path(shutil.which(nvcc) or nvcc).resolve().parent] if nvcc else []
    wheels = [Path(folder).parent / "bin" for folder in nvrtc.folders()]
    places = [os.environ.get("PATH", ""), *map(str, [*beside, *wheels])]
    return shutil.which(name, path=os.pathsep.join(places))


@functools.lru_cache
def ptx_of(source: Path, *flags: str) -> str:
    """The PTX that nvcc makes of a file of kernels."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernels.ptx"
        command = [EMBED["find_nvcc"](), "-ptx", "-arch=compute_90", EMBED["STANDARD"], *flags]
        command += [f"-I{ROOT / 'csrc'}", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return made.read_text()


@functools.lru_cache
def ptx_in(image: Path) -> str:
    """The PTX that an image holds: what is shipped, and need not be compiled again."""
    dump = find_tool("cuobjdump")
    assert dump is not None
    done = subprocess.run([dump, "-ptx", str(image)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def functions_of(
    image: Path, architecture: str, names: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """(function, its instructions, each once) of an image's machine code for an architecture: of
    these functions, each of which takes the tool as long as three of all, or of all."""
    dump, disassembler = find_tool("cuobjdump"), find_tool("nvdisasm")
    assert dump is not None
    assert disassembler is not None
    path = os.pathsep.join([str(Path(disassembler).parent), os.environ.get("PATH", "")])
    some = ["-fun", ",".join(names)] if names else []
    done = subprocess.run(
        [dump, "-sass", "-arch", f"sm_{architecture}", *some, str(image)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr
    for function in done.stdout.split("Function : ")[1:]:
        name, _, body = function.partition("\n")
        # Each behind its address, which is in a comment.
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", body, re.MULTILINE)
        yield name.strip(), "\n".join(dict.fromkeys(instructions))
