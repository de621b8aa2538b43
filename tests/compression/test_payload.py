"""Bytes that leave a host: how few they are, and that `stats()` counts them right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pycollective.compression.header import header_bytes
from pycollective.compression.kernels import TAIL
from tests.compression.players import KINDS, TOPOLOGIES, ends_of, gradients

COUNT = 4 << 20


class Counting:
    """A group between hosts; what this rank hands over for others, call by call."""

    def __init__(self, group):
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.sent = []
        self.abort = group.abort

    def all_to_all(self, rows):
        self.sent.append(rows.nbytes - rows[self.rank].nbytes)
        return self._group.all_to_all(rows)

    def all_gather(self, row):
        self.sent.append(row.nbytes * (self.size - 1))
        return self._group.all_gather(row)


def counted(comm, host_of, kind, shapes, **options):
    """A state, and its group between hosts with what it has sent; None without a local shard."""
    ends = ends_of(comm, host_of)
    across = None if ends.across is None else Counting(ends.across)
    of, settings = KINDS[kind]
    state = of(shapes, replace(ends, across=across), **{**settings, **options})
    return state, across


def said_and_sent(comm, host_of, kind, seed):
    """payload_bytes, what was counted, and the calls between hosts."""
    state, across = counted(comm, host_of, kind, {"w": (70, 100), "b": (9,), "v": (5, 1031)})
    for step in range(3):
        mine = gradients(seed, comm.rank, step, state._feedback.shapes)
        for name, x in mine.items():
            # Ranks and shards send different numbers of bytes.
            x.reshape(-1)[: x.size // 3] *= 10 ** (comm.rank % 3)
            state.all_reduce({name: x})
    sent = across.sent if across else []
    return state.stats()["payload_bytes"], sum(sent), len(sent), state.stats()["compressed_calls"]


@pytest.mark.parametrize("host_of", TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_stats_say_what_has_left(pool, kind, host_of):
    outcomes = pool(4).call(said_and_sent, host_of, kind, len(kind))
    for said, sent, calls, compressed in outcomes:
        assert said == sent
        assert compressed == 6  # nine calls, three of them of a small parameter
        assert calls in (0, 18, 36)
    assert outcomes[0][1] > 0


def large(comm, host_of, kind, options, seed):
    """The calls' bytes between hosts, of one tensor of 4 Mi normal elements."""
    ends = ends_of(comm, host_of)
    if ends is None:
        return None
    state, across = counted(comm, host_of, kind, {"w": (4, COUNT // 4)}, **options)
    mine = np.random.default_rng([seed, comm.rank]).standard_normal((4, COUNT // 4), np.float32)
    state.all_reduce({"w": mine})
    stats = state.stats()
    return across.sent, stats["payload_bytes"], stats["dense_bytes"]


@pytest.mark.parametrize("host_of", [(0, 1), (0, 1, 2, 3)])
def test_one_bit_sends_31_times_fewer_bytes_in_each_phase(pool, host_of):
    hosts = len(host_of)
    for found in pool(4).call(large, host_of, "one_bit", {"chunk": 1024}, hosts)[:hosts]:
        sent, payload, dense = found
        assert len(sent) == 2
        assert dense == 2 * 4 * COUNT * (hosts - 1) / hosts
        assert all(31 * phase <= dense / 2 for phase in sent)
        assert payload == sum(sent)


def test_int8_sends_3_9_times_fewer(pool):
    for sent, _, dense in pool(4).call(large, (0, 1, 2, 3), "int8", {}, 1):
        assert 3.93 * sum(sent) <= dense


def test_a_payload_of_a_thousandth_of_the_elements_is_a_thousand_times_smaller(pool):
    for kind, host_of in (("top_k", (0, 1)), ("top_k of chunks", (0, 1)), ("top_k", (0, 1, 2, 3))):
        hosts = len(host_of)
        options = {"density": 0.001, "values": "bfloat16", "chunk": 8192}
        for found in pool(4).call(large, host_of, kind, options, hosts)[:hosts]:
            lengths, payloads = found[0]
            each = (lengths + payloads) / (hosts - 1)
            assert 1000 * each <= 4 * COUNT


def not_finite(comm):
    """What a call between hosts sends of gradients that are not finite."""
    state, across = counted(comm, (0, 1, 2, 3), "top_k", {"w": (70, 100)})
    assert not state.all_reduce({"w": np.full((70, 100), np.nan, np.float32)})
    return across.sent


def test_what_is_not_finite_sends_no_entries(pool):
    of_places = 1  # byte, of none
    message = header_bytes(1) + TAIL + of_places
    assert pool(4).call(not_finite) == [[3 * 8, 3 * message]] * 4
