"""The rules that keep the house in order: who may import whom, what an import does."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pycollective"
CSRC = ROOT / "csrc"
NATIVE = {".cpp", ".cu", ".h", ".inl"}

# Each layer, and the layers of the package that it may import. `_core` is the native core.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "dtypes": {"_core", "errors"},
    "agree": {"errors"},
    "config": {"errors"},
    "cores": {"errors"},
    "system_limits": {"config", "errors"},
    "placement": {"config", "errors"},
    "order": set(),
    "leaves": {"_core", "agree", "errors", "order", "typing"},
    "deal": {"leaves"},  # a name of before, for one release
    "segments": set(),
    "triton": {"errors", "order", "segments"},
    "reference": {"order"},
    "typing": set(),
    "host_memory": {"errors"},
    "schedule": {"errors", "leaves", "order", "placement"},  # of leaves the deal: test below
    "shim": {"config", "errors"},
    "transport": {"_core", "_torch", "config", "errors", "shim", "system_limits"},
    "planning": {"_core", "config", "errors", "leaves", "schedule", "transport"},
    "device_path": {"_core", "agree", "config", "errors"},
    "communicator": {
        *(
            "_core",
            "agree",
            "dtypes",
            "errors",
            "device_path",
            "host_memory",
            "leaves",
            "placement",
            "planning",
            "typing",
        ),
    },
    "ledger": {"config", "errors"},
    "testing": {"_core", "communicator", "dtypes", "errors"},
    "compression": {"_core", "agree", "communicator", "errors", "placement", "segments", "typing"},
    "bootstrap": {
        *("_core", "communicator", "config", "errors", "device_path", "host_memory", "placement"),
        *("planning", "schedule", "system_limits", "transport", "typing"),
    },
    "launch": {"bootstrap", "config", "cores", "errors", "system_limits"},
    "__init__": {
        *("_core", "bootstrap", "communicator", "config", "errors", "leaves"),
    },
    "torch": {
        *("_core", "_torch", "agree", "bootstrap", "communicator", "compression", "config"),
        *("dtypes", "errors", "leaves", "ledger", "order", "placement", "segments", "shim"),
        *("system_limits", "triton", "typing"),
    },
    "bench": {
        *("_core", "bootstrap", "communicator", "compression", "config", "cores", "device_path"),
        *("dtypes", "errors", "planning", "reference", "schedule", "testing", "torch", "typing"),
    },
    "verify": {
        *("_core", "bootstrap", "communicator", "config", "dtypes", "errors", "reference"),
        *("schedule", "testing"),
    },
    "cli": {
        *("_core", "bench", "bootstrap", "config", "cores", "device_path", "dtypes", "errors"),
        *("host_memory", "launch", "ledger", "order", "planning", "schedule", "shim", "verify"),
    },
    "__main__": {"cli"},
}

# What may be imported at the top of a file, beside NumPy and the standard library. All else is
# imported where it is used, so that a program pays for no more than it asks for.
TOP_LEVEL: dict[str, set[str]] = {
    "torch": {"torch"},
    "triton": {"torch"},
    "triton/accumulate": {"triton"},
    "triton/finite": {"triton"},
    "triton/floats": {"triton"},
    "triton/headers": {"triton"},
    "triton/launching": {"triton"},
    "triton/quantize": {"triton"},
    "triton/reduce": {"triton"},
    "triton/rows": {"triton"},
    "triton/index_packing": {"triton"},
    "triton/sparse_sums": {"triton"},
    "triton/tables": {"triton"},
    "triton/top_k": {"triton"},
    "bench/ranks/library_torch": {"torch"},
    "bench/ranks/library_mpi": {"mpi4py"},
}
# What may be imported inside functions.
LAZY: dict[str, set[str]] = {
    "bootstrap/init": {"torch"},  # under torchrun
    "bootstrap/mpi": {"mpi4py"},
    "bootstrap/mpi_membership": {"mpi4py"},
    "ledger/digests": {"xxhash"},
    "shim": {"torch"},
    "transport/gloo": {"torch"},
    "transport/mpi": {"mpi4py"},
    "cli": {"matplotlib"},
    "dtypes": {"ml_dtypes"},
    "bench": {"matplotlib"},
}

# The same for the native code: which folders a folder may include. `csrc` is the files beside them.
NATIVE_LAYERS: dict[str, set[str]] = {
    "csrc": set(),
    "kernels": {"csrc"},
    "shared_memory": {"csrc"},
    "engine": {"csrc", "kernels", "shared_memory", "cuda"},
    "mpi": {"engine"},
    "cuda": {"csrc"},
    "bindings": {"csrc", "kernels", "shared_memory", "engine", "mpi", "cuda"},
    "torch": {"csrc", "engine", "bindings"},  # the bindings' errors and lock alone: test below
    "tests": {"csrc", "kernels", "shared_memory", "engine", "mpi", "cuda"},
}


# Within the engine: what stands further down includes only what stands above it, or beside it. A
# name is a file's, without its ending, or a folder's; the longer one counts.
ENGINE_ORDER: list[set[str]] = [
    {"api", "chooser", "cores", "failure_text", "waiting_time"},
    {"plans"},
    {"shards", "task"},
    {"call_signature", "validate"},
    {"internode"},
    {"messages"},
    {"group"},
    {"operation"},
    {"watch"},
    {"operations"},
    {"gpu"},
    {"any_operation"},
    {"communicator", "pending", "progress", "queues"},
]


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def place(path: Path) -> str:
    """``bench/ranks/case`` for that file of the package."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def layer_of(name: str) -> str:
    """The layer of a place, or of a dotted name below the package."""
    return re.split(r"[./]", name)[0] if name else "__init__"


def import_statements(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Each import: the module, the name taken from it or "", and whether it is in a function."""
    tree = ast.parse(path.read_text(), str(path))
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", id(node) in lazy
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
            base = ".".join([*(package if node.level else ()), *filter(None, [node.module])])
            for alias in node.names:
                yield base, alias.name, id(node) in lazy


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each imported module's dotted name, and whether a function must be called to import it."""
    for base, name, lazy in import_statements(path):
        # `from pycollective import errors` imports a module, `... import init` a name of one.
        submodule = base == "pycollective" and name in {*LAYERS, "_core", "_torch"}
        yield f"{base}.{name}" if submodule else base, lazy


def allowed(rules: dict[str, set[str]], where: str) -> set[str]:
    """What the rules for `where` and for every folder above it allow."""
    parts = where.split("/")
    folders = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return set().union(*(rules.get(folder, set()) for folder in folders))


def below_the_package(name: str) -> bool:
    return name.split(".")[0] == "pycollective"


def unused(rules: dict[str, set[str]], used: dict[str, set[str]]) -> dict[str, set[str]]:
    """What the rules allow and nothing makes use of."""
    return {layer: more for layer in rules if (more := rules[layer] - used.get(layer, set()))}


def test_a_module_imports_only_layers_below_and_the_rules_name_no_more() -> None:
    used: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for path in modules():
        layer = layer_of(place(path))
        assert layer in LAYERS, f"{layer} is new: say in LAYERS what it may import"
        for name, _ in imports(path):
            if below_the_package(name) and (to := layer_of(name.partition(".")[2])) != layer:
                assert to in LAYERS[layer], f"{place(path)} imports {name}"
                if to == "leaves" and layer in ("schedule", "planning"):
                    assert name == "pycollective.leaves.deal", f"{place(path)} imports {name}"
                used[layer].add(to)
    assert {layer_of(place(path)) for path in modules()} == set(LAYERS)
    assert unused(LAYERS, used) == {}


def test_the_layers_have_no_cycle() -> None:
    done: set[str] = {"_core", "_torch"}
    left = dict(LAYERS)
    while left:
        free = [layer for layer, below in left.items() if below <= done]
        assert free, f"these import each other: {sorted(left)}"
        for layer in free:
            del left[layer]
            done.add(layer)


def modules_imported(path: Path, known: set[str]) -> set[str]:
    """The places of the package's modules that a file imports, those for type checkers among them.

    A name of a module beside it, as in ``from pycollective.bootstrap import mpi``, counts as that.
    """
    found = set()
    for base, name, _ in import_statements(path):
        if not below_the_package(base):
            continue
        parts = [*base.split(".")[1:], *filter(None, [name])]
        for end in (len(parts), len(parts) - 1):
            where = "/".join(parts[:end])
            if hits := {where, f"{where}/__init__"} & known:
                found |= hits
                break
    return found - {place(path)}


def test_no_modules_import_each_other() -> None:
    known = {place(path) for path in modules()}
    left = {place(path): modules_imported(path, known) for path in modules()}
    assert "bootstrap/options" in left["bootstrap/mpi"]
    while free := [module for module, below in left.items() if not below & left.keys()]:
        for module in free:
            del left[module]
    circles = {module: sorted(below & left.keys()) for module, below in left.items()}
    assert not circles, f"these import each other, or one that does: {circles}"


def test_other_packages_are_imported_where_they_may() -> None:
    for path in modules():
        where = place(path)
        for name, lazy in imports(path):
            package = name.split(".")[0]
            if package in {*sys.stdlib_module_names, "numpy", "pycollective"}:
                continue
            may = allowed(TOP_LEVEL, where) | (allowed(LAZY, where) if lazy else set())
            assert package in may, f"{where} imports {package} {'in a function' if lazy else ''}"


def test_the_rules_see_a_forbidden_import(tmp_path: Path) -> None:
    """The parser itself: each form of import, at the top and inside a function."""
    file = PACKAGE / "bench" / "imaginary.py"  # never written: only its place matters

    class Source(type(file)):  # type: ignore[misc]
        def read_text(self, *args: object, **options: object) -> str:
            return (
                "import torch.distributed\n"
                "from . import plot\n"
                "from .ranks.case import Case\n"
                "from pycollective import _core, init\n"
                "def later():\n"
                "    from pycollective.cli import main\n"
            )

    assert list(imports(Source(file))) == [
        ("torch.distributed", False),
        ("pycollective.bench", False),
        ("pycollective.bench.ranks.case", False),
        ("pycollective._core", False),
        ("pycollective", False),
        ("pycollective.cli", True),
    ]


# Runs in a new process: what `import pycollective` changes beyond `import numpy`.
PROBE = """
import json, os, signal, sys, threading, warnings
import numpy

def state():
    descriptors = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            pass  # the listing's own
    maps = open("/proc/self/maps").read().splitlines()
    return {
        "threads": sorted(os.listdir("/proc/self/task")),
        "descriptors": descriptors,
        "environment": dict(os.environ),
        "signals": [repr(signal.getsignal(number)) for number in range(1, 32)],
        "files": sorted(os.listdir(".")) + sorted(os.listdir("/dev/shm")),
        "shared memory": [line for line in maps if "memfd:" in line or "/dev/shm/" in line],
        "folder": os.getcwd(),
        "warnings": repr(warnings.filters),
        "path": sys.path[:],
    }

modules = set(sys.modules)
before = state()
import pycollective
after = state()
print(json.dumps({
    "modules": sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
    "changed": [name for name in before if before[name] != after[name]],
}))
"""


@pytest.mark.alone  # it looks at all of /dev/shm, where other tests' jobs make files
def test_importing_the_package_needs_numpy_alone_and_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROBE]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert set(seen["modules"]) - set(sys.stdlib_module_names) == {"pycollective"}
    assert seen["changed"] == []
    assert done.stderr == ""


def native_files() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*.*") if path.suffix in NATIVE)


def native_place(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


def native_includes(path: Path) -> list[str]:
    """What stands between the quotes of each include, but for the stand-in's half of device.h."""
    names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
    return [name for name in names if name != "emulation.h"]


def folder_of(name: str) -> str:
    """The folder of a file, of which the path from csrc/ on is given."""
    return name.split("/")[0] if "/" in name else "csrc"


def test_native_code_includes_only_layers_below_and_the_rules_name_no_more() -> None:
    used: dict[str, set[str]] = {}
    for path in native_files():
        where = native_place(path)
        folder = folder_of(where)
        used.setdefault(folder, set()).update(map(folder_of, native_includes(path)))
        for name in native_includes(path):
            # Includes are written from csrc/ on; a bare name is a file of csrc/ itself.
            assert (CSRC / name).exists() or (path.parent / name).exists(), (where, name)
            included = folder_of(name)
            assert included == folder or included in NATIVE_LAYERS[folder], (where, name)
            if (folder, included) == ("torch", "bindings"):
                assert name in ("bindings/errors_py.h", "bindings/gil.h"), where
            if (folder, included) == ("engine", "cuda"):
                assert where.startswith("engine/gpu/"), (where, name)
    assert set(used) == set(NATIVE_LAYERS)
    assert unused(NATIVE_LAYERS, used) == {}


def engine_level(name: str) -> int:
    """The place in `ENGINE_ORDER` of a file, of which the path from engine/ on is given."""
    stem = name.rpartition(".")[0]
    for known in (stem, stem.split("/")[0]):
        for level, names in enumerate(ENGINE_ORDER):
            if known in names:
                return level
    raise AssertionError(f"engine/{name} is new: say in ENGINE_ORDER where it stands")


def test_the_engine_includes_nothing_that_stands_above_it() -> None:
    for path in (CSRC / "engine").rglob("*.*"):
        where = path.relative_to(CSRC / "engine").as_posix()
        for name in native_includes(path):
            if name.startswith("engine/"):
                below = engine_level(name.removeprefix("engine/"))
                assert below <= engine_level(where), f"engine/{where} includes {name}"
    for name in set().union(*ENGINE_ORDER):
        assert list((CSRC / "engine").glob(f"{name}*")), f"there is no engine/{name}"


def test_only_the_shim_knows_torch_and_only_bindings_know_python() -> None:
    for path in native_files():
        system = re.findall(r"^#include <([^>]+)>", path.read_text(), re.MULTILINE)
        folder = folder_of(native_place(path))
        if folder != "torch":
            assert not [name for name in system if re.match(r"(torch|c10|ATen)/", name)], path
        if folder not in ("torch", "bindings"):
            python = [name for name in system if re.match(r"(pybind11|numpy)/|Python\.h", name)]
            assert not python, path
