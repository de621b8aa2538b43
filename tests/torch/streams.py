"""A device whose streams work late: a stand-in of CPU tensors for what only real streams show.

An operation is queued on the current stream, and its result holds nothing meaningful until the
stream has come to it. A stream goes on only as far as the host, or another stream, waits for it.
So whoever does not wait reads, or overwrites, too early, every time. With a seed, other streams go
on meanwhile in a drawn order.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pycollective.torch.compression import kernels as device_kernels
from pycollective.torch.compression import states
from pycollective.torch.compression.groups import TorchGroup
from pycollective.torch.ordered import reduction
from pycollective.torch.ordered.device_messages import DeviceMessages
from pycollective.torch.streams import Streams
from tests.torch import cpu_kernels
from tests.torch.compressed import state_of

KERNELS = ("lay_out", "reduce", "narrowed")  # of `reduction`
EXCHANGES = ("all_to_all", "all_gather")  # of `DeviceMessages`
_OF_A_QUERY = 2  # so many operations end from one query of the host's to the next, at most


class Stream:
    """A queue of operations, and of events of others that it waits for.

    Attributes:
        issued, done: how many.
    """

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._work: deque[Callable[[], Any] | Event] = deque()
        self.issued = self.done = 0

    def later(self, work: Callable[[], Any] | Event) -> None:
        self._work.append(work)
        self.issued += 1

    @property
    def ready(self) -> bool:
        """Whether there is an operation that waits for nothing."""
        head = self._work[0] if self._work else None
        return head is not None and not (isinstance(head, Event) and head.stream.done < head.at)

    def step(self) -> None:
        """Make the next operation, or wait."""
        head, before = self._work[0], self.done
        if isinstance(head, Event):
            head.stream.run(head.at)
        else:
            head()
        if self.done == before:  # else it was drawn meanwhile
            self._work.popleft()
            self.done += 1

    def run(self, until: int) -> None:
        while self.done < until:
            self._device.draw()
            if self.done < until:
                self.step()

    def synchronize(self) -> None:
        """Let the host wait for it."""
        with _made_now():
            self.run(self.issued)

    def wait_event(self, event: Event) -> None:
        self.later(Event(self._device, event.stream, event.at))

    def wait_stream(self, other: Stream) -> None:
        self.later(Event(self._device, other, other.issued))


class Event:
    """A place in a stream: the last one recorded."""

    def __init__(self, device: LateDevice, stream: Stream | None = None, at: int = 0) -> None:
        self._device = device
        self.stream, self.at = stream or device.current, at

    def record(self) -> None:
        self.stream, self.at = self._device.current, self._device.current.issued

    def query(self) -> bool:
        """Whether the stream has come to it. It goes on a little from one query to the next, of the
        thread that issues its work."""
        if self.stream.done >= self.at:
            return True
        if threading.get_ident() != self._device.thread:  # that looks for late calls
            return False
        with _made_now():
            self.stream.run(min(self.at, self.stream.done + _OF_A_QUERY))
        return False


class LateDevice:
    """What `torch.get_device_module` would give, and the streams.

    Attributes:
        streams: all of them; the caller's is the first.
        current: the current one.
        thread: issues the work.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.streams = [Stream(self)]
        self.current = self.streams[0]
        self.thread = threading.get_ident()
        self._messages = Stream(self)  # like NCCL's own
        self._drawn = None if seed is None else random.Random(seed)
        # What is freed on a stream is taken again behind what the stream has been given; the CPU's
        # memory would be taken at once.
        self.memory: list[torch.Tensor] = []

    # As torch.cuda has it.

    def Stream(self, device: torch.device, priority: int = 0) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        """Let the host wait for all streams, the caller's first."""
        for each in self.streams:
            each.synchronize()

    # Its work.

    def draw(self) -> None:
        """Let other streams go on, if an order is drawn."""
        while self._drawn is not None and self._drawn.random() < 0.5:
            ready = [each for each in self.streams if each.ready]
            if not ready:
                return
            self._drawn.choice(ready).step()

    def later(self, call: Callable[[], Any]) -> None:
        self.current.later(call)

    def late(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same, made later."""
        return lambda *args, **options: self.later(lambda: function(*args, **options))

    def result(self, like: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `call` gives later, in memory like that of `like`, which holds something else."""
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.memory.append(out)
        if out.dtype == torch.bool:
            out.fill_(True)
        else:
            out.view(-1).view(torch.uint8).fill_(0xA5)
        self.later(lambda: out.copy_(call()))
        return out

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Operations on tensors, kernels and exchanges are this device's."""

        start = DeviceMessages.start

        def late_start(
            messages: DeviceMessages, tag: int, sends: Any, receives: Any
        ) -> SimpleNamespace:
            self._messages.wait_stream(self.current)
            self._messages.later(lambda: start(messages, tag, sends, receives).wait())
            return SimpleNamespace(wait=lambda: self.current.wait_stream(self._messages))

        exchange, gather = TorchGroup.all_to_all, TorchGroup.all_gather

        def late_exchange(group: TorchGroup, rows: Any) -> Any:
            if not isinstance(rows, torch.Tensor):
                return exchange(group, rows)
            with _made_now():
                return self.result(rows, lambda: exchange(group, rows))

        def late_gather(group: TorchGroup, row: Any) -> Any:
            if not isinstance(row, torch.Tensor):
                return gather(group, row)
            with _made_now():
                like = row.expand(group.size, row.numel()).contiguous()
                return self.result(like, lambda: gather(group, row))

        with ExitStack() as patched:
            for where, name, what in (
                (TorchGroup, "all_to_all", late_exchange),
                (TorchGroup, "all_gather", late_gather),
                (TorchGroup, "average", self.late(TorchGroup.average)),
                (DeviceMessages, "start", late_start),
                *((DeviceMessages, n, self.late(getattr(DeviceMessages, n))) for n in EXCHANGES),
                *((reduction, n, self.late(getattr(reduction, n))) for n in KERNELS),
                (torch.futures, "Future", lambda devices: Future(self)),
                (torch.Tensor, "record_stream", lambda *_: None),
            ):
                patched.enter_context(mock.patch.object(where, name, what))
            patched.enter_context(_Operations(self))
            patched.enter_context(_Methods(self))
            yield


class Future:
    """torch's, of a device: it has an event, for which a waiter's stream waits."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._event = device, Event(device)

    def set_result(self, value: Any) -> None:
        self._event.record()

    def wait(self) -> None:
        self._device.current.wait_event(self._event)


class _Operations(TorchDispatchMode):
    """Queues operations; views are made at once."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema, later = func._schema, self._device.later
        if func is torch.ops.aten._local_scalar_dense.default:  # the host waits
            self._device.current.synchronize()
            return func(*args, **kwargs)
        if schema.is_mutable:
            later(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0]) if schema.returns else None
        found = func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not tensors:
            self._device.memory.append(found)
            return found
        if any(each.alias_info is not None for each in schema.returns):
            return found
        assert isinstance(found, torch.Tensor), func
        return self._device.result(found, lambda: func(*args, **kwargs))


class _Methods(TorchFunctionMode):
    """What CPU tensors would not tell."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "cpu":  # the host waits
            self._device.current.synchronize()
        return func(*args, **(kwargs or {}))


@contextmanager
def _made_now() -> Iterator[None]:
    """Operations are made at once."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def on_late_device(device: LateDevice, model, codec, topology, group, **options):
    """A state of such parameters on a stream of this device, with the CPU's kernels."""

    def streams_of(_: torch.device, whose: str) -> Streams:
        return late_streams(device, whose)

    def load(name: str) -> Any:
        kernels = cpu_kernels.module(name)
        if name == "tables":
            return kernels
        return SimpleNamespace(**{n: device.late(each) for n, each in vars(kernels).items()})

    with (
        mock.patch.object(states, "streams_of", streams_of),
        mock.patch.object(device_kernels, "load", load),
    ):
        return state_of(model, codec, topology, group, **options)


def late_streams(device: LateDevice, whose: str) -> Streams:
    """A stream of this device."""
    with mock.patch.object(torch, "get_device_module", return_value=device):
        return Streams(torch.device("cpu"), whose)
