"""What is done with arrays, a bucket at a time: what CPUs and devices need to have, and the CPU's.

Tables of segments, and what a call finds, are `pycollective.segments`'. Messages are bytes
(wire.md). The state machine (`feedback`, `quantized`, `top_k`) cuts and reshapes arrays of
either kind, and leaves all else to the kernels. Devices have theirs in
`pycollective.torch.compression.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective.compression.arrays import Flat, Floats, Numbers, address_of, whole
from pycollective.compression.header import AGREED, BITS, FLAGS, Agreement
from pycollective.errors import ConfigurationError
from pycollective.segments import BAD, DIFFERS, ENTRY, ITEM, NONZERO, zero_at

Bytes = NDArray[np.uint8]
Read = tuple[Any, Numbers, int]  # a buffer, where headers begin, and where they go in `found`

# How values of top-k are held: the bits of a bfloat16 as an int16, which the kernels take for one.
VALUES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
}
TAIL = 8  # bytes of top-k's counts, before its places


class Part(NamedTuple):
    """Where a message of top-k has its entries.

    Attributes:
        first: its first entry, of all that were chosen.
        capacity: how many entries it has, or at most.
        size: places are below it.
        tail: its first byte with entries, of all messages' bytes.
    """

    first: int
    capacity: int
    size: int
    tail: int


class Came(NamedTuple):
    """Where a message of top-k that came has its entries; rows of a shard lie side by side.

    Attributes:
        start: its first byte, of all that came.
        tail: its first byte with entries.
        room: bytes from there on.
        size, capacity: as in `Part`.
        shard: what its places are counted in.
    """

    start: int
    tail: int
    room: int
    size: int
    capacity: int
    shard: int


def tail_bound(count: int, size: int, values: str) -> int:
    """Bytes of the longest tail of up to `count` entries below `size`."""
    return TAIL + _core.pack_indices_bound(count, size) + count * VALUES[values].itemsize


class Kernels(Protocol):
    """Kernels, and the arrays that they take: all in one memory, contiguous, and the caller's.

    In every method: `table` is int64, (segments, COLUMNS), of NumPy; `found` is int32, (words,);
    messages are uint8. Kernels never clear a word of `found`. Where BAD is set, what they write may
    be anything; `fill_nan` makes it NaN.

    Attributes:
        most_hosts: whose selections top-k can add up.
    """

    most_hosts: int

    # Memory.

    def memory(self, words: int, sizes: Sequence[int]) -> tuple[Any, list[Any]]:
        """(`found` of so many words, messages of these sizes), all zero."""
        ...

    def floats(self, count: int) -> Any:
        """Room for fp32 numbers, (count,)."""
        ...

    def entries(self, capacity: int, values: str) -> tuple[Any, Any]:
        """Room for entries of top-k: their places, 32 bits each, and values of this type."""
        ...

    def numbers(self, array: Numbers) -> Any:
        """A copy of int64 numbers where the kernels are, which may be kept for the next call."""
        ...

    def address(self, array: Any) -> int:
        """Of the first element of an array that was made here."""
        ...

    # Residuals.

    def scaled(self, values: Any, factor: float) -> Any:
        """fp32 numbers times a number, each rounded once; a copy."""
        ...

    def to_host(self, values: Any) -> Floats:
        """fp32 numbers as NumPy's; the host waits for them."""
        ...

    def from_host(self, values: Floats) -> Any:
        """A copy of NumPy's."""
        ...

    def add_error(self, flat: Flat, error: Floats, found: Any, unused: int) -> None:
        """Add an error to an average, rounded once. BAD is set if the sum is not finite.

        Where `unused` is not 0, an average that is all zero stays as it is, and that word of
        `found` becomes 1.
        """
        ...

    # All codecs.

    def headers(
        self, found: Any, agreement: Agreement, reads: Sequence[Read], write: Any, means: bool
    ) -> None:
        """Read headers, and write this rank's to messages; see `Call.headers`.

        Args:
            found: gets copies of the headers; BAD and DIFFERS are set as they say.
            agreement: what this rank's headers say.
            reads: at most two.
            write: (messages, bytes), each of which gets a header; or None.
            means: whether the last headers read are of all hosts, and `write` says what they say.
        """
        ...

    def copy(self, table: Any, messages: Any, found: Any, agreement: Agreement) -> None:
        """Write elements in fp32 to messages, (ranks, bytes), after a header in each.

        The header says that all is finite and nothing zero. NONZERO is not noted.
        """
        ...

    def average_copies(self, table: Any, messages: Any, divisor: int, found: Any) -> None:
        """Average what is in messages in fp32, as `dequantize` does.

        An average that is not finite sets BAD.
        """
        ...

    def sum(self, rows: Any, first: int, count: int) -> Any:
        """The sum of fp32 numbers, from byte `first` of each row on, in the contract's order."""
        ...

    def fill_nan(self, table: Any, found: Any) -> None:
        """Make all elements NaN where BAD is set."""
        ...

    def check_finite(self, table: Any, found: Any) -> None:
        """Set BAD where an element is not finite."""
        ...

    def verdict(self, found: Any) -> Any:
        """The bytes of [BAD] and [DIFFERS]."""
        ...

    def join(self, found: Any, verdicts: Any, at: int = 0) -> None:
        """Set what is set in any of the verdicts, (ranks, 8) bytes; keep them from word `at` on."""
        ...

    # 1 bit and 8 bits.

    def quantize(
        self, codec: str, chunk: int, table: Any, messages: Any, found: Any, zeros: int = 0
    ) -> None:
        """Write x + held to messages, and what that leaves of it to the new residuals.

        Where K is 0, x goes as it is, in fp32. A sum that is not finite sets BAD.

        Args:
            codec: of `_core.quantize_codecs()`.
            chunk: elements to a scale.
            table: x, which may lie where what is left of it goes; AT in `messages`; HELD and LEFT.
            messages: flat; nothing else of them is written.
            found: if `zeros` is 0, NONZERO of a parameter is set where an x is not zero.
            zeros: else parameters whose word is set from there on are left out.
        """
        ...

    def dequantize(
        self,
        codec: str,
        chunk: int,
        table: Any,
        messages: Any,
        divisor: int,
        found: Any,
        zeros: int = 0,
    ) -> None:
        """Add up the payloads of messages in the contract's order, divide, and round once.

        Args:
            codec: of `_core.quantize_codecs()`.
            chunk: elements to a scale.
            table: where averages go; AT in each message. Where K is 0 there are fp32 numbers.
            messages: (ranks, bytes).
            divisor: 1: do not divide.
            found: BAD is set by an average of 16 bits that is not finite, and if `zeros` is not 0
                by any. If it is set before, all averages are NaN.
            zeros: not 0: where all messages' headers say that a parameter is all zero, its average
                is, and its word from there on is set.
        """
        ...

    # Top-k.

    def top_k(
        self, table: Any, chunk: int, places: Any, values: Any, messages: Any, found: Any
    ) -> None:
        """Take the largest elements of x + held off it, and leave the rest.

        Args:
            table: x; HELD and LEFT; K and ENTRY; AT is what is added to an element's index.
                Segments whose K is 0 go to `messages` as with `quantize`.
            chunk: K are taken of each so many elements; 0: of the segment.
            places: of the entries, ascending in each segment.
            values: theirs, rounded.
            messages: flat.
            found: NONZERO and BAD are set as by `quantize`.
        """
        ...

    def add(self, table: Any, messages: Any, found: Any) -> None:
        """Write x + held to the new residuals, nothing taken off; else as `top_k`."""
        ...

    def histogram(self, table: Any, shift: int, bits: int, prefixes: Any, bins: Any) -> None:
        """Count new residuals whose magnitude begins with a prefix by the bits that follow.

        Args:
            table: LEFT of compressed segments.
            shift: how many bits lie below those that are counted.
            bits: how many are counted.
            prefixes: int64, (segments,).
            bins: bytes of int32, (at least segments, 2^bits), added to.
        """
        ...

    def merge(self, came: Any, bits: int, wanted: Any, begins: Numbers, rank: int) -> Any:
        """Find in which bin of all ranks' histograms the wanted elements end.

        Args:
            came: (ranks, bytes): of each rank those of the parameters that this one adds up.
            bits: a histogram has 2^bits bins.
            wanted: int64, (parameters,): how many elements of each, the largest.
            begins: see `top_k.Thresholds`.
            rank: this one.

        Returns:
            What it tells the others, as bytes.
        """
        ...

    def take(self, heard: Any, bits: int, prefixes: Any, rank: int) -> tuple[Any, Any, Any]:
        """(prefixes, wanted, ties) of the next round, of what all have told: (ranks, bytes)."""
        ...

    def select(self, table: Any, keys: Any, ties: Any, places: Any, values: Any) -> Any:
        """Take elements of a larger magnitude than their segment's key, and some that have it.

        As `top_k`, of new residuals that `add` has written; entries lie one behind another, K of a
        segment at most. `keys` and `ties` are int64, (segments,).

        Returns:
            How many entries in all: int64, (1,).
        """
        ...

    def pack(
        self,
        places: Any,
        values: Any,
        parts: Numbers,
        counts: Any,
        messages: Any,
        found: Any,
    ) -> Numbers | None:
        """Write messages' entries; none where BAD is set.

        Args:
            places, values: of the entries.
            parts: (messages, fields of `Part`).
            counts: how many entries each message has: int64, (messages,); None: all it can have.
            messages: flat.
            found: see above.

        Returns:
            Where each message ends, in bytes of `messages`; None where the host does not know.
        """
        ...

    def average(
        self, came: Any, parts: Numbers, values: str, table: Any, divisor: int, found: Any
    ) -> None:
        """Add up the entries of messages in the contract's order, divide, and round once.

        Args:
            came: messages that begin with headers, flat. Whatever their bytes are, nothing outside
                of a part is read; entries that cannot be set DIFFERS and BAD.
            parts: (messages, fields of `Came`), the same number of each local shard.
            values: the type of values in messages.
            table: where averages go, 0 where there is no entry; AT: the place of the first element,
                ENTRY: its local shard. What all of a shard's headers call zero is.
            divisor: the number of ranks.
            found: BAD is set by an average that is not finite.
        """
        ...


# Of a call about segments that are not compressed.
_NO_CODEC = "one_bit", 64


class CpuKernels:
    """Native kernels, and NumPy's arrays.

    Attributes:
        ends_are_told: whether a message of top-k ends where `Came` says, and no byte lies behind.
    """

    most_hosts = 1 << 15
    ends_are_told = True
    fill_nan, check_finite = staticmethod(_core.fill_nan), staticmethod(_core.check_finite)
    quantize, dequantize = staticmethod(_core.quantize), staticmethod(_core.dequantize)
    top_k, add = staticmethod(_core.top_k), staticmethod(_core.sparse_add)

    def memory(self, words: int, sizes: Sequence[int]) -> tuple[Any, list[Any]]:
        return np.zeros(words, np.int32), [np.zeros(size, np.uint8) for size in sizes]

    def floats(self, count: int) -> Any:
        return np.empty(count, np.float32)

    def entries(self, capacity: int, values: str) -> tuple[Any, Any]:
        return np.empty(capacity, np.uint32), np.empty(capacity, VALUES[values])

    def numbers(self, array: Numbers) -> Any:
        return array

    def address(self, array: Any) -> int:
        return address_of(array)

    def scaled(self, values: Any, factor: float) -> Any:
        found = np.empty_like(values)
        with np.errstate(over="ignore"):
            np.multiply(values, factor, out=found, dtype=np.float64, casting="same_kind")
        return found

    def to_host(self, values: Any) -> Floats:
        return np.asarray(values)

    def from_host(self, values: Floats) -> Any:
        return np.array(values, np.float32)

    def add_error(self, flat: Flat, error: Floats, found: Any, unused: int) -> None:
        table = whole([flat])
        total = np.empty(flat.count, np.float32)
        _core.quantize(*_NO_CODEC, table, total.view(np.uint8), found)
        if unused and not total.any():
            found[unused] = 1
            return
        total += error
        self.dequantize(*_NO_CODEC, table, total.view(np.uint8)[None], 1, found)
        self.check_finite(table, found)

    def headers(
        self, found: Any, agreement: Agreement, reads: Sequence[Read], write: Any, means: bool
    ) -> None:
        items, mine = agreement.items, agreement.plain()
        told = found.view(np.uint8)
        for buffer, offsets, at in reads:
            heads = buffer.take(offsets[:, None] + np.arange(mine.size), mode="clip")
            told[at : at + heads.size] = heads.reshape(-1)
            if (heads[:, AGREED] != mine[AGREED]).any():
                found[BAD] = found[DIFFERS] = 1
            if (heads[:, FLAGS] & 1).any():
                found[BAD] = 1
        zero = found[NONZERO:][:items] == 0
        if means:
            bits = np.bitwise_and.reduce(heads[:, BITS:])
            zero = np.unpackbits(bits, count=items, bitorder="little")
            found[zero_at(items) :][:items] = zero
        if write is not None:
            if found[DIFFERS]:
                mine[:8] ^= 0xFF
            mine[FLAGS] = found[BAD]
            mine[BITS:] = np.packbits(zero, bitorder="little")
            write[:, : mine.size] = mine

    def copy(self, table: Any, messages: Any, found: Any, agreement: Agreement) -> None:
        head = agreement.plain()
        messages[:, : head.size] = head
        # So that it does not note what is not zero: that is found of sums. None is skipped yet.
        zeros = zero_at(agreement.items)
        _core.quantize(*_NO_CODEC, table, messages.reshape(-1), found, zeros)

    def average_copies(self, table: Any, messages: Any, divisor: int, found: Any) -> None:
        _core.dequantize(*_NO_CODEC, table, messages, divisor, found)
        self.check_finite(table, found)

    def sum(self, rows: Any, first: int, count: int) -> Any:
        total = np.empty(count, np.float32)
        if not count:
            return total
        leaves = rows[:, first : first + 4 * count]
        _core.reduce_into([row.view(np.float32) for row in leaves], "sum", total)
        return total

    def verdict(self, found: Any) -> Any:
        return found[: DIFFERS + 1].view(np.uint8)

    def join(self, found: Any, verdicts: Any, at: int = 0) -> None:
        words = verdicts.reshape(-1).view(np.int32)
        if at:
            found[at : at + words.size] = words
        found[: DIFFERS + 1] |= np.bitwise_or.reduce(words.reshape(-1, 2))

    def histogram(self, table: Any, shift: int, bits: int, prefixes: Any, bins: Any) -> None:
        rows = bins.view(np.int32).reshape(-1, 1 << bits)
        _core.sparse_histogram(table, shift, bits, prefixes, rows[: len(table)])

    def merge(self, came: Any, bits: int, wanted: Any, begins: Numbers, rank: int) -> Any:
        histograms = came.view(np.uint32).reshape(len(came), -1, 1 << bits).astype(np.int64)
        _, each, bins = histograms.shape
        mine = slice(rank * each, (rank + 1) * each)
        want = np.zeros(each, np.int64)
        want[: wanted[mine].size] = wanted[mine]
        above = np.cumsum(histograms.sum(0)[:, ::-1], axis=1)  # as large as this or larger
        back = np.minimum((above < want[:, None]).sum(1), bins - 1)
        one, place = np.arange(each), bins - 1 - back
        there = histograms[:, one, place]  # of each rank
        left = want - (above[one, back] - there.sum(0))
        # Of those that are equal the first: what the ranks before one have comes off.
        begin = begins[:, mine]
        before = (begin[:, None] >= 0) & (begin[:, None] < begin[None])
        ties = np.maximum(0, left - (before * there[:, None]).sum(0))
        return np.concatenate([place[None], left[None], ties]).reshape(-1).view(np.uint8)

    def take(self, heard: Any, bits: int, prefixes: Any, rank: int) -> tuple[Any, Any, Any]:
        told = heard.view(np.int64).reshape(len(heard), 2 + len(heard), -1)
        told = told.transpose(1, 0, 2).reshape(2 + len(heard), -1)[:, : prefixes.size]
        return prefixes << bits | told[0], told[1].copy(), told[2 + rank].copy()

    def select(self, table: Any, keys: Any, ties: Any, places: Any, values: Any) -> Any:
        return np.array([_core.sparse_select(table, keys, ties, places, values)])

    def pack(
        self,
        places: Any,
        values: Any,
        parts: Numbers,
        counts: Any,
        messages: Any,
        found: Any,
    ) -> Numbers | None:
        ends = []
        for number, part in enumerate(map(Part._make, parts.tolist())):
            count = part.capacity if counts is None else int(counts[number])
            here = slice(part.first, part.first + (0 if found[BAD] else count))
            stream = messages[part.tail + TAIL :]
            length = _core.pack_indices(places[here], part.size, stream)
            of_values = values[here].view(np.uint8)
            stream[length : length + of_values.size] = of_values
            lengths = np.array([places[here].size, length], np.uint32)
            messages[part.tail : part.tail + TAIL] = lengths.view(np.uint8)
            ends.append(part.tail + TAIL + length + of_values.size)
        return np.array(ends, np.int64)

    def average(
        self, came: Any, parts: Numbers, values: str, table: Any, divisor: int, found: Any
    ) -> None:
        every = [Came._make(each) for each in parts.tolist()]
        for shard in range(every[-1].shard + 1):
            rows = [each for each in every if each.shard == shard]
            read = [self._entries(came, each, values, found) for each in rows]
            room = sum(each[0].size for each in read)
            places, sums = np.empty(room, np.uint32), np.empty(room, np.float32)
            count = _core.sparse_sum(
                [each[0] for each in read], [each[1] for each in read], places, sums
            )
            mine = table[table[:, ENTRY] == shard]
            bits = int(mine[:, ITEM].max(initial=0)) // 8 + 1
            heads = [came[each.start + BITS :][:bits] for each in rows]
            zero = np.unpackbits(np.bitwise_and.reduce(heads), bitorder="little")
            _core.sparse_scatter(mine, places[:count], sums[:count], divisor, found, zero)

    def _entries(self, came: Bytes, of: Came, values: str, found: Any) -> tuple[Any, Any]:
        """The entries of a message; none where they are damaged, which is found then."""
        dtype = VALUES[values]
        if of.room >= TAIL:
            count, length = came[of.tail : of.tail + TAIL].copy().view(np.uint32).tolist()
            end = TAIL + length + count * dtype.itemsize
            fits = end == of.room if self.ends_are_told else end <= of.room
            if count <= of.capacity and fits:
                places = np.empty(count, np.uint32)
                stream = came[of.tail + TAIL :][:length]
                try:
                    _core.unpack_indices(stream, of.size, places)
                except ConfigurationError:
                    pass
                else:
                    sent = came[of.tail + TAIL + length :][: count * dtype.itemsize]
                    return places, sent.copy().view(dtype)
        found[BAD] = found[DIFFERS] = 1
        return np.empty(0, np.uint32), np.empty(0, dtype)
