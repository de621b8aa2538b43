"""Executes a kernel's PTX with NumPy: all threads of a launch are lanes, each with a place in the
code, and those at the least place go on together.

It is strict. Registers start as garbage and have widths; a vector is aligned to its size; each
access is in bounds, of bytes that somebody has written, and writes to nothing that is read-only.
What one lane writes to global memory no other lane may touch in the same launch, but those of its
block behind a barrier of it; to a block's shared memory, before a barrier of the block, or of the
warp if it has both lanes. What is changed by atomic operations may be so by all lanes, in an order
that is drawn. By one that is `acq_rel` a block gets what it, and those that had come to the same
word before, did before their last barriers: that is then the newest block's alone. Memory counts
what is read and written, byte by byte.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.ptx.instructions import SIGNED, TYPES, UNSIGNED, Meaning, Type, meaning, of_three
from tests.ptx.parser import Address, Instruction, Kernel, PtxError
from tests.ptx.warps import LANES, exchange

ALL = slice(None)
MAPPED, WRITTEN, WRITABLE = 1, 2, 4
# Who has touched a byte: a lane, or one of these, or lanes of one group (see _several), which is a
# warp in shared memory, and a block in global memory.
NOBODY, MANY, ATOMIC = -1, -2, -3
MOST_TURNS = 100_000  # that lanes go on: against what never ends
_CHANGES = ("add", "min", "max", "and", "or", "xor")


class Trap(PtxError):
    """What a GPU would fault on, or what the memory model leaves undefined."""


def _several(group):
    """More than one lane of a group has touched this byte since the group's last barrier."""
    return -4 - 2 * group


def _before(group):
    """Lanes of a group have touched this byte before the group's last barrier, and none since."""
    return -5 - 2 * group


class Buffer(NamedTuple):
    """Bytes that a kernel may touch, and where they lie in the memory's arrays."""

    name: str
    address: int
    size: int
    place: int


class Memory:
    """Global memory, or all blocks' shared memory: buffers at made-up addresses, with gaps.

    `reads` and `writes` count the accesses of each byte, and `loads`, `stores` and `changes` (which
    are atomic) those of lanes by their width in bytes, since the last launch began. `replicas`
    says that several lanes may store the same bytes to one place, as Triton does to shared memory.
    """

    BASE = 0x7F3A_4000_0000
    GAP = 128

    def __init__(self, capacity: int = 1 << 20, replicas: bool = False):
        self.replicas = replicas
        self.random = np.random.default_rng(7)
        self.data = self.random.integers(0, 256, capacity, dtype=np.uint8)
        self.flags = np.zeros(capacity, np.uint8)
        self.capacity, self.used = capacity, 0
        self.buffers: list[Buffer] = []
        self.begin()

    def begin(self, together: int = LANES) -> None:
        """A launch begins: nothing has been counted; so many lanes are a group."""
        self.together = together
        # The lanes and the bytes that have been touched since barriers of their groups.
        self.touched: list[tuple[np.ndarray, np.ndarray]] = []
        self.reads = np.zeros(self.capacity, np.uint16)
        self.writes = np.zeros(self.capacity, np.uint16)
        self.reader = np.full(self.capacity, NOBODY, np.int32)
        self.writer = np.full(self.capacity, NOBODY, np.int32)
        # Bytes that atomic operations have changed, and who did.
        self.changed = np.zeros(0, np.int64)
        self.changer = np.zeros(0, np.int64)
        # Of words that `acq_rel` operations have changed: whose groups' lanes did.
        self.released: dict[int, set[int]] = collections.defaultdict(set)
        self.loads: collections.Counter[int] = collections.Counter()
        self.stores: collections.Counter[int] = collections.Counter()
        self.changes: collections.Counter[int] = collections.Counter()

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

    def order_groups(self, groups: np.ndarray) -> None:
        """What lanes of these groups did is done before all that they do now."""
        waiting = []
        for lanes, places in self.touched:
            mine = np.isin(lanes // self.together, groups)
            for who in (self.reader, self.writer):
                part = who[places[mine]]
                group = self._group(part)
                who[places[mine]] = np.where(np.isin(group, groups), _before(group), part)
            if not mine.all():
                waiting.append((lanes[~mine], places[~mine]))
        self.touched = waiting
        group = self._group(self.changer)
        self.changer = np.where(np.isin(group, groups), _before(group), self.changer)

    def _group(self, who):
        """The one whose lanes these are; -1 where there is none, or more."""
        several = np.where(who <= _several(0), (-4 - who) // 2, -1)
        return np.where(who >= 0, who // self.together, several)

    def _touch(self, lanes: np.ndarray, group: np.ndarray, size: int) -> None:
        self.touched.append((lanes, group[:, None] * size + np.arange(size)))

    def load(self, address: np.ndarray, width: int, count: int, lanes: np.ndarray) -> np.ndarray:
        """(lane, word): `count` words of `width` bytes for each lane."""
        group = self._groups(address, width * count, MAPPED | WRITTEN, "load")
        writer, reader = (x.reshape(-1, width * count) for x in (self.writer, self.reader))
        lane = lanes[:, None]
        others = self._others(writer[group], lane) & ~self._settled(writer[group], group, lane)
        self._refuse(others, address, "another lane has written in this launch what this one loads")
        before = reader[group]
        reader[group] = lane
        self._share(reader, group, before, lane)
        self._touch(lanes, group, width * count)
        np.add.at(self.reads.reshape(-1, width * count), group, np.uint16(1))
        self.loads[width * count] += len(lanes)
        return self.data.view(UNSIGNED[8 * width]).reshape(-1, count)[group]

    def store(self, address: np.ndarray, width: int, words: np.ndarray, lanes: np.ndarray) -> None:
        """The words of each lane, (lane, word)."""
        count = words.shape[1]
        group = self._groups(address, width * count, MAPPED | WRITABLE, "store")
        writer, reader = (x.reshape(-1, width * count) for x in (self.writer, self.reader))
        lane = lanes[:, None]
        loaded = self._others(reader[group], lane)
        self._refuse(loaded, address, "another lane has loaded what this one stores")
        before = writer[group]
        others = self._others(before, lane) & ~self._settled(before, group, lane)
        if self.replicas:
            new = np.ascontiguousarray(words).view(np.uint8)
            data = self.data.reshape(-1, width * count)
            others &= (before == ATOMIC) | (data[group] != new)
        self._refuse(others, address, "another lane has written what this one stores")
        writer[group] = lane
        self.data.view(UNSIGNED[8 * width]).reshape(-1, count)[group] = words
        both = data[group] != new if self.replicas else writer[group] != lane
        self._refuse(both, address, "two lanes store to one place")
        self._share(writer, group, before, lane)
        self._touch(lanes, group, width * count)
        self.writes.reshape(-1, width * count)[group] += np.uint16(1)
        self.stores[width * count] += len(lanes)
        self.flags.reshape(-1, width * count)[group] |= WRITTEN

    def change(
        self,
        address: np.ndarray,
        function: Callable,
        words: np.ndarray,
        lanes: np.ndarray,
        orders: bool = False,
    ) -> np.ndarray:
        """Each lane's word as it was before `function` of it and the lane's word took its place, by
        one lane after the other. `orders`: it is `acq_rel`."""
        width = words.itemsize
        group = self._groups(address, width, MAPPED | WRITTEN | WRITABLE, "change")
        lane = lanes[:, None]
        for who, did in ((self.writer, "written"), (self.reader, "loaded")):
            before = who.reshape(-1, width)[group]
            others = self._others(before, lane) & (before != ATOMIC)
            self._refuse(others, address, f"another lane has {did} what this one changes")
        self.writer.reshape(-1, width)[group] = ATOMIC
        self.changes[width] += len(lanes)
        places = (group[:, None] * width + np.arange(width)).reshape(-1)
        self.changed = np.concatenate([self.changed, places])
        by = _before(lanes // self.together) if orders else lanes
        self.changer = np.concatenate([self.changer, np.repeat(by, width)])
        data, old = self.data.view(words.dtype), np.empty_like(words)
        order = np.lexsort((self.random.random(len(lanes)), group))
        _, first, counts = np.unique(group[order], return_index=True, return_counts=True)
        for turn in range(counts.max()):
            now = order[first[counts > turn] + turn]
            old[now] = data[group[now]]
            data[group[now]] = function(old[now], words[now])
        if orders:
            for begin, count in zip(first, counts, strict=True):
                self._pass_on(int(group[order[begin]]), lanes[order[begin : begin + count]])
        return old

    def _pass_on(self, word: int, lanes: np.ndarray) -> None:
        """What these lanes' groups, and those that came before, did before their barriers becomes
        that of the last lane's group."""
        groups = lanes // self.together
        self.released[word].update(groups.tolist())
        done = _before(np.array(sorted(self.released[word])))
        for who in (self.reader, self.writer, self.changer):
            who[np.isin(who, done)] = _before(groups[-1])

    def _others(self, who: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Where this lane may not touch what these have touched."""
        return (who != NOBODY) & (who != lane) & (who != _before(lane // self.together))

    def _settled(self, who: np.ndarray, group: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Where atomic operations have changed a byte, and all that did are this lane's group's."""
        settled = who == ATOMIC
        if settled.any():
            places = group[:, None] * who.shape[1] + np.arange(who.shape[1])
            mine = _before(lane // self.together)
            for own in np.unique(mine):
                others = np.isin(places, self.changed[self.changer != own])
                settled &= (mine != own) | ~others
        return settled

    def _share(self, reader, group, before, lane) -> None:
        """Where several lanes load a byte, now or with those before, it says so."""
        own = _several(lane // self.together)
        row, byte = np.nonzero(self._others(before, lane) | (reader[group] != lane))
        if row.size:
            reader[group[row], byte] = own[row, 0]
            stranger = (before != NOBODY) & (self._group(before) != lane // self.together)
            row, byte = np.nonzero(stranger | (reader[group] != lane) & (reader[group] != own))
            reader[group[row], byte] = MANY

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
        self.shared = Memory(len(blocks) * (shared + 3 * Memory.GAP), replicas=True)
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
        self.memory.begin(self.kernel.threads)
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
        if at.op == "bar.warp.sync" and at.operands == ["-1"] and at.guard is None:
            return self._meet_in_warps
        if head in ("ldmatrix", "stmatrix"):
            return self._access_to_matrices(head, parts, *at.operands)
        if at.op == "ld.volatile.global.b32":
            return self._volatile_load(*at.operands)
        if head in ("ld", "st"):
            return self._access(head, parts, *at.operands)
        if head in ("atom", "red"):
            return self._change(head, parts, *at.operands)
        if head == "mov" and vector:
            return self._packing(parts, *at.operands)
        result, *operands = at.operands
        known = meaning(at.op)
        if head in ("min", "max") and len(operands) == 3:
            known = of_three(known)
        if known is None:
            known = self._of_whole_warps(exchange(at.op))
        if len(operands) != len(known.sources):
            raise PtxError(f"{len(operands)} operands")
        put = self._target(result, known.result, known.wider)
        sources = [
            self._source(each, of, known.wider)
            for each, of in zip(operands, known.sources, strict=True)
        ]
        function = known.function

        def step(chosen):
            if known.together:
                self._whole_warps(chosen)
            put(chosen, function(*(each(chosen) for each in sources)))

        return step

    def _of_whole_warps(self, known: Meaning | None) -> Meaning:
        """What the lanes of a warp do together, all of them."""
        if known is None:
            raise PtxError("unknown instruction")

        def function(*sources):
            if (sources[-1] != 0xFFFFFFFF).any():
                raise Trap("for a part of a warp")
            return known.function(*(each.reshape(-1, LANES) for each in sources)).reshape(-1)

        return known._replace(function=function, together=True)

    def _whole_warps(self, chosen) -> None:
        lanes = self.lanes[chosen]
        if lanes.size % LANES or (np.ptp(lanes.reshape(-1, LANES) // LANES, axis=1) != 0).any():
            raise Trap("a part of a warp")

    def _meet_in_warps(self, chosen) -> None:
        """At a barrier of each warp; a GPU would wait for ever for the rest of one."""
        self._whole_warps(chosen)
        if self.kernel.threads == LANES:
            self._meet(chosen)
            return
        self.shared.order_groups(np.unique(self.lanes[chosen] // LANES))

    def _meet(self, chosen) -> None:
        """At a barrier; a GPU would wait for ever for the rest of a block."""
        _, here = np.unique(self.special["%ctaid.x"][chosen], return_counts=True)
        if (here != self.kernel.threads).any():
            raise Trap("a part of a block is at a barrier")
        for window in np.unique(self.windows[chosen]):
            self.shared.order(int(window))
        if self.lanes[chosen].size == self.lanes.size:
            self.shared.touched.clear()
        self.memory.order_groups(np.unique(self.lanes[chosen] // self.kernel.threads))

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
        space = space.removesuffix("::cta")
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

    def _volatile_load(self, words, at: Address) -> Callable:
        """In order with atomic operations of other lanes, as one that changes nothing."""
        [word] = words if isinstance(words, tuple) else (words,)
        put = self._target(word, TYPES["b32"])
        memory, address = self._addresses("global", at)

        def step(chosen):
            lanes = self.lanes[chosen]
            nothing = np.zeros(lanes.size, np.uint32)
            put(chosen, memory.change(address(chosen), lambda old, new: old, nothing, lanes))
            memory.changes -= collections.Counter({4: lanes.size})
            memory.loads[4] += lanes.size

        return step

    def _addresses(self, space: str, at: Address) -> tuple[Memory, Callable]:
        """The memory, and the lanes' addresses in it."""
        of = TYPES["b64" if space == "global" else "b32"]
        base, offset = self._source(at.base, of), of.numpy(at.offset & (1 << of.bits) - 1)
        if space == "global":
            return self.memory, lambda chosen: base(chosen) + offset
        windows = self.windows - np.uint64(self.SHARED)
        return self.shared, lambda chosen: windows[chosen] + (base(chosen) + offset)

    def _change(self, head: str, parts, *operands) -> Callable:
        """`atom` and `red`: lanes change a word, one after the other."""
        spaces, scopes = ("global", "shared"), ("gpu", "sys", "cta")
        *how, operation, name = parts
        kinds = [("relaxed", "acq_rel"), scopes, spaces]
        if len(how) != 3 or any(sum(each in kind for each in how) != 1 for kind in kinds):
            raise PtxError("unknown variant")
        known = meaning(f"{operation}.{name}")
        if known is None or operation not in _CHANGES or known.result.bits < 32:
            raise PtxError("unknown variant")
        if known.result.kind == "f":  # whose order would show
            raise PtxError("unknown variant")
        *result, at, words = operands
        if len(result) != (head == "atom"):
            raise PtxError("not the operands of these")
        puts = [self._target(each, known.result) for each in result]
        source = self._source(words, known.result)
        memory, address = self._addresses(how[[each in spaces for each in how].index(True)], at)

        def step(chosen):
            old = memory.change(
                *(address(chosen), known.function, source(chosen), self.lanes[chosen]),
                orders="acq_rel" in how,
            )
            for put in puts:
                put(chosen, old)

        return step

    def _access_to_matrices(self, head: str, parts, *operands) -> Callable:
        """`ldmatrix` and `stmatrix`: matrices of 8 rows of 16 bytes, at the addresses of the warp's
        lanes in their order; a lane has 4 bytes of each."""
        *how, space, name = parts
        count = {"x1": 1, "x2": 2, "x4": 4}.get(how[3] if len(how) > 3 else "")
        fixed = [*how[:3], space, name] == ["sync", "aligned", "m8n8", "shared", "b16"]
        turned = how[4:] == ["trans"]
        if not fixed or count is None or (how[4:] and not turned):
            raise PtxError("unknown variant")
        at, words = operands if head == "stmatrix" else reversed(operands)
        if not isinstance(words, tuple) or len(words) != count:
            raise PtxError("not as many matrices")
        memory, address = self._addresses("shared", at)
        of, width = (TYPES["b16"], 2) if turned else (TYPES["b32"], 4)
        if head == "ldmatrix":
            ends = [self._target(each, TYPES["b32"]) for each in words]
        else:
            ends = [self._source(each, TYPES["b32"]) for each in words]

        def step(chosen):
            self._whole_warps(chosen)
            lanes = self.lanes[chosen]
            rows = address(chosen).reshape(-1, LANES)
            if (rows[:, : 8 * count] % np.uint64(16)).any():
                raise Trap("misaligned row")
            lane = np.arange(LANES)
            for number, end in enumerate(ends):
                if turned:  # two numbers of a column
                    pieces = [(2 * (lane % 4) + i, 2 * (lane // 4)) for i in (0, 1)]
                else:
                    pieces = [(lane // 4, 4 * (lane % 4))]
                places = [
                    (rows[:, 8 * number + row] + byte.astype(np.uint64)).reshape(-1)
                    for row, byte in pieces
                ]
                if head == "ldmatrix":
                    got = [memory.load(place, width, 1, lanes)[:, 0] for place in places]
                    end(chosen, np.stack(got, axis=1).view(np.uint32)[:, 0])
                else:
                    words = np.ascontiguousarray(end(chosen))[:, None].view(of.numpy)
                    for i, place in enumerate(places):
                        memory.store(place, width, words[:, i : i + 1], lanes)

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
