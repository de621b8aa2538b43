"""Which ranks share a host: how it is written, read and refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollective.errors import ConfigurationError
from pycollective.schedule import Topology


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("1x1", (0,)),
        ("2x3", (0, 0, 0, 1, 1, 1)),
        (" 2 x 3 ", (0, 0, 0, 1, 1, 1)),
        ("3,1", (0, 0, 0, 1)),
        (" 1 , 2 ,1 ", (0, 1, 1, 2)),
        ("4", (0, 0, 0, 0)),
    ],
)
def test_parse(text: str, hosts: tuple[int, ...]) -> None:
    assert Topology.parse(text, len(hosts)).host_of == hosts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *(
            (text, "neither hosts x ranks a host, such as 2x4, nor")
            for text in (
                *("", "x", "2x", "x4", "0x4", "4x0", "2x4x1", "-1,5", "3,,1", "3,1,", "3,0,1"),
                *("two", "2*4", "99999999x1"),
            )
        ),
        *((text, "is for 8 ranks, and there are 9") for text in ("2x4", "8", "5,3")),
    ],
)
def test_what_is_no_topology_of_nine_ranks_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Topology.parse(text, 9)


@pytest.mark.parametrize("hosts", [(), (1,), (1, 0), (0, 2, 1), (-1, 0)])
def test_hosts_are_numbered_in_the_order_of_their_first_ranks(hosts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="numbered from 0 in the order of their first"):
        Topology(hosts)


def test_of_hosts_numbers_whatever_names_a_host() -> None:
    assert Topology.of_hosts(["b", "a", "b", "c"]).host_of == (0, 1, 0, 2)
    assert Topology.of_hosts([7, ("rack", 3), 7]).host_of == (0, 1, 0)
    assert Topology.of_hosts(["a"] * 5) == Topology.single_host(5)


def test_hosts_and_places() -> None:
    topology = Topology.of_hosts(["a", "b", "a", "c", "b", "a"])
    assert topology.ranks == 6
    assert topology.hosts == ((0, 2, 5), (1, 4), (3,))
    assert topology.local_index == (0, 0, 1, 0, 1, 2)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("a", "1x1"),
        ("aaaa", "1x4"),
        ("aabb", "2x2"),
        ("aaab", "3,1"),
        ("abbb", "1,3"),
        ("abab", "hosts 0,1,0,1"),
        ("aba", "hosts 0,1,0"),
    ],
)
def test_str(hosts: str, text: str) -> None:
    assert str(Topology.of_hosts(hosts)) == text


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_blocks_are_read_back_as_they_are_written(sizes: list[int]) -> None:
    topology = Topology.of_hosts([host for host, size in enumerate(sizes) for _ in range(size)])
    assert Topology.parse(str(topology), sum(sizes)) == topology


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40))
def test_every_rank_has_its_own_place_on_its_own_host(names: list[str]) -> None:
    topology = Topology.of_hosts(names)
    assert sorted(rank for host in topology.hosts for rank in host) == list(range(len(names)))
    for rank, (name, host) in enumerate(zip(names, topology.host_of, strict=True)):
        assert topology.hosts[host][topology.local_index[rank]] == rank
        assert {names[other] for other in topology.hosts[host]} == {name}
