"""``python -m pycollective``: the command line."""

from pycollective.cli import main

main()
