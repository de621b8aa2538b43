"""Compiles kernels for a GPU that need not be there, or for Triton's interpreter."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from pycollective import order
from pycollective.triton.formats import words

HOPPER = GPUTarget("cuda", 90, 32)


def module(name: str, interpreted: bool) -> Any:
    """A copy of pycollective.triton.`name`, and of those that it imports from there, for Triton's
    interpreter or for its compiler."""
    package = "pycollective.triton"
    loaded = {each: sys.modules.pop(each) for each in _below(package)}
    was = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = interpreted
    try:
        made = importlib.import_module(f"{package}.{name}")
        for each in _below(package):
            for value in vars(sys.modules[each]).values():
                if isinstance(value, interpreter.InterpretedFunction):
                    value.run = functools.partial(_run, value)
        return made
    finally:
        triton.knobs.runtime.interpret = was
        for each in _below(package):
            del sys.modules[each]
            delattr(sys.modules[package], each.rpartition(".")[2])
        sys.modules.update(loaded)
        for each, one in loaded.items():
            setattr(sys.modules[package], each.rpartition(".")[2], one)


@functools.cache
def _rewritten(function: Any) -> Any:
    """One of Triton's own functions, for the interpreter."""
    return interpreter.InterpretedFunction(function).rewrite()


def _interpreted(function: JITFunction, *args: Any, **more: Any) -> Any:
    """What one of Triton's own functions gives inside of a kernel that is interpreted: they are
    made for the compiler, which does not call them in this way."""
    return _rewritten(function.fn)(*args, **more)


def _called(function: interpreter.InterpretedFunction, *args: Any, **more: Any) -> Any:
    """What a function that a kernel calls gives: Triton's would patch the language once more."""
    return function.rewrite()(*args, **more)


def _scanned(scan: interpreter.ScanOps, inputs: Sequence[Any]) -> list[Any]:
    """What a scan gives, of all rows at a time: Triton's own takes one element after the other."""
    kinds = [each.dtype for each in inputs]
    given = [np.moveaxis(each.handle.data, scan.axis, 0) for each in inputs]
    found = [each.copy() for each in given]
    for i in range(1, len(given[0])):
        sources = [*(each[i - 1] for each in found), *(each[i] for each in given)]
        made = scan.combine_fn.fn(*map(scan.to_tensor, sources, 2 * kinds))
        for out, new in zip(found, made if isinstance(made, tuple) else (made,), strict=True):
            out[i] = new.handle.data.reshape(out[i].shape)  # of one row it has one more
    ends = [np.ascontiguousarray(np.moveaxis(each, 0, scan.axis)) for each in found]
    return list(map(scan.to_tensor, ends, kinds))


def _run(function: interpreter.InterpretedFunction, *args: Any, **more: Any) -> None:
    """A launch, while which Triton's own functions, calls and scans are those above."""
    with (
        mock.patch.object(JITFunction, "__call__", _interpreted),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", _called),
        mock.patch.object(interpreter.ScanOps, "generic_scan", _scanned),
    ):
        patched = interpreter._patch_lang(tl.standard.sum.fn)  # for all of Triton's own functions
        try:
            interpreter.InterpretedFunction.run(function, *args, **more)
        finally:
            patched.restore()


def _below(package: str) -> list[str]:
    """The names of its modules that are loaded."""
    return [name for name in sys.modules if name.startswith(f"{package}.")]


COMPILED = module("reduce", interpreted=False)
_NAMES = {
    **{torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32"},
    torch.int64: "i64",
}


def kernel(
    dtype: torch.dtype,
    op: str,
    n: int,
    *,
    recipe: Sequence[int] = (),
    leaves: int = 0,
    terms: torch.dtype | None = None,
    out: torch.dtype | None = None,
    finish: bool = True,
    aligned: bool = True,
    target: GPUTarget = HOPPER,
    divisor: bool = False,
) -> Any:
    """The compiled kernel: its ``asm`` has "ptx" and "cubin".

    Its parameters in PTX: pointers to the terms and to the result, i32 `m`, i32 `step` (the rows'
    stride over ``VECTOR`` of `constants`), a pointer to the divisor if memory holds it, and two
    pointers that Triton adds, to no memory. A launch has ``programs(m, VECTOR)`` blocks of
    ``THREADS`` threads.

    Args:
        dtype: of the leaves.
        n: rows. They are leaves, of an order over `leaves` (default `n`), and made by `recipe`
            (default: the order over n) to a result, unless told otherwise.
        terms: the rows' type (default: `dtype`).
        out: the result's type (default: `dtype`).
        aligned: whether all rows begin at multiples of 16 bytes.
        divisor: whether memory holds it.
    """
    recipe = recipe or order.recipe((0, n), [(i, i + 1) for i in range(n)])
    terms, out = terms or dtype, out or dtype
    constants = COMPILED.constants(op, recipe, leaves or n, terms, out, finish, aligned)
    pointers = [_NAMES[words(torch.empty(1, dtype=each)).dtype] for each in (terms, out)]
    types = {"terms": f"*{pointers[0]}", "out": f"*{pointers[1]}", "m": "i32", "step": "i32"}
    if divisor:
        types["divisor"] = "*fp64"
    else:
        constants["divisor"] = None
    return compiled(
        COMPILED.reduce_rows,
        types,
        constants,
        COMPILED.OPTIONS,
        ("terms", "out") if aligned else (),
        target,
    )


def compiled(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    aligned: Collection[str] = (),
    target: GPUTarget = HOPPER,
) -> Any:
    """A kernel as Triton compiles it; its PTX has two more parameters, pointers to no memory.

    Args:
        types: of its arguments, as Triton calls them.
        constants: its constexprs.
        aligned: the pointers that are multiples of 16.
    """
    source = ASTSource(
        function,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs=dict(constants),
        attrs={
            (function.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in types
            if name in aligned
        },
    )
    return triton.compile(source, target=target, options=dict(options))


def needs(compiled: Any, folder: Path) -> tuple[int, int]:
    """What ptxas says: (registers of a thread, bytes that it keeps in memory for want of them).

    Raises:
        AssertionError: its code is not what the PTX says, as a GPU has shown: to store a float's
            lowest byte, it converted the float.
    """
    text = compiled.asm["ptx"]
    (folder / "kernel.ptx").write_text(text)
    tool = get_ptxas(compiled.metadata.target.arch).path
    target = re.search(r"\.target (\w+)", text)[1]
    command = [tool, "-v", "--fmad=false", f"-arch={target}", folder / "kernel.ptx"]
    done = subprocess.run(
        [*command, "-o", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    )
    dump = Path(tool).with_name("cuobjdump")
    code = subprocess.run(
        [dump, "-sass", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    )
    assert "F2IP" not in code.stdout
    [registers] = re.findall(r"Used (\d+) registers", done.stderr)
    return int(registers), sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))
