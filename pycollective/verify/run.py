"""Runs a selection of the table on this rank; every rank does."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

from pycollective.bootstrap import init as bootstrap
from pycollective.communicator import Communicator
from pycollective.errors import CollectiveError
from pycollective.testing.places import place_of
from pycollective.verify.cases import STAND_IN, Call, Case, Data, Selection, can_do, cases
from pycollective.verify.reports import (
    Line,
    Report,
    Tally,
    columns,
    describe,
    footer,
    gather,
    header,
    how_far,
    rows,
)


class Lost(RuntimeError):
    """A rank was lost, or an operation failed; the message says in which combination."""


def verify(
    selection: Selection,
    timeout: float,
    show: Callable[[str], None],
    device: str = "cpu",
    *,
    every: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> bool:
    """Join the launch, and run a selection of the table; every rank must call it.

    Args:
        selection: the same on all ranks.
        timeout: seconds that joining, and later each operation, may take.
        show: called on rank 0, with each line as soon as it is known.
        device: where arrays lie, of `places.PLACES`.
        every: show every combination, not only where something is wrong.
        progress: called on rank 0, with how far it is before each combination, and with nothing
            before each line that is shown.

    Returns:
        Whether all was right, on this rank and on all others; the same on all ranks, unless the
        all-gather is wrong.

    Raises:
        Lost: a rank was, or an operation failed.
        ConfigurationError: the launch cannot be joined, or there is no GPU.
    """
    try:
        with bootstrap.init(timeout=timeout) as communicator:
            if communicator.rank != 0:
                show = progress = lambda line: None
            return _Run(communicator, selection, show, device, every, progress).all()
    except CollectiveError as error:  # while joining or leaving
        raise Lost(str(error)) from error


class _Run:
    def __init__(
        self,
        communicator: Communicator,
        selection: Selection,
        show: Callable[[str], None],
        device: str,
        every: bool,
        progress: Callable[[str], None],
    ) -> None:
        self._communicator = communicator
        self._place = place_of(device, communicator)
        self._selection = selection
        self._print, self._progress = show, progress
        self._every = every
        self._lines: list[Line] = []

    def all(self) -> bool:
        size = self._communicator.size
        begin = time.monotonic()
        self._show(header(self._selection, size, self._place.name))
        if self._every:
            self._show(columns(self._selection, size))
        for dtype in self._selection.dtypes:
            made = {
                operation: list(cases(operation, dtype, size, self._selection.quick))
                for operation in self._selection.operations
            }
            longest = max(case.start + case.count for calls in made.values() for case in calls)
            data = Data(dtype, size, longest)
            for operation, calls in made.items():
                for algorithm in self._selection.algorithms_for(operation):
                    self._combination(operation, algorithm, dtype, calls, data)
        took = time.monotonic() - begin
        self._show(footer(self._selection, size, self._lines, self._digests(), took))
        # Launchers end all ranks when one has failed: rank 0 must have printed by then.
        self._communicator.barrier()
        return all(line.right for line in self._lines)

    def _combination(
        self, operation: str, algorithm: str, dtype: str, calls: list[Case], data: Data
    ) -> None:
        whole = len(self._selection.dtypes) * sum(
            len(self._selection.algorithms_for(each)) for each in self._selection.operations
        )
        what = f"{dtype} {operation} by {algorithm}"
        self._progress(how_far(len(self._lines), whole, what))
        tally = Tally()
        at = ""
        try:
            for case in calls:
                at = describe(operation, case)
                call = Call(self._communicator, algorithm, case, data, self._place)
                for check in call.make(operation):
                    tally.add(check, at)
            at = "telling the others"
            reports = gather(self._communicator, len(self._lines), tally)
        except CollectiveError as error:
            raise Lost(f"{what}, {at}: {error}") from error
        self._lines.append(Line(operation, algorithm, dtype, len(calls), reports))
        if self._every or not self._lines[-1].right:
            self._show(rows(self._lines[-1]))

    def _show(self, lines: Iterable[str]) -> None:
        self._progress("")
        for line in lines:
            self._print(line)

    def _digests(self) -> dict[str, str]:
        """SHA-256 over the digests of all ranks, in the table's order, for each algorithm.

        Not for one of which a report is missing.
        """
        found = {(line.operation, line.algorithm, line.dtype): line for line in self._lines}
        digests = {}
        for algorithm in self._selection.algorithms:
            reports: list[Report | None] = []
            for operation in self._selection.operations:
                by = algorithm if can_do(operation, algorithm) else STAND_IN
                for dtype in self._selection.dtypes:
                    reports += found[operation, by, dtype].reports
            whole = b"".join(report.digest for report in reports if report)
            if None not in reports:
                digests[algorithm] = hashlib.sha256(whole).hexdigest()
        return digests
