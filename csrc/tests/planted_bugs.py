"""Bugs of the device's protocol, planted one at a time: the tests must see each.

`make -C csrc/tests planted`, or this with the names of some. Each is a line of the sources that is
written anew in a copy of them, where the stand-in and the tests are built and run: plainly, under
seeds, then under TSan, until one fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "planted"
KERNEL = "csrc/cuda/program.h"
HOST = "csrc/engine/device/peer_memory.cpp"
TESTS = ("test_cuda_waits", "test_cuda_programs")
SECONDS = 900


class Bug(NamedTuple):
    """What is written instead of what, and where."""

    file: str
    right: str
    wrong: str
    only_races: bool = False  # what only TSan can see: the machine that runs this orders stores


BUGS = {
    "a flag before its data": Bug(
        KERNEL,
        "if ((head & kMeets) != 0) barrier();",
        "if ((head & kMeets) != 0 && kind != InstructionCode::kPublish) barrier();",
    ),
    "a relaxed flag": Bug(
        KERNEL,
        "store_release(flag_of(p, thread(), p.me), mark);",
        "__atomic_store_n(flag_of(p, thread(), p.me), mark, __ATOMIC_RELAXED);",
        only_races=True,
    ),
    "a relaxed look": Bug(
        KERNEL,
        "if (has_come(load_acquire(word), wanted)) return true;\n  const",
        "if (has_come(load_relaxed(word), wanted)) return true;\n  const",
        only_races=True,
    ),
    "an epoch reused": Bug(
        KERNEL, "is_ready = thread() >= p.members", "is_ready = true || thread() >= p.members"
    ),
    "an epoch reused by the next launch": Bug(
        KERNEL,
        "return !has_peer || has_come(seen, free)",
        "return true || has_come(seen, free)",
    ),
    "one slot": Bug(KERNEL, "(epoch & 1) * p.shape.slot_bytes", "(epoch & 0) * p.shape.slot_bytes"),
    "an epoch counted by launches": Bug(
        KERNEL, "epoch = chunk_of(load_relaxed(flag_of(p, p.me, p.me)));", "epoch = 0;"
    ),
    "marks compared as numbers": Bug(
        "csrc/cuda/mailbox.h",
        "static_cast<std::int32_t>(mark - wanted) >= 0",
        "mark >= wanted",
    ),
    "no barrier before a chunk is done with": Bug(
        KERNEL, "    barrier();\n    tell(p, ~std", "    tell(p, ~std"
    ),
    "no barrier between instructions": Bug(
        "csrc/engine/device/device_program.cpp",
        "    return conflicts;",
        "    return false;",
    ),
    "an abort not looked at": Bug(
        KERNEL, "if (load_relaxed(visible(p.abort)) != 0) ending = Ending::kAborted;", ""
    ),
    "a deadline not looked at": Bug(
        KERNEL, "now - begin > p.nanoseconds ?", "now - begin > ~std::uint64_t{0} ?"
    ),
    "poison not looked at": Bug(KERNEL, "if (is_poisoned) return false;", "(void)is_poisoned;"),
    "poison only told": Bug(
        KERNEL,
        "store_release(word_at(visible(p.mailboxes[p.me]), kPoisonAt), ending);",
        "",
    ),
    "a missing context": Bug(
        HOST,
        "  const Current current(context_);\n  const Uploaded* known",
        "  const Uploaded* known",
    ),
}


def run(kind: str, test: str, seed: int | None) -> subprocess.CompletedProcess[str]:
    """A test, built first."""
    environment = dict(os.environ)
    if seed is not None:
        environment["PYCOLLECTIVE_STANDIN_SEED"] = str(seed)
    command = ["make", "-C", str(COPY / "csrc/tests"), f"run-{kind}-{test}"]
    if compiler := os.environ.get("CXX"):
        command.append(f"CXX={compiler}")
    return subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def first_failure(bug: Bug) -> str | None:
    """What the first test that fails says; None: all pass.

    Raises:
        RuntimeError: it does not compile, which shows nothing.
    """
    plain = [] if bug.only_races else [("plain", seed) for seed in (None, 1, 2, 3)]
    for kind, seed in [*plain, ("thread", None)]:
        for test in TESTS:
            done = run(kind, test, seed)
            if done.returncode == 0:
                continue
            said = done.stdout + done.stderr
            if "error:" in said:
                raise RuntimeError(said[said.index("error:") :][:1000])
            signs = ("CHECK(", "is wrong", "SUMMARY", "what()", "kernel `", "Error 124")
            words = [line for line in said.splitlines() if any(sign in line for sign in signs)]
            under = kind if seed is None else f"{kind}, seed {seed}"
            return f"{under}: {test}: {words[0].strip() if words else said[-200:]}"
    return None


def copy(source: str, target: str) -> None:
    """Only what differs, and as new: what was built of a bug is built again."""
    there = Path(target)
    if not there.exists() or there.read_bytes() != Path(source).read_bytes():
        shutil.copyfile(source, target)


def main() -> int:
    """All bugs, or those that are named."""
    for folder in ("csrc", "tests/cuda_driver"):
        shutil.copytree(ROOT / folder, COPY / folder, dirs_exist_ok=True, copy_function=copy)
    missed = 0
    for name in sys.argv[1:] or BUGS:
        bug = BUGS[name]
        right = (ROOT / bug.file).read_text()
        assert right.count(bug.right) == 1, f"{name}: the line is not what it was"
        (COPY / bug.file).write_text(right.replace(bug.right, bug.wrong))
        try:
            seen = first_failure(bug)
        finally:
            (COPY / bug.file).write_text(right)
        print(f"{name}: {f'seen ({seen})' if seen else 'NOT SEEN'}", flush=True)
        missed += seen is None
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
