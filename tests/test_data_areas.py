"""How much shared memory a process's groups get: as much for later ones, within a bound."""

import pytest

from pycollective import _core

KIB, MIB = 1 << 10, 1 << 20


def areas(node: _core.Node, ranks: int, far: bool, groups: int) -> list[int]:
    """The bytes of each of so many groups' mailboxes, one after another."""
    sizes = []
    for _ in range(groups):
        sizes.append(node.mailbox_bytes(ranks, far))
        node.allocate(ranks, far)
    return sizes


@pytest.mark.parametrize(
    ("ranks", "far", "groups", "least"),
    [(2, False, 6, 896 * KIB), (8, False, 3, 3 * MIB // 2), (1, True, 9, 4 * MIB)],
)
def test_later_groups_get_as_much_as_the_first(
    ranks: int, far: bool, groups: int, least: int
) -> None:
    """A state of compression makes three groups: their messages are as large as the default's."""
    sizes = areas(_core.Node(), ranks, far, groups)
    assert set(sizes) == {sizes[0]}
    assert sizes[0] >= least


def test_groups_between_hosts_take_nothing_from_those_on_one() -> None:
    """And the other way round: each kind has a budget of its own."""
    fresh = {far: _core.Node().mailbox_bytes(2, far) for far in (False, True)}
    for used in (False, True):
        node = _core.Node()
        areas(node, 2, used, 20)
        assert node.mailbox_bytes(2, not used) == fresh[not used]
        assert node.mailbox_bytes(2, used) < fresh[used]


def test_many_groups_of_both_kinds_fit() -> None:
    """Data areas add up to a bound, and to 32 KiB for each group beyond it."""
    node = _core.Node()
    total = sum(areas(node, 8, far, 300)[-1] for far in (False, True))
    assert total < 2 * 64 * KIB
    together = sum(sum(areas(_core.Node(), 8, far, 300)) for far in (False, True))
    assert together < (9 + 48) * MIB + 600 * 64 * KIB
