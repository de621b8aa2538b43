"""Which rank answers for which element: each element one owner, by name, size and hosts alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pycollective.compression.arrays import Item
from pycollective.compression.bucket import Bucket
from pycollective.compression.partition import Hosts, Partition
from pycollective.placement import number_hosts

hosts_of = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(number_hosts)
names = st.text(max_size=8)
counts = st.integers(0, 5000)
chunks = st.integers(1, 8).map(lambda n: 64 * n)


class Zeros:
    """A flat gradient that is never looked at."""

    address = dtype = 0
    array = np.empty(0)

    def __init__(self, count: int) -> None:
        self.count = count


def exactly_once(ranges, count):
    """Whether the ranges have each of the elements, none twice."""
    times = np.zeros(count, int)
    for start, stop in ranges:
        times[start:stop] += 1
    return bool((times == 1).all())


@given(hosts_of, names, counts, chunks)
def test_shards_have_each_element_once(host_of, name, count, chunk):
    partition = Partition(Hosts(0, host_of), chunk)
    local = partition.local_shards(name, count)
    assert len(local) == partition.hosts.shards
    assert exactly_once(local, count)
    owned = []
    for first, last in local:
        every = partition.host_shards(name, (first, last))
        assert len(every) == partition.hosts.count
        assert all(first <= start <= stop <= last for start, stop in every if start < stop)
        owned += every
    assert exactly_once(owned, count)


@given(hosts_of, names, counts, chunks)
def test_cuts_are_at_chunk_starts_and_even(host_of, name, count, chunk):
    partition = Partition(Hosts(0, host_of), chunk)
    local = partition.local_shards(name, count)
    for start, stop in local:
        assert start == stop or start % chunk == 0
        assert stop % chunk == 0 or stop == count
        for lower, upper in partition.host_shards(name, (start, stop)):
            assert lower == upper or lower % chunk == 0
    whole = [-(-(stop - start) // chunk) for start, stop in local]
    assert max(whole) - min(whole) <= 1


@given(hosts_of, names, counts, chunks)
def test_all_ranks_cut_alike(host_of, name, count, chunk):
    every = set()
    for rank in range(len(host_of)):
        partition = Partition(Hosts(rank, host_of), chunk)
        local = partition.local_shards(name, count)
        every.add((*local, *(tuple(partition.host_shards(name, each)) for each in local)))
    assert len(every) == 1


@given(hosts_of, st.lists(st.tuples(names, counts), min_size=2, max_size=6), st.randoms(), chunks)
def test_a_bucket_does_not_change_who_owns_what(host_of, parameters, random, chunk):
    """DDP rebuilds its buckets: an element whose owner changed would lose its residual."""
    hosts = Hosts(0, number_hosts([*host_of, *host_of]))  # two local shards or more
    items = [Item(name, Zeros(count), False) for name, count in dict(parameters).items()]
    alone = {i.name: Bucket([i], Partition(hosts, chunk)).local_shards[0] for i in items}
    random.shuffle(items)
    together = Bucket(items, Partition(hosts, chunk))
    assert {i.name: s for i, s in zip(items, together.local_shards, strict=True)} == alone


@given(hosts_of)
def test_each_local_shard_has_one_rank_on_each_host(host_of):
    seen = []
    every = [Hosts(rank, host_of) for rank in range(len(host_of))]
    for shard in range(every[0].shards):
        ranks = every[0].across(shard)
        assert [host_of[rank] for rank in ranks] == list(range(every[0].count))
        assert all(every[rank].shard == shard for rank in ranks)
        seen += ranks
    assert len(set(seen)) == len(seen)
    assert all((each.shard is None) == (each.rank not in seen) for each in every)


def test_names_rotate_what_is_left_over():
    """One chunk each: if names did not matter, all would fall to one rank."""
    partition = Partition(Hosts(0, (0, 1, 2, 3)), 64)
    owners = set()
    for number in range(64):
        every = partition.host_shards(f"layer{number}", (0, 64))
        owners |= {host for host, (start, stop) in enumerate(every) if start < stop}
    assert owners == {0, 1, 2, 3}
