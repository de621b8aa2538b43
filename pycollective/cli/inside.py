"""Commands that start ranks are not for the ranks of a launch: each of them would start its own."""

from __future__ import annotations

from pycollective.errors import ConfigurationError


def refuse_inside_a_launch(what: str, instead: str) -> None:
    """Refuse, where a launcher has started this process, to start ranks in it.

    Args:
        what: the option or command that would start them.
        instead: what to do, for the message.

    Raises:
        ConfigurationError: this process is a rank of some launch.
    """
    # Here, because the other commands of this program should not wait for it.
    from pycollective.bootstrap import init as bootstrap

    if bootstrap.launched():
        raise ConfigurationError(
            f"{what} starts ranks of its own, and this process is a rank already, of "
            f"`pycollective run`, torchrun, mpiexec or srun, by its environment: {instead}"
        )
