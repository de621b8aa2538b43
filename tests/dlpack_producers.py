"""Producers of DLPack capsules, for tests: as the standard has them, and as some libraries do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, ROCM = 1, 2, 3, 10
READ_ONLY, IS_COPIED = 1, 2


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_CODES = {"f": 2, "i": 0, "u": 1}
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


class Producer:
    """An array behind `__dlpack__` alone, which hands over what it is told to.

    Attributes:
        asked: the `max_version` of each call; None where there was none.
        deleted: how many capsules have called their deleter.
    """

    def __init__(
        self,
        array: np.ndarray,
        *,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        device: int = CPU,
    ) -> None:
        self.array, self.version, self.flags, self.device = array, version, flags, device
        self.asked: list[tuple[int, int] | None] = []
        self.deleted = 0
        self._kept: list[Any] = []  # what capsules point to

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        self.asked.append(max_version)
        return self.capsule()

    def capsule(self) -> Any:
        """One more capsule, of `version`."""
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        tensor = _Tensor(
            data=self.array.ctypes.data,
            device=(self.device, 0),
            ndim=self.array.ndim,
            code=_CODES[self.array.dtype.kind],
            bits=self.array.itemsize * 8,
            lanes=1,
            shape=shape,
        )
        held: Any = _Managed(tensor=tensor)
        if self.version is not None:
            held = _Versioned(version=self.version, flags=self.flags, tensor=tensor)

        def destroy(capsule: int) -> None:
            if _is_valid(capsule, name):  # nobody has taken it over
                self.deleted += 1

        destructor = _Destructor(destroy)
        self._kept += [name, shape, held, destructor]
        return _new(ctypes.addressof(held), name, destructor)


class OldProducer(Producer):
    """From before versions: its `__dlpack__` knows no `max_version`."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array, version=None)

    def __dlpack__(self, stream: object = None) -> Any:  # type: ignore[override]
        self.asked.append(None)
        return self.capsule()


class LikeJax(bytes):
    """Immutable, and no capsule says so: it knows `max_version` and pays it no heed; its buffer is
    read-only; and an assignment to an item raises (JAX 0.10)."""

    def __dlpack__(self, *, stream: object = None, max_version: object = None) -> Any:
        return OldProducer(np.frombuffer(self, np.uint8)).capsule()

    def __setitem__(self, index: object, value: object) -> None:
        raise TypeError("arrays are immutable")


class LikeArrow:
    """Immutable, and no capsule says so: it gives items and takes none (PyArrow 16)."""

    def __init__(self, array: np.ndarray) -> None:
        self._producer = OldProducer(array)

    def __dlpack__(self, stream: object = None) -> Any:
        return self._producer.capsule()

    def __getitem__(self, index: int) -> Any:
        return self._producer.array[index]


class Behind:
    """A NumPy array behind the protocol alone; all keywords go through to it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)


def pointer_of(capsule, name):
    """What a capsule of this name points to."""
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return get(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, name)
