"""The command line: ``pycollective run``, ``bench``, ``verify``, ``schedule``, ``doctor``.

Needs the extra ``cli``.
"""

from __future__ import annotations

import sys

from pycollective import installing


def main() -> None:
    """Entry point of the ``pycollective`` command."""
    try:
        import typer
    except ImportError as error:
        print(
            f"pycollective: the command line needs {error.name}; {installing.CLI}", file=sys.stderr
        )
        sys.exit(2)

    from pycollective.cli.bench import bench
    from pycollective.cli.doctor import doctor
    from pycollective.cli.run import run
    from pycollective.cli.schedule import schedule
    from pycollective.cli.verify import verify

    app = typer.Typer(
        help="Collective communication: start ranks, measure, see what algorithms send.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    # Everything after the options is the program's, its own options too.
    app.command(
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
    )(run)
    app.command()(bench)
    app.command()(verify)
    app.command()(schedule)
    app.command()(doctor)
    app()
