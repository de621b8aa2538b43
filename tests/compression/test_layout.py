"""How messages fit together, and what a call costs however many hosts there are."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollective import _core
from pycollective.compression import domain, quantized, selection, sparse
from pycollective.compression.arrays import Item
from pycollective.compression.bucket import Bucket, Cuts
from pycollective.compression.domain import Sparse
from pycollective.compression.layout import Plan, Plans
from pycollective.compression.placing import Places, regions_of, regions_on, turn_of
from pycollective.placement import number_hosts
from tests.compression.players import digest, gradients, make
from tests.compression.test_placing import Zeros, chunks, counts, hosts_of, names

CHUNK = 64
parameters = st.dictionaries(names, st.tuples(counts, st.booleans()), min_size=1, max_size=6)


def bucket_of(sizes, places):
    """The items of names, counts and whether they are dense."""
    items = [Item(name, Zeros(count), dense) for name, (count, dense) in sizes.items()]
    return Bucket(items, Cuts(CHUNK, places))


@given(hosts_of, st.lists(st.tuples(names, counts, counts), min_size=1, max_size=6), chunks)
def test_regions_of_many_parameters_at_once_are_those_of_each(host_of, several, chunk):
    places = Places(0, host_of)
    starts = np.array([start for _, start, _ in several])
    stops = starts + [count for _, _, count in several]
    turns = np.array([turn_of(name) // places.shares for name, _, _ in several])
    for host in range(places.hosts):
        found = regions_on(host, starts, stops, turns, chunk, places.hosts)
        for (name, start, count), *its in zip(several, *found, strict=True):
            assert tuple(its) == regions_of(name, (start, start + count), chunk, places)[host]


@given(hosts_of, parameters, st.integers(0, 2**32))
def test_what_is_split_over_domains_and_merged_is_as_before(host_of, sizes, seed):
    places = Places(0, number_hosts([*host_of, *host_of]))
    plan = Plan(bucket_of(sizes, places), places, CHUNK)
    random = np.random.default_rng(seed)
    for layout in (plan.shares, plan.all_regions, plan.own_share, plan.own_regions):
        of = np.flatnonzero(random.random(layout.edges[-1]) < 0.2)
        values = random.standard_normal(of.size, np.float32)
        parts = layout.split(of, values)
        assert all(
            (each.places < d.size).all() for each, d in zip(parts, layout.domains, strict=True)
        )
        none = [np.zeros(len(sizes), np.bool_)] * len(parts)
        back, same = layout.merge(parts, none)
        assert (back == of).all()
        assert (same == values).all()
    whole = [0 if dense else count for count, dense in sizes.values()]
    assert np.diff(plan.all_regions.edges).tolist() == whole
    assert np.diff(plan.shares.edges).tolist() == whole


def test_what_is_absent_is_not_merged():
    places = Places(0, (0, 1))
    sizes = {"a": (1000, False), "b": (500, False)}
    layout = Plan(bucket_of(sizes, places), places, CHUNK).own_share
    every = Sparse(np.arange(1500, dtype=np.uint32), np.ones(1500, np.float32))
    found, _ = layout.merge([every], [np.array([True, False])])
    assert found.tolist() == list(range(1000, 1500))


def test_a_parameter_is_in_one_plan():
    """DDP rebuilds its buckets after the first step: plans of the old ones must not stay."""
    places = Places(0, (0, 1))
    plans = Plans(partial(Plan, places=places, chunk=CHUNK))
    first = [bucket_of({"a": (9, False), "b": (9, False)}, places)]
    rebuilt = [bucket_of({name: (9, False)}, places) for name in "ba"]
    made = [plans.of(each) for each in [*first, *first, *rebuilt, *rebuilt]]
    assert len(set(map(id, made))) == 3
    assert len(plans) == 2
    plans.of(first[0])
    assert len(plans) == 1


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
    modules = [sparse, domain, quantized, selection]
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
    return dict(counting.calls), len(state._exchanged._plans), digest(mine)


@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1)])
@pytest.mark.parametrize("kind", ["one_bit", "top_k", "top_k by region"])
def test_parameters_are_not_unpacked_by_host_and_share(pool, kind, host_of):
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
    """A call of one small parameter, of which one share has all and the other nothing."""
    found = []
    for kind in ("one_bit", "top_k", "top_k by region"):
        state = make(comm, (0, 0, 1, 1), kind, {"b": (9,), "none": (0, 4)})
        mine = gradients(5, comm.rank, 0, state._shapes)
        found += [state.all_reduce({name: x}) for name, x in mine.items()]
        found.append(bool(mine["b"].any()))
    return found


def test_a_share_may_have_nothing_of_a_call(pool):
    assert pool(4).call(small_alone) == [[True] * 9] * 4
