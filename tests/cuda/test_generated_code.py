"""The kernels as the compilers leave them: no warning, no spill, no fused or flushing operation.

No GPU is needed. Where nvcc, its tools or NVRTC are missing, that part is skipped, and says so.
"""

from __future__ import annotations

import collections
import re
import subprocess

import pytest

from benchmarks.native_parts import native_part
from pycollective.gpu import nvrtc
from tests.cuda.generated_code import (
    ARCHITECTURES,
    EMBED,
    FORBIDDEN_IN_PTX,
    FORBIDDEN_IN_SASS,
    FORBIDDEN_IN_SASS_OF_SUMS,
    KERNELS,
    ROOT,
    find_tool,
    functions_of,
    ptx_in,
    ptx_of,
    violations,
)

MOST_REGISTERS = 128  # of a thread: device.h's blocks have up to 512
ALL_KERNELS = {name for names in KERNELS.values() for name in names}

needs_nvcc = pytest.mark.skipif(EMBED["find_nvcc"]() is None, reason="there is no nvcc")
slow = pytest.mark.timeout(900)  # compiles


@pytest.fixture(scope="module")
def images():
    """The fatbins that the build has made, or, where anything has changed, new ones."""
    folder = ROOT / "build" / "cuda"
    return [
        EMBED["compile_image"](EMBED["find_nvcc"](), module, folder, ARCHITECTURES)
        for module in EMBED["modules"]()
    ]


def shipped_ptx(images, module):
    if find_tool("cuobjdump") is None:
        pytest.skip("there is no cuobjdump: pip install nvidia-cuda-cuobjdump")
    (image,) = [each for each in images if each.name.startswith(f"{module}-")]
    return ptx_in(image)


@needs_nvcc
@slow
def test_nothing_spills_and_blocks_fit(images, record_property):
    said = "".join(image.with_suffix(".log").read_text() for image in images)
    assert "warning" not in said
    used = collections.defaultdict(dict)
    for function in re.split(r"^ptxas info\s*: Compiling entry function ", said, flags=re.M)[1:]:
        name, architecture = re.match(r"'(\w+)' for 'sm_(\d+)'", function).groups()
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in function, name
        used[architecture][name] = int(re.search(r"Used (\d+) registers", function)[1])
    assert set(used) == set(ARCHITECTURES)
    for architecture, registers in used.items():
        assert set(registers) == ALL_KERNELS
        most = max(registers, key=registers.get)
        record_property(f"registers sm_{architecture}", f"{registers[most]} ({most})")
        assert registers[most] <= MOST_REGISTERS


@needs_nvcc
@slow
@pytest.mark.parametrize("module", KERNELS)
def test_ptx_holds_nothing_that_changes_bits_or_ends_a_process(images, module):
    ptx = shipped_ptx(images, module)
    assert violations(ptx, FORBIDDEN_IN_PTX) == []
    assert sorted(re.findall(r"\.entry (\w+)", ptx)) == sorted(KERNELS[module])
    assert "add.rn.f32" in ptx
    assert re.search(r"ld(\.global)?\.v4\.u32", ptx)


# One PTX, of which ptxas makes each one's code: some of Hopper's are read, all in `make storm`.
USUALLY_READ = "90"
SOME = {
    "program": [
        *(f"program_float32_{op}" for op in ("sum", "avg", "prod", "min", "max")),
        *("program_bfloat16_sum", "program_float8_e4m3fn_sum", "program_float64_sum"),
        *("program_int32_max", "program_move"),
    ]
}


@needs_nvcc
@slow
@pytest.mark.parametrize(
    ("architecture", "some"),
    [
        pytest.param(
            *(USUALLY_READ, SOME), marks=pytest.mark.storm, id=f"sm_{USUALLY_READ}, some programs"
        ),
        *(
            pytest.param(each, {}, marks=pytest.mark.storm, id=f"sm_{each}")
            for each in ARCHITECTURES
        ),
    ],
)
def test_machine_code_holds_nothing_that_changes_bits_or_ends_a_process(images, architecture, some):
    for tool in ("cuobjdump", "nvdisasm"):
        if find_tool(tool) is None:
            pytest.skip(f"there is no {tool}: pip install nvidia-cuda-{tool}")
    seen = set()
    for image in images:
        names = some.get(image.name.partition("-")[0], ())
        for name, code in functions_of(image, architecture, names):
            seen.add(name)
            assert "EXIT" in code
            rules = {**FORBIDDEN_IN_SASS}
            if not name.endswith("_avg"):
                rules.update(FORBIDDEN_IN_SASS_OF_SUMS)
            assert violations(code, rules) == [], name
    assert seen == {name for module in KERNELS for name in some.get(module, KERNELS[module])}


def made_by_nvrtc(folder, *flags):
    """What NVRTC makes of each module, by name."""
    folder.mkdir()
    command = [native_part("nvrtc_images"), folder, "9", "0", *nvrtc.folders(), "--", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if "no NVRTC" in done.stderr:
        pytest.skip(done.stderr)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.storm
def test_nvrtc_takes_every_kernel(tmp_path):
    """What its front end says, templates and assertions in them included; a warning is an error."""
    made = made_by_nvrtc(tmp_path / "right", "-fdevice-syntax-only")
    assert set(made) == {module.stem for module in EMBED["modules"]()}
    with pytest.raises(RuntimeError, match=r"does not compile cuda/(?s:.*)no_such"):
        made_by_nvrtc(tmp_path / "wrong", "-fdevice-syntax-only", "-Dfloat=no_such")


def code_takes_long(test):
    """75 s: where nvcc is, whose code is read above, `make storm` makes NVRTC's."""
    return slow(test if EMBED["find_nvcc"]() is None else pytest.mark.storm(test))


@code_takes_long
def test_nvrtc_compiles_every_kernel(tmp_path):
    made = made_by_nvrtc(tmp_path / "images")
    for module, names in KERNELS.items():
        assert made[module].startswith(b"\x7fELF")
        for name in names:
            assert f".text.{name}\0".encode() in made[module]


@needs_nvcc
@slow
def test_marks_are_acquired_and_released_and_nothing_else_is(images):
    """Of each program's kernel: every flag that the protocol reads or writes, as it is compiled."""
    ptx = shipped_ptx(images, "program")
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


# What each function of device.h becomes.
DEVICE = """
#include "cuda/device.h"
using namespace pycollective::cuda;
struct Words { std::uint32_t* words; std::uint64_t* time; };
KERNEL(probe, Words) {
  SHARED(std::uint32_t, shared);
  if (thread() == 0) shared = load_acquire(visible(p.words));
  barrier();
  if (barrier_or(load_relaxed(p.words + 1) != shared)) pause();
  *p.time = nanoseconds();
  store_release(p.words + 2, block() + blocks() + threads());
}
"""


@needs_nvcc
@slow
def test_flags_are_of_the_system_and_waits_leave_the_core(tmp_path):
    source = tmp_path / "device.cu"
    source.write_text(DEVICE)
    ptx = ptx_of(source)
    for expected in (
        "ld.acquire.sys.u32",
        "st.release.sys.u32",
        "ld.relaxed.sys.u32",
        "%globaltimer",
        "nanosleep.u32",
        "bar.red.or.pred",
        ".maxntid 512",
    ):
        assert expected in ptx, ptx
    assert violations(ptx, FORBIDDEN_IN_PTX) == []


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
    made = re.split(r"\.entry bad(\d+)", ptx_of(source, *flags))[1:]
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
