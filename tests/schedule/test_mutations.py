"""The proof catches every way to spoil a schedule, and says what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest

from pycollective.schedule import OPERATIONS, Schedule, Topology, make_schedule
from pycollective.schedule.proof import Fault, check_shard
from pycollective.schedule.steps import (
    INPUT,
    OUTPUT,
    Combine,
    Copy,
    RankSteps,
    Receive,
    Send,
    Type,
)
from tests.schedule.mutations import (
    Lowered,
    buffer_used_twice,
    changed,
    dropped,
    early_finish,
    missing_finish,
    operand_taken_twice,
    operands_out_of_order,
    output_nobody_asked_for,
    positions,
    rotated,
    sent_as_it_arrives,
    swapped_receives,
    wrong_children,
)

# What the mutations are applied to: algorithms that differ in what a rank holds, sends and makes;
# a number of ranks that is not a power of two where that matters; and a shard of it.
SPOILT: dict[str, tuple[Schedule, int]] = {
    "direct": (make_schedule("all_reduce", "direct", Topology.single_host(5)), 3),
    "ring": (make_schedule("all_reduce", "ring", Topology.parse("2x3", 6)), 1),
    "tree": (make_schedule("all_reduce", "tree", Topology.single_host(7)), 0),
    "halving": (make_schedule("all_reduce", "halving_doubling", Topology.single_host(7)), 2),
    "doubling": (make_schedule("all_reduce", "recursive_doubling", Topology.single_host(6)), 0),
    "hierarchical": (make_schedule("all_reduce", "hierarchical", Topology.parse("4,3", 7)), 5),
    "scattered": (
        make_schedule("reduce_scatter", "hierarchical", Topology.of_hosts("abcabcab")),
        6,
    ),
    "to a root": (make_schedule("reduce", "tree", Topology.single_host(6), root=4), 0),
}
ONLY_MOVED: dict[str, tuple[Schedule, int]] = {
    "Bruck": (make_schedule("all_gather", "recursive_doubling", Topology.single_host(6)), 2),
    "broadcast": (make_schedule("broadcast", "tree", Topology.single_host(6), root=2), 0),
    "scatter": (make_schedule("scatter", "tree", Topology.single_host(8), root=1), 0),
    "all to all": (make_schedule("all_to_all", "direct", Topology.single_host(4)), 7),
}
ANY = {**SPOILT, **ONLY_MOVED}


def but(cases: dict[str, tuple[Schedule, int]], *names: str) -> dict[str, tuple[Schedule, int]]:
    return {name: case for name, case in cases.items() if name not in names}


def check(schedule: Schedule, shard: int, lowered: Lowered) -> None:
    check_shard(schedule.operation, shard, schedule.topology.ranks, schedule.root, lowered)


def all_caught(
    case: tuple[Schedule, int], mutate: Callable[[Lowered], Iterable[Lowered]], says: str
) -> None:
    """The proof accepts the schedule, and none of its mutants; it says what is wrong with each."""
    schedule, shard = case
    right = schedule.lowered(shard)
    check(schedule, shard, right)
    mutants = list(mutate(right))
    assert mutants
    for mutant in mutants:
        assert mutant != right
        with pytest.raises(Fault) as caught:
            check(schedule, shard, mutant)
        assert re.search(says, str(caught.value)), (str(caught.value), mutant)


# Each way to spoil a schedule: which schedules it can spoil, and what the proof says.
Mutation = Callable[[Lowered], Iterable[Lowered]]
MUTATIONS: dict[str, tuple[dict[str, tuple[Schedule, int]], Mutation, str]] = {
    "a dropped send": (ANY, lambda low: dropped(low, Send), r"rank \d awaits what \d does not"),
    "a dropped receive": (
        *(ANY, lambda low: dropped(low, Receive)),
        r"sends to \d, which does not receive it",
    ),
    "two swapped receives": (
        *(SPOILT, swapped_receives),
        r"takes \(\d, \d\) for \(\d, \d\)|writes a \w+ to a buffer for a|"
        r"awaits \d buffers of \d, which sends|reads buffer \d+ before",
    ),
    "leaves rotated by one": (
        *(SPOILT, lambda low: [rotated(low, len(low))]),
        r"takes \(\d, \d\) for \(\d, \d\)",
    ),
    "a buffer used twice": (
        *(ANY, buffer_used_twice),
        r"writes buffer \d+ a second time|writes to its input|writes a result to a buffer for a",
    ),
    "a send of what arrives in the same step": (
        but(ANY, "all to all"),  # there nobody passes on what has arrived
        *(sent_as_it_arrives, r"rank \d reads buffer \d+ before it is written"),
    ),
    "operands in the wrong order": (
        *(SPOILT, operands_out_of_order, r"not its parts, each once, in order"),
    ),
    "an operand taken twice": (
        *(SPOILT, operand_taken_twice, r"not its parts, each once, in order"),
    ),
    "a node made of the wrong children": (
        *(SPOILT, wrong_children),
        r"is no node of the order|not its parts, each once, in order|"
        r"finishes \(\d, \d\) of|takes \(\d, \d\) for",
    ),
    "a missing finish": (SPOILT, missing_finish, r"does not finish \(0, \d\) of"),
    "a finish before the root": (
        but(SPOILT, "direct", "scattered"),  # there nothing but the root is computed
        *(early_finish, r"finishes \(\d, \d\) of \(0, \d\)"),
    ),
}


@pytest.mark.parametrize(
    ("what", "case"), [(what, case) for what, (cases, _, _) in MUTATIONS.items() for case in cases]
)
def test_a_spoiled_schedule_is_caught(what: str, case: str) -> None:
    _, mutate, says = MUTATIONS[what]
    all_caught(ANY[case], mutate, says)


@pytest.mark.parametrize(
    "case",
    [
        SPOILT["scattered"],
        SPOILT["to a root"],
        ONLY_MOVED["scatter"],
        ONLY_MOVED["all to all"],
        (make_schedule("reduce_scatter", "ring", Topology.single_host(5)), 2),
        (make_schedule("reduce_scatter", "tree", Topology.single_host(5)), 2),
        (make_schedule("gather", "tree", Topology.single_host(5), root=3), 1),
    ],
    ids=lambda case: f"{case[0].operation.name} {case[0].algorithm.name}",
)
def test_an_output_nobody_asked_for_is_caught(case: tuple[Schedule, int]) -> None:
    ranks = case[0].topology.ranks

    (owner,) = case[0].operation.wants(case[1], ranks, case[0].root)
    all_caught(
        case,
        lambda lowered: output_nobody_asked_for(lowered, owner, ranks),
        r"rank \d gets an output that it must not have",
    )


RING, SHARD = SPOILT["ring"]


def ring() -> Lowered:
    return RING.lowered(SHARD)


def test_a_step_after_a_later_one_is_caught() -> None:
    rank, index, send = max(positions(ring(), Send), key=lambda found: found[1])
    late = send._replace(step=send.step + 50)
    with pytest.raises(Fault, match=r"comes back to this step from step \d+"):
        check(RING, SHARD, changed(ring(), rank, index, late, send))


def test_a_receive_before_a_send_of_the_same_step_is_caught() -> None:
    schedule, shard = SPOILT["doubling"]
    lowered = schedule.lowered(shard)
    rank, index, send = next(
        found for found in positions(lowered, Send) if type(lowered[found[0]].steps[1]) is Receive
    )
    receive = lowered[rank].steps[index + 1]
    assert receive.step == send.step
    swapped = changed(changed(lowered, rank, index + 1, send), rank, index, receive)
    with pytest.raises(Fault, match="does not first send, then receive, then compute"):
        check(schedule, shard, swapped)


def test_two_messages_to_one_rank_in_a_step_are_caught() -> None:
    rank, index, send = next(positions(ring(), Send))
    with pytest.raises(Fault, match=rf"rank {rank} sends to {send.to} twice"):
        check(RING, SHARD, changed(ring(), rank, index, send, send))


@pytest.mark.parametrize("to", [-1, 6, 0])
def test_a_message_to_no_other_rank_is_caught(to: int) -> None:
    rank, index, send = next(positions(ring(), Send))
    assert rank == 0
    with pytest.raises(Fault, match=rf"rank 0 sends to {to}, which is no other rank"):
        check(RING, SHARD, changed(ring(), rank, index, send._replace(to=to)))


def test_a_rank_beyond_the_last_is_caught() -> None:
    with pytest.raises(Fault, match="there is no rank 6"):
        check(RING, SHARD, {**ring(), 6: RankSteps([], [Type.LEAF, Type.RESULT])})


@pytest.mark.parametrize("buffer", [-1, 99])
def test_a_buffer_that_is_not_there_is_caught(buffer: int) -> None:
    rank, index, receive = next(positions(ring(), Receive))
    wrong = receive._replace(buffers=(buffer, *receive.buffers[1:]))
    with pytest.raises(Fault, match=rf"writes buffer {buffer}, and has \d"):
        check(RING, SHARD, changed(ring(), rank, index, wrong))


@pytest.mark.parametrize(("buffer", "kind"), [(0, "input is a result"), (1, "output is a node")])
def test_an_input_or_output_of_the_wrong_type_is_caught(buffer: int, kind: str) -> None:
    lowered = ring()
    types = list(lowered[3].types)
    types[buffer] = [Type.RESULT, Type.NODE][buffer]
    with pytest.raises(Fault, match=rf"rank 3's {kind}"):
        check(RING, SHARD, {**lowered, 3: RankSteps(lowered[3].steps, types)})


def test_a_copy_of_what_is_no_result_is_caught() -> None:
    lowered = ring()
    steps, types = lowered[3]
    copies = RankSteps([Copy(-1, len(types), INPUT), *steps], [*types, Type.RESULT])
    with pytest.raises(Fault, match=r"rank 3 copies \(3, 4\), which is no result"):
        check(RING, SHARD, {**lowered, 3: copies})


@pytest.mark.parametrize("inner", [(1, 3), (0, 3)])
def test_a_node_of_another_order_is_caught(inner: tuple[int, int]) -> None:
    """0+(1+2)+3 and ((0+1)+2)+3: each step adds neighbours, and the sum has other bits."""
    leaves = [((rank, rank + 1), buffer) for rank, buffer in enumerate((INPUT, 2, 3, 4))]
    lo, hi = inner
    lowered = {
        rank: RankSteps([Send(0, 0, (INPUT,))], [Type.LEAF, Type.RESULT]) for rank in (1, 2, 3)
    }
    receives = [Receive(0, rank, (rank + 1,)) for rank in (1, 2, 3)]
    combines = [
        Combine(0, 5, inner, tuple(leaves[lo:hi]), False),
        Combine(0, OUTPUT, (0, 4), (*leaves[:lo], (inner, 5), *leaves[hi:]), True),
    ]
    types = [Type.LEAF, Type.RESULT, *[Type.LEAF] * 3, Type.NODE]
    lowered[0] = RankSteps([*receives, *combines], types)
    with pytest.raises(Fault, match=rf"computes \({lo}, {hi}\), which is no node of the order"):
        check_shard(OPERATIONS["reduce"], 0, 4, 0, lowered)


def test_a_result_in_the_place_of_an_input_is_caught() -> None:
    schedule = make_schedule("broadcast", "direct", Topology.single_host(2))
    received = [Receive(0, 0, (INPUT,)), Copy(0, OUTPUT, INPUT)]
    wrong = RankSteps(received, [Type.RESULT, Type.RESULT])
    with pytest.raises(Fault, match="rank 1 writes to its input"):
        check(schedule, 0, {**schedule.lowered(0), 1: wrong})


def test_a_rank_left_out_is_caught() -> None:
    schedule, shard = ONLY_MOVED["scatter"]
    with pytest.raises(Fault, match="rank 0 never has its output"):
        check(schedule, shard, {})
