"""A program's text, run in a rank that is a fork and has torch already."""

from __future__ import annotations

import os
import runpy
import sys
import traceback

# What forks have, and need not import.
import pytest  # noqa: F401
import torch._dynamo  # DDP does, which takes a second
import torch.distributed  # noqa: F401

import tests.torch.ordered_groups
import tests.torch.trainings  # scikit-learn's digits: another second  # noqa: F401


def run_program(_: object, rank: int, size: int, output: str, program: list[str]) -> int:
    """As rank `rank`, run a file with arguments, which writes to the file `output`: its status."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    sys.argv = list(program)
    with open(output, "w") as file:  # of which all is seen that was flushed, however the rank ends
        os.dup2(file.fileno(), 1)
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # whatever it is, Python would tell it and end with 1
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0
