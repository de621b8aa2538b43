"""Operations other than all-reduce by kernels over peer memory: odd numbers of ranks, few and
uneven elements, any root, any algorithm, and replays. One start of eight ranks, which split."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import _core, reference
from pycollective.schedule import algorithms_for
from tests.cuda import standin
from tests.cuda.arrays import for_device, on_its_gpu
from tests.cuda.captures import Capture
from tests.harness import RankPool
from tests.inputs import order_sensitive, same_bits

MOST = 8


@pytest.fixture(scope="module")
def eight():
    pool = RankPool(MOST, module=__name__, variables=standin.environment(devices=MOST))
    assert pool.call(for_device) == [(rank, "peer") for rank in range(MOST)]
    yield pool
    pool.close()


class Operations:
    """Each operation on this rank's GPU: `begin` lays the arrays out, calling the result makes the
    call, and `check` looks at what it has given. Inputs are the same on all ranks."""

    def __init__(self, comm, dtype, op, counts, root):
        self.comm, self.dtype, self.op, self.counts, self.root = comm, dtype, op, counts, root
        self.stream = _core.DeviceStream(comm.device)
        self.begins = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.arrays = {}

    def part(self, x, rank):
        return x[self.begins[rank] : self.begins[rank + 1]]

    def put(self, name, x):
        """The array of this name, the same one each time, with these elements."""
        if name not in self.arrays:
            self.arrays[name] = on_its_gpu(self.comm, x, stream=self.stream)
        else:
            self.arrays[name].write(x)
        return self.arrays[name]

    def lay(self, seed):
        """Inputs of all operations for this seed, and outputs without a meaning."""
        n, rank = self.comm.size, self.comm.rank
        self.inputs = order_sensitive(self.dtype, n, self.begins[-1], seed)
        mine = self.inputs[rank]
        self.even = [np.resize(x, 5 * n) for x in self.inputs]
        whole, shard = np.full_like(mine, 77), np.full_like(self.part(mine, rank), 77)
        for name, x in (
            ("whole", mine),
            ("shard", self.part(mine, rank)),
            ("even", self.even[rank]),
            ("broadcast", mine),
            ("reduce", mine),
            ("reduce_scatter", shard),
            ("all_gather", whole),
            ("gather", whole),
            ("scatter", shard),
            ("all_to_all", np.full_like(self.even[rank], 77)),
        ):
            self.put(name, x)

    def call(self, name, algorithm="auto"):
        comm, a = self.comm, self.arrays
        is_root = comm.rank == self.root
        more = {"algorithm": algorithm, "stream": self.stream}
        if name == "reduce_scatter":
            comm.reduce_scatter(a[name], a["whole"], op=self.op, counts=self.counts, **more)
        elif name == "all_gather":
            comm.all_gather(a[name], a["shard"], counts=self.counts, **more)
        elif name == "broadcast":
            comm.broadcast(a[name], root=self.root, **more)
        elif name == "reduce":
            comm.reduce(a[name], root=self.root, op=self.op, **more)
        elif name == "gather":
            out = a[name] if is_root else None
            comm.gather(out, a["shard"], root=self.root, counts=self.counts, **more)
        elif name == "scatter":
            x = a["whole"] if is_root else None
            comm.scatter(a[name], x, root=self.root, counts=self.counts, **more)
        else:
            comm.all_to_all(a[name], a["even"], **more)

    def check(self, name):
        rank, inputs = self.comm.rank, self.inputs
        shards = np.concatenate([self.part(x, r) for r, x in enumerate(inputs)])
        reduced = reference.reduce(inputs, self.op)
        untouched = np.full_like(shards, 77)
        want = {
            "reduce_scatter": self.part(reduced, rank),
            "all_gather": shards,
            "broadcast": inputs[self.root],
            "reduce": reduced if rank == self.root else inputs[rank],
            "gather": shards if rank == self.root else untouched,
            "scatter": self.part(inputs[self.root], rank),
            "all_to_all": np.concatenate([x[5 * rank : 5 * rank + 5] for x in self.even]),
        }[name]
        said = name, self.comm.size, rank, self.counts, self.root
        assert same_bits(self.arrays[name].to_numpy(), want), said
        for name, x in (("whole", inputs[rank]), ("even", self.even[rank])):
            assert same_bits(self.arrays[name].to_numpy(), x), (*said, name)


NAMES = (
    *("reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter"),
    "all_to_all",
)


def in_parts(comm, colors, function, *arguments):
    """In the communicator of this rank's color; None: in none. What calls kernels made there."""
    part = comm.split(colors[comm.rank], -comm.rank)
    if part is None:
        return 0
    assert part.device_path[0] == "peer", part.device_path
    made = function(part, *arguments)
    assert part.kernel_calls == made
    part.close()
    return made


def few_and_uneven(comm):
    n, made = comm.size, 0
    for place, (dtype, op, counts) in enumerate(
        (
            ("float16", "sum", [1] * n),
            ("bfloat16", "sum", [(r * 5 + 2) % 7 for r in range(n)]),  # some have none
            ("int64", "max", [0] * (n - 1) + [9]),
            ("float32", "avg", [17 * r + 1 for r in range(n)]),
        )
    ):
        operations = Operations(comm, dtype, op, counts, (n - 1 - place) % n)
        operations.lay(place)
        for name in NAMES:
            operations.call(name)
            operations.check(name)
            made += 1
    return made


@pytest.mark.parametrize(
    "colors",
    [[0] * 3 + [1] * 5, [0] * 6 + [None] * 2, [None] + [0] * 7, [0] * 8],
    ids=["3 and 5", "6", "7", "8"],
)
def test_few_and_uneven_elements_and_any_root(eight, colors):
    made = eight.call(in_parts, colors, few_and_uneven)
    assert made == [0 if color is None else 28 for color in colors]


def each_algorithm(comm):
    n, made = comm.size, 0
    operations = Operations(comm, "bfloat16", "sum", [211 * r + 1 for r in range(n)], n // 2)
    for name in NAMES:
        for algorithm in algorithms_for(name):
            operations.lay(made)
            operations.call(name, algorithm)
            operations.check(name)
            made += 1
    return made


@pytest.mark.parametrize("colors", [[0] * 3 + [1] * 5, [0] * 7 + [None]], ids=["3 and 5", "7"])
def test_each_algorithm(eight, colors):
    made = eight.call(in_parts, colors, each_algorithm)
    assert made == [0 if color is None else 20 for color in colors]


def replayed(comm, times):
    """All operations in one graph, on what is in their arrays each time; beside other calls."""
    n = comm.size
    operations = Operations(comm, "float16", "sum", [5003 * r + 1 for r in range(n)], n - 1)
    operations.lay(0)
    for name in NAMES:
        operations.call(name)
    with Capture(comm.device, operations.stream) as capture:
        for name in NAMES:
            operations.call(name)
    for turn in range(1, times + 1):
        operations.lay(turn)
        if turn % 2 == 0:
            operations.call("all_to_all")
        capture.replay()
        for name in NAMES:
            operations.check(name)
    comm.barrier()  # nobody closes while others replay
    return 2 * len(NAMES) + times // 2


@pytest.mark.parametrize("colors", [[0] * 3 + [1] * 5], ids=["3 and 5"])
def test_graphs_of_every_operation_replay(eight, colors):
    assert eight.call(in_parts, colors, replayed, 5) == [16] * 8
