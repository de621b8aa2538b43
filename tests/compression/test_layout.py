"""How messages fit together, and what a call costs however many hosts there are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollective import _core
from pycollective.compression import quantized, sparse, sparse_layout
from pycollective.compression.arrays import Item
from pycollective.compression.bucket import Bucket, ByBucket
from pycollective.compression.partition import Hosts, Partition
from pycollective.compression.sparse_layout import Layout, Sparse
from pycollective.placement import number_hosts
from tests.compression.players import digest, gradients, make
from tests.compression.test_partition import Zeros, chunks, counts, hosts_of, names

CHUNK = 64
parameters = st.dictionaries(names, st.tuples(counts, st.booleans()), min_size=1, max_size=6)


def bucket_of(sizes, host_of, chunk=CHUNK):
    """The items of names, counts and whether they are dense."""
    items = [Item(name, Zeros(count), dense) for name, (count, dense) in sizes.items()]
    return Bucket(items, Partition(Hosts(0, host_of), chunk))


@given(hosts_of, parameters, chunks)
def test_shards_of_many_parameters_at_once_are_those_of_each(host_of, sizes, chunk):
    partition = Partition(Hosts(0, host_of), chunk)
    shards = bucket_of(sizes, host_of, chunk).shards
    for shard in range(partition.hosts.shards):
        local = list(zip(*map(np.ndarray.tolist, shards.local(shard)), strict=True))
        wants = [partition.local_shards(n, count)[shard] for n, (count, _) in sizes.items()]
        assert local == wants
        for host in range(partition.hosts.count):
            found = zip(*map(np.ndarray.tolist, shards.host(shard, host)), strict=True)
            wants = [partition.host_shards(*each)[host] for each in zip(sizes, local, strict=True)]
            assert list(found) == wants


@given(hosts_of, parameters, st.integers(0, 2**32))
def test_what_is_split_over_messages_and_merged_is_as_before(host_of, sizes, seed):
    bucket = bucket_of(sizes, number_hosts([*host_of, *host_of]))
    layout = Layout(bucket)
    random = np.random.default_rng(seed)
    for space in (*(layout.local_shards, layout.own_local_shard, layout.own_host_shards),):
        of = np.flatnonzero(random.random(space.edges[-1]) < 0.2)
        values = random.standard_normal(of.size, np.float32)
        parts = space.split(of, values)
        assert all(
            (each.places < m.size).all() for each, m in zip(parts, space.messages, strict=True)
        )
        none = [np.zeros(len(sizes), np.bool_)] * len(parts)
        back, same = space.merge(parts, none)
        assert (back == of).all()
        assert (same == values).all()
    whole = [0 if dense else count for count, dense in sizes.values()]
    assert np.diff(layout.local_shards.edges).tolist() == whole


def test_what_is_absent_is_not_merged():
    space = Layout(bucket_of({"a": (1000, False), "b": (500, False)}, (0, 1))).own_local_shard
    every = Sparse(np.arange(1500, dtype=np.uint32), np.ones(1500, np.float32))
    found, _ = space.merge([every], [np.array([True, False])])
    assert found.tolist() == list(range(1000, 1500))


def test_a_parameter_is_in_one_bucket():
    """DDP rebuilds its buckets after the first step: layouts of the old ones must not stay."""
    layouts = ByBucket(Layout)
    first = [bucket_of({"a": (9, False), "b": (9, False)}, (0, 1))]
    rebuilt = [bucket_of({name: (9, False)}, (0, 1)) for name in "ba"]
    made = [layouts.of(each) for each in [*first, *first, *rebuilt, *rebuilt]]
    assert len(set(map(id, made))) == 3
    assert len(layouts) == 2
    layouts.of(first[0])
    assert len(layouts) == 1


class Counting:
    """The kernels; how often each was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(_core, name)


def calls_of(comm, kind, host_of, several):
    """Of a second step: its calls of kernels, what a third leaves in plans, and a digest."""
    shapes = {f"w{number}": (40, 256) for number in range(several)}
    state = make(comm, host_of, kind, shapes)
    state.all_reduce(gradients(1, comm.rank, 0, shapes))
    mine = gradients(1, comm.rank, 1, shapes)
    counting = Counting()
    modules = [sparse, sparse_layout, quantized]
    for each in modules:
        each._core = counting
    try:
        state.all_reduce(mine)
    finally:
        for each in modules:
            each._core = _core
    with state.step():
        for name, x in mine.items():
            state.all_reduce({name: x})
    return dict(counting.calls), len(state._feedback.codec._layouts), digest(mine)


@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1)])
@pytest.mark.parametrize("kind", ["one_bit", "top_k"])
def test_parameters_are_not_unpacked_by_shard(pool, kind, host_of):
    several = 12
    outcomes = pool(4).call(calls_of, kind, host_of, several)
    for calls, plans, _ in outcomes:
        if kind == "one_bit":  # what it sends and the mean that it owns; that mean and the result
            assert calls["quantize"] <= 2 * several
            assert calls["dequantize"] <= 2 * several
        else:
            assert calls["sparse_scatter"] == several
            assert calls["sparse_sum"] <= 2
        assert plans == several
    assert len({found for _, _, found in outcomes}) == 1


def small_alone(comm):
    """A call of one small parameter, of which one local shard has all and the other nothing."""
    found = []
    for kind in ("one_bit", "top_k"):
        state = make(comm, (0, 0, 1, 1), kind, {"b": (9,), "none": (0, 4)})
        mine = gradients(5, comm.rank, 0, state._feedback.shapes)
        found += [state.all_reduce({name: x}) for name, x in mine.items()]
        found.append(bool(mine["b"].any()))
    return found


def test_a_local_shard_may_have_nothing_of_a_call(pool):
    assert pool(4).call(small_alone) == [[True] * 6] * 4
