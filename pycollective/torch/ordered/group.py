"""A process group whose reductions have the contract's bits, whatever its backend.

How a call goes is in `cpu.CpuCalls` and in `devices.DeviceCalls`. With several ranks on each of
several hosts (`layout.Layout`) each host adds its leaves up first, so that sums cross to other
hosts, and once a host. Large tensors are cut into pieces, so that little memory is needed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycollective.bootstrap.attach import host_identity
from pycollective.bootstrap.init import simulated_hosts
from pycollective.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
)
from pycollective.placement import number_hosts
from pycollective.torch.ordered import header
from pycollective.torch.ordered.cpu import CpuCalls
from pycollective.torch.ordered.device_messages import DeviceMessages
from pycollective.torch.ordered.devices import DeviceCalls
from pycollective.torch.ordered.header import Header
from pycollective.torch.ordered.late import WATCH, LateCalls
from pycollective.torch.ordered.layout import Layout, layout_of
from pycollective.torch.ordered.messages import Messages
from pycollective.torch.ordered.pieces import Buffers, Call, combine
from pycollective.torch.ordered.work import DeviceWork, Issued, UnderWay
from pycollective.torch.streams import Streams, wait_for
from pycollective.torch.worker import Worker

# Bytes of a piece. Smaller ones cost more by their messages than they gain.
_PIECE = 64 << 20
# What `prepare` calls: reductions of gradients that are not small.
_PREPARED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PREPARED_OPS = ("sum", "avg")
_PREPARED_BYTES = 64 << 10
# Seconds for peers to tell what they have called, once a call has failed.
_TELLING = 1.0
_AS_IT_IS = contextlib.nullcontext()


class OrderedGroup:
    """The ordered reductions of one process group on one device.

    On CPUs a call without `async_op` runs on the caller's thread, behind those that were issued
    before; all others run on a thread of the group's own, in their order. On devices all is issued
    at the call, on a stream of the group's own.

    Args:
        group: of torch's; held weakly. It need not be known to `torch.distributed`.
        device: where its tensors are.
        streams: of the device; None on CPUs.
        ranks: those of the group, numbered in the default group; None to ask torch.
        name: of the part of the group's store by which connections of its own are made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        streams: Streams | None,
        ranks: Sequence[int] | None = None,
        name: str = "pycollective.torch.ordered",
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.device = device
        self.streams = streams
        self.calls = 0
        self.failure: CollectiveError | None = None
        self.piece = _PIECE
        self.group = weakref.ref(group)
        self._ranks = dist.get_process_group_ranks(group) if ranks is None else ranks
        self._layout: Layout | None = None
        self._backward = -1  # the last one at whose end this raises
        self._buffers = Buffers(device, zeroed=streams is not None)
        self._one_at_a_time = threading.Lock()
        self._messages: Messages | DeviceMessages
        self._calls: CpuCalls | DeviceCalls
        if streams is None:
            self._messages = Messages(group, name)
            self._calls = CpuCalls(self.rank, self.size, self._messages, self._buffers)
        else:
            self._messages = DeviceMessages(group, device)
            self._under_way = UnderWay()
            given = self._messages, self._buffers
            with streams.entered():
                self._calls = DeviceCalls(device, *given, streams, self._under_way)
            give_up = weakref.WeakMethod(self.give_up)
            self._late = LateCalls(group, self._under_way, self._calls.found, streams, give_up)
            WATCH.add(self._late)
        # Nothing here refers to this, so that its memory and thread go with the group at once.
        self.worker = Worker("an ordered group", self._messages.abort)

    def run(self, call: Call) -> Header:
        """Make a call here and now; on a device, on the current stream. Returns what it is.

        Raises:
            CollectiveError: it failed, or one before it has; then the group makes no more calls.
            ConfigurationError: this process is a fork, whose messages would mix with its parent's.
        """
        # Only that mode may write its tensors, and it is the thread's, not the call's.
        with torch.inference_mode() if call.results.is_inference() else _AS_IT_IS:
            with self._alone(call.kind):
                made = self._run(call)
            call.done()
        return made

    def issue(
        self, calls: Sequence[Call], value: Any, tensors: Sequence[torch.Tensor]
    ) -> DeviceWork:
        """Make calls on the stream of a device, behind the caller's.

        Args:
            calls: at least one.
            value: of the work's future.
            tensors: all that the calls use.

        Raises:
            CollectiveError, ConfigurationError: as for `run`.
        """
        streams, way = self.streams, self._calls
        assert streams is not None
        assert isinstance(way, DeviceCalls)
        begun = False
        try:
            with streams.behind_caller():
                begun = True
                headers, runs_ahead = [], False
                for each in calls:
                    headers.append(self.run(each))
                    may_misfit = each.narrow is not None and each.nodes is None
                    runs_ahead |= may_misfit and each.narrow_check == "device"
                event = streams.event()
        except BaseException:
            if begun:  # a capture that is refused must not wait for what runs outside of it
                streams.join_caller()
            raise
        issued = Issued(headers, event, tensors)
        self._under_way.add(issued)
        if runs_ahead:
            self._raise_at_end_of_backward()
        return DeviceWork(issued, value, self.device, streams, way.found)

    def _raise_at_end_of_backward(self) -> None:
        """Let the backward pass that runs now, if one does, raise what its calls find."""
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            end = partial(self._end_calls, "backward")
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_calls(self, what: str) -> None:
        assert isinstance(self._calls, DeviceCalls)
        with self._alone(what):
            newest = self._under_way.newest()
            if newest is None:
                self._calls.raise_late()
            else:
                self._calls.raise_at(newest, what)

    def prepare(self) -> None:
        """Learn which ranks share hosts, unless it is known. Collective over the group.

        On a device calls are made, too, on the current stream, so that kernels are compiled. They
        are those of gradients: later ones of other sizes have the same kernels.

        Raises:
            CollectiveError, ConfigurationError: as for `run`.
        """
        self.learn_hosts()
        if self.streams is not None:
            for dtype in _PREPARED_DTYPES:
                count = _PREPARED_BYTES // dtype.itemsize
                zeros = torch.zeros(count, dtype=dtype, device=self.device)
                for op in _PREPARED_OPS:
                    self.issue([Call("all_reduce", op, zeros, zeros)], zeros, [zeros])

    def learn_hosts(self) -> None:
        """Learn which ranks share hosts, unless it is known. Collective over the group."""
        with self._behind_caller(), self._alone("prepare"):
            self._learn_layout()

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """Have every rank's row of bytes, in the host's memory: (n,) in, (size, n) out.

        Collective. On CPUs nothing is compared. For a device the host waits.

        Raises:
            CollectiveError, ConfigurationError: as for `run`.
        """
        if self.size == 1:
            return row[None]
        with self._exchanging("all_gather"):
            return self._calls.all_gather(self.calls, row)

    def exchange(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Send each rank its row of bytes, and have theirs, on CPUs.

        Collective; nothing is compared.

        Args:
            rows: as long as each other, on every rank.
            out: a row for each rank.

        Raises:
            CollectiveError, ConfigurationError: as for `run`.
        """
        assert isinstance(self._calls, CpuCalls)
        with self._exchanging("exchange"):
            self._calls.exchange(rows, out)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Make the bytes of a flat tensor those of rank 0. Collective; nothing is compared.

        Raises:
            CollectiveError, ConfigurationError: as for `run`.
        """
        if self.size == 1:
            return
        with self._exchanging("broadcast"):
            self._calls.broadcast(flat)
        if self.streams is not None:
            self.streams.join_caller()

    @contextlib.contextmanager
    def _exchanging(self, kind: str) -> Iterator[None]:
        """Within, a call that is no reduction is made."""
        with self._behind_caller(), self._alone(kind):
            if isinstance(self._messages, Messages):
                self._messages.connect()
            self._calls.raise_late()
            self.calls += 1
            yield

    def _behind_caller(self) -> contextlib.AbstractContextManager[Any]:
        """On a device, the stream of the calls is current, behind the caller's."""
        return _AS_IT_IS if self.streams is None else self.streams.behind_caller()

    def name_ranks(self, names: Sequence[int]) -> None:
        """Call the ranks so in errors; by default by their numbers in the group."""
        self._messages.names = names

    def disconnect(self) -> None:
        """Let the calls under way fail over Gloo, here and on the peers."""
        if isinstance(self._messages, Messages):
            self._messages.disconnect()

    def close(self) -> None:
        """End the thread, and let go of connections of its own; no call follows."""
        self.worker.end()
        if isinstance(self._messages, Messages):
            self._messages.close()

    def give_up(self, error: CollectiveError) -> None:
        """End what a device has under way, because of an error; from any thread."""
        self.failure = error
        self._under_way.fail(error)
        self._messages.abort(str(error))

    def settle(self) -> None:
        """Let the host wait until a device has ended all calls.

        Raises:
            CollectiveError: what they have found, or that one has not ended in the group's timeout.
        """
        self._end_calls("settle")

    def abandon(self, error: CollectiveError) -> None:
        """Make no more calls on a device, and let no peer wait for them.

        Peers make those that are under way, too, and need their results: these end first, if they
        do within some seconds. Then peers' next calls are late, and hear of the error.
        """
        assert self.streams is not None
        if self.failure is not None:
            return
        self._late.compare([Header(self.calls + 1, "all_reduce")], True, str(error))
        if (newest := self._under_way.newest()) is not None:
            with contextlib.suppress(CollectiveTimeout):
                wait_for(newest.event, self._late.after, "calls under way")
        if (newest := self._under_way.newest()) is not None:
            self._late.compare(newest.headers, True, str(error))
        self.give_up(error)

    def stats(self) -> dict[str, int]:
        """What `ordered.stats` says."""
        return {
            "calls": self.calls,
            "sent_messages": self._messages.sent_messages,
            "sent_bytes": self._messages.sent_bytes,
            "buffer_bytes": self._buffers.nbytes,
        }

    @contextlib.contextmanager
    def _alone(self, kind: str) -> Iterator[None]:
        """Let no other call run meanwhile, and none after a failure."""
        self.worker.refuse_in_a_fork()
        with self._one_at_a_time:
            if self.failure is not None:
                raise type(self.failure)(str(self.failure), self.rank, kind, self.calls + 1)
            issued = self._messages.issued
            try:
                yield
            except BaseException as error:
                # Not the one that is raised, whose traceback keeps tensors and the group.
                self.failure = self._described(error, kind)
                known = isinstance(error, CollectiveMismatch)  # to all ranks
                if not known and (found := self._let_peers_know(error, issued)) is not None:
                    self.failure = self._described(found, kind)
                if isinstance(error, RuntimeError):
                    raise type(self.failure)(
                        str(self.failure), self.rank, kind, self.calls
                    ) from error
                raise

    def _let_peers_know(self, error: BaseException, issued: int) -> CollectiveError | None:
        """Let nobody wait for a call that has failed here.

        Args:
            error: what it raised.
            issued: how many exchanges the group had issued before it.

        Returns:
            What peers know of it, if they do.
        """
        if isinstance(self._calls, CpuCalls):
            self.disconnect()
            return None
        failing = self._calls.failing
        if failing is None:
            return None
        mine = [failing]
        if not isinstance(error, CollectiveError):
            # Of this rank's own, such as too little memory: peers wait for what it has not sent.
            self._late.compare(mine, True, str(self.failure))
            found = None
        else:  # The backend has ended it, or it is late. Peers may have called something else.
            until = time.monotonic() + _TELLING
            while (found := self._late.compare(mine, True)) is None and time.monotonic() < until:
                time.sleep(_TELLING / 20)
        if self._messages.issued > issued:  # what goes on must not keep the caller's stream
            self._messages.abort(str(error))
        return found

    def _described(self, error: BaseException, kind: str) -> CollectiveError:
        how = type(error) if isinstance(error, CollectiveError) else CollectiveError
        if not isinstance(error, Exception):
            how = CollectiveAborted  # Ctrl-C, in the middle of a call
        said = str(error) or type(error).__name__
        return how(f"{kind} number {self.calls}: {said}", self.rank, kind, self.calls)

    def _run(self, call: Call) -> Header:
        layout = self._learn_layout()
        self._calls.raise_late()
        self.calls += 1
        if self.size == 1:
            nodes = call.nodes
            divisor = 1 if nodes is None else nodes.divisor(nodes.block.view(1, -1))
            order = [node for node, _ in call.given(1)]
            combine(call, call.rows, call.results, order, divisor, finish=True)
            return call.header(self.calls, fits=True)
        return self._calls.run(call, layout, self.calls, self.piece)

    def _learn_layout(self) -> Layout:
        if self._layout is None and self.size == 1:
            self._layout = layout_of(0, [0])
        if self._layout is None:
            self.calls += 1
            if isinstance(self._messages, Messages):
                self._messages.connect()
            names = self._calls.tell_names(self.calls, _host_name(self._ranks[self.rank]))
            # Of what all have been told alone, so that all have the same layout.
            self._layout = layout_of(self.rank, number_hosts(names))
        return self._layout


def _host_name(rank: int) -> torch.Tensor:
    """The host of this rank of the default group, real or simulated, as all ranks are told."""
    name = np.zeros(header.ROOM, np.uint8)
    simulated = simulated_hosts(dist.get_world_size())
    said = str(simulated[rank] if simulated else host_identity()).encode()[: name.size]
    name[: len(said)] = np.frombuffer(said, np.uint8)
    return torch.from_numpy(name)
