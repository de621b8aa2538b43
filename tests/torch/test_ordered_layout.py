"""Who reduces what in ordered calls, and how many bytes that sends where."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch

from pycollective.order import held
from pycollective.torch import ordered
from pycollective.torch.ordered import header, messages
from pycollective.torch.ordered.layout import (
    Layout,
    Shard,
    inter_host_bytes,
    layout_of,
    offsets,
    spans,
)
from tests.torch.ordered_groups import apart, laid_out, named, size_of, standing

SPLIT = [
    *(((0, 1), (2,)), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2, 3))),
    *(
        ((0, 1, 2), (3, 4, 5)),
        ((0, 1, 2, 3), (4, 5)),
        ((0, 2, 4), (1, 3, 5)),
        ((0, 1), (2, 3), (4,)),
    ),
]
ALL = [*map(apart, (1, 2, 3, 4, 6)), *SPLIT]


def random_hosts(size, seed):
    """The host of each rank: any."""
    choose = random.Random(seed)
    return [choose.randrange(choose.randint(1, 4)) for _ in range(size)]


# --- Pure.


@pytest.mark.parametrize("hosts", ALL, ids=named)
def test_shards_are_all_elements_once_and_all_ranks_agree(hosts):
    layout = Layout(0, hosts)
    for begin, end in ((0, 0), (0, 1), (3, 5), (0, 1_000), (7, 1_012)):
        shards = layout.shards_of(begin, end)
        for rank in range(layout.size):
            assert Layout(rank, hosts).shards_of(begin, end) == shards
        assert spans(shards) == ([(begin, end)] if end > begin else [])
        assert sum(each.size for each in shards) == end - begin
        assert max(each.size for each in shards) - min(each.size for each in shards) <= 1
        assert all(each.at == each.begin and each.rank is None for each in shards)
        owners = [layout.owner(each) for each in shards]
        assert len(set(owners)) == len(owners) == layout.rails * len(hosts)
        # One message has all of a rail.
        for rail in range(layout.rails):
            assert len(spans([each for each in shards if each.rail == rail])) <= 1


@pytest.mark.parametrize("hosts", ALL, ids=named)
def test_shards_for_ranks_are_each_ranks_part_on_its_host(hosts):
    layout = Layout(0, hosts)
    each, begin, end = 10, 3, 8
    shards = layout.shards_for_ranks(each, begin, end)
    assert [shard.rank for shard in shards] == list(range(layout.size))
    for shard in shards:
        assert (shard.begin, shard.end) == (shard.rank * each + begin, shard.rank * each + end)
        assert shard.at == begin
        assert shard.rank in hosts[shard.host]
        owner = layout.owner(shard)
        assert owner in hosts[shard.host]
        # Who reduces something reduces its own part.
        assert owner == shard.rank or hosts[shard.host].index(shard.rank) >= layout.rails


def test_spans_join_neighbours_and_leave_out_what_is_empty():
    def shard(begin, end):
        return Shard(0, 0, begin, end, begin)

    assert spans([]) == []
    assert spans([shard(4, 4)]) == []
    assert spans([shard(5, 9), shard(0, 2), shard(2, 5)]) == [(0, 9)]
    assert spans([shard(0, 2), shard(3, 4), shard(4, 4), shard(4, 6)]) == [(0, 2), (3, 6)]
    assert offsets([shard(0, 2), shard(3, 4), shard(7, 9)]) == [0, 2, 3, 5]


@pytest.mark.parametrize("hosts", ALL, ids=named)
def test_every_rank_knows_its_place(hosts):
    for h, ranks in enumerate(hosts):
        for index, rank in enumerate(ranks):
            layout = Layout(rank, hosts)
            assert (layout.host, layout.index, layout.local) == (h, index, ranks)
            assert layout.apart == (max(map(len, hosts)) == 1)
            # What all hosts have together is every leaf once.
            leaves = [leaf for of in layout.nodes for node in of for leaf in range(*node)]
            assert sorted(leaves) == list(range(layout.size))
            assert all(leaf in hosts[h] for node in layout.nodes[h] for leaf in range(*node))


def counted_inter_host_bytes(layout, host_of, count, leaf, node):
    """By message: who sends how many bytes of an all-reduce to whom, of `count` elements."""
    total = 0
    shards = layout.shards_of(0, count)
    for shard in shards:
        owner = layout.owner(shard)
        for h, ranks in enumerate(layout.hosts):
            peer = ranks[shard.rail]
            if host_of[peer] != host_of[owner]:
                terms = 1 if layout.apart else len(layout.nodes[h])
                total += shard.size * terms * (leaf if layout.apart else node)  # to the owner
                total += shard.size * leaf  # and its result back
    return total


@pytest.mark.parametrize("seed", range(40))
def test_inter_host_bytes_are_those_of_a_count(seed):
    size = random.Random(seed).randint(1, 9)
    host_of = random_hosts(size, seed)
    hosts = tuple(
        tuple(rank for rank in range(size) if host_of[rank] == host)
        for host in dict.fromkeys(host_of)
    )
    layouts = [Layout(0, apart(size)), Layout(0, hosts)]
    parts = [layout.rails * len(layout.hosts) for layout in layouts]
    count = 840 * max(parts) * min(parts)
    bytes_of = [counted_inter_host_bytes(each, host_of, count, 2, 4) for each in layouts]
    for layout, counted in zip(layouts, bytes_of, strict=True):
        assert inter_host_bytes(layout, host_of, 2, 4) * count == pytest.approx(counted, rel=1e-9)
    chosen = layout_of(0, host_of)
    assert chosen in layouts
    assert counted_inter_host_bytes(chosen, host_of, count, 2, 4) == min(bytes_of)
    assert {layout_of(rank, host_of).hosts for rank in range(size)} == {chosen.hosts}


@pytest.mark.parametrize(
    ("host_of", "hosts"),
    [
        ([0], apart(1)),
        ([0, 0, 0, 0], apart(4)),  # nothing leaves the host
        ([0, 1, 2], apart(3)),
        ([0, 0, 1, 1], ((0, 1), (2, 3))),
        ([1, 1, 0, 0], ((0, 1), (2, 3))),  # in the order in which ranks meet them
        ([0, 1, 0, 1], apart(4)),  # no two leaves of a host add up
        ([0, 0, 0, 0, 1, 1, 1, 1], ((0, 1, 2, 3), (4, 5, 6, 7))),
        ([0, 0, 0, 1], apart(4)),  # one rail for all
    ],
)
def test_the_layout_of_hosts(host_of, hosts):
    for rank in range(len(host_of)):
        assert layout_of(rank, host_of) == Layout(rank, hosts)


# --- Bytes, counted by a backend.

# Of an element: of a leaf, and of a sum that crosses to another host.
TYPES = {
    **{("bfloat16", "avg"): (2, 4), ("bfloat16", "max"): (2, 2), ("float32", "sum"): (4, 4)},
    **{("float64", "sum"): (8, 8), ("int8", "sum"): (1, 1)},
}
COUNT = 72_000  # goes into equal shards


def bytes_by_path(hosts, kind, count, leaf, node):
    """What crosses between hosts, and what stays within them, of all ranks; without headers."""
    ranks, rails = size_of(hosts), min(map(len, hosts))
    part = count // ranks
    if max(map(len, hosts)) == 1:
        times = 2 if kind == "all_reduce" else 1
        return ranks * (ranks - 1) * part * leaf * times, 0
    nodes = [len(held(local, ranks)) for local in hosts]
    cross = within = 0
    for h, local in enumerate(hosts):
        if kind == "all_reduce":
            cross += nodes[h] * node * count * (len(hosts) - 1) // len(hosts)
            # A rank that reduces keeps the leaves of its rail; results go to all others.
            within += leaf * (len(local) * count - count)
            within += leaf * (len(local) - 1) * count
        else:
            cross += nodes[h] * node * (count - len(local) * part)
            rail = [
                part * sum(i % rails == number for ranks_ in hosts for i in range(len(ranks_)))
                for number in range(rails)
            ]
            within += leaf * sum(count - (rail[i] if i < rails else 0) for i in range(len(local)))
            within += leaf * (len(local) - rails) * part
    if kind == "all_reduce":
        cross += leaf * count * (len(hosts) - 1)
    return cross, within


def sent_bytes(comm, hosts, kind, dtype, op, count, piece):
    """Bytes to each rank that one call sends, and what `ordered.stats` says of them."""
    group = standing(comm, "counting")
    tensor = torch.zeros(count, dtype=getattr(torch, dtype))
    part = torch.empty(count // comm.size, dtype=tensor.dtype)
    with laid_out(group, hosts, piece):
        before = list(group.sent)
        group.tags.clear()
        if kind == "all_reduce":
            ordered.all_reduce(tensor, op, group)
        else:
            ordered.reduce_scatter(part, tensor, op, group)
        sent = [now - then for now, then in zip(group.sent, before, strict=True)]
        said = ordered.stats(group)["sent_bytes"]
    assert group.tags <= {messages.HEADERS, messages.LEAVES, messages.RESULTS}
    return sent, said


def crossing(outcomes, hosts):
    """(between hosts, within them), of all ranks."""
    host_of = {rank: h for h, ranks in enumerate(hosts) for rank in ranks}
    cross = within = 0
    for rank, (sent, said) in enumerate(outcomes):
        assert sum(sent) == said
        assert sent[rank] == 0
        for other, each in enumerate(sent):
            if host_of[other] == host_of[rank]:
                within += each
            else:
                cross += each
    return cross, within


def header_messages(hosts):
    """How many cross between hosts in one call, and how many stay within them."""
    ranks = size_of(hosts)
    within = sum(len(local) * (len(local) - 1) for local in hosts)
    return ranks * (ranks - 1) - within, within


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("hosts", [*ALL[1:4], *SPLIT[:5]], ids=named)
def test_the_bytes_are_those_of_the_formula(pool, hosts, kind):
    cross_headers, within_headers = header_messages(hosts)
    ranks = size_of(hosts)
    for (dtype, op), (leaf, node) in TYPES.items():
        for piece in (None, leaf * COUNT // 3):
            outcomes = pool(ranks).call(sent_bytes, hosts, kind, dtype, op, COUNT, piece)
            cross, within = bytes_by_path(hosts, kind, COUNT, leaf, node)
            assert crossing(outcomes, hosts) == (
                cross + cross_headers * header.MESSAGE,
                within + within_headers * header.MESSAGE,
            )


@pytest.mark.parametrize("hosts", [apart(3), ((0, 1), (2, 3))], ids=named)
def test_few_bytes_travel_with_the_header_or_right_behind_it(pool, hosts):
    pairs = header_messages(hosts)
    room = header.ROOM // 2
    cases = ((0, 0), (1, 0), (room, 0), (room + 4, header.ROOM + 8), (4_000, 8_000))
    for count, beside in cases:
        outcomes = pool(size_of(hosts)).call(
            sent_bytes, hosts, "all_reduce", "bfloat16", "sum", count, None
        )
        want = tuple(each * (header.MESSAGE + beside) for each in pairs)
        assert crossing(outcomes, hosts) == want


EAGER_BYTES = 64 << 10


def buckets(comm, hosts, counts, piece):
    """Bytes that are kept after each bucket."""
    group = standing(comm, "gloo")
    held = []
    with mock.patch.object(messages, "EAGER_BYTES", EAGER_BYTES), laid_out(group, hosts, piece):
        for count in counts:
            tensor = torch.zeros(count, dtype=torch.bfloat16)
            ordered.all_reduce(tensor, "avg", group)
            held.append(ordered.stats(group)["buffer_bytes"])
    return held


@pytest.mark.parametrize(
    ("hosts", "share"),
    [(apart(2), 1), (apart(4), 1), (((0, 1), (2, 3)), 2), (((0, 1, 2), (3, 4, 5)), 2.7)],
    ids=str,
)
def test_no_more_memory_is_kept_than_some_buckets(pool, hosts, share):
    """As many as docs/reference/ordered.md says; of large ones a piece counts."""
    counts = np.random.default_rng(0).integers(20_000, 500_000, 12).tolist()
    piece = 2 * 300_000
    for after in pool(size_of(hosts)).call(buckets, hosts, counts, piece):
        for number, kept in enumerate(after):
            # Beside them is what goes with headers, and room for as much from others.
            assert 0 < kept <= share * min(2 * max(counts[: number + 1]), piece) + 3 * EAGER_BYTES
