"""What does a step of each codec cost on CPUs, compared with another commit?

Two ranks, pinned, which the states take for hosts (``between="ranks"``); the other tree, the other
tree again and this one take turns as in `between_commits.py`. A step is what a hook does of a
backward with one bucket: `step` of a state, and in it `all_reduce` of all gradients at once.
Gradients are Gaussian, with row scales that vary as those of real layers do:

- `layers`: 48 parameters of 3.2 M elements in all, four layers of a small transformer: matrices,
  and between them biases and norms, which are not compressed;
- `matrix`: one parameter of 6.4 M elements.

Both faces are measured: NumPy's, and torch's over pycollective in fp32 and bf16. A time is the
slowest rank's. The results of the first steps are the same bits on both ranks and in both trees.

Of the mean of a codec's calls, this tree is to take at most 1.03 times as long as the other one.
Where the other tree differs from itself by more than that, the machine is too noisy to tell.
Messages go through shared memory, which is quiet: of one_bit, 3.2 M elements, eight of ten steps
took 4.3 to 4.5 ms. Between simulated hosts (``--over gloo``) they took 7.0 to 14.2.

Four minutes.

Usage: python -m benchmarks.compression_step --other ../old [--out DIR] [--rounds N]
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.between_commits import ROOT, Comparison, Round, Row, phases_of, rows_of
from benchmarks.driver import Benchmark, Record, Run
from pycollective.bench import phase
from pycollective.cores import cores_of, used_by_others

RANKS = 2
BOUND = 1.03
WIDTH = 256
LAYER = (
    *((WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)),
    *((WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)),
)
GRADIENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "layers": LAYER * 4,
    "matrix": ((6250, 1024),),
}
CODECS: dict[str, tuple[str, Mapping[str, object]]] = {
    "one_bit": ("OneBitState", {}),
    "int8": ("Int8State", {}),
    "top_k": ("TopKState", {"density": 0.01}),
    "top_k by chunk": ("TopKState", {"density": 0.01, "by": "chunk"}),
}
# Runs in either tree, between BEGIN and END of `between_commits.py`.
CALLS = """
import statistics, zlib
import torch
import torch.distributed as dist
import pycollective.compression, pycollective.torch
from pycollective.bench.codec import gradient

STEPS, CHECKED = 4, 2  # in a block; before the first one
torch.set_num_threads(1)
dist.init_process_group("pycollective")

def rows(number, shape):
    return gradient(me, number, (shape[0] if len(shape) > 1 else 1, shape[-1])).reshape(shape)

mine = {f"p{i}": rows(i, shape) for i, shape in enumerate(map(tuple, given["shapes"]))}

def numpy_face(make, options):
    shapes = {name: x.shape for name, x in mine.items()}
    state = make(shapes, comm, between="ranks", **options)
    return state, {name: x.copy() for name, x in mine.items()}, lambda x: x

def torch_face(dtype):
    def face(make, options):
        every = {name: torch.from_numpy(x).to(dtype) for name, x in mine.items()}
        pairs = [(name, x.clone().requires_grad_()) for name, x in every.items()]
        state = make(pairs, between="ranks", **options)
        return state, every, lambda x: x.view(torch.uint8).numpy()
    return face

def add(name, face, make, options):
    state, out, bytes_of = face(make, options)
    given_to = {name: x.copy() if face is numpy_face else x.clone() for name, x in out.items()}
    slowest = np.zeros(1)

    def step():
        for key, x in given_to.items():
            out[key][...] = x
        comm.barrier()
        start = time.perf_counter()
        with state.step():
            state.all_reduce(out)
        slowest[0] = time.perf_counter() - start
        comm.all_reduce(slowest, "max")
        return float(slowest[0])

    def digest():
        found = 0
        for x in out.values():
            found = zlib.crc32(bytes_of(x), found)
        same = np.zeros((n, 1), np.int64)
        comm.all_gather(same, np.array([found]))
        assert np.all(same == found), f"{name}: the ranks have other averages than each other"
        return found

    made[name] = []
    for _ in range(CHECKED):
        step()
        made[name].append(digest())
    blocks[name] = lambda: statistics.median(step() for _ in range(STEPS))

faces = {
    "numpy": (numpy_face, pycollective.compression),
    "torch fp32": (torch_face(torch.float32), pycollective.torch),
    "torch bf16": (torch_face(torch.bfloat16), pycollective.torch),
}
for codec, (state, options) in given["codecs"].items():
    for name, (face, module) in faces.items():
        add(f"{codec}, {name}", face, getattr(module, state), options)
for task in os.listdir("/proc/self/task"):  # states have threads
    os.sched_setaffinity(int(task), {cores[me]})
"""


def measure(run: Run) -> Record:
    """Of each kind of gradients."""
    other, over = Path(run.options["other"]).resolve(), run.options["over"]
    record: Record = {
        "pinned": cores_of(RANKS),
        "used_by_others": used_by_others(),
        "over": over,
        "commits": {"other": _commit(other), "this": _commit(ROOT)},
    }
    every: dict[str, list[Round]] = {}
    for name, shapes in GRADIENTS.items():
        comparison = Comparison(CALLS, {"shapes": shapes, "codecs": CODECS}, RANKS, over)
        seen = comparison.rounds(other, run.rounds)
        every |= {f"{call}, {name}": rounds for call, rounds in seen.items()}
    rows = list(rows_of(every))
    print(*rows, sep="\n")
    codecs = [
        _of_codec(codec, now, same)
        for codec in CODECS
        for now in phase.PHASES
        if (same := [r for r in rows if r.call.startswith(f"{codec},") and r.phase == now])
    ]
    for each in codecs:
        print("{codec:16} {phase:5} again {again:.3f}  this {this:.3f}  {verdict}".format(**each))
    print(phases_of(every))
    return {
        **record,
        "phases": phases_of(every),
        "codecs": codecs,
        "rows": [asdict(row) for row in rows],
    }


def _of_codec(codec: str, now: str, rows: Sequence[Row]) -> Record:
    """The mean ratios of a codec's calls in one phase, and whether the bound is met."""
    again = statistics.geometric_mean(row.again for row in rows)
    this = statistics.geometric_mean(row.this for row in rows)
    verdict = "met" if this <= BOUND else "MISSED"
    if abs(again - 1) > BOUND - 1:
        verdict = "too noisy"
    return {
        "codec": codec,
        "phase": now,
        "calls": len(rows),
        "again": again,
        "this": this,
        "verdict": verdict,
    }


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    OPTIONS = {"other": "../old", "over": "shm"}
    Benchmark("compression_step", __doc__, measure, rounds=3, options=OPTIONS).main()
