"""Runs host code of kernels whose launches are compiled, and their PTX executed by `tests/ptx`."""

from __future__ import annotations

import collections
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.ptx.machine import Launch, Memory
from tests.ptx.parser import parse
from tests.triton.compiled import compiled, module

TYPES = {
    **{torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"},
    **{torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32"},
    **{torch.int64: "i64", torch.float64: "fp64"},
}
_COMPILED = {}
_POINTED_TO = []  # tensors
WAYS = ("interpreted", "executed")


def address(tensor):
    """A tensor's address for a table. Launches within `executed` have what lies there, too."""
    _POINTED_TO.append(tensor)
    return tensor.data_ptr()


class Launches:
    """What launches have done; with `execute` False they are compiled and do nothing.

    Attributes:
        moved: bytes that each kernel's lanes have loaded, stored and changed, by its name.
        accesses: of each kernel, how many accesses of each width in bytes.
        kernels: each that was compiled, by its name.
    """

    def __init__(self, architecture: int = 90, execute: bool = True):
        self.execute = execute
        self.target = GPUTarget("cuda", architecture, 32)
        self.moved = collections.Counter()
        self.accesses = collections.defaultdict(collections.Counter)
        self.kernels = collections.defaultdict(list)

    def launch(self, function, *args, grid, warmup, **more):
        """What `JITFunction.run` does, on CPU tensors."""
        names = function.arg_names
        given = {**dict(zip(names, args, strict=False)), **more}
        fixed = {each.name for each in function.params if each.do_not_specialize}
        constant = {each.name for each in function.params if each.is_constexpr}
        # As Triton does: a 1 is a constant.
        constant |= {n for n in names if n not in fixed and type(given[n]) is int and given[n] == 1}
        constant |= {name for name in names if given[name] is None}  # likewise
        constants = {name: given[name] for name in names if name in constant}
        rest = {name: given[name] for name in names if name not in constant}
        types = {name: _type(value) for name, value in rest.items()}
        fixed |= {each.name for each in function.params if each.do_not_specialize_on_alignment}
        even = [name for name, value in rest.items() if name not in fixed and _even(value)]
        options = {name: value for name, value in more.items() if name not in names}
        key = (function.fn, self.target, *types.items(), *even, *constants.items())
        if key not in _COMPILED:
            made = compiled(function, types, constants, options, even, self.target)
            _COMPILED[key] = made, parse(made.asm["ptx"])
        made, kernel = _COMPILED[key]
        self.kernels[function.__name__].append(made)
        if self.execute:
            self._execute(function.__name__, made, kernel, rest, grid[0])

    def _execute(self, name, made, kernel, rest, blocks):
        whole = _storages(x for x in rest.values() if torch.is_tensor(x))
        rows = rest.get("rows")  # a table's
        if rows is not None:
            known = _storages(_POINTED_TO)
            whole |= {at: each for at, each in known.items() if _inside(rows, at, each).any()}
        memory = Memory(sum(each.numel() // 512 * 512 + 1024 for each in whole.values()) + 1024)
        where = {}
        for at, each in whole.items():
            where[at] = memory.allocate(f"storage {len(where)}", each.numel(), at % 16)
            memory.put(where[at], each.numpy())
        if rows is not None:
            translated = rows.clone()
            for at, each in whole.items():
                translated[_inside(rows, at, each)] += where[at] - at
            start = rows.untyped_storage().data_ptr()
            memory.put(where[start] + rows.data_ptr() - start, translated.numpy())
        numbers = []
        for value in rest.values():
            if torch.is_tensor(value):
                start = value.untyped_storage().data_ptr()
                numbers.append(where[start] + value.data_ptr() - start)
            elif isinstance(value, float):
                numbers.append(int(np.float32(value).view(np.uint32)))
            else:
                numbers.append(value)
        numbers += [0] * (len(kernel.parameters) - len(numbers))
        Launch(kernel, range(blocks), memory, numbers, made.metadata.shared).run()
        if rows is not None:
            del whole[rows.untyped_storage().data_ptr()]  # kernels only read it
        for at, each in whole.items():
            each.copy_(torch.from_numpy(memory.get(where[at], each.numpy()).copy()))
        for kind in (memory.loads, memory.stores, memory.changes):
            self.accesses[name].update(kind)
            self.moved[name] += sum(width * count for width, count in kind.items())


def _storages(tensors):
    """Bytes of the storages of tensors, by their addresses."""
    whole = {}
    for x in tensors:
        start = x.untyped_storage().data_ptr()
        if start not in whole:
            whole[start] = torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage())
    return whole


def _inside(rows, at, storage):
    """Which of a table's numbers are addresses in this storage."""
    return (rows >= at) & (rows < at + storage.numel())


def _type(value):
    if torch.is_tensor(value):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _even(value):
    number = value.data_ptr() if torch.is_tensor(value) else value
    return isinstance(number, int) and number % 16 == 0


@contextmanager
def executed(architecture: int = 90, execute: bool = True):
    """Within it launches of compiled kernels are executed; gives what they did."""
    launches, was = Launches(architecture, execute), JITFunction.run
    JITFunction.run = lambda self, *args, **more: launches.launch(self, *args, **more)
    try:
        yield launches
    finally:
        JITFunction.run = was
        _POINTED_TO.clear()


# `make storm` executes the PTX, too.
MOSTLY_INTERPRETED = pytest.mark.parametrize(
    "kernels", ["interpreted", pytest.param("executed", marks=pytest.mark.storm)], indirect=True
)


def ways(name: str):
    """A fixture: that module's kernels in Triton's interpreter, and their PTX executed."""
    modules = {way: module(name, interpreted=way == "interpreted") for way in WAYS}

    @pytest.fixture(params=WAYS)
    def way(request):
        with np.errstate(all="ignore"), executed():
            yield modules[request.param]

    return way
