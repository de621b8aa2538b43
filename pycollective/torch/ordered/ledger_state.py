"""The ledger of a DistributedDataParallel with the hook: its averages (ledger.md)."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycollective.torch.ordered.calls import fail
from pycollective.torch.tensor_ledger import TensorLedger, folder_of

_Future = torch.futures.Future[torch.Tensor]


class LedgerState:
    """The state of `all_reduce_hook` with which it notes each step's averages::

        ddp.register_comm_hook(LedgerState(ddp, "ledger"), all_reduce_hook)

    A parameter has the name that DDP's module gives it, and a step is a backward pass that
    averages, so neither buckets nor ``no_sync`` matter.

    Args:
        ddp: whose hook it is; the averages are over its process group.
        ledger: a folder; None for that of PYCOLLECTIVE_LEDGER, or none.
        step: the number of the first step, as of a run that is resumed.

    Raises:
        ConfigurationError: xxhash lacks, the file cannot be written, or a parameter is not on a
            CPU.
    """

    def __init__(
        self, ddp: DistributedDataParallel, ledger: str | Path | None = None, step: int = 0
    ) -> None:
        self.group: dist.ProcessGroup = ddp.process_group
        self._step = step - 1
        self._lock = threading.Lock()
        self._under_way = 0  # buckets of this step
        self._ledger: TensorLedger | None = None
        if (folder := folder_of(ledger)) is not None:
            named = [pair for pair in ddp.module.named_parameters() if pair[1].requires_grad]
            self._ledger = TensorLedger(folder, named, self.group.rank(), self.group.size())

    def noted(self, bucket: dist.GradBucket, average: _Future) -> _Future:
        """A future of the same average, which is noted by then; the last bucket's writes all."""
        ledger = self._ledger
        if ledger is None:
            return average
        if bucket.index() == 0:
            self._step += 1
        step = self._step
        with self._lock:
            self._under_way += 1
            self._whole = bucket.is_last()  # all of this step's are issued
        pairs = [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
        noted = _Future()

        def note(done: _Future) -> None:
            try:
                with self._lock:  # futures may end on several threads, in any order
                    self._under_way -= 1
                    value = done.value()
                    for parameter, gradient in pairs:
                        ledger.result(step, parameter, gradient)
                    if self._whole and not self._under_way:
                        ledger.writer.flush()
            except BaseException as error:
                fail(noted, error)
            else:
                noted.set_result(value)

        average.add_done_callback(note)
        return noted
