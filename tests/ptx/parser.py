"""Reads the PTX of one kernel, as Triton's LLVM writes it. What it does not know is an error."""

from __future__ import annotations

import re
from typing import NamedTuple


class PtxError(Exception):
    """PTX that this reader, or the machine, does not know."""


class Address(NamedTuple):
    """A register or a parameter, and the bytes that are added to it."""

    base: str
    offset: int


Operand = str | tuple[str, ...] | Address


class Instruction(NamedTuple):
    """`@guard op operands;` and the line where it stands."""

    guard: str | None
    negated: bool
    op: str
    operands: list[Operand]
    line: int


class Kernel(NamedTuple):
    """An entry: bits of each parameter and register, threads of a block, its code, and the name of
    its shared memory, which has the size that a launch gives it."""

    name: str
    shared: str | None
    parameters: dict[str, int]
    registers: dict[str, int]
    threads: int
    labels: dict[str, int]
    code: list[Instruction]


BITS = {
    "pred": 1,
    "f32": 32,
    **{f"{kind}{bits}": bits for kind in "bu" for bits in (8, 16, 32, 64)},
}
_PARAMETER = re.compile(r"\.param \.(\w+)(?: \.ptr \.global \.align \d+)? ([\w$]+),?")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>;")
_SHARED = re.compile(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\];")
_LABEL = re.compile(r"([\w$]+):")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?;")
# A string that a library of LLVM's is asked by, at compile time, is left behind.
_PREAMBLE = re.compile(r"\.(version|target|address_size|global \.align 1 \.b8 _\$_str)\b")
# What debuggers read, inside a kernel and behind it.
_NOTE = re.compile(
    r"\.loc\b.*|\.pragma .*;"
    # A stack that LLVM declares and need not use; nothing here has an access to it.
    r"|\.local \.align \d+ \.b8\s+__local_depot0\[\d+\];|\.reg \.b\d+\s+%SPL?;"
)


def parse(text: str) -> Kernel:
    """The one kernel of a module."""
    text = re.sub(r"^\t\.section\b.*\n?(\t\{\n(.*\n)*?\t\}|.*)$", "", text, flags=re.MULTILINE)
    bare = ((number, re.sub(r"//.*", "", line)) for number, line in enumerate(text.split("\n"), 1))
    lines = iter([(number, line.strip()) for number, line in bare if line.strip()])
    return _Module(lines).kernel()


class _Module:
    def __init__(self, lines):
        self.lines = lines

    def kernel(self) -> Kernel:
        shared = None
        for number, line in self.lines:
            if found := _SHARED.fullmatch(line):
                shared = found[1]
                continue
            if entry := re.fullmatch(r"\.visible \.entry (\w+)\(", line):
                break
            if not _PREAMBLE.match(line):
                raise PtxError(f"line {number}: {line}")
        else:
            raise PtxError("no kernel")
        parameters, threads = self.head()
        registers, labels, code = self.body()
        for number, line in self.lines:
            if not line.startswith(".file"):
                raise PtxError(f"line {number}, behind the kernel: {line}")
        return Kernel(entry[1], shared, parameters, registers, threads, labels, code)

    def head(self):
        parameters = {}
        threads = None
        for number, line in self.lines:
            if line == "{":
                break
            if found := _PARAMETER.fullmatch(line):
                parameters[found[2]] = BITS[found[1]]
            elif found := re.fullmatch(r"\.reqntid (\d+)", line):
                threads = int(found[1])
            elif line != ")" and not re.fullmatch(r"\.maxnreg \d+", line):
                raise PtxError(f"line {number}: {line}")
        if threads is None:
            raise PtxError("no .reqntid")
        return parameters, threads

    def body(self):
        registers, labels, code = {}, {}, []
        within = False
        for number, line in self.lines:
            if line == "}" and not within:
                break
            if line == ("}" if within else "{"):  # around an instruction: it declares nothing
                within = not within
                continue
            if _NOTE.fullmatch(line):
                continue
            if found := _REGISTERS.fullmatch(line):
                for each in range(int(found[3])):
                    registers[f"{found[2]}{each}"] = BITS[found[1]]
            elif found := _LABEL.fullmatch(line):
                labels[found[1]] = len(code)
            elif found := _STATEMENT.fullmatch(line):
                negated, guard, op, operands = found.groups()
                operands = [_operand(each) for each in _split(operands or "")]
                code.append(Instruction(guard, negated == "!", op, operands, number))
            else:
                raise PtxError(f"line {number}: {line}")
        return registers, labels, code


def _split(operands: str) -> list[str]:
    """At the commas that are in no braces."""
    return [each.strip() for each in re.findall(r"(?:\{[^}]*\}|[^,{])+", operands)]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(each.strip() for each in text[1:-1].split(","))
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        return Address(base.strip(), int(offset or "0", 0))
    return text
