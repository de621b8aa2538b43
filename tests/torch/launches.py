"""Counts what a step of compression launches on a device: kernels, and torch's operations.

There is no device: tensors are the CPU's (`tests.torch.on_devices`). Kernels are not run: the host
does not look at what they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from pycollective.torch.compression.groups import TorchGroup
from tests.torch.compressed import group_of
from tests.torch.on_devices import as_on_a_device

# The old residual and the new one change places in each step, so tables come again from here on.
WARM_STEPS = 3
# The first is so long that no single program selects its largest, also where two ranks of a host
# share it. The last is not compressed.
_LONG, _SHORT, _AS_IT_IS = (70, 130), (3, 70), (33,)


class Launches(TorchDispatchMode):
    """Counts launches of kernels and torch's operations while it is entered.

    Views and allocations launch nothing. What collectives, and the interpreter, do with tensors is
    not counted.

    Attributes:
        names: how many of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._within = 0
        self._patches = ExitStack()

    def __enter__(self) -> Launches:
        for owner, name in [
            (InterpretedFunction, "run"),
            *((TorchGroup, name) for name in ("all_to_all", "all_gather", "average")),
        ]:
            patch = mock.patch.object(owner, name, self._apart(getattr(owner, name)))
            self._patches.enter_context(patch)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _apart(self, call: Callable[..., object]) -> Callable[..., object]:
        """That call, within which nothing is counted; a kernel's is counted, and not made."""

        def within(of: object, *args: object, **more: object) -> object:
            if isinstance(of, InterpretedFunction):
                self.names[of.fn.__name__] += 1
                return None
            self._within += 1
            try:
                return call(of, *args, **more)
            finally:
                self._within -= 1

        return within

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._within and not _is_free(func):
            self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _is_free(func: torch._ops.OpOverload) -> bool:
    """Whether an operation is a view, or takes memory and no more."""
    returned = [each.alias_info for each in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return is_view or "empty" in func._schema.name


def count_launches(
    comm, codec: str, topology: str, many: int, small: int, options: dict[str, object]
) -> Counter[str]:
    """What one `all_reduce` of a bucket launches on this rank, once steps are alike.

    Args:
        comm: of all ranks.
        codec: its name.
        topology: the hosts that ranks simulate.
        many: parameters of the bucket that are compressed; `small` ones are not.
        options: the state's.
    """
    shapes = {f"w{i}": _SHORT for i in range(many)} | {"w0": _LONG}
    shapes |= {f"b{i}": _AS_IT_IS for i in range(small)}
    pairs = [(name, torch.zeros(shape, requires_grad=True)) for name, shape in shapes.items()]
    random = torch.Generator().manual_seed(comm.rank)
    found = Launches()
    state = as_on_a_device(
        *(pairs, codec, topology, group_of(comm, "gloo"), "triton"),
        **{"chunk": 64, "compress": lambda name, shape: len(shape) > 1, **options},
    )
    mine = {name: torch.empty(shape) for name, shape in shapes.items()}
    for step in range(WARM_STEPS + 1):
        for each in mine.values():
            each.normal_(generator=random)
        with state.step(), found if step == WARM_STEPS else Launches():
            state.all_reduce(mine)
    assert state.stats()["compressed_calls"] == WARM_STEPS + 1
    state.close()
    return found.names
