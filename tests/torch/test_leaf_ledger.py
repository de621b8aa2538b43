"""`LeafSync(ledger=)`: what is noted depends on bits alone, and a planted change is named."""

from __future__ import annotations

import errno
import itertools
import os
import random
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash

from pycollective import CollectiveAborted, CollectiveMismatch, ConfigurationError
from pycollective.config import ENV_LEDGER
from pycollective.ledger.compare import compare
from pycollective.ledger.layout import RESULT
from pycollective.ledger.reader import read
from pycollective.torch import LeafSync
from pycollective.torch.tensor_ledger import TensorLedger
from tests.harness import ROOT, PerRank
from tests.torch.groups import standing_group, to_torch
from tests.torch.ordered_groups import standing
from tests.torch.test_leaf_sync import MIXED, Weights, gradients_of, wanted

OVER = {"pycollective": standing_group, "gloo": standing}


# --- What is noted.


def noted(comm, folder, over="pycollective", by_columns=True, **options):
    """Have leaves with gradients that are given; the ledger is closed."""
    model = Weights(MIXED)
    if not by_columns:
        model.each[0].data = model.each[0].data.contiguous()
    sync = LeafSync(model, 6, group=OVER[over](comm), ledger=folder, **options)
    given = gradients_of(MIXED, 6)
    for leaf in sync.local_leaves:
        with sync.leaf(leaf):
            model([None if each is None else to_torch(each) for each in given[leaf]]).backward()
    sync.finish()
    sync.close()


def digests(ledger):
    """By leaf and name."""
    names = [each.name for each in ledger.header.parameters]
    return {
        (int(each["leaf"]), names[each["parameter"]]): each["digest"].tobytes()
        for each in ledger.records
    }


def digest(array):
    return xxhash.xxh3_128_digest(np.ascontiguousarray(array).tobytes())


def test_digests_are_of_values_in_c_order(pool, tmp_path):
    pool(1).call(noted, tmp_path)
    found = read(tmp_path)
    assert [str(each) for each in found.header.parameters] == [
        "each.0 of bfloat16, shape (40, 25)",
        "each.1 of float32, shape (7,)",
        "each.2 of float16, shape (300, 3)",
        "each.3 of float32, shape (1,)",
    ]
    assert (found.header.leaves, found.header.seed) == (6, 0)
    want = {
        (leaf, f"each.{place}"): digest(each)
        for leaf, given in enumerate(gradients_of(MIXED, 6))
        for place, each in enumerate(given)
        if each is not None  # as this leaf does not use the parameter
    }
    averages = enumerate(wanted(MIXED, 6))
    want |= {(RESULT, f"each.{place}"): digest(each) for place, each in averages}
    assert digests(found) == want


def test_ranks_buckets_strides_and_transports_do_not_matter(pool, tmp_path):
    pool(1).call(noted, tmp_path / "0")
    cases = [
        (1, "pycollective", False, {}),
        (2, "pycollective", True, {"bucket_cap_mb": 1e-5}),
        (3, "pycollective", False, {"bucket_cap_mb": 0.003}),
        (2, "gloo", True, {}),
    ]
    for number, (ranks, over, by_columns, options) in enumerate(cases, 1):
        folder = tmp_path / str(number)

        pool(ranks).call(noted_so, folder, over, by_columns, options)
        found = compare(read(tmp_path / "0"), read(folder))
        assert found.same, str(found)
        assert len([*folder.iterdir()]) == ranks
    pool(1).call(noted_so, tmp_path / "fp32", "pycollective", True, {"grad_dtype": torch.float32})
    with pytest.raises(ConfigurationError, match="bfloat16 averaged in float32, shape"):
        compare(read(tmp_path / "0"), read(tmp_path / "fp32"))


def noted_so(comm, folder, over, by_columns, options):
    noted(comm, folder, over, by_columns, **options)


# --- Planted changes.

LEAVES, STEPS = 8, 4


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 7), torch.nn.Linear(7, 1)
    )


NAMES = [name for name, _ in network().named_parameters()]


def batch(step, leaf):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + leaf))


def loss_of(model, x):
    return model(x).square().sum()


def by_an_ulp(tensor, at):
    """The tensor, of which one element is the next number."""
    changed = tensor.clone()
    one = changed.view(-1)[at % changed.numel() :][:1]
    one.copy_(torch.nextafter(one, torch.tensor(torch.inf)))
    return changed


class Planted:
    """A training in which something is changed, and what must be named for it.

    Args:
        model: the training's.
        kind: "gradient" by an ulp, one "sample" by another, the "order" of a sum; "" for nothing.
        step, leaf, name: where; a sample has no name, an order no leaf.
        at: which element or sample.
    """

    def __init__(self, model, kind="", step=-1, leaf=-1, name="", at=0):
        self.kind, self.where, self.name, self.at = kind, (step, leaf), name, at
        self.model, self.now = model, (-1, -1)
        self.named = dict(model.named_parameters())
        self.came = []  # parameters, as backward comes to them
        self.wanted = name
        for each, parameter in self.named.items():
            parameter.register_hook(lambda gradient, each=each: self._hook(each, gradient))

    def _hook(self, name, gradient):
        self.came.append(name)
        planted = ("gradient", self.where, self.name) == (self.kind, self.now, name)
        return by_an_ulp(gradient, self.at) if planted else gradient

    def compute(self, step, leaf):
        self.now, x = (step, leaf), batch(step, leaf)
        if (self.kind, self.where) != ("sample", self.now):
            loss_of(self.model, x).backward()
            return
        before = self._gradients(x)
        x[self.at % 4] = batch(step, LEAVES)[0]
        after = self._gradients(x)
        self.came.clear()
        loss_of(self.model, x).backward()
        self.wanted = next(each for each in self.came if not torch.equal(before[each], after[each]))

    def _gradients(self, x):
        found = torch.autograd.grad(loss_of(self.model, x), [*self.named.values()])
        return dict(zip(self.named, found, strict=True))

    def swap(self, sync):
        """Of one parameter rank 0 adds two leaves in each other's place; none of its buckets has
        two parameters."""
        if self.kind != "order" or sync.step != self.where[0] or sync._transport.rank:
            return
        mine = sync.local_leaves
        a, b = next(pair for pair in itertools.combinations(mine, 2) if pair[0] ^ pair[1] > 1)
        [accumulator] = [
            each.accumulator
            for each in sync._buckets
            if each.parameters[0] is self.named[self.name]
        ]
        add, other = accumulator.add, {a: b, b: a}
        accumulator.add = lambda leaf, arrays: add(other.get(leaf, leaf), arrays)


def trained(comm, folder, over="pycollective", plant=()):
    """Train with a ledger, and return the parameter that must be named."""
    torch.set_num_threads(1)
    model = network()
    planted = Planted(model, *plant)
    sync = LeafSync(
        *(model, LEAVES), group=OVER[over](comm), ledger=folder, bucket_cap_mb=1e-5 if plant else 6
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        planted.swap(sync)
        for leaf in sync.local_leaves:
            with sync.leaf(leaf):
                planted.compute(step, leaf)
        sync.finish()
        optimizer.step()
        for bucket in sync._buckets:
            bucket.accumulator.__dict__.pop("add", None)
    rank = sync._transport.rank
    sync.close()
    return rank, planted.wanted


def check(pool, folder, ranks, over, plant):
    """What is found beside a run on one rank that nobody has changed."""
    kind, step, leaf, *_ = plant
    if not (folder / "clean").exists():
        pool(1).call(trained, folder / "clean")
    said = pool(ranks).call(trained, folder / "planted", over, plant)
    found = compare(read(folder / "clean"), read(folder / "planted"))
    for each in (folder / "planted").iterdir():
        each.unlink()
    first = found.finding
    assert first is not None, plant
    assert (first.step, found.agreed, first.within) == (step, step, None), str(found)
    if kind == "order":
        assert (first.leaf, first.parameter, first.parameters) == (None, plant[3], 1), str(found)
        assert "all 8 leaves have the same bits, and the average differs" in str(found)
        return
    names = {rank: name for rank, name in said}
    [(owner, size)] = first.against
    assert (first.leaf, first.leaves, size) == (leaf, [leaf], ranks), str(found)
    assert first.parameter == names[owner], str(found)
    if kind == "gradient":
        assert first.parameters == 1
    where = f"step {step}, {first.parameter}, leaf {leaf}: "
    assert str(found).startswith(f"{where}rank 0 of 1 gave other bits than rank {owner} of {size}")


@pytest.mark.parametrize(
    ("ranks", "over", "plant"),
    [
        (3, "pycollective", ("gradient", 2, 5, "2.weight", 11)),
        (1, "pycollective", ("order", 1, -1, "0.weight")),
        (2, "gloo", ("sample", 3, 6, "", 2)),
    ],
)
def test_a_planted_change_is_named(pool, tmp_path, ranks, over, plant):
    check(pool, tmp_path, ranks, over, plant)


@pytest.mark.storm
def test_planted_changes_are_named_wherever_they_are(pool, tmp_path):
    """50 of 50."""
    draw = random.Random(7)
    kinds = ["gradient", "sample", "order"]
    for number in range(50):
        kind = kinds[number % 3]
        plant = (kind, draw.randrange(STEPS), draw.randrange(LEAVES), draw.choice(NAMES))
        if kind == "order":  # where a sum of few elements may have the same bits in any order
            plant = (kind, plant[1], -1, draw.choice(["0.weight", "2.weight"]))
        over = draw.choice([*OVER])
        check(pool, tmp_path, draw.randint(1, 3), over, (*plant, draw.randrange(1000)))


# --- What is refused, and what it costs if nobody asks.


def refused(comm, folders, case):
    model = Weights(MIXED)
    try:
        with mock.patch.dict(sys.modules, {"xxhash": None} if case == "xxhash" else {}):
            LeafSync(model, 6, group=standing_group(comm), ledger=folders).close()
    except (ConfigurationError, CollectiveMismatch) as error:
        return type(error).__name__, str(error)


def test_all_ranks_hear_of_a_ledger_that_one_cannot_write(pool, tmp_path):
    (tmp_path / "file").write_text("")
    folders = PerRank([str(tmp_path / "good"), str(tmp_path / "file")])
    for kind, said in pool(2).call(refused, folders, ""):
        assert kind == "ConfigurationError"
        assert f"the ledger {tmp_path}/file/rank1-" in said
        assert "cannot be written: " in said
    alone = PerRank([str(tmp_path / "good"), None])
    for found in pool(2).call(refused, alone, ""):
        said = "LeafSync: rank(s) 1 have other ledger than rank 0: False, not True"
        assert found == ("CollectiveMismatch", said)
    for _, said in pool(2).call(refused, str(tmp_path / "none"), "xxhash"):
        assert "a ledger needs xxhash: pip install xxhash" in said


def full(comm, folder):
    """Rank 0's disk gets full in the second step."""
    model = Weights(MIXED)
    sync = LeafSync(model, 2, group=standing_group(comm), ledger=folder)
    given = gradients_of(MIXED, 2)
    try:
        for step in range(3):
            if (step, comm.rank) == (1, 0):
                error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                writer = sync._ledger.writer
                writer._file = mock.Mock(
                    wraps=writer._file, closed=False, write=mock.Mock(side_effect=error)
                )
            for leaf in sync.local_leaves:
                with sync.leaf(leaf):
                    gradients = [None if e is None else to_torch(e) for e in given[leaf]]
                    model(gradients).backward()
            sync.finish()
    except (ConfigurationError, CollectiveAborted) as error:
        return type(error).__name__, str(error)
    finally:
        sync.close()


def test_a_disk_that_gets_full_ends_the_training_on_all_ranks(pool, tmp_path):
    (kind, said), (other, heard) = pool(2).call(full, tmp_path)
    assert kind == "ConfigurationError"
    assert said.endswith("cannot be written: No space left on device")
    assert other == "CollectiveAborted"
    assert said in heard
    assert {0, 1} >= {*read(tmp_path).records["step"].tolist()}


def test_parameters_that_are_not_on_a_cpu_are_refused(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(ConfigurationError, match="parameters on CPUs, and w is on meta"):
        TensorLedger(tmp_path, [("w", weight)], 0, 1)
    assert [*tmp_path.iterdir()] == []


OFF = f"""
import sys, torch
from pycollective.torch import LeafSync
model = torch.nn.Linear(2, 1)
sync = LeafSync(model, 2)
print("xxhash" in sys.modules)
sync.close()
import os
os.environ["{ENV_LEDGER}"] = sys.argv[1]
sync = LeafSync(model, 2)
for leaf in sync.local_leaves:
    with sync.leaf(leaf):
        model(torch.ones(3, 2)).sum().backward()
sync.close()
print("xxhash" in sys.modules)
"""


def test_xxhash_is_imported_when_the_environment_asks_for_a_ledger(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OFF, str(tmp_path / "made")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\nTrue\n", "")
    assert len(read(tmp_path / "made").records) == 2 * 2 + 2
