"""Compression of tensors on devices gives what CPUs give, bit for bit, and no host waits in a step.

There is no device here: tensors are the CPU's, streams a stand-in, and kernels are the CPU's or
interpreted.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers its backend)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pycollective import CollectiveMismatch, CollectiveTimeout, ConfigurationError
from pycollective.compression.feedback import ErrorFeedback
from pycollective.compression.groups import GroupMaker, Groups
from pycollective.compression.kernels import TAIL, CpuKernels
from pycollective.compression.options import Common
from pycollective.compression.partition import Hosts
from pycollective.compression.quantized import QuantizedOptions
from pycollective.compression.residuals import Scaled
from pycollective.compression.top_k import TopKOptions
from pycollective.torch import compressed_reduce_scatter
from pycollective.torch.compression import kernels as device_kernels
from pycollective.torch.compression import states
from pycollective.torch.compression.devices import Later
from pycollective.torch.compression.groups import TorchGroup, group_maker
from pycollective.torch.compression.kernels import TritonKernels
from pycollective.torch.compression.states import FlatTensor
from tests.torch.compressed import HOOKS, Bucket, digest_of, group_of, ranks_of, state_of
from tests.torch.groups import CPU, Gradient, standing_group
from tests.torch.on_devices import NoWaits, Streams, as_on_a_device, loading, sent_by_states

ranks = ranks_of(__name__, 4)

SHAPES = {"w": (5, 132), "b": (33,), "z": (3, 70), "v": (300,)}
OPTIONS = {"chunk": 64, "compress": lambda name, shape: name != "b"}


def parameters(dtype=torch.float32):
    return [
        (name, torch.zeros(shape, dtype=dtype, requires_grad=True))
        for name, shape in SHAPES.items()
    ]


def gradients(rank, step, dtype, zero=(), scale=1.0):
    """Of all parameters; `zero` are those that are all zero on all ranks, some of it -0."""
    random = torch.Generator().manual_seed(100 * step + rank)
    found = {n: torch.randn(s, generator=random) * scale for n, s in SHAPES.items()}
    for name in zero:
        found[name] = found[name].sign() * 0.0
    return {name: each.to(dtype) for name, each in found.items()}


def held(state):
    """A copy of this rank's residuals."""
    return {
        (kind, name): torch.as_tensor(each).clone()
        for kind, of in state._feedback.codec.residuals.items()
        for name, each in of
    }


def same_tensors(one, other):
    """Whether two mappings have the same names and bits."""
    return one.keys() == other.keys() and all(
        digest_of([one[name]]) == digest_of([other[name]]) for name in one
    )


class Pair:
    """A state on CPUs and one as on a device, of the same parameters."""

    def __init__(self, comm, codec, topology, dtype=torch.float32, kernels="cpu", **options):
        self.codec = codec
        given = parameters(dtype), codec, topology, group_of(comm, "gloo")
        self.cpu = state_of(*given, **OPTIONS, **options)
        self.device = as_on_a_device(*given, kernels, **OPTIONS, **options)
        assert self.device._streams is not None

    def step(self, gradients, bad=False):
        """What differs after a step with these gradients; of bad ones messages may."""
        cut = [["w"], ["b"], ["z", "v"]]  # of the second some ranks have no element
        outs, sent = [], []
        for state in (self.cpu, self.device):
            mine = {name: each.clone() for name, each in gradients.items()}
            with sent_by_states() as messages, ExitStack() as of_step:
                of_step.enter_context(state.step())
                waits = state._streams.waits if state is self.device else 0
                with ExitStack() as watched:
                    if state is self.device and not state._feedback._is_dense:
                        watched.enter_context(NoWaits())
                    for names in cut:
                        joined = state._streams.joined if state is self.device else 0
                        known = state.all_reduce({name: mine[name] for name in names})
                        assert (known is None) == (state is self.device)
                        if state is self.device:  # the stream knows what it uses
                            assert state._streams.used == [mine[name].data_ptr() for name in names]
                            assert state._streams.joined == joined + 1
                    of_step.close()
                assert state is self.cpu or state._streams.waits == waits
            outs.append(mine)
            sent.append(messages)
        found = [] if same_tensors(*outs) else ["averages"]
        # Those of top-k have other lengths on devices.
        if self.codec != "top_k" and not bad and (sent[0] != sent[1] or not sent[0]):
            found.append("messages")
        return found + self.differs()

    def differs(self):
        """What differs between the two states."""
        found = []
        if self.codec == "top_k" and self.cpu.density != self.device.density:
            found.append("the next step's density")
        counts = [state.stats() for state in (self.cpu, self.device)]
        for each in counts:  # a device makes room for what turns out to be all zero
            each.pop("residual_bytes")
            if self.codec == "top_k":
                each.pop("payload_bytes")
        if counts[0] != counts[1]:
            found.append(f"stats {counts}")
        if not same_tensors(held(self.cpu), held(self.device)):
            found.append("residuals")
        return found

    def close(self):
        self.cpu.close()
        self.device.close()


def steps(comm, codec, topology, dtype, kernels, options):
    """What differs in steps with zeros, a NaN on one rank and other loss scales; and the counts."""
    dtype = getattr(torch, dtype)
    pair, found = Pair(comm, codec, topology, dtype, kernels, **options), []
    for number, (zero, scale, bad) in enumerate(
        [([], 1.0, False), (["z", "b"], 1.0, False), ([], 64.0, True), (["v"], 48.0, False)]
    ):
        for state in (pair.cpu, pair.device):
            state.set_loss_scale(scale)
        mine = gradients(comm.rank, number, dtype, zero, scale)
        if codec == "top_k" and number == 0:  # many equal ones, and one that fp16 sums have not
            mine = {name: (each * 4).round() / 4 for name, each in mine.items()}
            mine["w"][0, 5] = 6e4
        if bad and comm.rank == 1:
            mine["v"].view(-1)[7] = torch.nan
        found += [f"step {number}: {each}" for each in pair.step(mine, bad)]
    stats = pair.device.stats()
    pair.close()
    return found, stats["steps"], stats["steps_given_up"], stats["compressed_calls"]


@pytest.mark.parametrize(
    ("codec", "topology", "dtype", "kernels", "options"),
    [
        ("one_bit", "4x1", "float32", "cpu", {}),
        ("int8", "2x2", "bfloat16", "cpu", {}),
        ("one_bit", "1,3", "float16", "cpu", {}),
        ("top_k", "4x1", "float32", "cpu", {}),
        pytest.param(
            *("top_k", "2x2", "bfloat16", "cpu", {"values": "float32"}), marks=pytest.mark.storm
        ),
        ("top_k", "4x1", "bfloat16", "cpu", {"by": "chunk", "decay": 0.9, "density": 0.2}),
        ("top_k", "1,3", "float16", "cpu", {"values": "float16", "warm_up": 2}),
        pytest.param(
            *("top_k", "1,1,2", "float16", "cpu", {"by": "chunk", "density": 0.2}),
            marks=pytest.mark.storm,
        ),
        *(
            pytest.param(codec, topology, dtype, "triton", options, marks=pytest.mark.storm)
            for codec, topology, dtype, options in [
                ("one_bit", "2x2", "float32", {}),
                ("int8", "1,3", "float16", {}),
                ("top_k", "2x2", "float32", {"decay": 0.9}),
                ("top_k", "1,1,2", "bfloat16", {"by": "chunk", "density": 0.2}),
                ("top_k", "4x1", "float16", {"values": "float32"}),
            ]
        ),
    ],
)
def test_steps_are_those_of_cpus(ranks, codec, topology, dtype, kernels, options):
    for found, counted, given_up, calls in ranks(steps, codec, topology, dtype, kernels, options):
        assert found == []
        assert (counted, given_up, calls) == (3, 1, 8)


def first_step(comm, codec, topology, options):
    """What differs in a step whose kernels are interpreted."""
    pair = Pair(comm, codec, topology, kernels="triton", **options)
    found = pair.step(gradients(comm.rank, 0, torch.float32))
    pair.close()
    return found


@pytest.mark.parametrize(
    ("topology", "options"),
    [("2x2", {}), pytest.param("4x1", {"by": "chunk"}, marks=pytest.mark.storm)],
)
def test_a_step_of_top_k_with_interpreted_kernels_is_that_of_cpus(ranks, topology, options):
    assert ranks(first_step, "top_k", topology, options) == [[]] * 4


def cancelled(comm, codec):
    """What differs in steps in the second of which the sums of w over each host are zero."""
    pair, found = Pair(comm, codec, "2x2"), []
    for step in range(2):
        mine = gradients(comm.rank if step == 0 else comm.rank // 2, step, torch.float32)
        if step and comm.rank % 2:
            mine["w"] = -mine["w"]
        found += pair.step(mine)
    pair.close()
    return found


@pytest.mark.parametrize("codec", ["int8", "top_k"])
def test_what_cancels_within_hosts_is_that_of_cpus(ranks, codec):
    assert ranks(cancelled, codec) == [[]] * 4


class NoFp64(TorchDispatchMode):
    """No result is of fp64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            assert not isinstance(each, torch.Tensor) or each.dtype != torch.float64, func
        return out


@pytest.mark.parametrize(
    ("scale", "other", "is_narrow"),
    [
        *((64.0, each, True) for each in (128.0, 1.0, 48.0, 7.0, 2.0**-80, 3.0**60)),
        *((2.0**-80, each, False) for each in (2.0**80, 3.0**50)),
        (2.0**80, 3.0**-50, False),
    ],
)
def test_residuals_in_another_scale_are_those_of_cpus_and_take_no_fp64(scale, other, is_narrow):
    words = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)  # also of subnormals
    values = words.view(np.float32)
    values = values[np.isfinite(values)]
    with loading("cpu"):
        there, here = TritonKernels(CPU), CpuKernels()
    with NoFp64() if is_narrow else nullcontext():
        found = Scaled(torch.from_numpy(values), scale).to(other, there)
    want = torch.from_numpy(Scaled(values, scale).to(other, here))
    assert digest_of([found]) == digest_of([want])


def messages_of_top_k(comm):
    """A CPU's message, the device's and how many bytes it counts, of the same gradients."""
    pair, found = Pair(comm, "top_k", "4x1"), []
    for state in (pair.cpu, pair.device):
        with sent_by_states() as sent:
            state.all_reduce(gradients(comm.rank, 0, torch.float32))
        kind, _, message = sent[-1]
        found.append((kind, len(sent), message))
    counted = pair.device.stats()["payload_bytes"]
    pair.close()
    return *found, counted


def test_messages_of_top_k_are_those_of_cpus_and_zeros(ranks):
    for cpu, device, counted in ranks(messages_of_top_k):
        lengths_first, alone = 2, 1
        assert (cpu[:2], device[:2]) == (("gather", lengths_first), ("gather", alone))
        assert device[2][: len(cpu[2])] == cpu[2]
        assert not any(device[2][len(cpu[2]) :])
        assert counted == 3 * len(device[2])


@contextmanager
def damaged_message(number):
    """Within, the entries of the message with this number are packed as nothing is."""
    pack = CpuKernels.pack

    def packed(self, places, values, parts, counts, messages, found):
        pack(self, places, values, parts, counts, messages, found)
        messages[parts[number, 3] + TAIL] = 7

    with mock.patch.object(CpuKernels, "pack", packed):
        yield


def damaged(comm):
    """What is said of a message that holds what it cannot, at the next step."""
    pair = Pair(comm, "top_k", "4x1")
    mine = gradients(comm.rank, 0, torch.float32)
    with damaged_message(0) if comm.rank == 2 else nullcontext():
        pair.device.all_reduce(mine)
    with pytest.raises(CollectiveMismatch) as raised:
        pair.device.flush()
    pair.close()
    return str(raised.value), all(each.isnan().all().item() for each in mine.values())


def test_a_damaged_message_is_told_to_every_rank(ranks):
    for said, lost in ranks(damaged):
        assert "a damaged message" in said
        assert lost


def damaged_shard(comm):
    """What a rank finds after a step in which rank 1 alone got what no message can hold."""
    pair = Pair(comm, "top_k", "4x1")
    out, mine = torch.ones(165), gradients(comm.rank, 0, torch.float32)["w"]
    with damaged_message(1) if comm.rank == 2 else nullcontext():
        compressed_reduce_scatter(out, mine, pair.device, "w")
    with pytest.raises(CollectiveMismatch) as raised:
        pair.device._feedback.meet()  # begins every call, and waits for no other rank
    pair.close()
    return str(raised.value), out.isnan().all().item()


def test_every_rank_hears_of_a_damaged_message_that_one_has_read(ranks):
    for said, lost in ranks(damaged_shard):
        assert "rank(s) [1] have read" in said
        assert lost


def memory_kept(comm, codec):
    """Of each call of a step whether its memory is still there when the step has ended."""
    state = as_on_a_device(parameters(), codec, "2x2", group_of(comm, "gloo"), **OPTIONS)
    mine, memory, given = gradients(comm.rank, 0, torch.float32), TritonKernels.memory, []

    def noted(*sizes):
        made = memory(*sizes)
        given.append(StorageWeakRef(made[0].untyped_storage()))
        return made

    with mock.patch.object(TritonKernels, "memory", noted), state.step():
        for names in (["w", "b"], ["z", "v"]):
            state.all_reduce({name: mine[name] for name in names})
    kept = [not each.expired() for each in given]
    assert state.stats()["steps"] == 1
    state.close()
    return kept


@pytest.mark.parametrize("codec", ["one_bit", "top_k"])
def test_memory_of_a_call_is_let_go_once_it_is_issued(ranks, codec):
    assert ranks(memory_kept, codec) == [[False] * 2] * 4


class Model(torch.nn.Module):
    """Its gradients are what it is given."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients):
        return sum(Gradient.apply(p, gradients[n]) for n, p in self.named_parameters())


def hooked(comm, codec, topology):
    """What differs between DDP's gradients by a hook on CPUs and as on a device; the counts."""
    group, found = group_of(comm, "gloo"), []
    trained = []
    for make in (state_of, as_on_a_device):
        ddp = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=0.001)
        state = make(ddp, codec, topology, group, **OPTIONS)
        ddp.register_comm_hook(state, HOOKS[codec])
        trained.append((ddp, state))
    for step in range(3):
        mine, averages = gradients(comm.rank, step, torch.float32), []
        if step == 1 and comm.rank == 2:
            mine["v"][5] = torch.inf
        for ddp, _ in trained:
            ddp.zero_grad()
            ddp(mine).backward()
            averages.append({n: p.grad for n, p in ddp.module.named_parameters()})
        if not same_tensors(*averages):
            found.append(f"gradients of step {step}")
    counts = [state.stats()["steps"] for _, state in trained]
    if not same_tensors(*(held(state) for _, state in trained)):
        found.append("residuals")
    for _, state in trained:
        state.close()
    return found, *counts


@pytest.mark.parametrize(
    ("codec", "topology", "steps"),
    [
        ("one_bit", "1x4", 3),
        ("top_k", "2x2", 2),
        pytest.param("one_bit", "2x2", 2, marks=pytest.mark.storm),
    ],
)
def test_the_hook_is_that_of_cpus(ranks, codec, topology, steps):
    # Where averages are dense for good, every step counts.
    assert ranks(hooked, codec, topology) == [([], steps, steps)] * 4


def in_other_worlds(comm, codec):
    """What differs when states on CPUs and as on a device load what either has saved, in the same
    world and on one host, and when both flush."""
    found = []
    pair = Pair(comm, codec, "4x1", dense_steps=1)
    for step in range(3):
        pair.step(gradients(comm.rank, step, torch.float32))
    saved = [state.state_dict() for state in (pair.cpu, pair.device)]
    if not same_saved(*saved):
        found.append("state_dict")
    # What a device has saved goes on on a CPU, and the other way round.
    pair.cpu.load_state_dict(saved[1])
    pair.device.load_state_dict(saved[0])
    found += pair.step(gradients(comm.rank, 3, torch.float32))
    flushed = [state.flush() for state in (pair.cpu, pair.device)]
    if not same_tensors(*flushed):
        found.append("flush")
    if held(pair.device):
        found.append("what is held after flush")
    pair.close()
    alone = Pair(comm, codec, "1x4", dtype=torch.bfloat16)
    for state in (alone.cpu, alone.device):
        state.load_state_dict(saved[0])
    for step in range(4, 7):
        zero = ["w"] if step == 4 else []  # whose error then goes with the next step
        mine = gradients(comm.rank, step, torch.bfloat16, zero)
        found += [f"one host: {each}" for each in alone.step(mine, bad=True)]
        carried = [sorted(state._feedback.carried) for state in (alone.cpu, alone.device)]
        if carried != [["w"] if step == 4 else []] * 2:
            found.append(f"{carried} are carried after step {step}")
    alone.close()
    return found


@pytest.mark.parametrize(
    "codec", ["one_bit", "top_k", pytest.param("int8", marks=pytest.mark.storm)]
)
def test_checkpoints_go_between_devices_cpus_and_worlds(ranks, codec):
    assert ranks(in_other_worlds, codec) == [[]] * 4


def scattered(comm, codec, topology, kernels):
    """What differs between shards of averages on CPUs and as on a device."""
    pair, found = Pair(comm, codec, topology, kernels=kernels), []
    for step in range(4):
        outs = []
        for state in (pair.cpu, pair.device):
            mine = gradients(comm.rank, step, torch.float32, ["v"] if step == 1 else [])
            if step == 2 and comm.rank == 3:
                mine["w"][1, 1] = -torch.inf
            shards = {n: torch.ones(mine[n].numel() // 4) for n in ("v", "w")}
            with state.step(), ExitStack() as watched:
                if state is pair.device:
                    watched.enter_context(NoWaits())
                for name, out in shards.items():
                    compressed_reduce_scatter(out, mine[name], state, name)
            outs.append(shards)
        if not same_tensors(*outs):
            found.append(f"shards of step {step}")
        found += pair.differs()
    flushed = [state.flush() for state in (pair.cpu, pair.device)]
    if not same_tensors(*flushed):
        found.append("flush")
    stats = pair.device.stats()
    pair.close()
    return found, stats["steps"], stats["steps_given_up"]


@pytest.mark.parametrize(
    ("codec", "topology", "kernels"),
    [
        *(("int8", "2x2", "cpu"), ("top_k", "2x2", "cpu"), ("one_bit", "1x4", "cpu")),
        *(
            pytest.param(codec, topology, "triton", marks=pytest.mark.storm)
            for codec, topology in [("int8", "2x2"), ("top_k", "2x2"), ("one_bit", "4x1")]
        ),
    ],
)
def test_shards_are_those_of_cpus(ranks, codec, topology, kernels):
    assert ranks(scattered, codec, topology, kernels) == [([], 3, 1)] * 4


TWINS = {"w": (256,), "u": (256,)}


def mismatched(comm, topology, what, dense, who, codec):
    """What a rank sees of a step in which rank `who` differs, and of the one after it."""
    pairs = [(name, torch.zeros(shape, requires_grad=True)) for name, shape in TWINS.items()]
    options = {"chunk": 64, "compress": lambda name, shape: True, "dense_steps": 9 * dense}
    state = as_on_a_device(pairs, codec, topology, group_of(comm, "gloo"), **options)
    random = torch.Generator().manual_seed(comm.rank)
    state.all_reduce({name: torch.randn(256, generator=random) for name in TWINS})
    state.stats()
    before = held(state)
    differs = comm.rank == who
    state.set_loss_scale(2.0 if what == "scale" and differs else 1.0)
    name = "u" if what == "parameters" and differs else "w"
    mine = torch.ones(256)
    state.all_reduce({name: mine})
    state.set_loss_scale(1.0)
    if comm.rank == 0:
        state.stats()  # looks, and raises nothing: the next call does, on every rank
    with pytest.raises(CollectiveMismatch) as raised:
        state.all_reduce({"w": torch.ones(256)})
    kept = same_tensors(before, held(state))
    after = {"w": torch.ones(256)}
    state.all_reduce(after)
    stats = state.stats()
    state.close()
    lost = mine.isnan().all().item()
    return lost, kept, str(raised.value), stats["steps"], after["w"].isfinite().all().item()


@pytest.mark.parametrize(
    ("topology", "what", "dense", "who", "codec"),
    [
        ("2x2", "scale", True, 3, "one_bit"),
        ("2x2", "parameters", False, 3, "one_bit"),
        pytest.param(*("2x2", "parameters", False, 3, "top_k"), marks=pytest.mark.storm),
        ("1,3", "scale", False, 3, "one_bit"),  # which only the ranks of a host meet
        pytest.param(*("1,3", "scale", False, 3, "top_k"), marks=pytest.mark.storm),
        ("1,3", "parameters", True, 3, "one_bit"),
        ("1,3", "scale", True, 0, "one_bit"),  # which others of the second host do not
    ],
)
def test_every_rank_learns_of_a_mismatch_at_the_next_step(ranks, topology, what, dense, who, codec):
    for lost, kept, said, steps, goes_on in ranks(mismatched, topology, what, dense, who, codec):
        assert (lost, kept, steps, goes_on) == (True, True, 2, True)
        assert "all ranks must make the same calls" in said or "loss scale" in said


def mismatched_before_a_hook(comm):
    """Whether a hook that only averages raises what the call before it met, and then goes on."""
    model = Model()
    state = as_on_a_device(model, "one_bit", "1x4", group_of(comm, "gloo"))
    bucket = Bucket(model, gradients(comm.rank, 0, torch.float32))
    state.set_loss_scale(2.0 if comm.rank == 3 else 1.0)
    state.all_reduce({"w": torch.ones(5, 132)})
    with pytest.raises(CollectiveMismatch):
        HOOKS["one_bit"](state, bucket)
    HOOKS["one_bit"](state, bucket).wait()
    state.close()
    return bucket.buffer().isfinite().all().item()


def test_a_hook_that_only_averages_tells_of_a_mismatch(ranks):
    assert ranks(mismatched_before_a_hook) == [True] * 4


def given_up(comm):
    """What a rank sees after a step with a mismatch that rank 1 alone gives up."""
    pairs = [(name, torch.zeros(shape, requires_grad=True)) for name, shape in TWINS.items()]
    options = {"chunk": 64, "compress": lambda name, shape: True}
    state = as_on_a_device(pairs, "int8", "2x2", group_of(comm, "gloo"), **options)
    with suppress(KeyError), state.step():
        state.all_reduce({"u" if comm.rank == 3 else "w": torch.ones(256)})
        if comm.rank == 1:
            raise KeyError
    with pytest.raises(CollectiveMismatch):
        state.all_reduce({"w": torch.ones(256)})
    state.all_reduce({"w": torch.ones(256)})
    stats = state.stats()
    state.close()
    return stats["steps"], stats["steps_given_up"]


def test_every_rank_learns_of_a_mismatch_in_a_step_that_one_gives_up(ranks):
    assert ranks(given_up) == [(1, 0)] * 4


def waited(comm, gives_up):
    """What is said where the device does not end a step's calls in time."""
    pairs = [(name, torch.zeros(shape, requires_grad=True)) for name, shape in TWINS.items()]
    state = as_on_a_device(pairs, "int8", "4x1", group_of(comm, "gloo"), chunk=64)
    said = []

    def late(call):
        with (
            mock.patch.object(TorchGroup, "timeout", 0.01),
            pytest.raises(CollectiveTimeout) as raised,
        ):
            call()
        said.append(str(raised.value))

    with suppress(KeyError), state.step():
        state.all_reduce({name: torch.ones(256) for name in TWINS})
        if gives_up:
            raise KeyError
    if not gives_up:
        state._streams.done = False
        late(state.stats)
        late(lambda: state.all_reduce({"w": torch.ones(256)}))
        state._streams.done = True
        assert state.stats()["steps"] == 1
    state._streams.done = False
    late(state.close)
    state.close()
    with mock.patch.object(TorchGroup, "timeout", 0.01):
        assert state.stats()["steps"] == (not gives_up)  # waits for nothing any more
    return said


@pytest.mark.parametrize("gives_up", [False, True])
def test_the_host_waits_no_longer_than_the_group(ranks, gives_up):
    call = "all_reduce of 'w' and 1 more in step 1"
    waits = [call] if gives_up else [call, call, "all calls before close"]
    for said in ranks(waited, gives_up):
        assert [each.partition(" has not ended it")[0] for each in said] == [
            f"Int8State: {what}: the device" for what in waits
        ]


def refusals(comm):
    """What is said of states that cannot be on devices."""
    group = group_of(comm, "gloo")
    pairs = [(name, torch.zeros(64, 64, requires_grad=True)) for name in ("w", "u")]
    said = []
    places = [torch.device("cuda", number) for number in (0, 1)]
    with (
        mock.patch.object(states, "_device_of", side_effect=places),
        mock.patch.object(states, "group_maker", lambda group, device: group_maker(group, None)),
        pytest.raises(ConfigurationError) as raised,
    ):
        as_on_a_device(pairs, "int8", "4x1", group)
    said.append(str(raised.value))
    with mock.patch.dict(sys.modules, {"pycollective.triton": None}):
        kinds = CollectiveMismatch if comm.rank else ConfigurationError
        with (
            mock.patch.object(states, "streams_of", return_value=None if comm.rank else Streams()),
            pytest.raises(kinds) as raised,
        ):
            state_of(pairs, "int8", "4x1", group)
    said.append(str(raised.value))
    return said


def test_what_cannot_be_on_a_device_is_refused_by_name(ranks):
    for places, triton in ranks(refusals):
        assert "the parameters are on cuda:0 and cuda:1" in places
        assert "Triton, which cannot be imported" in triton


def mixed(comm, backend, kind):
    """What a rank is told whose tensors are on another kind of device than others'."""
    standing_group(comm)
    group = dist.new_group(backend=f"cpu:gloo,{kind}:{backend}")
    pairs = [("w", torch.zeros(64, 64, requires_grad=True))]
    device = torch.device(kind, 0) if comm.rank == 1 else torch.device("cpu")
    with (
        mock.patch.object(states, "_device_of", return_value=device),
        mock.patch.object(states, "streams_of", return_value=Streams() if comm.rank == 1 else None),
        pytest.raises(CollectiveMismatch) as raised,
    ):
        state_of(pairs, "int8", "4x1", group)
    return str(raised.value)


@pytest.mark.parametrize(("backend", "kind"), [("fake", "xpu"), ("gloo", "cuda")])
def test_ranks_on_cpus_and_on_devices_are_told(ranks, backend, kind):
    for said in ranks(mixed, backend, kind):
        assert "rank(s) [1] were given something else" in said
        assert f"'backend': '{backend}', 'device': '{kind}'}}; rank 0 {{" in said
        assert said.endswith("'backend': 'gloo', 'device': 'cpu'}")


def elsewhere(comm):
    """What a rank says whose tensors no backend of the group takes, and what others are told."""
    pairs = [("w", torch.zeros(64, 64, requires_grad=True))]
    device = torch.device("xpu" if comm.rank == 1 else "cpu")
    kinds = ConfigurationError if comm.rank == 1 else CollectiveMismatch
    with (
        mock.patch.object(states, "_device_of", return_value=device),
        mock.patch.object(states, "streams_of", return_value=Streams() if comm.rank == 1 else None),
        pytest.raises(kinds) as raised,
    ):
        state_of(pairs, "int8", "4x1", group_of(comm, "gloo"))
    return str(raised.value)


def test_all_ranks_hear_of_one_whose_device_the_backend_does_not_take(ranks):
    assert all("does not take tensors on xpu" in said for said in ranks(elsewhere))


META = torch.device("meta")


def in_memory():
    """Within, tensors have an address, as on devices; those of "meta" have none."""
    return mock.patch.object(torch.Tensor, "data_ptr", return_value=64)


def test_tensors_of_a_device_have_memory_and_its_numbers():
    there = torch.ones(8, device=META)
    with in_memory():
        assert FlatTensor(there, META).count == 8
        with pytest.raises(ConfigurationError, match="resolve_neg"):
            FlatTensor(torch._neg_view(there), META)
    with pytest.raises(ConfigurationError, match="memory of its own"):
        FlatTensor(there, META)
    assert FlatTensor(there[:0], META).count == 0


class OnlyOnMeta(TorchDispatchMode):
    """All operands and results are on the device "meta", where there are no data to wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, out)):
            assert not isinstance(each, torch.Tensor) or each.device == META, func
        return out


class MetaGroup(TorchGroup):
    """A group of rank 0's, whose messages have no data."""

    def __init__(self, size):
        self.rank, self.size = 0, size

    def all_to_all(self, rows):
        return torch.empty_like(rows)

    def all_gather(self, row):
        if isinstance(row, np.ndarray):
            return np.stack([row] * self.size)
        return row.new_empty((self.size, row.numel()))

    def average(self, parts): ...

    def abort(self, reason): ...


def on_meta(array, device=META):
    return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=device)


class OnMeta:
    """Modules of kernels that give what has no data.

    Attributes:
        given: what they were given, by name.
    """

    def __init__(self):
        self.given = []
        tables = SimpleNamespace(numbers=on_meta)
        self.tables = SimpleNamespace(Tables=lambda device: tables, upload=on_meta)

    def load(self, name):
        return self.tables if name == "tables" else self

    def __getattr__(self, name):
        return lambda *given, **more: self.given.append((name, (given, more)))

    def merge(self, came, wanted, begins, rank, tables):
        self.given.append(("merge", (came, wanted)))
        return torch.empty(2 + len(came), came.shape[1], dtype=torch.int64, device=META)

    def take(self, told, bits, prefixes, rank):
        self.given.append(("take", (told, prefixes)))
        return [torch.empty_like(prefixes) for _ in range(3)]

    def sparse_select(self, *given):
        self.given.append(("sparse_select", given))
        return torch.empty(1, dtype=torch.int64, device=META)


HEADERS = {"headers", "fill_nan"}
QUANTIZED = {"quantize", "dequantize"}
TOP_K = {"pack", "average", "dequantize"}
AGREEING = {"sparse_add", "sparse_histogram", "merge", "take", "sparse_select"}


@pytest.mark.parametrize(
    ("host_of", "dense"),
    [
        *(((0, 1, 2, 3), False), ((0, 0, 1, 1), False), ((0, 1, 1, 0), False)),
        *(((0, 0, 0, 0), False), ((0, 1, 1, 1), True)),
    ],
)
def test_no_operation_needs_data_or_memory_of_the_host(host_of, dense):
    called = steps_on_meta(host_of, dense, QuantizedOptions("one_bit", 64))
    compressed = len(set(host_of)) > 1 and not dense
    assert called >= HEADERS | (QUANTIZED if compressed else {"check_finite"})


@pytest.mark.parametrize("by", ["tensor", "chunk"])
@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 1, 1)])
def test_no_operation_of_top_k_needs_data_or_memory_of_the_host(host_of, by):
    options = TopKOptions(0.1, by, 64, "bfloat16", "auto", 2, 0.5)
    called = steps_on_meta(host_of, False, options)
    agrees = host_of == (0, 0, 1, 1) and by == "tensor"
    assert called >= HEADERS | TOP_K | (AGREEING if agrees else {"top_k"})
    assert agrees or not called & AGREEING


def steps_on_meta(host_of, dense, options):
    """Steps with tensors that have no data; the kernels that were called."""
    hosts, kernels = Hosts(0, host_of), OnMeta()
    groups = Groups.make(
        hosts, MetaGroup(4), lambda parts: MetaGroup(len(next(p for p in parts if 0 in p)))
    )

    def unsent(found, what):  # what is found cannot be known
        assert found.device == META
        return lambda: np.zeros(found.shape, np.int32)

    with mock.patch.object(device_kernels, "load", kernels.load):
        state = ErrorFeedback(
            *("a state", SHAPES, GroupMaker(groups.all, lambda: None, lambda _: groups)),
            *(options, Common("hosts", OPTIONS["compress"], 9 * dense)),
            kernels=lambda: TritonKernels(META),
            learning=lambda groups: Later(Streams(), "a state", groups.all),
        )
    with mock.patch.object(state._learning, "send", unsent), in_memory():
        for dtype in (torch.float32, torch.bfloat16):
            state.carried.add({"w": np.ones(660, np.float32)}, 1.0)
            found = {
                name: FlatTensor(torch.empty(shape, dtype=dtype, device=META), META)
                for name, shape in SHAPES.items()
            }
            for scale in (1.0, 2.0):
                state.set_loss_scale(scale)
                state.begin()
                with OnlyOnMeta():
                    state.reduce(found)
                state.end()
            state.reset()
            if len(set(map(host_of.count, host_of))) == 1:
                out = FlatTensor(torch.empty(75, dtype=dtype, device=META), META)
                state.begin()
                with OnlyOnMeta():
                    state.reduce_scatter(out, found["v"], "v")
                state.end()
                state.reset()
    for _, given in kernels.given:
        assert all(t.device == META for t in tree_leaves(given) if isinstance(t, torch.Tensor))
    return {name for name, _ in kernels.given}


def same_saved(one, other):
    """Whether two checkpoints have the same bits."""
    errors = [
        {(kind, name): each for kind, of in kinds.items() for name, each in of.items()}
        for kinds in (
            {**saved["residuals"], "undelivered": saved["undelivered"]} for saved in (one, other)
        )
    ]
    plain = [
        {name: each for name, each in saved.items() if name not in ("residuals", "undelivered")}
        for saved in (one, other)
    ]
    return same_tensors(*errors) and plain[0] == plain[1]
