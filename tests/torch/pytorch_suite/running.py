"""Runs PyTorch's tests in this process, one after the other, and tells how each ended.

All of them as they are; or those that are named, of which those of all_to_all are not skipped.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import unittest

os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")

from tests.torch.pytorch_suite import is_unskipped
from tests.torch.pytorch_suite.cases import Suite, Unskipped


class _Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[str, tuple[str, str]] = {}

    def _note(self, test: unittest.TestCase, how: str, why: str = "") -> None:
        self.ended[test.id().rpartition(".")[2]] = how, why

    def addSuccess(self, test):
        self._note(test, "passed")

    def addFailure(self, test, err):
        self._note(test, "failed", str(err[1]))

    def addError(self, test, err):
        self._note(test, "failed", str(err[1]))

    def addSkip(self, test, reason):
        self._note(test, "skipped", reason)


def names() -> list[str]:
    """All tests there are."""
    return unittest.TestLoader().getTestCaseNames(Suite)


def run(chosen: list[Suite]) -> dict[str, tuple[str, str]]:
    """By name: "passed", "failed" or "skipped", and why."""
    result = _Outcomes()
    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.WARNING)
    for test in chosen:
        name = test.id().rpartition(".")[2]
        begin = time.monotonic()
        test.run(result)
        print(f"{name}: {result.ended.get(name)} {time.monotonic() - begin:.1f} s", file=sys.stderr)
    return result.ended


def named(name: str) -> Suite:
    """The test, if it is of all_to_all without its marks to be skipped."""
    return (Unskipped if is_unskipped(name) else Suite)(name)


if __name__ == "__main__":
    chosen = [named(name) for name in sys.argv[1:]] or [Suite(name) for name in names()]
    print(json.dumps(run(chosen)))
