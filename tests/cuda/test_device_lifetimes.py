"""How long a GPU's memory lives, and what comes after what is on a stream. On the stand-in."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import threading
import time

import pytest

from pycollective import _core
from pycollective.testing.device_array import DeviceArray
from tests import dlpack_producers
from tests.cuda import standin
from tests.cuda.test_device_array import some

MIB = 1 << 20
TIMES = 400  # that 16 MiB are filled: some 0.7 s


def lifetime(how):
    """Whether the memory can be read once the array is gone, and once its last user is."""
    array = DeviceArray.from_numpy(some("int32", 4 * MIB))
    address = array.address
    driver = standin.Driver()
    if how == "view":
        user = array[5:]
    elif how == "capsule":
        user = array.__dlpack__(stream=-1, max_version=(1, 0))
    else:
        user = Taken(array.__dlpack__(stream=-1))
    del array
    gc.collect()
    before = driver.readable(address)
    del user
    gc.collect()
    return before, driver.readable(address)


class Taken:
    """A consumer: renames the capsule, and calls the deleter from a thread without the GIL."""

    def __init__(self, capsule):
        self.managed = dlpack_producers.pointer_of(capsule, b"dltensor")
        rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
        assert rename(("PyCapsule_SetName", ctypes.pythonapi))(capsule, b"used_dltensor") == 0

    def __del__(self):
        deleter = dlpack_producers._Managed.from_address(self.managed).deleter
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)  # gives the lock back
        thread = threading.Thread(target=call, args=(self.managed,))
        thread.start()
        thread.join()


@pytest.mark.parametrize("how", ["view", "capsule", "taken over"])
def test_memory_lives_as_long_as_its_last_user(gpu, how):
    assert gpu(lifetime, how) == (True, False)


def busy():
    stream = _core.DeviceStream(0)
    array = DeviceArray((4 * MIB,), "int32", stream=stream)
    standin.Driver().occupy(array, TIMES)
    return stream, array


def after_the_stream(act):
    stream, array = busy()
    was_busy = not stream.query()
    {
        "read": array.to_numpy,
        "consumer": lambda: array.__dlpack__(stream=_core.DeviceStream(0).handle),
        "own stream": lambda: array.__dlpack__(stream=stream.handle),
        "asks for nothing": lambda: array.__dlpack__(stream=-1),
    }[act]()
    done = stream.query()
    stream.synchronize(60)
    assert array[-1:].to_numpy().tolist() == [TIMES]
    return was_busy, done


@pytest.mark.parametrize("act", ["read", "consumer", "own stream", "asks for nothing"])
def test_a_consumer_on_another_stream_comes_after_the_arrays(gpu, act):
    assert gpu(after_the_stream, act) == (True, act in ("read", "consumer"))


def out_of_time():
    stream, array = busy()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"has not come to its end in 0.01\d* s"):
        stream.synchronize(0.01)
    took = time.monotonic() - begun
    ran = []

    def look():
        time.sleep(0.05)
        ran.append(stream.query())

    thread = threading.Thread(target=look)
    thread.start()
    stream.synchronize(60)  # the lock is free meanwhile
    ran_beside = ran == [False]
    thread.join()
    del array
    return took < 5, ran_beside, stream.query()


def test_a_wait_has_an_end_and_leaves_the_lock_to_others(gpu):
    assert gpu(out_of_time) == (True, True, True)


def interrupted():
    stream, _array = busy()

    def ring(*_):
        raise InterruptedError("the bell")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        stream.synchronize(60)
    except InterruptedError as error:
        return str(error), stream.query()
    finally:
        signal.signal(signal.SIGALRM, before)
        stream.synchronize(60)
    return None


def test_a_signal_ends_a_wait(gpu):
    assert gpu(interrupted) == ("the bell", False)


def forked():
    array = DeviceArray.from_numpy(some("int8", 3))
    stream = _core.DeviceStream(0)
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        try:
            array.to_numpy()
            said = "read"
        except RuntimeError as error:
            said = str(error)
        del array, stream
        gc.collect()
        os.write(write_end, pickle.dumps(said))
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        said = pickle.loads(pipe.read())
    return said, os.wait()[1], array.to_numpy().tobytes() == some("int8", 3).tobytes()


def test_a_fork_has_no_gpu_and_frees_nothing(gpu):
    said, status, intact = gpu(forked)
    assert "CUDA_ERROR_NOT_INITIALIZED" in said
    assert (status, intact) == (0, True)
