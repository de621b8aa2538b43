"""Puts the kernels into a C++ file: their sources, for NVRTC, and where nvcc is, their images.

setup.py and the native tests' Makefile run it. What nvcc made is kept beside the C++ file, under a
name that holds a digest of all that went into it, and is not made again.

Environment:
    PYCOLLECTIVE_NVCC            nvcc's path; 0: leave the images out
    PYCOLLECTIVE_CUDA_ARCHS      the GPUs to compile for, as in "90"; PTX of the oldest is added
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CSRC = Path(__file__).resolve().parents[1]
PROGRAM = CSRC / "cuda" / "program.cu"  # all kernels
ARCHITECTURES = "80 90 100"
# The contract: each operation is one of IEEE's, and subnormals stay. NVRTC takes these as well.
IEEE_FLAGS = ["-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"]
STANDARD = "-std=c++17"
LONGEST_LINE = 300
# What kernels use of the standard headers, of which NVRTC has none; memcpy it knows without one.
NVRTC_HEADERS = {
    "cfloat": "#define FLT_EVAL_METHOD 0  // a GPU computes each type in its own precision",
    "cstddef": "namespace std { using size_t = decltype(sizeof(0)); }",
    "cstdint": """namespace std {
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
}""",
    "cstring": "",
}


def sources() -> dict[str, str]:
    """All that kernels include, directly or not, by the names in their includes; and themselves."""
    found: dict[str, str] = {}
    left = [PROGRAM.relative_to(CSRC).as_posix()]
    while left:
        name = left.pop()
        if name in found:
            continue
        found[name] = text = (CSRC / name).read_text()
        for included in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            if included != "emulation.h":  # the stand-in's
                left.append(included)
    for name, text in NVRTC_HEADERS.items():
        found[name] = f"#pragma once\n{text}\n"
    return dict(sorted(found.items()))


def find_nvcc() -> str | None:
    """The compiler, or None where there is none or it is not wanted."""
    named = os.environ.get("PYCOLLECTIVE_NVCC", "")
    if named == "0":
        return None
    if named:
        return named
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [f"{home}/bin/nvcc" for home in [*filter(None, homes), "/usr/local/cuda"]]
    return shutil.which("nvcc") or next(filter(shutil.which, places), None)


def wanted_architectures() -> list[str]:
    """The GPUs that images are made for: "90" is compute capability 9.0."""
    return (os.environ.get("PYCOLLECTIVE_CUDA_ARCHS", "").strip() or ARCHITECTURES).split()


def known_architectures(nvcc: str) -> list[str]:
    """Those wanted; of the usual ones only what this nvcc knows: 12.8 was the first with 100."""
    wanted = wanted_architectures()
    if os.environ.get("PYCOLLECTIVE_CUDA_ARCHS", "").strip():
        return wanted
    listed = subprocess.run([nvcc, "--list-gpu-arch"], check=False, capture_output=True, text=True)
    known = [each for each in wanted if f"compute_{each}" in listed.stdout.split()]
    return known or wanted


def nvcc_flags(architectures: list[str]) -> list[str]:
    """How each kernel file is compiled: once, to PTX of the oldest architecture; code for each.

    The kernels use nothing that is newer, their PTX is the same line by line for 80 and 90, and
    making it takes four fifths of the time. Any later GPU takes it, too. For 100 nvcc 13.0 has
    another compiler (NVVM 20), whose PTX differs; which is faster no GPU has shown.
    """
    plain = [each for each in architectures if each.isdigit()]  # "90a" has PTX for itself alone
    oldest = min(plain, key=int, default="")
    code = ",".join([f"compute_{oldest}", *(f"sm_{each}" for each in plain)])
    alone = [each for each in architectures if each not in plain]
    return [
        *(STANDARD, "-O3", f"-I{CSRC}", *IEEE_FLAGS, "-Werror", "all-warnings"),
        *("-Xfatbin", "-compress-all", "-Xptxas", "-v", "--threads", "2"),
        *([f"-gencode=arch=compute_{oldest},code=[{code}]"] if plain else []),
        *(f"-gencode=arch=compute_{each},code=[compute_{each},sm_{each}]" for each in alone),
    ]


def compile_image(
    nvcc: str, folder: Path, architectures: list[str], defines: tuple[str, ...] = ()
) -> Path:
    """The kernels' fatbin, from the folder if nothing has changed; and what ptxas said, a .log.

    Args:
        nvcc: the compiler.
        folder: for all that is made of them.
        architectures: "90" and so on.
        defines: "NAME=VALUE", which the kernels of users have none of.

    Raises:
        subprocess.CalledProcessError: nvcc does not compile it.
        OSError: there is no such nvcc.
    """
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True)
    flags = [*nvcc_flags(architectures), *(f"-D{define}" for define in defines)]
    digest = hashlib.sha256()
    for part in [version.stdout, PROGRAM.name, *flags, *sum(sources().items(), ())]:
        digest.update(part.replace(str(CSRC), "").encode() + b"\0")
    image = folder / f"{PROGRAM.stem}-{digest.hexdigest()[:16]}.fatbin"
    if not image.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = image.with_suffix(f".{os.getpid()}")
        command = [nvcc, "-fatbin", *flags, "-o", str(made), str(PROGRAM)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        image.with_suffix(".log").write_text(done.stdout + done.stderr)
        made.rename(image)
        for old in folder.glob(f"{PROGRAM.stem}-*"):
            if old.stem != image.stem:
                old.unlink(missing_ok=True)
    return image


class Compiled(NamedTuple):
    """What nvcc made of the kernels, and for which GPUs; or why it made nothing, in a line."""

    image: Path | None
    architectures: list[str]
    failure: str = ""


def compile_kernels(folder: Path, strict: bool) -> Compiled:
    """Their fatbin; none, and a word about it, where nvcc cannot."""
    nvcc = find_nvcc()
    if nvcc is None:
        return Compiled(None, [])
    try:
        architectures = known_architectures(nvcc)
        return Compiled(compile_image(nvcc, folder, architectures), architectures)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or "").strip() or str(error)
        if strict:
            raise SystemExit(f"{nvcc} does not compile the CUDA kernels:\n{said}") from error
        print(
            f"{nvcc} does not compile the CUDA kernels; NVRTC will, where they are used:\n{said}",
            file=sys.stderr,
        )
        return Compiled(None, [], f"{nvcc}: {telling_line(said)}")


def telling_line(said: str) -> str:
    """The first line that tells of an error, or else the first."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if re.search("error|fatal", line, re.IGNORECASE)]
    return (telling or lines)[0][:LONGEST_LINE]


def quoted(line: str) -> str:
    """A C++ literal of the line; what is not plain ASCII becomes a dot."""
    plain = re.sub(r"[^ -~]", ".", line)
    return '"' + re.sub(r'([\\"?])', r"\\\1", plain) + '"'


def cplusplus(compiled: Compiled) -> str:
    """The C++ file, cuda/embedded.h's other half."""
    lines = ['#include "cuda/embedded.h"', ""]
    image, symbol = "nullptr, nullptr", "pycollective_kernels"
    if compiled.image is not None:
        image, path = f"{symbol}, {symbol}_end", compiled.image.resolve()
        lines += [
            "__asm__(",
            '    ".pushsection .rodata, \\"a\\"\\n.balign 64\\n"',
            f'    ".global {symbol}, {symbol}_end\\n.hidden {symbol}, {symbol}_end\\n"',
            f'    "{symbol}:\\n.incbin \\"{path}\\"\\n{symbol}_end:\\n.byte 0\\n"',
            '    ".popsection\\n");',
            f'extern "C" const unsigned char {symbol}[], {symbol}_end[];',
        ]
    lines += ["", "namespace pycollective::cuda {", "namespace {", ""]
    lines.append("const EmbeddedSource kSources[] = {")
    for name, text in sources().items():
        lines.append(f'{{"{name}", R"kernel({text})kernel"}},')
    flags = ", ".join(f'"{flag}"' for flag in [STANDARD, *IEEE_FLAGS])
    names = ", ".join(f"sm_{each}" for each in compiled.architectures)
    texts = f'"{names} and PTX"' if compiled.image else '""', quoted(compiled.failure)
    lines += [
        *("};", f"const char* const kFlags[] = {{{flags}}};", "", "}  // namespace", ""),
        "const Embedded& embedded() {",
        "  static constexpr Embedded kEmbedded{",
        f'      kSources, {{"{PROGRAM.stem}", "cuda/{PROGRAM.name}", {image}}}, kFlags,',
        f"      {', '.join(texts)}}};",
        *("  return kEmbedded;", "}", "", "}  // namespace pycollective::cuda", ""),
    ]
    return "\n".join(lines)


def embed(folder: Path, strict: bool) -> Path:
    """Write ``embedded.cpp`` into the folder, unless it is there already; where it is."""
    text = cplusplus(compile_kernels(folder, strict))
    path = folder / "embedded.cpp"
    if not path.exists() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strict", action="store_true", help="fail where nvcc does")
    given = parser.parse_args()
    print(embed(given.folder, given.strict))
