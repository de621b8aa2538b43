"""Arrays behind DLPack: what may be written is, what may not is refused, and all can be read."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest

import pycollective as pc
from tests.dlpack_producers import (
    CUDA,
    CUDA_HOST,
    IS_COPIED,
    READ_ONLY,
    ROCM,
    Behind,
    LikeArrow,
    LikeJax,
    OldProducer,
    Producer,
)
from tests.inputs import same_bits


@pytest.fixture(scope="module")
def alone():
    with pc.init() as comm:
        yield comm


def numbers(dtype="float32", read_only=False):
    array = np.arange(1, 9, dtype=dtype)
    array.flags.writeable = not read_only
    return array


# Operations of one rank that read x and write out.
READS = {
    "all_reduce": lambda c, x, out: c.all_reduce(x, out=out),
    "reduce": lambda c, x, out: c.reduce(x, out=out),
    "reduce_scatter": lambda c, x, out: c.reduce_scatter(out, x),
    "all_gather": lambda c, x, out: c.all_gather(out, x),
    "all_to_all": lambda c, x, out: c.all_to_all(out, x),
    "gather": lambda c, x, out: c.gather(out, x),
    "scatter": lambda c, x, out: c.scatter(out, x),
    "async": lambda c, x, out: c.all_reduce(x, out=out, async_op=True).wait(timeout=30),
    "algorithm": lambda c, x, out: c.all_reduce(x, out=out, algorithm="direct"),
}
IMMUTABLE = {
    "read-only NumPy": lambda: Behind(numbers("uint8", read_only=True)),
    "flag": lambda: Producer(numbers("uint8"), flags=READ_ONLY),
    "flags": lambda: Producer(numbers("uint8"), flags=READ_ONLY | IS_COPIED),
    "a copy": lambda: Producer(numbers("uint8"), flags=IS_COPIED),
    "like JAX": lambda: LikeJax(numbers("uint8").tobytes()),
    "like Arrow": lambda: LikeArrow(numbers("uint8")),
}


@pytest.mark.parametrize("kind", IMMUTABLE)
@pytest.mark.parametrize("name", READS)
def test_an_immutable_array_is_an_input(alone, name, kind):
    out = np.zeros(8, np.uint8)
    READS[name](alone, IMMUTABLE[kind](), out)
    assert same_bits(out, numbers("uint8"))


@pytest.mark.parametrize("kind", IMMUTABLE)
@pytest.mark.parametrize("name", [*READS, "in place"])
def test_an_immutable_array_is_no_output(alone, name, kind):
    x = np.full(8, 7, np.uint8)
    out = IMMUTABLE[kind]()
    why = "hands over a copy of itself" if kind == "a copy" else "is read-only"
    says = rf"the output array \(a {re.escape(type(out).__name__)}\) {why}.*: numpy\.array\(x\)$"
    with pytest.raises(pc.ConfigurationError, match=says):
        READS[name](alone, x, out) if name in READS else alone.all_reduce(out)
    assert alone.failure is None
    then = np.zeros(8, np.uint8)
    alone.all_reduce(out, out=then)
    assert same_bits(then, numbers("uint8"))


def test_a_read_only_array_of_numpy_is_told_the_same(alone):
    array = numbers(read_only=True)
    with pytest.raises(pc.ConfigurationError, match=r"\(a numpy\.ndarray\) is read-only; give one"):
        alone.all_reduce(array)
    out = np.zeros_like(array)
    alone.all_reduce(array, out=out)
    assert same_bits(out, array)


@pytest.mark.parametrize(
    "producer",
    [Producer, lambda array: Producer(array, version=(1, 9)), OldProducer, Behind],
    ids=["version 1.0", "version 1.9", "no version", "NumPy"],
)
def test_what_may_be_written_is_written_where_it_lies(alone, producer):
    array = np.zeros(8, np.float32)
    alone.all_gather(producer(array), numbers())
    assert same_bits(array, numbers())


def test_a_version_is_asked_for_once_and_not_again_where_it_is_not_known(alone):
    new, old = Producer(numbers()), OldProducer(numbers())
    for each in (new, old):
        alone.all_reduce(each)
    assert new.asked == [(1, 0)]
    assert old.asked == [None]


def test_another_major_version_is_refused_and_given_back(alone):
    producer = Producer(numbers(), version=(2, 3))
    with pytest.raises(pc.ConfigurationError, match=r"DLPack version 2\.3, and version 1\.x was"):
        alone.all_reduce(producer)
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize("version", [(1, 0), None])
def test_each_capsule_is_given_back_once_and_not_before_the_end(alone, version):
    x, out = Producer(numbers(), version=version), Producer(np.zeros(8, np.float32))
    alone.all_reduce(x, out=out)
    assert (x.deleted, out.deleted) == (1, 1)
    work = alone.all_reduce(x, out=out, async_op=True)
    work.wait(timeout=30)
    assert same_bits(out.array, numbers())
    del work
    assert (x.deleted, out.deleted) == (2, 2)
    with pytest.raises(pc.ConfigurationError, match="different shapes"):
        alone.all_reduce(x, out=np.zeros(9, np.float32))
    assert x.deleted == 3


@pytest.mark.parametrize("version", [(1, 0), None])
def test_devices(alone, version, monkeypatch):
    alone.all_reduce(Producer(numbers(), version=version, device=CUDA_HOST))
    with pytest.raises(pc.ConfigurationError, match="lies on a device of DLPack's type 10"):
        alone.all_reduce(Producer(numbers(), version=version, device=ROCM))
    monkeypatch.setenv("PYCOLLECTIVE_CUDA_DRIVER", "/nowhere/libcuda.so.1")
    with pytest.raises(pc.ConfigurationError, match=r"^all_reduce: no CUDA driver"):
        alone.all_reduce(Producer(numbers(), version=version, device=CUDA))


@pytest.mark.parametrize("error", [BufferError, ValueError, AttributeError, TypeError, SystemExit])
def test_what_a_producer_raises_is_what_the_caller_sees(alone, error):
    class Refuses:
        def __dlpack__(self, **how):
            raise error("not today")

    with pytest.raises(error, match="not today"):
        alone.all_reduce(Refuses())
    assert alone.failure is None


def test_only_a_type_error_makes_it_ask_the_old_way(alone):
    class Refuses(Producer):
        def __dlpack__(self, **how):
            super().__dlpack__(**how)
            raise BufferError("not today")

    producer = Refuses(numbers())
    with pytest.raises(BufferError):
        alone.all_reduce(producer)
    assert producer.asked == [(1, 0)]


def test_a_container_that_can_be_written_and_has_no_versions_is_written(alone):
    class Mutable(bytearray):
        def __dlpack__(self, stream=None):
            return OldProducer(np.frombuffer(self, np.uint8)).capsule()

    out = Mutable(8)
    alone.all_gather(out, numbers("uint8"))
    assert bytes(out) == numbers("uint8").tobytes()


def test_tensors_of_torch(alone):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(1.0, 9.0)
    alone.all_reduce(tensor, op="avg")
    assert same_bits(tensor.numpy(), numbers())
    wide = torch.zeros(8, 3, dtype=torch.bfloat16)
    alone.all_gather(wide[:, 1], torch.ones(8, dtype=torch.bfloat16))
    assert wide.sum(0).tolist() == [0, 8, 0]
    with pytest.raises(BufferError, match="require gradient"):
        alone.all_reduce(torch.ones(3, requires_grad=True))


def wrapper(torch):
    """As DTensor is one, and FakeTensor."""

    class Sharded(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *call):
            return NotImplemented

    return torch.Tensor._make_wrapper_subclass(Sharded, (8,))


def freed(torch):
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


# Of torch, and of NumPy, what shows other numbers than its memory holds, or has none. What it says.
NO_MEMORY = "and has no memory of its own: give the tensor that it wraps"
LYING = {
    "the sign": (
        lambda torch: torch.full((8,), 2j).conj().imag,
        r"\(a Tensor\) is negated lazily.*give x\.resolve_neg\(\)",
    ),
    "a wrapper": (wrapper, f"is of type Sharded {NO_MEMORY}"),
    "a zero": (lambda torch: torch._efficientzerotensor(8), f"is of type Tensor {NO_MEMORY}"),
    "freed": (freed, f"is of type Tensor {NO_MEMORY}"),
    "a mask": (
        lambda torch: np.ma.array(numbers(), mask=[True] * 4 + [False] * 4),
        r"is a MaskedArray, whose mask is not kept: give x\.filled\(0\)",
    ),
}


@pytest.mark.parametrize("kind", LYING)
def test_an_array_whose_memory_is_not_what_it_shows_is_refused(alone, kind):
    make, says = LYING[kind]
    lying, out = make(pytest.importorskip("torch")), numbers()
    accumulator = pc.Accumulator(8, leaves=1)
    for call in (
        lambda: alone.all_reduce(lying),
        lambda: alone.all_reduce(lying, out=out),
        lambda: alone.all_gather(lying, out),
        lambda: accumulator.add(0, lying),
        lambda: accumulator.add(0, lying, donate=True),
    ):
        with pytest.raises(pc.ConfigurationError, match=says):
            call()
    assert same_bits(out, numbers())
    accumulator.add(0, out)
    with pytest.raises(pc.ConfigurationError, match=says):
        alone.all_reduce(accumulator, out=lying)


def test_a_broadcast_view_is_an_input_and_no_output(alone):
    torch = pytest.importorskip("torch")
    views = torch.ones(1).expand(8), np.lib.stride_tricks.as_strided(numbers()[:1], (8,), (0,))
    for view in views:
        assert alone.all_reduce(view, out=numbers()).tolist() == [1] * 8
        with pytest.raises(pc.ConfigurationError, match="whose elements share memory; give one"):
            alone.all_gather(view, numbers())
        assert view.tolist() == [1] * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_arrays_of_jax(alone, dtype):
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    array = jnp.ones(8, dtype)
    out = np.zeros_like(np.asarray(array))
    alone.all_reduce(array, op="max", out=out)
    assert same_bits(out, np.asarray(array))
    with pytest.raises(pc.ConfigurationError, match=r"ArrayImpl\) is read-only"):
        alone.all_reduce(array, op="max")
    with pytest.raises(pc.ConfigurationError, match=r"ArrayImpl\) is read-only"):
        alone.all_gather(array, np.zeros_like(out))
    assert bool((array == jnp.ones(8, dtype)).all())
