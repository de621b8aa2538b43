"""Bugs of the device's protocol, planted one at a time: the tests must see each.

`make -C csrc/tests planted`, or this with the names of some. Each is a line of the sources that is
written anew in a copy of them, where the stand-in and the tests are built and run: plainly, under
seeds, then under TSan, until one fails with the report that is the bug's. First of all, every one
of these runs must pass with nothing planted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "planted"
KERNEL = "csrc/cuda/program.cu"
HOST = "csrc/engine/gpu/peer_memory.cpp"
TESTS = ("test_cuda_waits", "test_cuda_programs")
SECONDS = 900


WRONG = r"byte \d+ is wrong"
NO_END = r"CHECK\(is_idle_in\(stream, seconds\)\) failed"
RACE = r"SUMMARY: ThreadSanitizer: data race .*csrc/cuda/"


class Bug(NamedTuple):
    """What is written instead of what, and where."""

    file: str
    right: str
    wrong: str
    report: str  # what the run that fails must say
    only_races: bool = False  # what only TSan can see: the machine that runs this orders stores


BUGS = {
    "a flag before its data": Bug(
        KERNEL,
        "if ((head & kMeets) != 0) barrier();",
        "if ((head & kMeets) != 0 && kind != InstructionCode::kPublish) barrier();",
        WRONG,
    ),
    "a relaxed flag": Bug(
        KERNEL,
        "store_release(flag_of(p, thread(), p.me), mark);",
        "__atomic_store_n(flag_of(p, thread(), p.me), mark, __ATOMIC_RELAXED);",
        RACE,
        only_races=True,
    ),
    "a relaxed look": Bug(
        KERNEL,
        "if (has_come(load_acquire(word), wanted)) return true;\n  const",
        "if (has_come(load_relaxed(word), wanted)) return true;\n  const",
        RACE,
        only_races=True,
    ),
    "an epoch reused": Bug(
        KERNEL,
        "is_ready = thread() >= p.members",
        "is_ready = true || thread() >= p.members",
        WRONG,
    ),
    "an epoch reused by the next launch": Bug(
        KERNEL,
        "return !has_peer || has_come(seen, free)",
        "return true || has_come(seen, free)",
        WRONG,
    ),
    "one slot": Bug(
        KERNEL, "(epoch & 1) * p.shape.slot_bytes", "(epoch & 0) * p.shape.slot_bytes", WRONG
    ),
    "an epoch counted by launches": Bug(
        KERNEL, "epoch = chunk_of(load_relaxed(flag_of(p, p.me, p.me)));", "epoch = 0;", WRONG
    ),
    "marks compared as numbers": Bug(
        "csrc/cuda/mailbox.h",
        "static_cast<std::int32_t>(mark - wanted) >= 0",
        "mark >= wanted",
        r"CHECK\(!rank.peers->ending\(\)\)",
    ),
    "no barrier before a chunk is done with": Bug(
        KERNEL, "    barrier();\n    tell(p, ~std", "    tell(p, ~std", WRONG
    ),
    "no barrier between instructions": Bug(
        "csrc/engine/gpu/device_program.cpp",
        "    return conflicts;",
        "    return false;",
        r"CHECK\(meets\(",
    ),
    "an abort not looked at": Bug(
        KERNEL, "if (load_relaxed(visible(p.abort)) != 0) ending = Ending::kAborted;", "", NO_END
    ),
    "a deadline not looked at": Bug(
        KERNEL, "now - begin > p.nanoseconds ?", "now - begin > ~std::uint64_t{0} ?", NO_END
    ),
    "poison not looked at": Bug(
        KERNEL, "if (is_poisoned) return false;", "(void)is_poisoned;", NO_END
    ),
    "poison only told": Bug(
        KERNEL,
        "store_release(word_at(visible(p.mailboxes[p.me]), kPoisonAt), ending);",
        "",
        NO_END,
    ),
    "a missing context": Bug(
        HOST,
        "  const Current current(context_);\n  const Uploaded* known",
        "  const Uploaded* known",
        r"what\(\)",
    ),
}


class NotBuiltError(RuntimeError):
    """It does not compile, which shows nothing."""


def make(target: str, seed: int | None = None) -> subprocess.CompletedProcess[str]:
    """A target of the copy's."""
    environment = dict(os.environ)
    environment.pop("PYCOLLECTIVE_STANDIN_SEED", None)
    if seed is not None:
        environment["PYCOLLECTIVE_STANDIN_SEED"] = str(seed)
    command = ["make", "-C", str(COPY / "csrc/tests"), target]
    if compiler := os.environ.get("CXX"):
        command.append(f"CXX={compiler}")
    return subprocess.run(
        command,
        check=False,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )


def failures(only_races: bool) -> Iterator[tuple[str, str]]:
    """Which runs fail, and all that each says. Each test is built before it is run.

    Raises:
        NotBuiltError: with what the compiler said.
    """
    plain = [] if only_races else [("plain", seed) for seed in (None, 1, 2, 3)]
    for kind, seed in [*plain, ("thread", None)]:
        for test in TESTS:
            built = make(f"build-{kind}-{test}")
            if built.returncode != 0:
                raise NotBuiltError(f"{kind} {test} is not built:\n{built.stdout[-1500:]}")
            done = make(f"run-{kind}-{test}", seed)
            if done.returncode != 0:
                under = kind if seed is None else f"{kind}, seed {seed}"
                yield f"{under}: {test}", done.stdout


def first_report(bug: Bug) -> str | None:
    """The first run that fails with the bug's report, and its line; None: there is none."""
    for name, said in failures(bug.only_races):
        if found := re.search(bug.report, said):
            begin = said.rfind("\n", 0, found.start()) + 1
            return f"{name}: {said[begin:].partition(chr(10))[0].strip()}"
        print(f"  {name} fails with another report: {said[-600:]}", flush=True)
    return None


def copy_sources() -> None:
    """Anew, for an object of another bug would be newer than the right source."""
    shutil.rmtree(COPY, ignore_errors=True)
    for folder in ("csrc", "tests/cuda_driver"):
        shutil.copytree(ROOT / folder, COPY / folder)


def main() -> int:
    """All bugs, or those that are named."""
    copy_sources()
    for name, said in failures(only_races=False):
        print(f"with nothing planted {name} fails:\n{said[-3000:]}", flush=True)
        return 2
    print("with nothing planted all pass", flush=True)
    missed = 0
    for name in sys.argv[1:] or BUGS:
        bug = BUGS[name]
        right = (COPY / bug.file).read_text()
        assert right.count(bug.right) == 1, f"{name}: the line is not what it was"
        (COPY / bug.file).write_text(right.replace(bug.right, bug.wrong))
        seen = first_report(bug)
        (COPY / bug.file).write_text(right)
        print(f"{name}: {f'seen ({seen})' if seen else 'NOT SEEN'}", flush=True)
        missed += seen is None
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
