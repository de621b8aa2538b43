"""What makes each algorithm what it is: steps, messages and what a message carries.

`test_documents_algorithms.py` has the bytes, for numbers of ranks that are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, log2

import pytest

from pycollective.schedule import Schedule, Topology, make_schedule
from pycollective.schedule.steps import Send, Type
from tests.schedule.proved import Proved, transfers_of

# From 18 to 30 nothing begins that smaller and larger numbers do not have.
ANY = [
    pytest.param(n, marks=pytest.mark.storm) if 17 < n < 31 else n
    for n in (*range(1, 34), 47, 48, 63, 64, 65)
]


def is_power(n: int) -> bool:
    return n & (n - 1) == 0


def folded(n: int) -> int:
    """Exchanges of `n` ranks or hosts; who is beyond a power of two hands over, and gets last."""
    return int(log2(n)) + (0 if is_power(n) else 2)


# By operation and algorithm, for any number of ranks on one host and a root in their middle: steps,
# messages of each rank or of all, and how many nodes a message of one shard has at most.
Count = Callable[[int], int]
STEPS: dict[tuple[str, str], tuple[Count, Count | None, Count | None]] = {
    ("all_reduce", "direct"): (lambda n: 2 * (n > 1), lambda n: 2 * (n - 1), lambda n: 1),
    ("reduce_scatter", "direct"): (lambda n: int(n > 1), lambda n: n - 1, lambda n: 1),
    ("all_gather", "direct"): (lambda n: int(n > 1), lambda n: n - 1, lambda n: 1),
    ("all_to_all", "direct"): (lambda n: int(n > 1), lambda n: n - 1, lambda n: 1),
    ("all_reduce", "ring"): (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1), None),
    ("reduce_scatter", "ring"): (lambda n: n - 1, lambda n: n - 1, None),
    ("all_gather", "ring"): (lambda n: n - 1, lambda n: n - 1, lambda n: 1),
    ("all_reduce", "tree"): (lambda n: 2 * ceil(log2(n)), None, lambda n: 1),
    ("reduce", "tree"): (lambda n: ceil(log2(n)) + (n > 1), None, lambda n: 1),
    ("broadcast", "tree"): (lambda n: ceil(log2(n)), None, lambda n: 1),
    ("all_reduce", "recursive_doubling"): (folded, None, lambda n: 1 if is_power(n) else 2),
    # Bruck's: each step at most doubles what a rank can have.
    ("all_gather", "recursive_doubling"): (
        *(lambda n: ceil(log2(n)), lambda n: ceil(log2(n))),
        lambda n: 1,
    ),
}


def message_sizes(schedule: Schedule) -> Iterator[int]:
    """Buffers of each message, shard by shard."""
    for shard in range(schedule.shards):
        for steps, _ in schedule.lowered(shard).values():
            yield from (len(step.buffers) for step in steps if isinstance(step, Send))


@pytest.mark.parametrize(("operation", "algorithm"), STEPS)
@pytest.mark.parametrize("n", ANY)
def test_steps_and_messages(operation: str, algorithm: str, n: int) -> None:
    steps, messages, nodes = STEPS[operation, algorithm]
    root = n // 2 if operation in ("reduce", "broadcast") else 0
    schedule = make_schedule(operation, algorithm, Topology.single_host(n), root)
    if operation == "all_to_all":
        n = min(n, 12)  # n * n shards
        schedule = make_schedule(operation, algorithm, Topology.single_host(n))
    traffic = Proved(schedule)
    assert traffic.steps == steps(n)
    if messages is not None:
        assert traffic.messages == [messages(n)] * n
    if nodes is not None:
        assert max(message_sizes(schedule), default=0) <= nodes(n)
    if algorithm == "tree" and root:  # over rank 0, and then to the root
        assert sum(traffic.messages) == n - 1 + (operation == "reduce")


@pytest.mark.parametrize("n", ANY)
@pytest.mark.parametrize("algorithm", ["tree", "halving_doubling"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_one_node_of_a_shard_a_message(operation: str, algorithm: str, n: int) -> None:
    assert set(message_sizes(make_schedule(operation, algorithm, Topology.single_host(n)))) <= {1}


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_direct_to_and_from_a_root(n: int) -> None:
    root = n // 2
    for name, from_root, from_others in (
        *(("broadcast", n - 1, 0), ("gather", 0, 1)),
        *(("scatter", n - 1, 0), ("reduce", n - 1, n)),
    ):
        schedule = make_schedule(name, "direct", Topology.single_host(n), root)
        wanted = [from_root if rank == root else from_others for rank in range(n)]
        assert Proved(schedule).messages == wanted, name


@pytest.mark.parametrize(
    ("hosts", "around"), [("aaaaaa", [0, 1, 2, 3, 4, 5]), ("ababab", [0, 2, 4, 1, 3, 5])]
)
def test_a_ring_goes_around_host_by_host(hosts: str, around: list[int]) -> None:
    schedule = make_schedule("all_reduce", "ring", Topology.of_hosts(hosts))
    pairs = {(each.source, each.target) for each in transfers_of(schedule, 0)}
    assert pairs == set(zip(around, [*around[1:], around[0]], strict=True))


def on_hosts(operation: str, algorithm: str, hosts: int, local: int) -> tuple[Schedule, Proved]:
    topology = Topology.parse(f"{hosts}x{local}", hosts * local)
    schedule = make_schedule(operation, algorithm, topology)
    return schedule, Proved(schedule)


def sent_across(schedule: Schedule, shard: int) -> Iterator[tuple[int, int, list[Type]]]:
    """Sender, receiver and kinds of each message of a shard that crosses hosts."""
    host_of = schedule.topology.host_of
    for rank, (steps, types) in schedule.lowered(shard).items():
        for step in steps:
            if isinstance(step, Send) and host_of[rank] != host_of[step.to]:
                yield rank, step.to, [types[buffer] for buffer in step.buffers]


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (4, 8), (8, 3), (64, 1), (3, 2), (11, 4)])
def test_recursive_doubling_exchanges_once_a_host(hosts: int, local: int) -> None:
    """Between hosts log2(hosts) messages one after the other, of the first rank alone."""
    schedule, traffic = on_hosts("all_reduce", "recursive_doubling", hosts, local)
    across = folded(hosts)
    assert all(rank % local == 0 for rank, _, _ in sent_across(schedule, 0))
    assert traffic.steps == across + (2 if local > 1 else 0)
    for rank, messages in enumerate(traffic.messages):
        if rank % local:
            assert messages == 1
        elif is_power(hosts):
            assert messages == across + local - 1
        else:
            assert messages <= across - 1 + local - 1


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 8), (8, 8), (16, 4), (3, 4), (11, 2)])
def test_hierarchical_sends_one_node_a_host_across(hosts: int, local: int) -> None:
    """Hosts of an aligned block each, any number of them: binary blocks of hosts keep the order.
    Every rank of a host carries its own part across."""
    schedule, traffic = on_hosts("reduce_scatter", "hierarchical", hosts, local)
    for shard in range(schedule.shards):
        across = list(sent_across(schedule, shard))
        assert all(kinds in ([Type.NODE], [Type.RESULT]) for _, _, kinds in across)
        assert all(sender % local == to % local for sender, to, _ in across)
        assert len({sender // local for sender, _, _ in across}) >= hosts - 1
    if is_power(hosts):
        assert len(set(traffic.messages)) == 1
