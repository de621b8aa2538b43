"""Gradients of micro-batches, added up in the contract's order (contract.md#leaves)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import accumulate
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pycollective import _core
from pycollective.errors import ConfigurationError
from pycollective.leaves.deal import checked_leaves
from pycollective.order import Node, parent, sibling
from pycollective.typing import Array

if TYPE_CHECKING:
    from pycollective._core import Work

Shape = int | Sequence[int]
_Row: TypeAlias = Any  # flat, of float32: an array, or a tensor on a device

_LINE = 64  # bytes
_ROOM = 32  # kNodeRoom: kernels read rows in multiples of so many elements


class Accumulator:
    """Adds up some of a reduction's leaves, in any order: what one rank gives to the reduction::

        acc = pycollective.Accumulator(weights.shape, leaves=12)
        for leaf in pycollective.leaves_of(comm.rank, comm.size, 12):
            acc.add(leaf, gradient_of(leaf))

    It keeps finished nodes of the order, each a row of fp32. Whenever both halves of a node are
    there, they become one row, in the same pass over memory that takes the leaf. Leaves 0, 1, 2,
    ... of an aligned run of ``m`` leaves need ``log2(m) + 1`` rows at most; any run from its first
    leaf to its last needs twice as many at most; other orders need more, up to one row a leaf.

    A reduction spends it: `reset` begins the next step, once the reduction is done. For one thread
    at a time.

    Args:
        shape: of a gradient; or a list of shapes: a leaf is then a list of arrays, one of each
            shape, which lie in one flat row one behind the other (a bucket of parameters).
        leaves: leaves of the whole reduction, M, on all ranks together.

    Attributes:
        leaves: M.
        shapes: the shapes of a leaf's arrays.
        shape: of a leaf, and so of the reduction's result: a list of arrays is one flat row.
        begins: the element of a row at which each array begins.
        size: elements of them all.

    Raises:
        ConfigurationError: `leaves` out of range, or no shape.
    """

    def __init__(self, shape: Shape | Sequence[Shape], *, leaves: int) -> None:
        self.leaves = checked_leaves(leaves)
        given: Any = shape
        if isinstance(given, list) and not given:
            raise ConfigurationError("[] has no shape in it; the shape of a scalar is ()")
        self._bucket = not _is_number(given) and not all(map(_is_number, given))
        self.shapes = tuple(map(_sizes, given if self._bucket else (given,)))
        counts = map(prod, self.shapes)
        *self.begins, self.size = accumulate(counts, initial=0)
        self.shape = (self.size,) if self._bucket else self.shapes[0]
        self._held: dict[Node, _Row | list[Any]] = {}  # a list: a leaf that was donated
        self._free: list[_Row] = []
        self._added: set[int] = set()
        self._spent = False
        self._work: Work[Any] | None = None  # of the asynchronous reduction that has the rows

    def add(
        self, leaf: int, gradient: Array | Sequence[Array | None] | None, donate: bool = False
    ) -> None:
        """Add the gradient of micro-batch ``leaf``. It is read before this returns, and not kept.

        Args:
            leaf: its number, 0 to M - 1; each once.
            gradient: in the host's memory, of float32, bfloat16, float16 or an 8-bit float, for
                NumPy (ml_dtypes) or with DLPack (torch). None is +0 everywhere: a parameter that
                this leaf does not use.
            donate: the arrays are given away: nobody changes them from now on. So they need not be
                copied, and may be kept until the leaf's sibling comes, or till `reset`.

        Raises:
            ConfigurationError: a leaf that is out of range or was added before; a gradient of
                another shape or type; or the rows were given to a reduction since the last
                `reset`. Nothing is changed.
        """
        leaf = index(leaf)
        self._refuse_if_spent()
        if not 0 <= leaf < self.leaves:
            raise ConfigurationError(f"leaf must be 0 to {self.leaves - 1}, not {leaf}")
        if leaf in self._added:
            raise ConfigurationError(f"leaf {leaf} was added before; add each leaf once")
        arrays = self._arrays(gradient)
        node, completed = _completed(leaf, self._held, self.leaves)
        if donate and not completed and self._keeps(arrays):
            self._held[node] = [*arrays]
        else:
            terms = [self._held[each] for each in completed]
            rows = [each for each in terms if not isinstance(each, list)]
            # The oldest row takes the sum. The newest comes free, and is the next to be written.
            out = rows.pop() if rows else self._free[-1] if self._free else self._new_row()
            self._sum(arrays, terms, out)
            if self._free and out is self._free[-1]:
                self._free.pop()
            self._free += reversed(rows)
            for each in completed:
                del self._held[each]
            self._held[node] = out
        self._added.add(leaf)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that it holds, ``(lo, hi)`` for the sum of leaves lo to hi - 1; they ascend."""
        return tuple(sorted(self._held))

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, of those that `reset` has kept and of donated arrays."""
        donated = sum(isinstance(each, list) for each in self._held.values())
        rows = len(self._held) - donated + len(self._free)
        return 4 * (rows * _padded(self.size) + donated * self.size)

    def nbytes_for(self, leaves: Iterable[int]) -> int:
        """Return how many bytes rows will have at most if these leaves are added in this order."""
        held: set[Node] = set()
        most = 0
        for leaf in leaves:
            node, completed = _completed(leaf, held, self.leaves)
            held = (held - {*completed}) | {node}
            most = max(most, len(held))
        return 4 * most * _padded(self.size)

    def reset(self) -> None:
        """Make it empty, for the next step; its rows are kept for that.

        Rows of a reduction that has failed are not: other ranks may still read them.

        Raises:
            ConfigurationError: an asynchronous reduction of it is not done. Nothing is changed.
        """
        if self._work is not None:
            if not self._work.done():
                raise ConfigurationError(
                    "the accumulator's rows are in a reduction that is not done: wait for the Work "
                    "first"
                )
            if not _ended_well(self._work):
                self._drop()
            self._work = None
        self._free += [each for each in self._held.values() if not isinstance(each, list)]
        self._held.clear()
        self._added.clear()
        self._spent = False

    def _rows(self) -> list[_Row]:
        """Return the sums that it holds, one for each of `nodes`: flat, of float32, its own memory.

        They begin with a cache line, and kernels may read up to 31 elements beyond their end.
        """
        for node, held in self._held.items():
            if isinstance(held, list):
                row = self._free.pop() if self._free else self._new_row()
                self._sum(held, (), row)
                self._held[node] = row
        return [row for _, row in sorted(self._held.items()) if not isinstance(row, list)]

    def _spend(self) -> list[_Row]:
        """Give the rows to a reduction, which may overwrite them.

        Raises:
            ConfigurationError: they were given to one before.
        """
        self._refuse_if_spent()
        rows = self._rows()
        self._spent = True
        return rows

    def _take_back(self) -> None:
        """Undo `_spend`: the reduction was refused, and has touched nothing."""
        self._spent = False

    def _drop(self) -> None:
        """Forget the rows: the reduction has failed, and other ranks may still read them."""
        self._held.clear()

    def _arrays(self, gradient: Any) -> Sequence[Any]:
        if not self._bucket:
            return (gradient,)
        if gradient is None:
            return (None,) * len(self.shapes)
        if not isinstance(gradient, list | tuple):
            raise ConfigurationError(
                f"a leaf is a list of {len(self.shapes)} arrays here, not {type(gradient).__name__}"
            )
        return gradient

    def _refuse_if_spent(self) -> None:
        if self._spent:
            raise ConfigurationError(
                "the accumulator's leaves were given to a reduction; reset() begins the next step"
            )

    # --- What depends on where the rows are: here in the host's memory.

    def _keeps(self, arrays: Sequence[Any]) -> bool:
        """Whether a leaf that was donated can be kept as it is."""
        return _core.leaf_is_node(arrays, self.shapes)

    def _sum(self, arrays: Sequence[Any], terms: Sequence[Any], out: _Row) -> None:
        """Add up a leaf and nodes, in this order. `out` may be one of the terms.

        Raises:
            ConfigurationError: the arrays are no leaf. Nothing was written.
        """
        _core.accumulate(arrays, self.shapes, terms, out)

    def _new_row(self) -> _Row:
        memory = np.empty(_padded(self.size) * 4 + _LINE, np.uint8)
        begin = -memory.ctypes.data % _LINE
        return memory[begin : begin + 4 * self.size].view(np.float32)


def _completed(leaf: int, held: Container[Node], leaves: int) -> tuple[Node, list[Node]]:
    """The node that a leaf makes with those that are held, and those of them that go into it."""
    node, completed = (leaf, leaf + 1), []
    while node != (0, leaves) and (other := sibling(node, leaves)) in held:
        completed.append(other)
        node = parent(node, leaves)
    return node, completed


def _padded(size: int) -> int:
    return -(-size // _ROOM) * _ROOM


def _ended_well(work: Work[Any]) -> bool:
    try:
        work.wait(0)
    except Exception:
        return False
    return True


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__")


def _sizes(shape: Any) -> tuple[int, ...]:
    sizes = (index(shape),) if _is_number(shape) else tuple(map(index, shape))
    if any(size < 0 for size in sizes):
        raise ConfigurationError(f"no array has the shape {sizes}")
    return sizes
