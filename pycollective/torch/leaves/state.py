"""What a training's state is beside its model: how it is sent to a rank that joins, and saved."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import torch

from pycollective.communicator import Communicator
from pycollective.errors import ConfigurationError
from pycollective.ledger.digests import digester
from pycollective.torch.tensor_ledger import bytes_of


class State:
    """The objects that a training's next step depends on, by name.

    Each has `state_dict` and `load_state_dict`, as optimizers, schedulers, a GradScaler and states
    of compression have.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """Of them all, in order."""
        return sorted(self._objects)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Add objects by their names.

        Raises:
            ConfigurationError: one has no state that can be read and set, or the name is taken.
        """
        for name, each in objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise ConfigurationError(
                    f"state: {name} is a {type(each).__name__}, which has no state_dict() and "
                    "load_state_dict()"
                )
            if self._objects.get(name, each) is not each:
                raise ConfigurationError(f"state: another object is registered as {name}")
        self._objects |= objects

    def gather(self) -> dict[str, Any]:
        """Return what each object's `state_dict` returns."""
        return {name: self._objects[name].state_dict() for name in self.names}

    def load(self, states: Mapping[str, Any]) -> None:
        """Give each object its state.

        Raises:
            ConfigurationError: they are of other objects.
        """
        if sorted(states) != self.names:
            raise ConfigurationError(f"the state is of {sorted(states)}, and here are {self.names}")
        for name in self.names:
            self._objects[name].load_state_dict(states[name])


class _Taking(pickle.Pickler):
    """Pickles a value without its tensors, which it collects."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.append(obj.detach())
        return str(obj.dtype).removeprefix("torch."), tuple(obj.shape)


class _Receiving(pickle.Unpickler):
    """Makes each tensor anew, and receives its elements."""

    def __init__(self, file: BytesIO, comm: Communicator, source: int) -> None:
        super().__init__(file)
        self._comm, self._source = comm, source

    def persistent_load(self, pid: Any) -> torch.Tensor:
        dtype, shape = pid
        made = torch.empty(shape, dtype=getattr(torch, dtype))
        if made.numel():
            self._comm.recv(bytes_of(made), self._source)
        return made


Packed: TypeAlias = tuple[bytes, list[torch.Tensor]]


def pack(value: Any) -> Packed:
    """Return a value as `send` takes it: pickled without its tensors, and these."""
    file = BytesIO()
    taking = _Taking(file)
    taking.dump(value)
    return file.getvalue(), taking.tensors


def send(comm: Communicator, packed: Packed, rank: int) -> None:
    """Send a rank what `pack` returned; its tensors, on CPUs, go without a copy."""
    text, tensors = packed
    comm.send(np.array([len(text)], np.int64), rank)
    comm.send(np.frombuffer(text, np.uint8), rank)
    for each in tensors:
        if each.numel():
            comm.send(bytes_of(each), rank)


def receive(comm: Communicator, rank: int) -> Any:
    """Return the value that `send` on that rank was given."""
    length = np.empty(1, np.int64)
    comm.recv(length, rank)
    text = np.empty(int(length[0]), np.uint8)
    comm.recv(text, rank)
    return _Receiving(BytesIO(text.tobytes()), comm, rank).load()


def digest(named: Iterable[tuple[str, torch.Tensor]], states: Any) -> str:
    """Return a digest of some tensors on CPUs, and of a nest of dicts, lists and tensors.

    Raises:
        ConfigurationError: xxhash is not installed.
    """
    of_bytes = digester("elastic=True")
    whole = blake2b(digest_size=16)

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            whole.update(f"{value.dtype}{tuple(value.shape)}".encode())
            whole.update(of_bytes(bytes_of(value).numpy()))
        elif isinstance(value, Mapping):
            whole.update(f"dict {len(value)}".encode())
            for key in sorted(value, key=repr):
                feed(key)
                feed(value[key])
        elif isinstance(value, list | tuple):
            whole.update(f"list {len(value)}".encode())
            for each in value:
                feed(each)
        elif value is None or isinstance(value, bool | int | float | str | bytes):
            whole.update(f"{type(value).__name__} {value!r}".encode())
        else:
            whole.update(pickle.dumps(value))

    for name, tensor in named:
        feed(name)
        feed(tensor)
    feed(states)
    return whole.hexdigest()
