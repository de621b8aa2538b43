"""Which rank answers for which element: each element one owner, by name, size and hosts alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pycollective.compression.arrays import Item
from pycollective.compression.bucket import Bucket, Cuts
from pycollective.compression.placing import Places, regions_of, shares_of
from pycollective.placement import number_hosts

hosts_of = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(number_hosts)
names = st.text(max_size=8)
counts = st.integers(0, 5000)
chunks = st.integers(1, 8).map(lambda n: 64 * n)


class Zeros:
    """A flat gradient that is never looked at."""

    def __init__(self, count: int) -> None:
        self.count = count


def exactly_once(ranges, count):
    """Whether the ranges have each of the elements, none twice."""
    times = np.zeros(count, int)
    for start, stop in ranges:
        times[start:stop] += 1
    return bool((times == 1).all())


@given(hosts_of, names, counts, chunks)
def test_shares_have_each_element_once_and_regions_each_of_a_share(host_of, name, count, chunk):
    places = Places(0, host_of)
    shares = shares_of(name, count, chunk, places)
    assert len(shares) == places.shares
    assert exactly_once(shares, count)
    owned = []
    for share in shares:
        regions = regions_of(name, share, chunk, places)
        assert len(regions) == places.hosts
        assert all(share[0] <= start <= stop <= share[1] for start, stop in regions if start < stop)
        owned += regions
    assert exactly_once(owned, count)


@given(hosts_of, names, counts, chunks)
def test_cuts_are_at_chunk_starts_and_even(host_of, name, count, chunk):
    places = Places(0, host_of)
    for start, stop in shares_of(name, count, chunk, places):
        assert start == stop or start % chunk == 0
        assert stop % chunk == 0 or stop == count
        for lower, upper in regions_of(name, (start, stop), chunk, places):
            assert lower == upper or lower % chunk == 0
    whole = [-(-(stop - start) // chunk) for start, stop in shares_of(name, count, chunk, places)]
    assert max(whole) - min(whole) <= 1


@given(hosts_of, names, counts, chunks)
def test_all_ranks_cut_alike(host_of, name, count, chunk):
    every = {
        (tuple(shares), tuple(tuple(regions_of(name, s, chunk, places)) for s in shares))
        for places in (Places(rank, host_of) for rank in range(len(host_of)))
        for shares in [shares_of(name, count, chunk, places)]
    }
    assert len(every) == 1


@given(hosts_of, st.lists(st.tuples(names, counts), min_size=2, max_size=6), st.randoms(), chunks)
def test_a_bucket_does_not_change_who_owns_what(host_of, parameters, random, chunk):
    """DDP rebuilds its buckets: an element whose owner changed would lose its residual."""
    places = Places(0, number_hosts([*host_of, *host_of]))  # two shares or more
    items = [Item(name, Zeros(count), False) for name, count in dict(parameters).items()]
    alone = {item.name: Bucket([item], Cuts(chunk, places)).shares[0] for item in items}
    random.shuffle(items)
    together = Bucket(items, Cuts(chunk, places))
    assert {i.name: s for i, s in zip(items, together.shares, strict=True)} == alone


@given(hosts_of)
def test_each_share_has_one_rank_on_each_host(host_of):
    seen = []
    every = [Places(rank, host_of) for rank in range(len(host_of))]
    for share in range(every[0].shares):
        ranks = every[0].across(share)
        assert [host_of[rank] for rank in ranks] == list(range(every[0].hosts))
        assert all(every[rank].share == share for rank in ranks)
        seen += ranks
    assert len(set(seen)) == len(seen)
    assert all((each.share is None) == (each.rank not in seen) for each in every)


def test_names_turn_what_is_left_over():
    """One chunk each: if names did not matter, all would fall to one rank."""
    places = Places(0, (0, 1, 2, 3))
    owners = set()
    for number in range(64):
        regions = regions_of(f"layer{number}", (0, 64), 64, places)
        owners |= {host for host, (start, stop) in enumerate(regions) if start < stop}
    assert owners == {0, 1, 2, 3}
