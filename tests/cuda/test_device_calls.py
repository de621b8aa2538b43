"""What arrays on GPUs and streams may be, and what is refused by name. On the stand-in."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pycollective import (
    ConfigurationError,
    _core,
    reference,
)
from pycollective.testing.device_array import DeviceArray
from tests.cuda import standin
from tests.cuda.arrays import on_gpu
from tests.cuda.captures import Capture
from tests.harness import PerRank
from tests.inputs import order_sensitive, same_bits

NOT_READY = 600  # CUDA_ERROR_NOT_READY


class InterfaceAlone:
    """What Numba's arrays are: the CUDA array interface, and no DLPack."""

    def __init__(self, array, **changes):
        self.kept, self.changes = array, changes

    @property
    def __cuda_array_interface__(self):
        return {**self.kept.__cuda_array_interface__, **self.changes}


def by_interface(comm, x):
    array = on_gpu(comm, x)
    comm.all_reduce(InterfaceAlone(array))
    refused = []
    for changes in (
        {"data": (array.address, True)},
        {"data": "nothing"},
        {"typestr": ">f4"},
        {"typestr": "<f16"},
        {"typestr": "<c8"},
        {"shape": 3},
        {"shape": (2, 2), "strides": (4, 8)},
        {"strides": (4, 4)},
        {"mask": array},
        {"data": (1 << 40, False)},
        {"stream": "mine"},
    ):
        try:
            comm.all_reduce(InterfaceAlone(array, **changes))
        except ConfigurationError as error:
            refused.append(str(error))
    return array.to_numpy(), refused


def test_an_array_may_have_the_interface_alone(gpu_pool):
    inputs = order_sensitive("float32", 2, 4, seed=1)
    want = reference.reduce(inputs, "sum")
    for got, refused in gpu_pool(2).call(by_interface, PerRank(inputs)):
        assert same_bits(got, want)
        reasons = [
            "read-only",
            "'data' is not",
            "'typestr' is not",
            "'typestr' is not",
            "kind 'c'",
            "'shape' is not",
            "not contiguous",
            "'strides' is not",
            "'mask' is not",
            "its memory is no GPU's",
            "no stream's handle",
        ]
        assert len(refused) == len(reasons), refused
        for text, reason in zip(refused, reasons, strict=True):
            assert reason in text, text


class Named:
    """A stream as torch, CuPy and cuda.core have them."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Protocol:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


# How a stream is named, by what it is called here: of its handle.
NAMES = {
    "a number": lambda handle: handle,
    "ptr": lambda handle: Named(ptr=handle),
    "cuda_stream": lambda handle: Named(cuda_stream=handle),
    "the protocol": Protocol,
    "the array": None,  # of a call that names none: the array itself says it
    "the legacy stream's handle": 0,
    "the legacy stream's number": 1,
}


def follow(comm, how):
    """Results of what was queued on the named stream before the call, and whether it is done."""
    driver = standin.Driver()
    array = on_gpu(comm, np.zeros(1 << 18, np.uint8))
    out = on_gpu(comm, np.zeros(1 << 18, np.uint8))
    name = NAMES[how]
    busy = _core.DeviceStream(array.device)
    handle = 0 if isinstance(name, int) else busy.handle
    if how == "the array":
        array.stream = out.stream = busy  # else a stream of its own, which has nothing to do
    go_on = driver.hold(array.device, handle)
    driver.occupy(array, 300, handle)
    with driver.context(array.device):
        assert driver("cuStreamQuery", ctypes.c_void_p(handle)) == NOT_READY
    go_on()
    given = name(handle) if callable(name) else name
    comm.all_reduce(array, "max", out=out, stream=given)
    with driver.context(array.device):
        done = driver("cuStreamQuery", ctypes.c_void_p(handle)) == 0
    out.stream = None
    return done, out.to_numpy()[-4:].view(np.uint32).tolist()


@pytest.mark.parametrize("how", NAMES)
def test_a_call_follows_the_stream_that_is_named(gpu_pool, how):
    # Of 300 the bytes are 44 and 1.
    assert gpu_pool(2).call(follow, how) == [(True, [300])] * 2


def no_streams(comm):
    array = DeviceArray.from_numpy(np.ones(3, np.float32), 0)
    refused = []
    for each in (-1, "mine", Named(ptr="x"), 1 << 70):
        with pytest.raises(ConfigurationError) as info:
            comm.all_reduce(array, stream=each)
        refused.append(str(info.value))
    host = np.ones(2, np.float32)
    comm.all_reduce(host, stream=_core.DeviceStream(0).handle)  # of no meaning to it
    return refused, host.tolist()


def test_what_is_no_stream_is_refused_and_the_hosts_arrays_have_none(gpu_pool):
    [(refused, host)] = gpu_pool(1).call(no_streams)
    wanted = ["no stream's handle", "stream is a str", "stream is a Named", "no stream's handle"]
    assert len(refused) == len(wanted)
    for text, reason in zip(refused, wanted, strict=True):
        assert reason in text, text
    assert host == [1, 1]


def refusals(comm):
    """Nothing moves, and the communicator works on."""
    array = on_gpu(comm, np.arange(6, dtype=np.float32))
    texts = []

    def refused(call):
        with pytest.raises(ConfigurationError) as info:
            call()
        texts.append(str(info.value))

    refused(lambda: comm.all_reduce(array, out=np.zeros(6, np.float32)))
    other = DeviceArray.from_numpy(np.zeros(6, np.float32), 1 - array.device)
    refused(lambda: comm.all_reduce(array, out=other))
    apart = on_gpu(comm, np.zeros(6, np.float32))
    refused(lambda: comm.all_reduce(array, out=apart))
    with Capture(array.device, array.stream):  # which is not spoilt
        refused(lambda: comm.all_reduce(array))
    comm.all_reduce(array)
    return array.to_numpy().tolist(), texts


def test_what_cannot_be_is_refused_by_name(gpu_pool):
    for got, texts in gpu_pool(2).call(refusals):
        assert got == [0, 2, 4, 6, 8, 10]
        for text, reason in zip(
            texts,
            ["in the host's memory", "on another", "different streams", "being captured"],
            strict=True,
        ):
            assert reason in text
