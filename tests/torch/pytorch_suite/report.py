"""Runs all of PyTorch's tests over Gloo and over pycollective, and writes what differs, and why.

`make test-torch-suite`; some five minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

from tests.torch.pytorch_suite import RANKS, REASONS, is_unskipped

_HEAD = """\
# PyTorch's own tests

`make test-torch-suite` runs the tests of `torch.testing._internal.distributed.distributed_test` \
that come with PyTorch. Each runs on {ranks} ranks, once over Gloo and once over pycollective: a \
test that asks for the backend `gloo` then gets pycollective's (`tests/torch/pytorch_suite/`). \
`make storm` runs some of them. This is PyTorch {version}, on CPUs; most skipped tests need GPUs.

| | passed | failed | skipped |
|---|---|---|---|
"""
_UNSKIPPED = """
{number} of the skipped tests are of `all_to_all` on CPUs, which PyTorch runs over MPI alone. They \
were run all the same, and are not counted above. (Gloo refuses lists of unequal tensors.)

| `all_to_all` | passed | failed |
|---|---|---|
"""


Outcomes = dict[str, tuple[str, str]]  # by test: "passed", "failed" or "skipped", and why


def outcomes(backend: str, *names: str) -> Outcomes:
    """How each test ended, or of some tests each."""
    environment = {**os.environ, "PYCOLLECTIVE_SUITE_BACKEND": backend}
    command = [sys.executable, "-m", "tests.torch.pytorch_suite.running", *names]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def page(by_backend: dict[str, Outcomes], unskipped: dict[str, Outcomes]) -> str:
    """The page, in Markdown.

    Args:
        by_backend: how all tests ended, over Gloo and over pycollective.
        unskipped: likewise those that are run although the suite skips them.

    Raises:
        SystemExit: a difference has no reason in `REASONS`, or a reason no difference; or
            pycollective has not passed one of `unskipped`.
    """
    text = _HEAD.format(ranks=RANKS, version=torch.__version__.partition("+")[0])
    for backend, ended in by_backend.items():
        count = Counter(how for how, _ in ended.values())
        text += f"| {backend} | {count['passed']} | {count['failed']} | {count['skipped']} |\n"
    gloo, ours = by_backend["gloo"], by_backend["pycollective"]
    differ = {name for name in gloo if gloo[name][0] != ours[name][0]}
    if differ != set(REASONS):
        raise SystemExit(
            f"without a reason: {sorted(differ - set(REASONS))}; "
            f"no difference any more: {sorted(set(REASONS) - differ)}"
        )
    text += "\n| differs | Gloo | pycollective | why |\n|---|---|---|---|\n"
    for name in sorted(differ):
        text += f"| `{name}` | {gloo[name][0]} | {ours[name][0]} | {REASONS[name]} |\n"
    missed = {name for name, (how, _) in unskipped["pycollective"].items() if how != "passed"}
    if missed:
        raise SystemExit(f"not passed: {sorted(missed)}")
    text += _UNSKIPPED.format(number=len(unskipped["pycollective"]))
    for backend, ended in unskipped.items():
        count = Counter(how for how, _ in ended.values())
        text += f"| {backend} | {count['passed']} | {count['failed']} |\n"
    return text


def main() -> None:
    """Write the page to the file that is named."""
    (out,) = sys.argv[1:]
    by_backend = {name: outcomes(name) for name in ("gloo", "pycollective")}
    names = [name for name in by_backend["gloo"] if is_unskipped(name)]
    if not names:
        raise SystemExit("PyTorch has no such tests as are run though it skips them")
    unskipped = {name: outcomes(name, *names) for name in by_backend}
    Path(out).write_text(page(by_backend, unskipped))


if __name__ == "__main__":
    main()
