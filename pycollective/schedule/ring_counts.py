"""What the ring takes, counted by formula (`counts.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pycollective.order import parent

from .blocks import largest_block
from .circle import circle_of
from .counts import NOTHING, Load, Phase, Phases
from .topology import Topology


def sent_by(places: Sequence[int], place: int) -> tuple[int, int]:
    """Leaves and nodes, each of one shard, that the rank at `place` sends to be reduced.

    It sends n - 1 partials, of the arcs of 1 to n - 1 places that end with its own. Such an arc
    holds a node of the order if it begins no later than the first of the node's leaves behind
    `place`: when that one lies ``k + 1`` places on, this is so for k arcs. The nodes of a partial
    are those whose parent is not in it, and each parent has two children; so the sum of k over all
    leaves less the sum over all inner nodes is what is sent.

    Args:
        places: of each rank on the ring.
        place: of the rank that sends.
    """
    n = len(places)
    arcs = [(at - place - 1) % n for at in places]
    leaves = buffers = n * (n - 1) // 2
    leaves -= 2 * sum(map(min, arcs[::2], arcs[1::2]))
    if n % 2 and n > 1:
        leaves -= min(arcs[parent((n - 1, n), n)[0] :])
    while len(arcs) > 1:  # a level of the order after another, from the leaves up
        above = list(map(min, arcs[::2], arcs[1::2]))
        buffers -= sum(above)
        arcs = above + arcs[2 * len(above) :]
    return leaves, buffers - leaves


# Up to so many ranks, each is looked at for who sends most.
_FEW = 64


def _busiest(sent: Mapping[int, tuple[int, int]], ranks: int) -> Load:
    """The load of the place that sends most."""
    loads = (Load(ranks - 1, leaves / ranks, nodes / ranks) for leaves, nodes in sent.values())
    return max(loads, key=lambda load: load.buffers, default=NOTHING)


def _both_ways(load: Load) -> Load:
    """Of a host, which receives as many messages as it sends."""
    return load.times(1, messages=2)


def _reduce_scatter_count(topology: Topology) -> Phases:
    """Exact for few ranks; for many, who sends and who adds most is looked for where it should be.

    Partials are largest before the middle of the largest aligned block of ranks, and before its
    end, and the next rank completes most nodes.
    """
    n = topology.ranks
    if n == 1:
        return ()
    order, place_of, _ = circle_of(topology)
    places = [place_of[rank] for rank in range(n)]
    host = [topology.host_of[rank] for rank in order]
    ends = [place for place in range(n) if host[place] != host[(place + 1) % n]]
    looked_at = set(range(n))
    if n > _FEW:
        looked_at = set()
        for middle in (largest_block(n) // 2 - 1, largest_block(n) - 1):
            before = max((end for end in ends if end < middle), default=n - 1)
            looked_at |= {middle - 1, middle, before}
        # One of each kind, where there is one.
        looked_at.update(ends[:1], sorted(set(range(n)).difference(ends))[:1])
    sent = {place: sent_by(places, place) for place in looked_at}
    adds = max(
        sum(sent[before]) - sum(sent[place]) + n - 1
        for place in looked_at
        if (before := (place - 1) % n) in looked_at
    )
    across = {place: sent[place] for place in looked_at.intersection(ends)}
    local = {place: sent[place] for place in looked_at.difference(ends)}
    return (Phase(_busiest(local, n), _both_ways(_busiest(across, n)), adds / n, n - 1),)


def _all_gather_count(topology: Topology) -> Phases:
    n, hosts = topology.ranks, len(topology.hosts)
    if n == 1:
        return ()
    load = Load(n - 1, results=(n - 1) / n)
    across = _both_ways(load) if hosts > 1 else NOTHING
    return (Phase(load if hosts < n else NOTHING, across, 0, n - 1),)


COUNTS = {
    "all_reduce": lambda topology: _reduce_scatter_count(topology) + _all_gather_count(topology),
    "reduce_scatter": _reduce_scatter_count,
    "all_gather": _all_gather_count,
}
