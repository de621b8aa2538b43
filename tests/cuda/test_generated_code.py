"""The kernels as the compilers leave them: no warning, no spill, no fused or flushing operation.

No GPU is needed. Where nvcc, its tools or NVRTC are missing, that part is skipped, and says so.
"""

from __future__ import annotations

import collections
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.native_parts import native_part
from pycollective import _core
from pycollective.device_path import nvrtc_folders

ROOT = Path(__file__).resolve().parents[2]
EMBED = runpy.run_path(str(ROOT / "csrc" / "cuda" / "embed.py"))
ARCHITECTURES = ["80", "90", "100"]

_CASES = [f"{dtype.name}_{op}" for dtype in _core.dtypes() for op in dtype.reduce_ops]
KERNELS = [*(f"program_{case}" for case in _CASES), "program_move"]

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
    wheels = [Path(folder).parent / "bin" for folder in nvrtc_folders()]
    places = [os.environ.get("PATH", ""), *map(str, [*beside, *wheels])]
    return shutil.which(name, path=os.pathsep.join(places))


def run_tool(name: str, *arguments: str) -> str:
    """What this program of the CUDA toolkit says; without it the test is skipped."""
    tool = find_tool(name)
    if tool is None:
        pytest.skip(f"there is no {name}: pip install nvidia-cuda-{name}")
    path = os.pathsep.join([str(Path(find_tool("nvdisasm") or "").parent), os.environ["PATH"]])
    done = subprocess.run(
        [tool, *arguments],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def functions_of(
    image: Path, architecture: str, names: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """(function, its instructions, each once) of an image's machine code for an architecture: of
    these functions, each of which takes the tool as long as three of all, or of all."""
    some = ["-fun", ",".join(names)] if names else []
    said = run_tool("cuobjdump", "-sass", "-arch", f"sm_{architecture}", *some, str(image))
    for function in said.split("Function : ")[1:]:
        name, _, body = function.partition("\n")
        # Each behind its address, which is in a comment.
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", body, re.MULTILINE)
        yield name.strip(), "\n".join(dict.fromkeys(instructions))


MOST_REGISTERS = 128  # of a thread: device.h's blocks have up to 512

needs_nvcc = pytest.mark.skipif(EMBED["find_nvcc"]() is None, reason="there is no nvcc")
slow = pytest.mark.timeout(900)  # compiles


@pytest.fixture(scope="module")
def image():
    """The fatbin that the build has made, or, where anything has changed, a new one."""
    folder = ROOT / "build" / "cuda"
    return EMBED["compile_image"](EMBED["find_nvcc"](), folder, ARCHITECTURES)


@pytest.fixture(scope="module")
def ptx(image):
    return run_tool("cuobjdump", "-ptx", str(image))


@needs_nvcc
@slow
def test_nothing_spills_and_blocks_fit(image, record_property):
    said = image.with_suffix(".log").read_text()
    assert "warning" not in said
    used = collections.defaultdict(dict)
    for function in re.split(r"^ptxas info\s*: Compiling entry function ", said, flags=re.M)[1:]:
        name, architecture = re.match(r"'(\w+)' for 'sm_(\d+)'", function).groups()
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in function, name
        used[architecture][name] = int(re.search(r"Used (\d+) registers", function)[1])
    assert set(used) == set(ARCHITECTURES)
    for architecture, registers in used.items():
        assert set(registers) == set(KERNELS)
        most = max(registers, key=registers.get)
        record_property(f"registers sm_{architecture}", f"{registers[most]} ({most})")
        assert registers[most] <= MOST_REGISTERS


@needs_nvcc
@slow
def test_ptx_holds_nothing_that_changes_bits_or_ends_a_process(ptx):
    assert violations(ptx, FORBIDDEN_IN_PTX) == []
    assert sorted(re.findall(r"\.entry (\w+)", ptx)) == sorted(KERNELS)
    assert "add.rn.f32" in ptx
    assert re.search(r"ld(\.global)?\.v4\.u32", ptx)


# One PTX, of which ptxas makes each one's code: some of Hopper's are read, all in `make storm`.
SOME = [
    *(f"program_float32_{op}" for op in ("sum", "avg", "prod", "min", "max")),
    *("program_bfloat16_sum", "program_float8_e4m3fn_sum", "program_float64_sum"),
    *("program_int32_max", "program_move"),
]


@pytest.mark.storm
@needs_nvcc
@slow
@pytest.mark.parametrize(
    ("architecture", "names"), [("90", SOME), *((a, []) for a in ARCHITECTURES)]
)
def test_machine_code_holds_nothing_that_changes_bits_or_ends_a_process(image, architecture, names):
    seen = set()
    for name, code in functions_of(image, architecture, names):
        seen.add(name)
        assert "EXIT" in code
        rules = {**FORBIDDEN_IN_SASS}
        if not name.endswith("_avg"):
            rules.update(FORBIDDEN_IN_SASS_OF_SUMS)
        assert violations(code, rules) == [], name
    assert seen == set(names or KERNELS)


def code_takes_long(test):
    """75 s: where nvcc is, whose code is read above, `make storm` makes NVRTC's."""
    return slow(test if EMBED["find_nvcc"]() is None else pytest.mark.storm(test))


@code_takes_long
def test_nvrtc_compiles_every_kernel(tmp_path):
    command = [native_part("nvrtc_images"), tmp_path, "9", "0", *nvrtc_folders()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if "no NVRTC" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "program").read_bytes()
    assert made.startswith(b"\x7fELF")
    for name in KERNELS:
        assert f".text.{name}\0".encode() in made


@needs_nvcc
@slow
def test_marks_are_acquired_and_released_and_nothing_else_is(ptx):
    """Of each program's kernel: every flag that the protocol reads or writes, as it is compiled."""
    kernels = re.split(r"\.entry (\w+)", ptx)[1:]
    for name, code in zip(kernels[::2], kernels[1::2], strict=True):
        flags = collections.Counter(re.findall(r"\b((?:ld|st)\.\w+\.sys)\.u32", code))
        # The poison and the counter when it starts, the abort word: of no order.
        assert flags["ld.relaxed.sys"] >= 3, name
        # A mark that the slot is free and of a wait: seen at once, and in their loops.
        assert flags["ld.acquire.sys"] >= 3, name
        # Events, a chunk's end, the poison and its report.
        assert flags["st.release.sys"] >= 4, name
        assert set(flags) == {"ld.relaxed.sys", "ld.acquire.sys", "st.release.sys"}, name


# What breaks each rule.
BAD = [
    ("x[0] = x[1] * x[2] + x[3];", "a fused operation"),
    ("x[0] = __fdividef(x[1], x[2]);", "an approximation"),
    ("x[0] = __ldg(x + 1);", "a load past the caches' coherence"),
    ("if (x[0] > 1) __trap();", "a trap"),
    ("x[0] = 1; __threadfence_system(); x[1] = 2;", "a fence"),
    ('asm("ld.acquire.gpu.f32 %0, [%1];" : "=f"(x[1]) : "l"(x));', "a flag for less than"),
    ("*(volatile float*)x = 1;", "a volatile access"),
]


def kernels_of(tmp_path, statements, *flags):
    """The PTX of a kernel of each: nvcc takes half a second to start."""
    source = tmp_path / "bad.cu"
    source.write_text(
        "".join(
            f'extern "C" __global__ void bad{number}(float* x) {{ {statement} }}\n'
            for number, statement in enumerate(statements)
        )
    )
    text = tmp_path / "bad.ptx"
    compiler = [EMBED["find_nvcc"](), "-ptx", "-arch=compute_90", EMBED["STANDARD"], *flags]
    subprocess.run([*compiler, "-o", text, source], check=True, timeout=600)
    made = re.split(r"\.entry bad(\d+)", text.read_text())[1:]
    found = dict(zip(map(int, made[::2]), made[1::2], strict=True))
    assert sorted(found) == [*range(len(statements))]
    return [found[number] for number in sorted(found)]


@needs_nvcc
@slow
def test_the_rules_see_what_they_forbid(tmp_path):
    made = kernels_of(tmp_path, [statement for statement, _ in BAD])
    for code, (statement, what) in zip(made, BAD, strict=True):
        found = violations(code, FORBIDDEN_IN_PTX)
        assert any(each.startswith(what) for each in found), (statement, found)
    [code] = kernels_of(tmp_path, ["x[0] = x[1] + x[2];"], "-ftz=true")
    assert any(each.startswith("subnormals flushed") for each in violations(code, FORBIDDEN_IN_PTX))
