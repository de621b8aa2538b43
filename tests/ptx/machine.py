"""Executes a kernel's PTX with NumPy: all threads of a launch are lanes, each with a place in the
code, and those at the least place go on together.

It is strict. Registers start as garbage and have widths; a vector is aligned to its size; each
access is in bounds, of bytes that somebody has written, and writes to nothing that is read-only.
What one lane writes to global memory no other lane may touch in the same launch, also behind a
barrier; to a block's shared memory, before a barrier. Memory counts what is read and written, byte
by byte.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.ptx.instructions import SIGNED, TYPES, UNSIGNED, Type, meaning
from tests.ptx.parser import Address, Instruction, Kernel, PtxError

ALL = slice(None)
MAPPED, WRITTEN, WRITABLE = 1, 2, 4
NOBODY, MANY = -1, -2
MOST_TURNS = 100_000  # that lanes go on: against what never ends


class Trap(PtxError):
    """What a GPU would fault on, or what the memory model leaves undefined."""


class Buffer(NamedTuple):
    """Bytes that a kernel may touch, and where they lie in the memory's arrays."""

    name: str
    address: int
    size: int
    place: int


class Memory:
    """Global memory, or all blocks' shared memory: buffers at made-up addresses, with gaps.

    `reads` and `writes` count the accesses of each byte, and `loads` and `stores` those of lanes
    by their width in bytes, since the last launch began.
    """

    BASE = 0x7F3A_4000_0000
    GAP = 128

    def __init__(self, capacity: int = 1 << 20):
        random = np.random.default_rng(7)
        self.data = random.integers(0, 256, capacity, dtype=np.uint8)
        self.flags = np.zeros(capacity, np.uint8)
        self.capacity, self.used = capacity, 0
        self.buffers: list[Buffer] = []
        self.begin()

    def begin(self) -> None:
        """A launch begins: nothing has been counted."""
        self.reads = np.zeros(self.capacity, np.uint16)
        self.writes = np.zeros(self.capacity, np.uint16)
        self.reader = np.full(self.capacity, NOBODY, np.int32)
        self.writer = np.full(self.capacity, NOBODY, np.int32)
        self.loads: collections.Counter[int] = collections.Counter()
        self.stores: collections.Counter[int] = collections.Counter()

    def allocate(self, name: str, size: int, skew: int = 0, far: int = 0) -> int:
        """The address of `size` writable bytes, `skew` bytes behind a multiple of 128.

        `far` moves it by so many bytes, a multiple of 128: no memory is needed for what lies there.
        """
        place = self.used + self.GAP + skew
        self.used = -(-(place + size + self.GAP) // self.GAP) * self.GAP
        if self.used > self.capacity:
            raise MemoryError("the memory is too small")
        self.flags[place : place + size] = MAPPED | WRITABLE
        self.buffers.append(Buffer(name, self.BASE + place + far, size, place))
        self.buffers.sort(key=lambda each: each.address)
        return self.BASE + place + far

    def read_only(self, name: str, array: np.ndarray, skew: int = 0) -> int:
        """The address of a copy of an array, which kernels may not write to."""
        address = self.allocate(name, array.nbytes, skew)
        self.put(address, array)
        self.flags[self.place(address, array.nbytes)] = MAPPED | WRITTEN
        return address

    def place(self, address: int, size: int) -> slice:
        """Where bytes of one buffer lie in the arrays."""
        [place] = self._places(np.array([address], np.uint64))
        return slice(place, place + size)

    def put(self, address: int, array: np.ndarray) -> None:
        """Write as the host does."""
        place = self.place(address, array.nbytes)
        self.data[place] = np.frombuffer(array.tobytes(), np.uint8)
        self.flags[place] |= WRITTEN

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        """What lies there, as an array of this one's shape and dtype."""
        place = self.place(address, like.nbytes)
        if not (self.flags[place] & WRITTEN).all():
            raise Trap("nobody has written this")
        return np.frombuffer(self.data[place].tobytes(), like.dtype).reshape(like.shape)

    def order(self, address: int) -> None:
        """Whatever was done to this buffer is done before all that follows."""
        [size] = [each.size for each in self.buffers if each.address == address]
        place = self.place(address, size)
        self.reader[place] = self.writer[place] = NOBODY

    def load(self, address: np.ndarray, width: int, count: int, lanes: np.ndarray) -> np.ndarray:
        """(lane, word): `count` words of `width` bytes for each lane."""
        group = self._groups(address, width * count, MAPPED | WRITTEN, "load")
        writer, reader = (x.reshape(-1, width * count) for x in (self.writer, self.reader))
        lane = lanes[:, None]
        others = (writer[group] != NOBODY) & (writer[group] != lane)
        self._refuse(others, address, "another lane has written in this launch what this one loads")
        before = reader[group]
        reader[group] = lane
        shared = (before != NOBODY) & (before != lane) | (reader[group] != lane)
        reader[group[shared.any(axis=1)]] = MANY
        np.add.at(self.reads.reshape(-1, width * count), group, np.uint16(1))
        self.loads[width * count] += len(lanes)
        return self.data.view(UNSIGNED[8 * width]).reshape(-1, count)[group]

    def store(self, address: np.ndarray, width: int, words: np.ndarray, lanes: np.ndarray) -> None:
        """The words of each lane, (lane, word)."""
        count = words.shape[1]
        group = self._groups(address, width * count, MAPPED | WRITABLE, "store")
        writer, reader = (x.reshape(-1, width * count) for x in (self.writer, self.reader))
        lane = lanes[:, None]
        for who, did in ((writer, "written"), (reader, "loaded")):
            others = (who[group] != NOBODY) & (who[group] != lane)
            self._refuse(others, address, f"another lane has {did} what this one stores")
        writer[group] = lane
        self._refuse(writer[group] != lane, address, "two lanes store to one place")
        self.writes.reshape(-1, width * count)[group] += np.uint16(1)
        self.stores[width * count] += len(lanes)
        self.data.view(UNSIGNED[8 * width]).reshape(-1, count)[group] = words
        self.flags.reshape(-1, width * count)[group] |= WRITTEN

    def _groups(self, address: np.ndarray, size: int, need: int, what: str) -> np.ndarray:
        """The number of each lane's aligned `size` bytes."""
        misaligned = address % np.uint64(size) != 0
        self._refuse(misaligned[:, None], address, f"misaligned {what} of {size} bytes")
        group = self._places(address) // size
        lacking = (self.flags.reshape(-1, size)[group] & need) != need
        self._refuse(lacking, address, f"{what} of {size} bytes that are not there for it")
        return group

    def _places(self, address: np.ndarray) -> np.ndarray:
        """Where these addresses are in the arrays: in a buffer, or in the gap beside one."""
        begins = np.array([each.address for each in self.buffers], np.uint64)
        sizes = np.array([each.size for each in self.buffers], np.uint64)
        gap = np.uint64(self.GAP)
        near = np.searchsorted(begins - gap, address, "right") - 1
        near = np.maximum(near, 0)
        beyond = (address < begins[near] - gap) | (address >= begins[near] + sizes[near] + gap)
        self._refuse(beyond[:, None], address, "far out of bounds")
        from_place = np.array([each.place for each in self.buffers])[near]
        return from_place + (address - begins[near]).view(np.int64)

    def _refuse(self, bad: np.ndarray, address: np.ndarray, why: str) -> None:
        if not bad.any():
            return
        where = int(address[bad.any(axis=1)][0])
        near = min(self.buffers, key=lambda each: abs(where - each.address - each.size // 2))
        raise Trap(f"{why}: {near.name}[{where - near.address}] of {near.size} bytes")


class Branch(NamedTuple):
    """To `target`, for those of the lanes that `taken` says."""

    taken: Callable
    target: int


class Launch:
    """These blocks of a kernel, over this memory, with these numbers as its parameters; each block
    has `shared` bytes."""

    SHARED = 1024  # where a block's shared memory begins, to it

    def __init__(
        self,
        kernel: Kernel,
        blocks: range,
        memory: Memory,
        arguments: Sequence[int],
        shared: int = 0,
    ):
        if len(arguments) != len(kernel.parameters):
            raise PtxError(f"{len(arguments)} arguments, not {len(kernel.parameters)}")
        self.kernel, self.memory = kernel, memory
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.lanes = np.arange(len(blocks) * kernel.threads)
        self.special = {
            "%tid.x": self.lanes % kernel.threads,
            "%ctaid.x": np.repeat(blocks, kernel.threads),
        }
        self.shared = Memory(len(blocks) * (shared + 3 * Memory.GAP))
        windows = [self.shared.allocate(f"shared of block {block}", shared) for block in blocks]
        self.windows = np.repeat(np.array(windows, np.uint64), kernel.threads)
        size, names = self.lanes.size, kernel.registers
        garbage = np.random.default_rng(1).integers(0, 1 << 64, size + len(names), np.uint64)
        self.registers = {
            name: (garbage[number : number + size] >> np.uint64(64 - bits)).astype(UNSIGNED[bits])
            for number, (name, bits) in enumerate(names.items())
        }
        self.steps = [self._bound(each) for each in kernel.code]

    def run(self) -> None:
        """Execute every lane to its end."""
        self.memory.begin()
        places = np.zeros(self.lanes.size, np.int64)
        end = len(self.steps)
        turns = 0
        with np.errstate(all="ignore"):
            while (place := int(places.min())) < end:
                here = places == place
                chosen = ALL if here.all() else np.flatnonzero(here)
                others = places[~here]
                places[chosen] = self._go_on(place, chosen, int(others.min(initial=end)))
                turns += 1
                if turns > MOST_TURNS:
                    raise Trap("no end")

    def _go_on(self, place: int, chosen, stop: int):
        """Where these lanes are when they part, go back, or come to where others wait."""
        while place < stop:
            step = self.steps[place]
            if isinstance(step, Branch):
                taken = step.taken(chosen)
                if step.target <= place or (taken.any() and not taken.all()):
                    return np.where(taken, step.target, place + 1)
                place = step.target if taken.all() else place + 1
                continue
            try:
                step(chosen)
            except (Trap, ZeroDivisionError) as problem:
                raise Trap(f"{_said(self.kernel.code[place])}: {problem}") from None
            place += 1
        return place

    # Instructions, bound to this launch's arrays: functions of the lanes that go on.
    def _bound(self, at: Instruction):
        try:
            if at.op in ("bra", "bra.uni", "ret"):
                end = len(self.kernel.code)
                target = end if at.op == "ret" else self.kernel.labels[at.operands[0]]
                return Branch(self._guard(at), target)
            step = self._step(at)
        except PtxError as problem:
            raise PtxError(f"{_said(at)}: {problem}") from None
        if at.guard is None:
            return step
        guard, lanes = self._guard(at), self.lanes

        def guarded(chosen):
            some = lanes[chosen][guard(chosen)]
            if some.size:
                step(some)

        return guarded

    def _guard(self, at: Instruction) -> Callable:
        if at.guard is None:
            return lambda chosen: np.ones(self.lanes[chosen].size, bool)
        predicate = self._register(at.guard, 1)
        return lambda chosen: predicate[chosen] ^ at.negated

    def _step(self, at: Instruction) -> Callable:
        head, *parts = at.op.split(".")
        vector = any(isinstance(each, tuple) for each in at.operands)
        if head == "ld" and parts[:1] == ["param"]:
            return self._load_of_a_parameter(parts[1:], *at.operands)
        if at.op == "bar.sync" and at.operands == ["0"] and at.guard is None:
            return self._meet
        if at.op == "ldmatrix.sync.aligned.m8n8.x4.shared.b16" and at.guard is None:
            return self._load_of_matrices(*at.operands)
        if head in ("ld", "st"):
            return self._access(head, parts, *at.operands)
        if head == "mov" and vector:
            return self._packing(parts, *at.operands)
        known = meaning(at.op)
        if known is None:
            raise PtxError("unknown instruction")
        result, *operands = at.operands
        if len(operands) != len(known.sources):
            raise PtxError(f"{len(operands)} operands")
        put = self._target(result, known.result, known.wider)
        sources = [
            self._source(each, of, known.wider)
            for each, of in zip(operands, known.sources, strict=True)
        ]
        function = known.function
        return lambda chosen: put(chosen, function(*(each(chosen) for each in sources)))

    def _meet(self, chosen) -> None:
        """At a barrier; a GPU would wait for ever for the rest of a block."""
        _, here = np.unique(self.special["%ctaid.x"][chosen], return_counts=True)
        if (here != self.kernel.threads).any():
            raise Trap("a part of a block is at a barrier")
        for window in np.unique(self.windows[chosen]):
            self.shared.order(int(window))

    def _register(self, name: str, bits: int, wider: bool = False) -> np.ndarray:
        have = self.kernel.registers.get(name)
        if have is None:
            raise PtxError(f"no register {name}")
        if have != bits and not (wider and have > bits):
            raise PtxError(f"{name} has {have} bits, not {bits}")
        return self.registers[name]

    def _source(self, text: str, of: Type, wider: bool = False) -> Callable:
        """What an operand holds, of this type, for the lanes that go on."""
        if text in self.special:
            if of.bits != 32:
                raise PtxError(f"{text} has 32 bits")
            array = self.special[text].astype(of.numpy)
        elif text.startswith("%"):
            register = self._register(text, of.bits, wider)
            if register.itemsize * 8 > of.bits > 1:
                return lambda chosen: register[chosen].astype(UNSIGNED[of.bits]).view(of.numpy)
            array = register.view(of.numpy)
        else:
            number = str(self.SHARED) if text == self.kernel.shared else text
            array = np.full(self.lanes.size, _constant(number, of))
        return lambda chosen: array[chosen]

    def _target(self, name: str, of: Type, wider: bool = False) -> Callable:
        """A function that writes values of this type to a register."""
        register = self._register(name, of.bits, wider)
        have = 8 * register.itemsize
        if have == of.bits or of.bits == 1:
            view = register.view(of.numpy)

            def put(chosen, values):
                view[chosen] = values
        else:
            table = SIGNED if of.kind == "s" else UNSIGNED

            def put(chosen, values):
                register[chosen] = values.astype(of.numpy).astype(table[have]).view(register.dtype)

        return put

    def _packing(self, parts, to, of) -> Callable:
        """`mov` between a register and a vector of its parts, the lowest first; `_` takes none."""
        if len(parts) != 1 or TYPES[parts[0]].kind != "b":
            raise PtxError("unknown variant")
        whole = TYPES[parts[0]]
        names = to if isinstance(to, tuple) else of
        part = Type("b", whole.bits // len(names))
        shifts = [whole.numpy(part.bits * number) for number in range(len(names))]
        if isinstance(to, tuple):
            source = self._source(of, whole)
            targets = [
                (self._target(name, part), shift)
                for name, shift in zip(names, shifts, strict=True)
                if name != "_"
            ]

            def step(chosen):
                value = source(chosen)
                for put, shift in targets:
                    put(chosen, (value >> shift).astype(part.numpy))
        else:
            put = self._target(to, whole)
            sources = [self._source(name, part) for name in names]

            def step(chosen):
                words = [each(chosen).astype(whole.numpy) for each in sources]
                put(chosen, sum(word << by for word, by in zip(words, shifts, strict=True)))

        return step

    def _load_of_a_parameter(self, parts, to: str, at: Address) -> Callable:
        of = TYPES[parts[0]]
        if at.offset or len(parts) != 1 or self.kernel.parameters[at.base] != of.bits:
            raise PtxError("not the whole of a parameter")
        put = self._target(to, of, wider=True)
        value = np.array(self.arguments[at.base] & (1 << of.bits) - 1, UNSIGNED[of.bits])
        return lambda chosen: put(chosen, value.view(of.numpy))

    def _access(self, head: str, parts, *operands) -> Callable:
        """`ld` and `st`, of global or shared memory, of a word or a vector."""
        space, *vector, name = parts if len(parts) > 1 else ("", *parts)
        count = int(vector[0][1:]) if vector and vector[0] in ("v2", "v4", "v8") else 1
        if space not in ("global", "shared") or len(vector) != (count > 1) or name not in TYPES:
            raise PtxError("unknown variant")
        of = TYPES[name]
        at, words = operands if head == "st" else reversed(operands)
        words = words if isinstance(words, tuple) else (words,)
        if len(words) != count or count * of.bits > 256:
            raise PtxError("not a vector of these")
        memory, address = self._addresses(space, at)
        lanes, width = self.lanes, of.bits // 8
        if head == "ld":
            targets = [self._target(word, of, wider=True) for word in words]

            def step(chosen):
                loaded = memory.load(address(chosen), width, count, lanes[chosen])
                for number, put in enumerate(targets):
                    put(chosen, loaded[:, number].view(of.numpy))
        else:
            raw = Type("b", of.bits)
            sources = [self._source(word, raw, wider=True) for word in words]

            def step(chosen):
                values = np.stack([each(chosen) for each in sources], axis=1)
                memory.store(address(chosen), width, values, lanes[chosen])

        return step

    def _addresses(self, space: str, at: Address) -> tuple[Memory, Callable]:
        """The memory, and the lanes' addresses in it."""
        of = TYPES["b64" if space == "global" else "b32"]
        base, offset = self._source(at.base, of), of.numpy(at.offset & (1 << of.bits) - 1)
        if space == "global":
            return self.memory, lambda chosen: base(chosen) + offset
        windows = self.windows - np.uint64(self.SHARED)
        return self.shared, lambda chosen: windows[chosen] + (base(chosen) + offset)

    def _load_of_matrices(self, to, at: Address) -> Callable:
        """`ldmatrix`: four matrices of 8 rows of 16 bytes, at the addresses of the warp's lanes in
        their order; a lane gets 4 bytes of each."""
        if len(to) != 4:
            raise PtxError("not four matrices")
        memory, address = self._addresses("shared", at)
        targets = [self._target(name, TYPES["b32"]) for name in to]

        def step(chosen):
            lanes = self.lanes[chosen]
            if lanes.size % 32 or (lanes.reshape(-1, 32)[:, 0] % 32).any():
                raise Trap("a part of a warp")
            rows = address(chosen)
            if (rows % np.uint64(16)).any():
                raise Trap("misaligned row")
            warp, lane = np.arange(lanes.size) // 32 * 32, lanes % 32
            for number, put in enumerate(targets):
                row = rows[warp + 8 * number + lane // 4] + (4 * (lane % 4)).astype(np.uint64)
                put(chosen, memory.load(row, 4, 1, lanes)[:, 0])

        return step


def _said(at: Instruction) -> str:
    return f"line {at.line}: {at.op} {at.operands}"


def _constant(text: str, of: Type):
    """A number of the source, as this type's."""
    if text[:2] in ("0f", "0d"):
        if len(text) != 2 + of.bits // 4 or of.kind not in "bf":
            raise PtxError(f"{text} is no {of}")
        number = int(text[2:], 16)
    elif of.kind == "f":
        raise PtxError(f"{text} is no {of}")
    else:
        number = int(text.rstrip("U"), 0) & (1 << of.bits) - 1
    return np.array(number, UNSIGNED[of.bits]).view(of.numpy)[()]
