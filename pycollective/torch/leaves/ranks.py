"""The ranks of a `LeafSync`, where they stay the same; elastic.py has those that change."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pycollective.errors import CollectiveError
from pycollective.torch.leaves.transport import Transport
from pycollective.torch.leaves.words import StepWords


class Ranks:
    """The ranks of a LeafSync, as many from its beginning to its end.

    Args:
        transport: of them.

    Attributes:
        transport: as given.
        is_elastic: whether they may become fewer or more.
        joins: whether this process has yet to get the state from ranks that are under way.
        loss: what has told that a rank is gone, until the others have made it good.
    """

    is_elastic = False
    joins = False
    loss: CollectiveError | None = None

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def noting_loss(self) -> AbstractContextManager[Any]:
        """Within, what says that a rank is gone is noted as `loss`, where it can be made good."""
        return nullcontext()

    def look(self) -> None:
        """Note whether a rank has died; asks nobody."""

    def see_newcomers(self) -> bool:
        """Whether this rank sees that a process waits to join."""
        return False

    def enter(self) -> None:
        """Join ranks that are under way, with their state."""

    def begin_step(self) -> None:
        """Begin a step on all ranks, with newcomers if there are any. Collective."""

    def commit(self, words: StepWords) -> None:
        """Wait until this step is prepared on all ranks. Collective where they may change."""

    def recover(self) -> bool:
        """Make the loss good; return whether all ranks now have the step prepared."""
        raise NotImplementedError

    def end(self) -> None:
        """End the loop with all ranks. Collective where they may change."""

    def leave(self, why: str, leaf: int | None = None) -> None:
        """Let no other rank wait for this one, as `leaf` has failed, if it is given."""
        self.transport.abort(why)

    def close(self) -> None:
        """Let go of the transport."""
        self.transport.close()
