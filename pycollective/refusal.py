"""What ranks have told each other they cannot do: each raises an error of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress


def let_all_hear(meet: Callable[[], object]) -> None:
    """Wait until every rank has learned that some rank refuses; at most the group's timeout.

    Whoever leaves a ``with`` block by an exception aborts its communicator. Were it the first to
    know, the others would raise that abort in the middle of hearing why.

    Args:
        meet: a collective call that no rank ends before all others have begun it, such as a
            barrier.
    """
    # Whatever the group raises, torch's RuntimeErrors among it: the refusal is what matters now.
    with suppress(Exception):
        meet()
