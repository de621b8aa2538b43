"""Builds the native parts: the core (no torch) always, the torch backend where torch is importable.

Environment:
    PYCOLLECTIVE_WERROR=1   compiler warnings are errors (CI)
    PYCOLLECTIVE_TORCH=0    leave the torch backend out even if torch is here
    PYCOLLECTIVE_NVCC       the CUDA compiler; 0: leave the kernels to NVRTC (csrc/cuda/embed.py)
    PYCOLLECTIVE_BUILD_JOBS how many files are compiled at once, beside them nvcc where it is not 1;
                            without it, as many as cores
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import platform
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

if 0 < int(setuptools.__version__.split(".")[0]) < 77:  # 0: its metadata are not there
    raise SystemExit(
        "pycollective is built with setuptools 77 or later, the first to read the licence in "
        f"pyproject.toml, and here is {setuptools.__version__}: pip install 'setuptools>=77'"
    )

# The contract: each add is one IEEE-754 addition. No contraction into fused multiply-adds.
IEEE_FLAGS = ["-ffp-contract=off", "-fno-fast-math"]
CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", *IEEE_FLAGS, "-Wall", "-Wextra"]
if os.environ.get("PYCOLLECTIVE_WERROR") == "1":
    CXX_FLAGS.append("-Werror")

# Kernels are compiled once for each instruction set (csrc/kernels/levels.h), with these flags.
KERNELS = [
    *("csrc/kernels/copy.cpp", "csrc/kernels/reduce.cpp", "csrc/kernels/pack/pack.cpp"),
    *("csrc/kernels/quantize/quantize.cpp", "csrc/kernels/sparse/sparse.cpp"),
]
LEVELS: dict[str, list[str]] = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS["avx2"] = ["-mavx2", "-mf16c"]
    LEVELS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"]


# What a small call runs through, linked side by side: scattered among all else it takes a seventh
# longer (232 ns in order of names against 204; in eight other orders 208 to 244).
HOT_SOURCES = [
    *("bindings/collective_methods.cpp", "bindings/call.cpp", "bindings/array_view.cpp"),
    *("engine/validate.cpp", "engine/communicator.cpp", "engine/operations/arrival.cpp"),
    *("engine/call_signature.cpp", "engine/operations/one_shot.cpp", "engine/group.cpp"),
    *("kernels/dispatch.cpp", "kernels/reduce_avx512.cpp", "kernels/reduce_avx2.cpp"),
]


def _hot_first(objects: list[str]) -> list[str]:
    def place(path: str) -> int:
        source = Path(path).with_suffix(".cpp").as_posix()
        return next((i for i, hot in enumerate(HOT_SOURCES) if source.endswith(hot)), 99)

    return sorted(objects, key=place)


# What csrc/cuda/embed.py puts into the core.
KERNEL_FILES = glob.glob("csrc/cuda/*.*")

# Parts of one another, which stand for nothing by themselves, are .inl.
HEADERS = [path for end in ("h", "inl") for path in glob.glob(f"csrc/**/*.{end}", recursive=True)]


# How the torch shim is compiled; and how sources are read together.
SHIM = runpy.run_path("pycollective/shim/compiling.py")


def core_extension() -> Extension:
    """The native core: kernels, shared memory, engine. It links nothing but libc and libstdc++."""
    sources = sorted(
        path
        for folder in (
            "kernels",
            "kernels/pack",
            "kernels/quantize",
            "kernels/sparse",
            "shared_memory",
            "engine",
            "engine/operations",
            "engine/plans",
            "engine/internode",
            "engine/gpu",
            "mpi",
            "cuda",
            "bindings",
        )
        for path in glob.glob(f"csrc/{folder}/*.cpp")
    )
    return Extension(
        "pycollective._core",
        sources,
        include_dirs=["csrc", _pybind11_include(), numpy.get_include()],
        depends=[*HEADERS, *KERNEL_FILES],
        extra_compile_args=CXX_FLAGS,
        libraries=["dl"],
        language="c++",
    )


def torch_extension() -> Extension | None:
    """The c10d::Backend shim: the only code that links torch."""
    if os.environ.get("PYCOLLECTIVE_TORCH") == "0":
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    torch = spec.submodule_search_locations[0]
    sources = SHIM["sources"]("csrc")
    if len(sources) < 2:
        raise SystemExit("csrc/torch is missing: an incomplete source distribution")
    return Extension(
        "pycollective._torch",
        sources,
        include_dirs=SHIM["include_folders"]("csrc", torch),
        library_dirs=[f"{torch}/lib"],
        libraries=SHIM["LIBRARIES"],
        depends=HEADERS,
        extra_compile_args=SHIM["FLAGS"] + (["-Werror"] if "-Werror" in CXX_FLAGS else []),
        language="c++",
    )


def _pybind11_include() -> str:
    """Its headers: the package's own, or those that torch brings with it."""
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return pybind11.get_include()
    torch = importlib.util.find_spec("torch")
    for folder in (torch.submodule_search_locations or []) if torch is not None else []:
        if Path(folder, "include", "pybind11", "pybind11.h").exists():
            return str(Path(folder, "include"))
    raise SystemExit("there is no pybind11, and no torch that has its headers")


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # not there, or built in place
        return package


def _targets(target: str, source: str) -> list[tuple[str, list[str]]]:
    """The objects of a source, each with its flags: of kernels one for each level."""
    if source not in KERNELS:
        return [(target, [])]
    stem, end = os.path.splitext(target)
    return [
        (f"{stem}_{level}{end}", [f"-DPYCOLLECTIVE_LEVEL={level}", *flags])
        for level, flags in LEVELS.items()
    ]


def _compile_in_parallel(compiler: Any, jobs: int) -> None:
    """Have it compile so many files at once, and kernels once for each level."""

    def compile_all(
        sources: Any,
        output_dir: Any = None,
        macros: Any = None,
        include_dirs: Any = None,
        debug: Any = False,
        extra_preargs: Any = None,
        extra_postargs: Any = None,
        depends: Any = None,
    ) -> Any:
        macros, objects, extra, options, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        arguments = compiler._get_cc_args(options, debug, extra_preargs)
        made = {
            target: (*build[each], arguments, [*extra, *flags], options)
            for each in objects
            for target, flags in _targets(each, build[each][0])
        }
        with ThreadPoolExecutor(jobs) as pool:
            under_way = [pool.submit(compiler._compile, each, *made[each]) for each in made]
        for each in under_way:
            each.result()
        return list(made)

    compiler.compile = compile_all


# Where extensions are linked, whichever command asks for them: pip builds an editable install in a
# folder that it removes, and all would be compiled again for a wheel.
EXTENSIONS = "build/extensions"


class BuildExt(build_ext):
    """Compiles in parallel, kernels for each instruction set; and the CUDA kernels."""

    def run(self) -> None:
        """Build what has changed, and copy it to where the command wants it."""
        wanted, self.build_lib = self.build_lib, EXTENSIONS
        try:
            super().run()
        finally:
            self.build_lib = wanted
        for ext in [] if self.inplace else self.extensions:
            path = self.get_ext_filename(ext.name)
            self.mkpath(str(Path(wanted, path).parent))
            self.copy_file(str(Path(EXTENSIONS, path)), str(Path(wanted, path)))

    def build_extensions(self) -> None:
        """Compile several files at once, and the CUDA kernels beside torch's."""
        jobs = int(os.environ.get("PYCOLLECTIVE_BUILD_JOBS") or 0) or os.cpu_count() or 1
        _compile_in_parallel(self.compiler, jobs)
        strict = os.environ.get("PYCOLLECTIVE_WERROR") == "1"
        embed = runpy.run_path("csrc/cuda/embed.py")["embed"]
        with ThreadPoolExecutor(1) as beside:
            self.embedded = beside.submit(embed, Path("build/cuda"), strict)
            if jobs == 1:
                self.embedded.result()
            super().build_extensions()

    def _made_of(self, ext: Any) -> Path:
        """A file that changes when flags, sources or libraries do: then all is compiled again."""
        versions = [_version(name) for name in ("numpy", "pybind11", "torch")]
        compilers = [f"{name}={os.environ.get(name, '')}" for name in ("CC", "CXX", "CFLAGS")]
        flags = [*ext.extra_compile_args, *ext.include_dirs]
        text = "\n".join([*compilers, *flags, *versions, *sorted(ext.sources), ""])
        stamp = Path("build", ext.name, "made_of")
        if not stamp.exists() or stamp.read_text() != text:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(text)
        return stamp

    def build_extension(self, ext: Any) -> None:
        """Compile one extension, and link what is hot side by side."""
        link = self.compiler.link_shared_object
        self.compiler.link_shared_object = lambda objects, *more, **named: link(
            _hot_first(objects), *more, **named
        )
        # Hot ones are linked side by side, each from an object of its own.
        read_together = [
            path
            for path in ext.sources
            if path.startswith(("csrc/bindings/", "csrc/torch/"))
            and path.removeprefix("csrc/") not in HOT_SOURCES
        ]
        apart = [path for path in ext.sources if path not in read_together]
        ext.depends = [*ext.depends, *read_together, "setup.py", str(self._made_of(ext))]
        ext.sources = apart + SHIM["joined"]("csrc", read_together, Path("build", ext.name))
        if ext.name == "pycollective._core":
            ext.sources.append(str(self.embedded.result()))
        try:
            super().build_extension(ext)
        finally:
            self.compiler.link_shared_object = link


class BuildPy(build_py):
    """Adds the torch shim's sources to a wheel, as pycollective/csrc; a checkout has its own."""

    def run(self) -> None:
        """Copy the package's files, and those sources."""
        super().run()
        for path in [] if self.editable_mode else SHIM["read"]("csrc"):
            to = Path(self.build_lib, "pycollective", path)
            self.mkpath(str(to.parent))
            self.copy_file(path, str(to))


# The core last: nvcc takes as long for its kernels as torch's part takes.
extensions = [ext for ext in (torch_extension(), core_extension()) if ext is not None]
setup(ext_modules=extensions, cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
