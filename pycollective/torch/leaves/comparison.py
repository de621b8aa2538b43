"""One leaf's gradients under two launches: which is the first that differs?"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from pycollective.errors import ConfigurationError

_ABOUT = ("weights", "leaves", "seed", "step", "leaf")
_WITH = ("threads", "torch", "instructions", "conditions", "gradients")


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of its elements' bytes, in C order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return sha256(flat.numpy().tobytes()).hexdigest()


def compare(
    path: Path, about: list[Any], gradients: dict[str, str], conditions: dict[str, Any]
) -> str | None:
    """Write what this launch found if nobody has yet; else compare, and print what came of it.

    Args:
        path: of the file.
        about: what must be the same in both: a value for each of `_ABOUT`.
        gradients: a digest for each name, in the order in which backward made them.
        conditions: on which they may depend; those that are unlike are printed.

    Returns:
        The first name whose digest differs, or that one launch has and the other has not.
    """
    mine = {
        **dict(zip(_ABOUT, about, strict=True)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "conditions": conditions,
        "gradients": gradients,
    }
    here = _circumstances(mine)
    if _write_first(path, json.dumps(mine, indent=1)):
        print(f"leaf {mine['leaf']}: wrote {len(gradients)} gradients to {path} ({here})")
        return None
    other = _read(path)
    for name in _ABOUT:
        if other[name] != mine[name]:
            raise ConfigurationError(
                f"compare_leaf: {path} is of {name} {other[name]}, and this is of {mine[name]}; "
                "remove the file to begin anew"
            )
    launches = f"here {here}; in the file {_circumstances(other)}"
    there = other["conditions"]
    names = [name for name in conditions | there if conditions.get(name) != there.get(name)]
    for name in names:
        launches += f"; {name}: {conditions.get(name)}, not {there.get(name)}"
    theirs = other["gradients"]
    names = [*gradients, *(name for name in theirs if name not in gradients)]
    differing = [name for name in names if theirs.get(name) != gradients.get(name)]
    if not differing:
        print(f"leaf {mine['leaf']}: all {len(names)} gradients have the same bits ({launches})")
        return None
    print(
        f"leaf {mine['leaf']}: {differing[0]} is the first of {len(differing)} of {len(names)} "
        f"gradients that differ ({launches})"
    )
    return differing[0]


def _circumstances(of: dict[str, Any]) -> str:
    device = f", {of['conditions']['device']}" if "device" in of["conditions"] else ""
    return f"{of['threads']} thread(s), torch {of['torch']}, {of['instructions']}{device}"


@contextmanager
def put_back(module: torch.nn.Module) -> Iterator[None]:
    """Leave gradients and buffers as they were."""
    gradients = [(each, each.grad) for each in module.parameters()]
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for owner, name, buffer, before in buffers:
            buffer.detach().copy_(before)
            setattr(owner, name, buffer)


def _read(path: Path) -> dict[str, Any]:
    """What another launch has written."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or {*found} != {*_ABOUT, *_WITH}:
        raise ConfigurationError(
            f"compare_leaf: {path} is there, and is not of compare_leaf: name another file"
        )
    return found


def _write_first(path: Path, text: str) -> bool:
    """Write the file whole; False if it is there, as another rank may have made it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        try:
            os.link(name, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if path.exists():
                return False
            os.replace(name, path)
        return True
    finally:
        Path(name).unlink(missing_ok=True)
