"""A test that runs over its time fails, which says so, and all others run.

pytest-timeout interrupts it by a signal. Where Python does not come to see that, as in native code
that waits for ever, its process ends after half as long again and tells where it was. Under xdist
that is a worker, and another takes its place.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

_TOLD = "over_time"  # of what a worker is given: the file in which it tells where it was


class OverTime:
    """Hooks of pytest, pytest-timeout and xdist, in the workers and in the process over them."""

    def __init__(self, config: pytest.Config) -> None:
        told = getattr(config, "workerinput", {}).get(_TOLD)
        # Of a worker, which may not live to clean up, the process over it has the folder.
        self._folder = None if told else TemporaryDirectory(prefix="pycollective-tests-")
        # Now, because tests have another stderr.
        self._told = os.open(told, os.O_WRONLY | os.O_CREAT) if told else os.dup(2)

    def pytest_unconfigure(self) -> None:
        os.close(self._told)
        if self._folder is not None:
            self._folder.cleanup()

    # In a worker.

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_set_timer(self, settings: Any) -> Iterator[Any]:
        faulthandler.dump_traceback_later(1.5 * settings.timeout, file=self._told, exit=True)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    # In the process over them.

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        assert self._folder is not None
        node.workerinput[_TOLD] = str(Path(self._folder.name) / node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        told = Path(report.node.workerinput[_TOLD]).read_text(errors="replace")
        if told:
            report.longrepr = f"{told}{report.longrepr}, which a signal had not ended"

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadFileScheduling

        class Scheduling(LoadFileScheduling):
            """xdist's own would run a test that has ended its worker again, until none is left.

            Nor has the next worker anything to do if it is given one test: it begins that when it
            knows the one behind it.
            """

            def remove_node(self, node: Any) -> str | None:
                units = self.assigned_work[node].values()
                unfinished = [(unit, test) for unit in units for test in unit if not unit[test]]
                if not unfinished:
                    return super().remove_node(node)
                unit, ended_it = unfinished[0]
                unit[ended_it] = True
                super().remove_node(node)
                return ended_it

            def _reschedule(self, node: Any) -> None:
                super()._reschedule(node)
                work = self.assigned_work[node]
                while self.workqueue and not node.shutting_down and self._pending_of(work) < 2:
                    self._assign_work_unit(node)

        return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
