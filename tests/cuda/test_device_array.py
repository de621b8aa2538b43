"""Arrays in a GPU's memory: what goes in comes out, and lives as long as whoever has it.

On the stand-in, in a process of its own: a process has one driver.
"""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from pycollective import _core
from pycollective.errors import ConfigurationError
from pycollective.testing.device_array import DeviceArray, storage_type
from tests import dlpack_producers
from tests.cuda import standin
from tests.harness import Ranks
from tests.inputs import DTYPES, from_words

MIB = 1 << 20
TYPESTRS = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "uint8": "|u1", "bool": "|b1"}


def some(dtype, count, seed=0):
    """Any bits at all; of a bool, those that it has."""
    random = np.random.default_rng([seed, count])
    size = storage_type(dtype).itemsize
    bits = random.integers(0, 2 if dtype == "bool" else 1 << 8 * size, count, f"u{size}")
    return from_words(bits, dtype)


def round_trip(dtype, count, offset, device):
    host = some(dtype, count)
    array = DeviceArray.from_numpy(host, device, offset=offset)
    assert array.address % 256 == offset
    assert (array.device, array.shape, array.nbytes) == (device, (count,), host.nbytes)
    back = array.to_numpy()
    return (back.dtype == host.dtype, back.tobytes() == host.tobytes(), standin.Driver().current())


@pytest.mark.parametrize("offset", [0, 1, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_in_comes_out(gpu, dtype, offset):
    for count in (0, 1, 1021):
        assert gpu(round_trip, dtype, count, offset, 0) == (True, True, None)
    assert gpu(round_trip, dtype, 5, offset, 1) == (True, True, None)


def views():
    cube = some("float32", 24).reshape(2, 3, 4)[:, :, ::-1]  # copied first
    there = DeviceArray.from_numpy(cube)
    assert np.array_equal(there.to_numpy(), cube, equal_nan=True)
    assert len(there) == 2
    host = some("uint8", 100)
    whole = DeviceArray.from_numpy(host)
    part = whole[3:50][4:]
    assert np.array_equal(part.to_numpy(), host[7:50])
    assert part.address == whole.address + 7
    part[-2:].write(np.array([1, 2], np.uint8))
    host[48:50] = 1, 2
    assert np.array_equal(whole.to_numpy(), host)
    assert whole[90:20].to_numpy().shape == (0,)
    words = DeviceArray((11,), "float64", memory=whole.memory, offset=5)  # aligned to nothing
    assert words.to_numpy().tobytes() == host[5:93].tobytes()
    halves = DeviceArray.from_numpy(some("float16", 9))[2:]
    assert halves.to_numpy().tobytes() == some("float16", 9)[2:].tobytes()
    assert halves.offset == 4


def test_shapes_and_slices_are_views_of_the_same_memory(gpu):
    gpu(views)


def words_by_name():
    made = DeviceArray.from_numpy(np.array([0x3F80], np.uint16), dtype="bfloat16")
    here = made.to_numpy()
    sys.modules["ml_dtypes"] = None  # as where it is not installed
    try:
        return str(here), made.to_numpy().tolist(), str(storage_type("bfloat16"))
    finally:
        del sys.modules["ml_dtypes"]


def test_bfloat16_has_words_where_ml_dtypes_is_not(gpu):
    assert gpu(words_by_name) == ("[1]", [0x3F80], "uint16")


def described(dtype, versioned):
    array = DeviceArray((3, 4), dtype, 1, offset=1)
    capsule = array.__dlpack__(max_version=(1, 2) if versioned else None)
    name = b"dltensor_versioned" if versioned else b"dltensor"
    kind = dlpack_producers._Versioned if versioned else dlpack_producers._Managed
    managed = kind.from_address(dlpack_producers.pointer_of(capsule, name))
    tensor = managed.tensor
    return {
        "at": tensor.data + tensor.byte_offset - array.address,
        "device": tuple(tensor.device),
        "dtype": (tensor.code, tensor.bits, tensor.lanes),
        "shape": tensor.shape[: tensor.ndim],
        "strides": tensor.strides[: tensor.ndim],
        "asked": array.__dlpack_device__(),
        "version": tuple(managed.version) if versioned else (),
    }


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize(("dtype", "kind"), [("float64", (2, 64, 1)), ("bfloat16", (4, 16, 1))])
def test_a_capsule_says_what_the_array_is(gpu, dtype, kind, versioned):
    assert gpu(described, dtype, versioned) == {
        "at": 0,
        "device": (dlpack_producers.CUDA, 1),
        "dtype": kind,
        "shape": [3, 4],
        "strides": [4, 1],
        "asked": (dlpack_producers.CUDA, 1),
        "version": (1, 0) if versioned else (),
    }


def interface(dtype):
    array = DeviceArray((5,), dtype, stream=_core.DeviceStream(0))
    if not hasattr(array, "__cuda_array_interface__"):
        return None
    said = array.__cuda_array_interface__
    assert said["data"] == (array.address, False)
    assert said["stream"] == array.stream.handle
    assert DeviceArray((5,), dtype).__cuda_array_interface__["stream"] is None
    assert DeviceArray((5,), dtype, stream=0).__cuda_array_interface__["stream"] == 1
    assert (said["shape"], said["strides"], said["version"]) == ((5,), None, 3)
    return said["typestr"]


def test_the_interface_says_what_the_array_is(gpu):
    for dtype, typestr in TYPESTRS.items():
        assert gpu(interface, dtype) == typestr
    assert gpu(interface, "bfloat16") is None


def refused(what):
    memory = _core.DeviceMemory(0, 16)
    array = DeviceArray((4,), "float32", memory=memory)
    {
        "device": lambda: DeviceArray((1,), "int8", 2),
        "below 0": lambda: _core.DeviceStream(-1),
        "memory": lambda: _core.DeviceMemory(0, 1 << 50),
        "dtype": lambda: DeviceArray((1,), "float8"),
        "read": lambda: memory.read(15, 2),
        "far read": lambda: memory.read((1 << 64) - 1, 2),
        "write": lambda: memory.write(b"12345", 12),
        "buffer": lambda: memory.write(np.zeros(8, np.uint8)[::2]),
        "view": lambda: DeviceArray((4,), "float32", memory=memory, offset=1),
        "capsule": lambda: memory.capsule(0, [1 << 62, 16], "int8"),
        "negative": lambda: memory.capsule(0, [-1], "int8"),
        "elements": lambda: array.write(np.zeros(3, np.float32)),
        "step": lambda: array[::2],
        "copy": lambda: array.__dlpack__(copy=True),
        "elsewhere": lambda: array.__dlpack__(dl_device=(1, 0)),
    }[what]()


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("device", ConfigurationError, "there is no GPU 2; this process has 2"),
        ("below 0", ConfigurationError, "there is no GPU -1"),
        ("memory", RuntimeError, "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY, "),
        ("dtype", ConfigurationError, "unknown dtype 'float8'; there are float16,"),
        ("read", ConfigurationError, "2 bytes from 15 on are not in an allocation of 16"),
        ("far read", ConfigurationError, "are not in an allocation of 16"),
        ("write", ConfigurationError, "5 bytes from 12 on are not in an allocation of 16"),
        ("buffer", ValueError, "contiguous"),
        ("view", ConfigurationError, "16 bytes from 1 on are more than the memory's 16"),
        ("capsule", ConfigurationError, "more bytes than there can be"),
        ("negative", ConfigurationError, "an extent below 0"),
        ("elements", ConfigurationError, "3 elements of 4 bytes into 4 of 4"),
        ("step", ConfigurationError, "a slice without steps"),
        ("copy", BufferError, "its own memory alone"),
        ("elsewhere", BufferError, "its own memory alone"),
    ],
)
def test_what_cannot_be_is_refused_by_name(gpu, what, error, said):
    with pytest.raises(error, match=re.escape(said)):
        gpu(refused, what)


def test_no_driver_is_said_with_its_cure():
    missing = {"PYCOLLECTIVE_CUDA_DRIVER": "/no/such/libcuda.so"}
    with Ranks(1, env=missing, join=False) as ranks:
        for function in (_core.device_count, _made):
            [outcome] = ranks.call(standin.called, function)
            assert isinstance(outcome.error, ConfigurationError)
            assert "no CUDA driver: /no/such/libcuda.so: " in str(outcome.error)


def _made():
    DeviceArray((1,), "int8")
