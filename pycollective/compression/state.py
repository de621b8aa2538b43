"""What compression keeps from step to step, and the calls that use it: NumPy's face.

A *step* is what an optimizer sees at once: all calls between `begin` and `end`. Only its end makes
the new residuals count, and only if every gradient of every call was finite on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective.compression.agreeing import check_alike, digest_of
from pycollective.compression.arrays import Flat, Item, OfNumpy, Readable
from pycollective.compression.bucket import Agreement, Outcome
from pycollective.compression.choice import Choice
from pycollective.compression.counting import Counts
from pycollective.compression.groups import Ends
from pycollective.compression.residuals import Gone, Residuals
from pycollective.compression.saving import Keeper, check_saved, mean_of
from pycollective.compression.sharding import check_shards, shards_of
from pycollective.compression.undelivered import Undelivered
from pycollective.errors import ConfigurationError

Shape = tuple[int, ...]

# Fewer elements than this go as they are: a message costs more than they do.
SMALL = 4096


class State:
    """Error feedback for a set of named parameters; collective over the group it was made for.

    A subclass says how gradients are exchanged. All ranks make it with the same parameters and
    options, and call the same methods in the same order. Not thread-safe.

    Attributes:
        kinds: residuals by kind, each this rank's part.
    """

    kinds: dict[str, Residuals]
    chunk: int
    codec = ""
    _warm_up = 0  # steps that tell nothing of the later ones

    def __init__(
        self,
        parameters: Mapping[str, Sequence[int]],
        ends: Ends,
        options: Mapping[str, Any],
        compress: Callable[[str, Shape], bool] | None,
        when: str,
    ) -> None:
        """Agree with the other ranks on all of it.

        Args:
            parameters: the shape of each.
            ends: the groups of this rank.
            options: of the codec, for the comparison.
            compress: whether a parameter of this name and shape is compressed; None for those of
                two dimensions or more and at least `SMALL` elements.
            when: "always", or "auto": where it is faster than dense.

        Raises:
            ConfigurationError: ranks differ in parameters or options.
        """
        self.shapes = {name: tuple(int(n) for n in shape) for name, shape in parameters.items()}
        self._ends = ends
        self.kinds = {}
        wants = compress or (lambda _, shape: len(shape) > 1 and math.prod(shape) >= SMALL)
        self._dense = {name: not wants(name, shape) for name, shape in self.shapes.items()}
        self._described = {"codec": self.codec, "when": when, **options}
        self._choice = Choice(when, ends.places.hosts, ends.all)
        self._undelivered = Undelivered()
        order = sorted(self.shapes)
        told = [[name, self.shapes[name], self._dense[name]] for name in order]
        self._digest = digest_of([self._described, told])
        check_alike(ends.all, self._digest, f"{type(self).__name__} of {self._described}")
        self._scale: Callable[[], float] = lambda: 1.0
        self._scaled = 1.0
        self._sharded: set[str] = set()  # parameters of reduce_scatter
        self._whole: set[str] = set()  # of all_reduce
        self._open, self._finite = False, True
        self._steps = 0
        self._counts = Counts()

    # A step.

    def begin(self) -> None:
        """Begin a step; what an unfinished one left is forgotten."""
        for each in self.kinds.values():
            each.discard()
        scale = float(np.float32(self._scale()))  # as messages carry it
        if not (scale > 0 and math.isfinite(scale)):
            raise ConfigurationError(f"the loss scale {scale} is not a positive number")
        if scale != self._scaled:
            for each in self.kinds.values():
                each.scale(scale / self._scaled)
            self._undelivered.scale(scale / self._scaled)
            self._scaled = scale
        self._open, self._finite, self._compressible = True, True, False
        self._gone = Gone()
        self._undelivered.begin()

    def reduce(self, gradients: Mapping[str, Flat], whole: Flat | None = None) -> bool:
        """Average some gradients of the step over all ranks, in place; whether all were finite.

        Args:
            gradients: by parameter name.
            whole: the array that they make up together, if there is one.
        """
        if not self._open:
            raise ConfigurationError(f"{type(self).__name__}: no step has begun")
        items = [self._item(name, flat) for name, flat in gradients.items()]
        if not items:
            return True
        if both := sorted(self._sharded & set(gradients)):
            raise ConfigurationError(f"{type(self).__name__}: {both} went by reduce_scatter before")
        self._whole.update(gradients)
        self._gone.note(gradients)
        with self._ends.telling(), self._choice.timed():
            if self._choice.way == "dense":
                outcome = self._average([whole] if whole else [item.flat for item in items])
            else:
                outcome = self._exchange(items, self._agreement(items))
        finite = outcome.finite and self._complete(items)
        self._finite &= finite
        self._counts.call(items, outcome, self._ends.places)
        self._compressible |= any(not item.dense for item in items)
        return finite

    def _complete(self, items: Sequence[Item]) -> bool:
        """Add what is still owed; whether the averages are finite in their own types, too.

        All ranks have the same bytes here, and come to the same end.
        """
        self._undelivered.deliver(items)
        finite = all(item.flat.is_finite() for item in items if item.flat.narrow)
        for item in () if finite else items:
            item.flat.fill(float("nan"))
        return finite

    def _average(self, flats: Sequence[Flat]) -> Outcome:
        """Dense."""
        self._ends.all.average([flat.part(0, flat.count) for flat in flats])
        if not (finite := all(flat.is_finite() for flat in flats)):
            for flat in flats:
                flat.fill(float("nan"))
        return Outcome(finite, None)

    def end(self) -> bool:
        """End the step: whether it counts. If not, what is held is what it was before."""
        if not self._open:
            raise ConfigurationError(f"{type(self).__name__}: no step has begun")
        self._open = False
        if self._finite:
            self._commit()
            self._steps += 1
            self._undelivered.commit()
        else:
            for each in self.kinds.values():
                each.discard()
        self._counts["steps" if self._finite else "steps_given_up"] += 1
        counts = self._finite and self._compressible and self._steps > self._warm_up
        with self._ends.telling():
            if self._choice.end_step(counts, self._gone):
                self._deliver_later(self.keeper.mean())
        return self._finite

    def _deliver_later(self, mean: Mapping[str, NDArray[np.float32]]) -> None:
        """Hold no residuals: what they add to the average goes with the next."""
        self._undelivered.add(mean)
        for each in self.kinds.values():
            each.clear()

    @contextmanager
    def step(self) -> Iterator[State]:
        """``with state.step():`` begins and ends one; an exception forgets it."""
        self.begin()
        try:
            yield self
        except BaseException:
            self._open = False  # what it left is forgotten when the next begins
            raise
        self.end()

    def all_reduce(self, gradients: Mapping[str, NDArray[Any]]) -> bool:
        """Average NumPy arrays over all ranks, in place; by itself a whole step, in one a part.

        Args:
            gradients: by parameter name, fp32, fp16 or bf16 (ml_dtypes), C-contiguous, with the
                parameter's number of elements.

        Returns:
            Whether all were finite on all ranks; if not, all are NaN now.

        Raises:
            ConfigurationError: an unknown name, another size or type; nothing has moved.
            CollectiveMismatch: ranks passed different parameters.
        """
        flats = {name: OfNumpy(array) for name, array in gradients.items()}
        return self._as_step(lambda: self.reduce(flats))

    def scatter(self, out: Flat, x: Readable, name: str) -> bool:
        """`reduce_scatter` within a step."""
        places = self._ends.places
        item = self._item(name, x)
        check_shards(name, x.count, places)
        if out.count * places.ranks != x.count:
            raise ConfigurationError(
                f"reduce_scatter: a shard of {name!r} has {x.count // places.ranks} elements, not "
                f"{out.count}"
            )
        if name in self._whole:
            raise ConfigurationError(f"{type(self).__name__}: {name!r} went by all_reduce before")
        self._gone.note([name])
        dense = item.dense or self._choice.way == "dense"
        self._sharded.add(name)
        items = shards_of(name, x, dense, places)
        with self._ends.telling(), self._choice.timed():
            outcome = self._scatter(items, self._agreement(items), out)
            if outcome.finite:
                self._undelivered.deliver_part(name, out, places.rank * out.count)
            fine = outcome.finite and out.is_finite()
            flags = self._ends.all.all_gather(np.array([fine], np.uint8))
        finite = bool(flags.all())
        if not finite:
            out.fill(float("nan"))
        self._finite &= finite
        self._counts.call(items, outcome, self._ends.places)
        self._compressible |= not item.dense
        return finite

    def reduce_scatter(self, out: NDArray[Any], x: NDArray[Any], name: str) -> bool:
        """Average a NumPy array over all ranks, each rank's shard of it to that rank.

        By itself a whole step, in one a part. A parameter goes this way always or never: its
        residual is another. One phase, so no error of the server's.

        Args:
            out: this rank's shard, ``x.size / ranks`` elements: rank r's begins at r times that.
            x: the gradient, C-contiguous; only read.
            name: the parameter's.

        Returns:
            Whether all were finite on all ranks; if not, `out` is NaN everywhere.

        Raises:
            ConfigurationError: see `all_reduce`; the elements cannot be shared out evenly, or hosts
                have different numbers of ranks.
        """
        return self._as_step(lambda: self.scatter(OfNumpy(out), OfNumpy(x, written=False), name))

    def _as_step(self, call: Callable[[], bool]) -> bool:
        """A call in the step under way, or in one of its own."""
        if self._open:
            return call()
        with self.step():
            return call()

    # What subclasses do.

    def _exchange(self, items: list[Item], agreement: Agreement) -> Outcome:
        raise NotImplementedError

    def _scatter(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        raise NotImplementedError

    def _commit(self) -> None:
        for each in self.kinds.values():
            each.commit()

    # What is held.

    def set_loss_scale(self, scale: float | Callable[[], float]) -> None:
        """Say by what the loss is multiplied, or a function that does (``scaler.get_scale``).

        Looked at when a step begins. Residuals are kept in the scale of the gradients: when it
        changes, they are multiplied by the ratio, which is exact for powers of two.
        """
        self._scale = scale if callable(scale) else lambda: float(scale)

    @property
    def keeper(self) -> Keeper:
        """Gathers and hands out what is held."""
        return Keeper(self._ends, self.shapes, self._dense, self.kinds, self.chunk, self._sharded)

    def flush(self) -> dict[str, NDArray[np.float32]]:
        """Give back what is held, and hold exactly nothing; collective.

        Returns:
            By parameter, in its shape, fp32, in the scale of the last step: what all ranks' held
            error adds to the average. Add it to a gradient, or to the parameter, or drop it.
        """
        self._undelivered.add(self.keeper.mean())
        found = dict(self._undelivered)
        self.reset()
        return {name: error.reshape(self.shapes[name]) for name, error in found.items()}

    def reset(self) -> None:
        """Hold nothing. Local: call it on all ranks."""
        for each in self.kinds.values():
            each.clear()
        self._undelivered.clear()
        self._open = False

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the same on every rank; collective.

        Takes 4 bytes times parameters times hosts (and once more for the server's residuals).
        """
        return {
            "version": 1,
            "steps": self._steps,
            "loss_scale": self._scaled,
            "ranks": self._ends.places.ranks,
            "hosts": self._ends.places.hosts,
            "codec": dict(self._described),
            "residuals": self.keeper.gather(),
            "undelivered": {
                name: np.array(self._undelivered.get(name, np.zeros(math.prod(shape))), np.float32)
                for name, shape in self.shapes.items()
                if not self._dense[name]
            },
            "sharded": sorted(self._sharded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what `state_dict` gave; every rank passes the same.

        With the same numbers of ranks and hosts the next step is the one that would have been, bit
        for bit. With others every host holds the same part of the mean error, which is kept.

        Raises:
            ConfigurationError: it is of another codec, or of other parameters.
        """
        check_saved(state, self.codec)
        ranks, hosts = int(state["ranks"]), int(state["hosts"])
        residuals = self.keeper.fitting(state["residuals"], hosts)
        for name in state["sharded"]:
            check_shards(name, math.prod(self.shapes[name]), self._ends.places)
        self._sharded = set(state["sharded"])
        self.keeper.load(residuals, ranks, hosts)
        self._steps = int(state["steps"])
        self._scaled = float(state["loss_scale"])
        self._undelivered = Undelivered(
            {
                name: np.array(error, np.float32)
                for name, error in state["undelivered"].items()
                if np.any(error)
            }
        )
        if self._choice.settled == "dense":
            self._deliver_later(mean_of(residuals, ranks))
        self._open = False

    def close(self) -> None:
        """Leave the groups that the state made; collective. What is held is lost; `flush` first."""
        self.reset()
        self._ends.close()

    def stats(self) -> dict[str, Any]:
        """What this rank has sent and held so far.

        Returns:
            ``steps`` and ``steps_given_up`` (a gradient was not finite); ``compressed_calls``, in
            which something was compressed, and ``dense_calls``; of the former ``payload_bytes``
            that left for other hosts, headers and padding included, and ``dense_bytes`` that a
            reduce-scatter and an all-gather of the same tensors would have sent in fp32;
            ``residual_bytes`` of memory; ``way``, how the next step goes, and ``why``;
            ``dense_parameters``, which always go as they are.
        """
        return {
            **self._counts.all(),
            "residual_bytes": self._undelivered.nbytes + sum(e.nbytes for e in self.kinds.values()),
            "way": self._choice.way,
            "why": self._choice.why,
            "dense_parameters": sorted(name for name, dense in self._dense.items() if dense),
        }

    def _item(self, name: str, flat: Readable) -> Item:
        shape = self.shapes.get(name)
        if shape is None:
            raise ConfigurationError(f"{type(self).__name__}: no parameter is named {name!r}")
        if flat.count != math.prod(shape):
            raise ConfigurationError(
                f"{type(self).__name__}: the gradient of {name!r} has {flat.count} elements, the "
                f"parameter {math.prod(shape)}"
            )
        return Item(name, flat, self._dense[name])

    def _agreement(self, items: Sequence[Item]) -> Agreement:
        names = [item.name for item in items]
        return Agreement(digest_of([self._digest, self._steps, names]), self._scaled)
