"""Refusals that ranks have told each other of, so that each raises one of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress


def let_all_hear(meet: Callable[[], object]) -> None:
    """Wait until all ranks know what they are about to raise.

    Whoever leaves a ``with`` block by an exception aborts its communicator. Were it the first to
    know, the others would raise that abort in the middle of hearing why.

    Args:
        meet: a collective call that no rank ends before all others have begun it, such as a
            barrier. If that fails, the refusal still is what to raise.
    """
    with suppress(Exception):
        meet()
