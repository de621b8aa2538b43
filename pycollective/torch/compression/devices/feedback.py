"""Error feedback on a device: the host learns how a step has ended when the next one begins.

Within a step all is issued, and nothing is waited for. Whether all was finite, whether ranks called
different things, and which parameters were all zero goes to pinned memory behind each call's work.
Whoever asks next for what a step has left waits for that: the next step's begin, `flush` and the
other calls between steps, `stats` and `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from pycollective.compression.arrays import Flat, Item
from pycollective.compression.bucket import CALL_BYTES, Agreement, Outcome
from pycollective.compression.feedback import (
    Common,
    ErrorFeedback,
    Given,
    Options,
    Shapes,
    Step,
)
from pycollective.compression.groups import Bytes, GroupMaker
from pycollective.compression.residuals import Scaled
from pycollective.errors import CollectiveMismatch
from pycollective.torch.compression.devices.exchanges import gather, where_calls_begin
from pycollective.torch.compression.devices.findings import Findings, Learn, wait_for
from pycollective.torch.compression.devices.headers import Headers, upload
from pycollective.torch.compression.devices.outcome import DeviceOutcome
from pycollective.torch.compression.devices.sums import put
from pycollective.torch.compression.groups import TorchGroup
from pycollective.torch.streams import Streams

_T = TypeVar("_T")


class DeviceFeedback(ErrorFeedback):
    """Error feedback whose gradients and residuals are on a device.

    Whether a step is finite is not known before `settle`. Calls are made with the stream of
    `streams` as the current one.
    """

    def __init__(
        self,
        name: str,
        parameters: Shapes,
        ranks: GroupMaker,
        options: Options,
        common: Common,
        device: torch.device,
        streams: Streams,
    ) -> None:
        self._device, self._streams = device, streams
        self._to_learn: list[Learn] = []  # of the step under way
        # The last step, and what to learn of it; of one that was given up only this.
        self._ended: tuple[Step | None, list[Learn]] | None = None
        self._mismatch: CollectiveMismatch | None = None  # which the next collective call raises
        super().__init__(name, parameters, ranks, options, common)

    # Steps.

    @property
    def steps_since_start(self) -> int:
        self.settle()  # between steps
        return super().steps_since_start

    def begin(self, of_backward: bool = False) -> None:
        self.give_up()  # one that is unfinished
        self.meet()
        super().begin(of_backward)
        self._to_learn = []

    def end(self) -> None:
        step, self.step = self._step_under_way(), None
        self._ended = step, self._to_learn

    def give_up(self) -> None:
        if self.step is not None:  # ranks may differ in it, and others hear of that
            self._ended = None, self._to_learn
        super().give_up()

    def settle(self) -> None:
        """Learn how the last step did, and make it count if it has ended and was finite.

        Raises:
            CollectiveTimeout: the device has not ended its calls in time; `settle` again.
        """
        if self._ended is None:
            return
        with self._streams.behind_caller():
            step, to_learn = self._ended
            finite = True
            try:
                for learn in to_learn:
                    finite &= learn()
            except CollectiveMismatch as error:
                self._mismatch = error
                step = None
            self._ended = None
            if step is not None:
                step.finite &= finite
                self._conclude(step)

    def _wait(self, event: Any, what: str) -> None:
        """Let the host wait for the device, as long as the ranks wait for each other."""
        whole = self.groups.all
        assert isinstance(whole, TorchGroup)
        wait_for(event, whole.timeout, f"{self.name}: {what}")

    def meet(self) -> None:
        """Settle, and raise once what that finds: all ranks do, at their next collective call.

        Raises:
            CollectiveMismatch: ranks called different things in the last step.
        """
        self.settle()
        error, self._mismatch = self._mismatch, None
        if error is not None:
            with self.groups.telling():
                raise error

    def reset(self) -> None:
        self.settle()
        super().reset()

    def _together(self, what: str, given: Callable[[], Given[_T]]) -> _T:
        self.in_step()  # gives up what an unfinished backward has begun
        self.meet()
        return super()._together(what, given)

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.settle()
            # Also for calls of a step that some rank has given up: groups end what is under way.
            self._wait(self._streams.event(), "all calls before close")
        finally:
            self._ended = None  # what was not learnt in time is lost with what was held
            super().close()

    def stats(self) -> dict[str, Any]:
        self.settle()
        return super().stats()

    # Their calls.

    def _average(self, items: Sequence[Item], flats: Sequence[Flat]) -> Outcome:
        agreement = self._agreement(self._step_under_way(), items, of_types=True)
        headers = self._compare_calls(agreement, self.is_dense_for_good)
        self.groups.all.average([flat.part(0, flat.count) for flat in flats])
        bad = headers.bad | ~_all_finite(flats)
        return DeviceOutcome(None, None, bad, headers.differs, headers.findings)

    def _compare_calls(self, agreement: Agreement, in_all: bool) -> Headers:
        """As `check_same_call`, whose messages these are; the host looks later.

        A difference that some ranks alone have met goes to all others, which would count the step.
        """
        headers = Headers(agreement, 0, self._device)
        whole = [(range(self.groups.all.size), self.groups.all)]
        for senders, group in whole if in_all else [*where_calls_begin(self.groups), *whole]:
            row = torch.zeros(CALL_BYTES, dtype=torch.uint8, device=self._device)
            row[: headers.bytes] = headers.row()
            headers.compare(gather(group, row), senders)
        return headers

    def _complete(self, items: Sequence[Item], flats: Sequence[Flat], outcome: Outcome) -> None:
        assert isinstance(outcome, DeviceOutcome)
        bad, delivered, zeros = outcome.bad, [], []
        for item in items:
            error = self.carried.get(item.name)
            if error is None:
                continue
            part = item.flat.part(0, item.flat.count)
            # All zero may be a parameter that no rank used: DDP ignores what comes back.
            zero = ~part.any()
            total = torch.empty_like(part)
            put(total, part.to(torch.float32) + self._there(error))
            part.copy_(torch.where(zero, part, total))
            bad = bad | ~_all_finite([item.flat])
            delivered.append(item.name)
            zeros.append(zero)
        narrow = [flat for flat in flats if flat.narrow]
        if narrow:
            bad = bad | ~_all_finite(narrow)
        for flat in flats:
            flat.part(0, flat.count).masked_fill_(bad, torch.nan)

        def read(found: Bytes) -> bool:
            for name, zero in zip(delivered, found[1:], strict=True):
                if not zero:
                    self.carried.note_delivered(name)
            return not found[0]

        more = f" and {len(items) - 1} more" if len(items) > 1 else ""
        what = f"all_reduce of {items[0].name!r}{more}"
        self._find(what, outcome.findings, torch.stack([bad, *zeros]), read)

    def _scatter(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        if not self.is_dense_for_good:
            return self.codec.reduce_scatter(items, agreement, self.steps_since_start, out)
        headers = self._compare_calls(agreement, in_all=True)
        outcome = self.codec.reduce_scatter(items, agreement, self.steps_since_start, out)
        assert isinstance(outcome, DeviceOutcome)
        headers.findings.append(outcome.findings)
        return replace(
            outcome,
            bad=outcome.bad | headers.bad,
            differs=outcome.differs | headers.differs,
            findings=headers.findings,
        )

    def _complete_shard(self, name: str, out: Flat, outcome: Outcome) -> None:
        assert isinstance(outcome, DeviceOutcome)
        part = out.part(0, out.count)
        error = self.carried.get(name)
        if error is not None:
            self.carried.note_delivered(name)
            start = self.hosts.rank * out.count
            mine = Scaled(error.values[start : start + out.count], error.scale)
            put(part, part.to(torch.float32) + self._there(mine))
        bad = outcome.bad | ~_all_finite([out])
        found_here = bad.to(torch.uint8) | outcome.differs.to(torch.uint8) << 1
        told = gather(self.groups.all, found_here.view(1))
        part.masked_fill_(told.bool().any(), torch.nan)

        def read(found: Bytes) -> bool:
            if ranks := np.flatnonzero(found > 1).tolist():
                raise CollectiveMismatch(
                    f"compressed exchange: rank(s) {ranks} have read what does not fit"
                )
            return not found.any()

        self._find(f"reduce_scatter of {name!r}", outcome.findings, told, read)

    def _there(self, error: Scaled) -> torch.Tensor:
        """A carried error, in the step's loss scale, on the device."""
        return upload(np.ascontiguousarray(error.to(self._step_under_way().scale)), self._device)

    def _find(
        self, what: str, findings: Findings, last: torch.Tensor, read: Callable[[Bytes], bool]
    ) -> None:
        """Let the host learn of a call, and of `last`, bools or bytes."""
        findings.add(last.to(torch.uint8), read)
        call = f"{what} in step {self.steps + 1}"
        self._to_learn.append(findings.send(self._streams, lambda event: self._wait(event, call)))


def _all_finite(flats: Sequence[Flat]) -> torch.Tensor:
    """Whether all are finite: () of bool."""
    parts = [flat.part(0, flat.count) for flat in flats]
    return torch.stack([torch.isfinite(part).all() for part in parts]).all()
