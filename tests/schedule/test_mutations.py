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
RIGHT = RING.lowered(SHARD)
(SENDER, SENT, SEND), (TAKER, TAKEN, TAKE) = (
    next(positions(RIGHT, kind)) for kind in (Send, Receive)
)
LATER = max(positions(RIGHT, Send), key=lambda found: found[1])
THREE = RIGHT[3]


def of_rank_3(index: int, kind: Type) -> Lowered:
    """With another type of its input or its output."""
    types = [*THREE.types[:index], kind, *THREE.types[index + 1 :]]
    return {**RIGHT, 3: RankSteps(THREE.steps, types)}


FAULTS: list[tuple[Lowered, str]] = [
    (
        changed(RIGHT, *LATER[:2], LATER[2]._replace(step=LATER[2].step + 50), LATER[2]),
        r"comes back to this step from step \d+",
    ),
    (changed(RIGHT, SENDER, SENT, SEND, SEND), rf"rank {SENDER} sends to {SEND.to} twice"),
    *(
        (
            changed(RIGHT, SENDER, SENT, SEND._replace(to=to)),
            rf"rank {SENDER} sends to {to}, which is no other rank",
        )
        for to in (-1, 6, SENDER)
    ),
    ({**RIGHT, 6: RankSteps([], [Type.LEAF, Type.RESULT])}, "there is no rank 6"),
    *(
        (
            changed(RIGHT, TAKER, TAKEN, TAKE._replace(buffers=(buffer, *TAKE.buffers[1:]))),
            rf"writes buffer {buffer}, and has \d",
        )
        for buffer in (-1, 99)
    ),
    (of_rank_3(INPUT, Type.RESULT), "rank 3's input is a result"),
    (of_rank_3(OUTPUT, Type.NODE), "rank 3's output is a node"),
    (
        {
            **RIGHT,
            3: RankSteps(
                [Copy(-1, len(THREE.types), INPUT), *THREE.steps], [*THREE.types, Type.RESULT]
            ),
        },
        r"rank 3 copies \(3, 4\), which is no result",
    ),
]


@pytest.mark.parametrize(("wrong", "says"), FAULTS, ids=[says for _, says in FAULTS])
def test_one_wrong_step_of_a_ring_is_caught(wrong: Lowered, says: str) -> None:
    with pytest.raises(Fault, match=says):
        check(RING, SHARD, wrong)


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
