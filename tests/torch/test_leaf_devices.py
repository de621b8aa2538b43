"""`LeafSync` on devices, with tensors of the CPU: the CPU's bits, and nobody waits in a step."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import pycollective as pc
from pycollective import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    ConfigurationError,
    PeerFailure,
)
from pycollective.torch import LeafSampler, LeafSync
from pycollective.torch.leaves import device_accumulator
from pycollective.torch.leaves.buckets import WholeBucket
from pycollective.torch.leaves.choosing import transport_of
from pycollective.torch.leaves.over_devices import OverDevices
from pycollective.torch.leaves.place import OnDevice
from pycollective.torch.leaves.words import StepWords
from pycollective.torch.ordered import reduction
from pycollective.torch.ordered.device_messages import DeviceMessages
from pycollective.torch.ordered.group import OrderedGroup
from pycollective.torch.ordered.work import Issued
from tests.inputs import same_bits
from tests.torch.groups import CPU, standing_group, to_numpy, to_torch
from tests.torch.leaf_devices import StandInModule, on_device
from tests.torch.on_devices import NoWaits
from tests.torch.ordered_groups import StandInStreams, own_group
from tests.torch.streams import LateDevice, late_streams
from tests.torch.test_leaf_sync import BF16, FP32, MIXED, Weights, gradients_of, wanted
from tests.triton.compiled import module

GIVEN = "ignore:LeafSync"  # warnings of conditions
pytestmark = pytest.mark.filterwarnings(GIVEN)


def taken(sync, model, leaves, given, counts=None):
    """The gradients of one step, whose leaves are computed in this order."""
    for leaf in leaves:
        tensors = [None if each is None else to_torch(each) for each in given[leaf]]
        with sync.leaf(leaf, counts and counts[leaf]):
            model(tensors).backward()
    sync.finish()
    return [each.grad for each in model.each]


# --- Bits.


def averages(comm, dtypes, leaves, options, counts=None, kernels=False):
    """As `test_leaf_sync.averages`, by the way of devices."""
    group = standing_group(comm)
    with ExitStack() as stack:
        stack.enter_context(on_device())
        if kernels:
            adding = module("accumulate", interpreted=True)
            stack.enter_context(
                mock.patch.object(device_accumulator, "kernels_of", return_value=adding)
            )
            reducing = module("reduce", interpreted=True)
            stack.enter_context(
                mock.patch.object(reduction.plain, "reduce", reducing.reduce)  # as by_torch calls
            )
        model = Weights(dtypes)
        sync = LeafSync(model, leaves, group=group, **options)
        said = sync.nbytes
        given, found = gradients_of(dtypes, leaves), []
        for order in (sync.local_leaves, sync.local_leaves):
            found.append([*map(to_numpy, taken(sync, model, order, given, counts))])
            found[-1] = [each.copy() for each in found[-1]]
        sync.state_dict()
        held = [each.averages for each in sync._buckets]
        held += [row for each in sync._buckets for row in each.accumulator._free]
        assert sum(each.nbytes for each in held) <= said < sum(each.nbytes + 128 for each in held)
        sync.close()
    return found


def check(pool, ranks, dtypes, leaves, options=None, counts=None, kernels=False):
    options = options or {}
    want = [*wanted(dtypes, leaves, options.get("grad_dtype"), counts and sum(counts))]
    for steps in pool(ranks).call(averages, dtypes, leaves, options, counts, kernels):
        for step in steps:
            assert all(same_bits(*each) for each in zip(step, want, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_the_references_average(pool, ranks):
    check(pool, ranks, MIXED, 7, {"bucket_cap_mb": 0.003})
    check(pool, ranks, BF16, 5, {"grad_dtype": torch.float32})
    check(pool, ranks, BF16, ranks)  # a leaf a rank travels as it is
    check(pool, ranks, FP32, 4, counts=[3, 0, 11, 5])
    check(pool, ranks, FP32, 4, counts=[1, 1 << 24, 0, 0])  # which fp32 does not hold


def test_ranks_without_leaves(pool):
    check(pool, 3, BF16, 1, counts=[3])


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_by_the_kernels(pool, ranks):
    check(pool, ranks, MIXED, 3, kernels=True)
    check(pool, ranks, FP32, 3, counts=[3, 1 << 24, 2], kernels=True)


# --- Trainings, on a device and on the CPU.


class Tied(torch.nn.Module):
    """Has tied weights, dropout, a part in a checkpoint of activations, and one that is not used
    in odd leaves."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.hidden = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2))
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.odd = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + checkpoint(self.hidden, x, use_reentrant=False) * self.scale
        return self.head(x if tokens[0, 0] % 2 else x * self.odd)


def tokens_of(step, leaf):
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(100 * step + leaf))


def autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def compiled(model):
    return torch.compile(model, backend="eager")


WAYS = {
    "plain": {},
    "autocast": {"call": autocast},
    "compiled": {"wrap": compiled},  # seconds
    "half weights": {"dtype": torch.bfloat16, "options": {"grad_dtype": torch.float32}},
    "scaled": {"scaler": True},
}


def trained(comm, device, way):
    """The digest of the weights after some steps."""
    how = WAYS[way]
    torch.manual_seed(3)
    with on_device() if device else nullcontext():
        model = Tied().to(how.get("dtype", torch.float32))
        run = how.get("wrap", lambda model: model)(model)
        sync = LeafSync(run, 5, seed=2, group=standing_group(comm), **how.get("options", {}))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**127, growth_interval=99, enabled="scaler" in how
        )
        for step in range(4):
            for leaf in sync.local_leaves:
                x = tokens_of(step, leaf)
                with sync.leaf(leaf):
                    y = how.get("call", lambda model, x: model(x))(run, x)
                    loss = functional.cross_entropy(y.float().flatten(0, 1), x.flatten())
                    scaler.scale(loss * (1000 if step == 0 else 1)).backward()  # infinite
            sync.finish()
            for each in model.parameters():
                if each.grad.dtype != each.dtype:
                    each.grad_dtype, each.grad = None, each.grad.to(each.dtype)
            scaler.step(optimizer)
            scaler.update()
        sync.close()
    weights = b"".join(each.detach().float().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(weights).hexdigest(), scaler.get_scale()


@pytest.mark.parametrize(
    "way",
    [pytest.param(each, marks=pytest.mark.storm if each == "compiled" else ()) for each in WAYS],
)
def test_a_training_on_devices_has_the_weights_of_cpus(pool, way):
    [on_cpu] = pool(1).call(trained, False, way)
    assert on_cpu[1] < 2.0**127 or way != "scaled"
    for ranks in (1, 2):
        assert pool(ranks).call(trained, True, way) == [on_cpu] * ranks


# --- Nobody waits.


def without_waiting(comm):
    """Steps of a device that ends nothing: how many words are on their way, and then are read."""
    streams = StandInStreams()
    given = gradients_of(FP32, 4)
    with on_device(streams=streams):
        model = Weights(FP32)
        sync = LeafSync(model, 4, group=standing_group(comm))
        streams.done = False
        with NoWaits():
            for _ in range(3):
                taken(sync, model, sync.local_leaves, given, [1, 2, 3, 4])
        coming = len(sync._transport._coming)
        streams.done = True
        sync.state_dict()
        left = len(sync._transport._coming)
        sync.close()
    return coming, left


def test_the_host_waits_for_nothing_within_a_step(pool):
    assert pool(2).call(without_waiting) == [(3, 0)] * 2


class Elsewhere(torch.autograd.Function):
    """Its gradient is made on another stream, which stays current for the hook."""

    @staticmethod
    def forward(ctx, weight, device, stream, gradient):
        ctx.given = device, stream, gradient
        return weight.detach().sum()

    @staticmethod
    def backward(ctx, _):
        device, stream, gradient = ctx.given
        device.current = stream
        return gradient + 0.0, None, None, None


class OnStreams(torch.nn.Module):
    """Weights whose gradients come on the caller's stream and on another one by turns."""

    def __init__(self, device):
        super().__init__()
        self.each = torch.nn.ParameterList(torch.zeros(50) for _ in range(3))
        self.device, self.other = device, device.Stream(None)

    def forward(self, gradients):
        caller = self.device.current
        streams = caller, self.other, caller
        terms = [
            Elsewhere.apply(*each)
            for each in zip(self.each, [self.device] * 3, streams, gradients, strict=True)
        ]
        return terms[0] + terms[1] + terms[2]


class LateModule(StandInModule):
    """What `torch.cuda` would be of a device that works late."""

    def __init__(self, device):
        super().__init__()
        self._device = device
        self.current_stream, self.stream = device.current_stream, device.stream


def late(comm, given, seed):
    """Averages of two steps on a device whose streams work late."""
    device = LateDevice(seed)
    found = []
    streams = late_streams(device, "LeafSync")
    with mock.patch("pycollective.torch.ordered.group.WATCH"), own_group(comm) as group:
        with on_device(LateModule(device), streams):
            model = OnStreams(device)
            sync = LeafSync(model, len(given[0]), group=group, bucket_cap_mb=0.0003)
            with device.in_use():
                for step in given:
                    for leaf in sync.local_leaves:
                        caller = device.current
                        with sync.leaf(leaf):
                            model(step[leaf]).backward()
                            device.current = caller
                    sync.finish()
                    found.append([each.grad.clone() for each in model.each])
                device.synchronize()
            sync.close()
        return [[each.numpy().copy() for each in step] for step in found]


@pytest.mark.parametrize(
    ("ranks", "seed"),
    [
        *((1, None), (2, None), (2, 1)),
        *(pytest.param(2, seed, marks=pytest.mark.storm) for seed in range(2, 12)),
    ],
)
def test_averages_are_right_though_streams_work_late(pool, ranks, seed):
    random = torch.Generator().manual_seed(seed or 0)
    given = torch.randn(2, 5, 3, 50, generator=random)
    for found in pool(ranks).call(late, given, seed):
        for step, leaves in zip(found, given, strict=True):
            for place, got in enumerate(step):
                want = pc.reference.reduce([leaf[place].numpy() for leaf in leaves], "avg")
                assert same_bits(got, want)


def test_a_bucket_is_added_on_one_stream():
    device = LateDevice()
    place, other = OnDevice(CPU, LateModule(device)), device.Stream(None)
    first = device.current
    place.begin()
    with device.stream(other):
        with place.adding():
            assert device.current is first
        assert device.current is other
        place.begin()
        with place.adding():
            assert device.current is other
    assert other.issued == 1  # waits for the first stream, which has the rows


def test_sums_and_divisors_ask_for_no_data():
    """On the device "meta", where there are none."""
    meta = torch.device("meta")
    total = device_accumulator.DeviceAccumulator([5, 0, 20], 4, meta)
    for leaf in range(3):
        total.add(
            leaf, [torch.empty(5, device=meta), None, torch.empty(20, device=meta).bfloat16()]
        )
    assert total.nodes == ((0, 2), (2, 3))
    assert [each.device for each in total._rows()] == [meta] * 2
    assert total.begins == [0, 16, 16]
    words = StepWords(0, pc.Deal.contiguous(3, 4), [], 0.0)
    made = words.divisor_on_device(torch.empty(3, 8, dtype=torch.int64, device=meta))
    assert (made.device, made.dtype, made.shape) == (meta, torch.float64, (1,))


# --- Words that do not go together.


def at_odds(comm, case):
    """What a step's averages are where ranks' words make no divisor; what is raised then."""
    with own_group(comm, timeout=timedelta(seconds=20)) as group, on_device():
        model = torch.nn.Linear(3, 2)
        sync = LeafSync(model, 4, group=group)
        if case == "step" and comm.rank == 1:
            sync.load_state_dict({**sync.state_dict(), "step": 5})
        for leaf in sync.local_leaves:
            counts = {"count": 1 if comm.rank else None, "none": 0, "step": None}
            with sync.leaf(leaf, counts[case]):
                model(torch.ones(1, 3)).sum().backward()
        sync.finish()
        are_nan = all(each.grad.isnan().all().item() for each in model.parameters())
        said = []
        for call in (sync.state_dict, sync.finish):
            with pytest.raises((CollectiveMismatch, ConfigurationError)) as raised:
                call()
            said.append(f"{type(raised.value).__name__}: {raised.value}")
        sync.close()
    return are_nan, said


WHY = {
    "step": "CollectiveMismatch: rank 0 is at step 0, and rank(s) 1 at [5]",
    "count": "CollectiveMismatch: step 0: 2 of 4 leaves have a count; all have one, or none",
    "none": "ConfigurationError: step 0: the counts make 0, and must make 1 to",
}


@pytest.mark.parametrize("case", WHY)
def test_words_that_make_no_divisor_make_nan_and_are_named_later(pool, case):
    for are_nan, said in pool(2).call(at_odds, case):
        assert are_nan
        assert said[0].startswith(WHY[case])
        assert "cannot go on: what ranks have told of a step" in said[1]


@pytest.mark.parametrize(
    ("words", "divisor"),
    [
        ([(0, 2, 5, 7), (0, 2, 1 << 52, 7)], (1 << 52) + 5),
        ([(0, 0, 0, 7), (0, 0, 0, 7)], 4),
        ([(0, 2, 1 << 53, 7), (0, 2, 0, 7)], 1 << 53),
        ([(0, 2, 1 << 53, 7), (0, 2, 2, 7)], None),
        ([(0, 2, 5, 7), (0, 2, 5, 8)], None),
        ([(0, 2, 5, 7), (1, 2, 5, 7)], None),
        ([(0, 3, 5, 7), (0, 2, 5, 7)], None),
        ([(0, 2, 0, 7), (0, 2, 0, 7)], None),
    ],
)
def test_a_device_makes_the_hosts_divisor(words, divisor):
    step = StepWords(0, pc.Deal.contiguous(2, 4), [], 0.0)
    rows = np.zeros((2, 8), np.int64)
    rows[:, :4] = words
    made = step.divisor_on_device(torch.from_numpy(rows))
    assert made.dtype == torch.float64
    assert made.shape == (1,)
    if divisor is None:
        assert made.isnan().all()
        with pytest.raises((CollectiveMismatch, ConfigurationError)):
            step.read(rows)
    else:
        assert made.item() == divisor == step.read(rows)


def given_up(comm):
    """A rank raises in a leaf; what another hears whose device waits for it, and whose host does
    not: the error of its checkpoint, and that of its next leaf."""
    streams, said = StandInStreams(), []
    with (
        mock.patch.dict(os.environ, {"PYCOLLECTIVE_LATE_AFTER": "0.3"}),
        own_group(comm, timeout=timedelta(seconds=60)) as group,
        on_device(streams=streams),
    ):
        model = torch.nn.Linear(3, 2)
        sync = LeafSync(model, 2, group=group)
        begin = time.monotonic()

        def compute():
            with sync.leaf(comm.rank):
                if comm.rank == 1:
                    raise RuntimeError("no memory")
                model(torch.ones(1, 3)).sum().backward()

        with ExitStack() as never:
            if comm.rank == 0:  # the device comes to nothing
                streams.done = False
                for where, name in (
                    *((DeviceMessages, each) for each in ("all_gather", "start")),
                    *((reduction, each) for each in ("lay_out", "reduce")),
                ):
                    never.enter_context(mock.patch.object(where, name))
            for call in (compute, sync.state_dict, compute):
                try:
                    call()
                except (RuntimeError, CollectiveError, ConfigurationError) as error:
                    said.append(f"{type(error).__name__}: {error}")
        took = time.monotonic() - begin
        streams.done = True
        sync.close()
    return said, took


def test_an_error_in_a_leaf_is_told_to_all(pool):
    (heard, took), (own, _) = pool(2).call(given_up)
    assert took < 45  # the group's timeout is 60
    assert own[0] == "RuntimeError: no memory"
    assert heard[0].startswith("CollectiveAborted: aborted by rank 1: leaf 1 of step 0 raised")
    assert "no memory" in heard[0]
    assert "cannot go on: what ranks have told of a step" in heard[1]


def test_calls_that_peers_make_too_end_before_a_rank_aborts():
    streams, order = StandInStreams(), []

    def end():
        order.append("ended")
        streams.done = True

    with group_of_one(), on_device(streams=streams):
        ordered = OrderedGroup(dist.group.WORLD, CPU, streams)
        streams.done = False
        ordered._under_way.add(Issued([], streams.event(), []))
        ending = threading.Timer(0.3, end)
        ending.start()
        abort = mock.Mock(side_effect=lambda *_: order.append("aborted"))
        with mock.patch.object(DeviceMessages, "abort", abort):
            ordered.abandon(CollectiveAborted("no memory"))
        ending.join()
    assert order == ["ended", "aborted"]


def test_words_of_a_failed_group_are_not_read(made):
    _, sync, _ = made
    transport = sync._transport
    event = SimpleNamespace(query=lambda: True)
    transport._coming.append((None, None, event))  # reading them would raise something else
    transport._ordered.failure = PeerFailure("rank 1 has died")
    words = StepWords(0, pc.Deal.contiguous(1, 4), [], 0.0)
    with pytest.raises(PeerFailure, match="rank 1 has died"):
        transport.announce(words, needed=False)
    transport._coming.clear()
    transport._ordered.failure = None


def dealt_apart(comm):
    """What is raised where ranks deal leaves otherwise on devices."""
    with own_group(comm, timeout=timedelta(seconds=20)) as group, on_device():
        model = torch.nn.Linear(3, 2)
        sync = LeafSync(model, 4, group=group)
        cuts = [(0, 2), (2, 4)] if comm.rank else [(2, 4), (0, 2)]
        deal = pc.Deal(4, tuple((each,) for each in cuts))

        def step():
            for leaf in sync.local_leaves:
                with sync.leaf(leaf):
                    model(torch.ones(1, 3)).sum().backward()
            sync.finish()
            sync.state_dict()

        with (
            mock.patch.object(LeafSync, "_deal_of", return_value=deal),
            pytest.raises(CollectiveMismatch) as raised,
        ):
            step()
        sync.close()
    return str(raised.value)


def test_ranks_with_other_deals_are_named(pool):
    for said in pool(2).call(dealt_apart):
        assert re.search(r"rank 0 called all_reduce_nodes of .* dealt as \w+\) as call", said)


# --- Conditions.


def set_to(owner, name, value):
    """A context manager in which a setting has this value; torch's cannot be patched."""

    @contextmanager
    def is_set():
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)

    return is_set


def unlike(comm, case):
    """What is raised where a condition of rank 1 is another."""
    module, mine = StandInModule(), comm.rank == 1
    with ExitStack() as stack:
        group = stack.enter_context(own_group(comm))
        if mine and case == "multiprocessors":
            module.properties = SimpleNamespace(name="stand-in", multi_processor_count=7)
        if mine and case == "cudnn.benchmark":
            stack.enter_context(set_to(torch.backends.cudnn, "benchmark", True)())
        stack.enter_context(on_device(module))
        model = torch.nn.Linear(3, 2)
        with pytest.raises((CollectiveMismatch, ConfigurationError)) as raised:
            LeafSync(compiled(model) if mine and case == "torch.compile" else model, 2, group=group)
    return str(raised.value)


@pytest.mark.parametrize("case", ["multiprocessors", "torch.compile"])
def test_ranks_are_told_which_condition_they_have_unlike(pool, case):
    for said in pool(2).call(unlike, case):
        assert said.startswith(f"LeafSync: rank(s) 1 have other {case} than rank 0: ")


def test_kernels_chosen_by_a_clock_are_refused(pool):
    here, there = pool(2).call(unlike, "cudnn.benchmark")
    assert "cuDNN then times its kernels" in there
    assert "refused on rank(s) 1" in here


CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn
SET = {
    "CUBLAS_WORKSPACE_CONFIG": lambda: mock.patch.dict(
        os.environ, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    ),
    "use_deterministic_algorithms": lambda: mock.patch.object(
        torch, "are_deterministic_algorithms_enabled", return_value=True
    ),
    "attention backends": lambda: mock.patch.object(CUDA, "flash_sdp_enabled", return_value=False),
    "TF32 of matmul": set_to(CUDA.matmul, "allow_tf32", True),
    "TF32 of cuDNN": set_to(CUDNN, "allow_tf32", False),
    "bf16 reductions of reduced precision": set_to(
        CUDA.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "cudnn.deterministic": set_to(CUDNN, "deterministic", True),
}


@pytest.mark.parametrize("name", SET)
def test_a_setting_is_a_condition(name):
    place = OnDevice(CPU, StandInModule())
    before = place.conditions(False)
    with SET[name]():
        now = place.conditions(False)
    # What was set stands for others, too.
    assert name in [each for each in before if before[each] != now[each]]
    assert json.loads(json.dumps(before)) == before == place.conditions(False)


@pytest.fixture
def alone():
    with pc.init(rank=0, size=1) as comm:
        yield comm


@pytest.fixture
def made(alone):
    """A model and its sync on a device, of 4 leaves, in a process without a group."""
    with on_device() as place:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        sync = LeafSync(model, 4, group=alone)
        yield model, sync, place
        sync.close()


def backward(model):
    model(torch.ones(2, 3)).sum().backward()


def test_what_does_not_repeat_itself_is_warned_of(alone):
    with on_device(), pytest.warns(UserWarning, match="LeafSync") as said:
        LeafSync(compiled(torch.nn.Linear(3, 2)), 2, group=alone).close()
    found = " ".join(str(each.message) for each in said)
    assert "torch.use_deterministic_algorithms is off" in found
    assert "CUBLAS_WORKSPACE_CONFIG is ''" in found
    assert "TORCHINDUCTOR_DETERMINISTIC is not 1" in found
    assert {each.filename for each in said} == {__file__}


def test_the_devices_random_numbers_follow_from_the_leaf_and_leave_no_trace(made):
    model, sync, place = made
    generator = place._module.default_generators[0]

    def draw():
        return torch.rand(1, generator=generator).item()

    generator.manual_seed(5)
    expected = draw(), draw()
    generator.manual_seed(5)
    drawn = {}
    for leaf in (2, 0, 3, 1):
        with sync.leaf(leaf):
            drawn[leaf] = draw()
            backward(model)
    assert (draw(), draw()) == expected
    assert len({*drawn.values()}) == 4
    sync.load_state_dict({**sync.state_dict(), "step": 0})
    with sync.leaf(3):
        assert draw() == drawn[3]
        backward(model)


def test_a_comparison_names_the_conditions_that_are_unlike(made, tmp_path, capsys):
    model, sync, place = made
    path = tmp_path / "leaf.json"
    for multiprocessors in (132, 108):
        place._module.properties = SimpleNamespace(
            name="stand-in", multi_processor_count=multiprocessors
        )
        assert sync.compare_leaf(path, 2, lambda: backward(model)) is None
    said = capsys.readouterr().out
    assert ", stand-in); in the file" not in said
    assert "multiprocessors: 108, not 132)" in said


# --- Logs, and what is refused.


def logged(comm, device):
    """What a step of the loop logs."""
    with on_device() if device else nullcontext():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        sync = LeafSync(model, 5, group=standing_group(comm))
        data = TensorDataset(torch.arange(60.0).view(20, 3))
        sampler = LeafSampler(sync, len(data), micro_batch=2)
        found = []
        for step in sync.steps(DataLoader(data, batch_sampler=sampler), until=3):
            for (x,) in step:
                loss = model(x).pow(2).sum()
                if step.number:
                    step.log(loss=loss)
                if step.number == 2:
                    step.count(step.leaf + 1)
                loss.backward()
            found.append(step)
        found = [each.logged for each in found]
        sync.close()
    return found


def test_logs_are_those_of_cpus(pool):
    [on_cpu] = pool(1).call(logged, False)
    assert not on_cpu[0]
    assert on_cpu[1]
    for ranks in (1, 3):
        assert pool(ranks).call(logged, True) == [on_cpu] * ranks


def test_old_logs_are_no_more_there(made):
    _, sync, _ = made
    texts = [sync._transport.tell(str(number)) for number in range(65)]
    assert texts[1]() == [b"1"]
    assert texts[64]() == [b"64"]
    with pytest.raises(ConfigurationError, match="64 steps ago is no more there"):
        texts[0]()


def test_who_reads_an_old_log_can_go_on(made):
    model, sync, _ = made
    data = TensorDataset(torch.ones(20, 3))
    loader = DataLoader(data, batch_sampler=LeafSampler(sync, 20, micro_batch=1))
    steps = []
    for step in sync.steps(loader, until=66):
        steps.append(step)
        for (x,) in step:
            step.log(x=step.number)
            model(x).sum().backward()
        if step.number == 64:
            with pytest.raises(ConfigurationError, match="is no more there"):
                assert steps[0].logged
            assert steps[1].logged == {"x": 1.0}
    assert sync.step == 66


def test_a_gradient_that_lies_otherwise_stays_on_its_device():
    place = SimpleNamespace(
        device=torch.device("meta"),
        accumulator=lambda shapes, leaves: SimpleNamespace(begins=[0], size=6),
        take=lambda gradient: gradient,
    )
    weight = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
    bucket = WholeBucket([("weight", weight)], torch.float32, 1, place)
    bucket.take(0, torch.empty(3, 2, device="meta").t())
    assert bucket.gradients[0].device == place.device
    assert bucket.gradients[0].is_contiguous()


def test_what_a_device_cannot_do_is_refused(made):
    _, sync, place = made
    data = TensorDataset(torch.ones(20, 3))
    loader = DataLoader(data, batch_sampler=LeafSampler(sync, 20, micro_batch=1))
    with pytest.raises(ConfigurationError, match="measure_ranks=True needs parameters on the CPU"):
        sync.steps(loader, cost=len, measure_ranks=True)
    place._module.is_current_stream_capturing = lambda: True
    with pytest.raises(ConfigurationError, match="a graph cannot capture a leaf"), sync.leaf(0):
        pass


def test_ranks_without_a_process_group_are_refused(alone):
    ranks = mock.MagicMock(spec=pc.Communicator, size=2)
    with on_device(), pytest.raises(ConfigurationError, match="and 2 ranks have none"):
        LeafSync(torch.nn.Linear(3, 2), 2, group=ranks)


def over_gloo(comm):
    with own_group(comm) as group, pytest.raises(ConfigurationError) as raised:
        transport_of(group, OnDevice(torch.device("cuda", 0), StandInModule()))
    return str(raised.value)


def test_gloo_carries_no_tensors_of_gpus(pool):
    why = "parameters are on cuda:0, and LeafSync does not work there over a process group of gloo"
    assert all(why in said for said in pool(2).call(over_gloo))


@contextmanager
def group_of_one():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_backend_that_cannot_be_made_anew_carries_the_calls_itself():
    with group_of_one(), on_device():
        with mock.patch("pycollective.torch.leaves.over_devices.own_side", return_value=None):
            sync = LeafSync(torch.nn.Linear(3, 2), 2)
        assert isinstance(sync._transport, OverDevices)
        sync.close()
        assert dist.is_initialized()
