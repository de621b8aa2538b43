"""NumPy's face of compression: steps of named arrays, and what is held between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pycollective.compression.agreeing import Told, agree, digest_of
from pycollective.compression.arrays import OfNumpy
from pycollective.compression.loading import Saved, check_saved
from pycollective.compression.saving import mean_of
from pycollective.compression.sharding import check_shards
from pycollective.compression.stepping import SHARDS, WHOLE, Steps
from pycollective.compression.undelivered import Undelivered
from pycollective.errors import ConfigurationError

_T = TypeVar("_T")


class State(Steps):
    """Error feedback for a set of named parameters; collective over the group it was made for.

    A subclass says how gradients are exchanged. All ranks make it with the same parameters and
    options, and call the same methods in the same order. Not thread-safe.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``:
    averages are dense then, and a warning says so.
    """

    # A step.

    def step(self) -> AbstractContextManager[State]:
        """``with state.step():`` begins and ends one; an exception forgets it."""
        return self._one_step()

    @contextmanager
    def _one_step(self) -> Iterator[State]:
        self._begin()
        try:
            yield self
        except BaseException:
            self._open = False  # what it left is forgotten when the next begins
            raise
        self._end()

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
        return self._as_step(lambda: self._reduce(flats))

    def reduce_scatter(self, out: NDArray[Any], tensor: NDArray[Any], key: str) -> bool:
        """Average a NumPy array over all ranks, each rank's shard of it to that rank.

        By itself a whole step, in one a part. A parameter goes this way always or never, until
        `flush`, `reset` or `load_state_dict`: its residual is another. One phase, so no error of
        the server's.

        Args:
            out: this rank's shard, ``tensor.size / ranks`` elements: rank r's begins at r times
                that.
            tensor: the gradient, C-contiguous; only read.
            key: the parameter's name.

        Returns:
            Whether all were finite on all ranks; if not, `out` is NaN everywhere.

        Raises:
            ConfigurationError: see `all_reduce`; the elements cannot be shared out evenly, or hosts
                have different numbers of ranks.
        """
        to, of = OfNumpy(out), OfNumpy(tensor, written=False)
        return self._as_step(lambda: self._reduce_shard(to, of, key))

    def _as_step(self, call: Callable[[], bool]) -> bool:
        """A call in the step under way, or in one of its own."""
        if self._in_step():
            return call()
        with self._one_step():
            return call()

    def _in_step(self) -> bool:
        """Whether one is under way."""
        return self._open

    # What is held.

    def set_loss_scale(self, scale: float | Callable[[], float]) -> None:
        """Say by what the loss is multiplied, or a function that does (``scaler.get_scale``).

        Looked at when a step begins. Residuals are kept in the scale of the step that left them:
        one in another scale adds them times the ratio, which is exact for powers of two. Where
        that is not finite the step is given up, and what is held is what it was.
        """
        self._loss_scale_of = scale if callable(scale) else lambda: float(scale)

    def flush(self) -> dict[str, NDArray[np.float32]]:
        """Give back what is held, and hold exactly nothing; collective, between steps.

        Returns:
            By parameter, in its shape, fp32, in the scale of the last step that counted: what all
            ranks' held error adds to the average. Add it to a gradient, or drop it.

        Raises:
            ConfigurationError: a step is under way, or the state was closed.
            CollectiveMismatch: another rank refused it, or called something else.
        """
        self._together("flush", _nothing)
        with self._ends.telling():
            self._undelivered.add(self._keeper.mean(), self._held_scale)
        found = self._undelivered.to(self._held_scale)
        self._forget()
        return {name: error.reshape(self._shapes[name]) for name, error in found.items()}

    def reset(self) -> None:
        """Hold nothing. Local: call it on all ranks, between steps.

        Raises:
            ConfigurationError: a step is under way, or the state was closed.
        """
        self._check_not_closed()
        self._check_between_steps("reset")
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the same on every rank; collective, between steps.

        Takes 4 bytes times parameters times hosts (and once more for the server's residuals).

        Raises:
            ConfigurationError: a step is under way, or the state was closed.
            CollectiveMismatch: another rank refused it, or called something else.
        """
        self._together("state_dict", _nothing)
        with self._ends.telling():
            residuals = self._keeper.gather()
        zeros = {name: np.zeros(size, np.float32) for name, size in self._sizes().items()}
        undelivered = self._undelivered.to(self._held_scale)
        return {
            "version": 1,
            "steps": self._steps,
            "loss_scale": self._held_scale,
            "ranks": self._ends.places.ranks,
            "hosts": self._ends.places.hosts,
            "codec": dict(self._described),
            "residuals": residuals,
            "undelivered": {
                name: np.array(undelivered.get(name, zero)) for name, zero in zeros.items()
            },
            "whole": sorted(name for name, way in self._went_by.items() if way == WHOLE),
            "sharded": sorted(self._sharded()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what `state_dict` gave; every rank passes the same, between steps.

        With the same numbers of ranks and hosts the next step is the one that would have been, bit
        for bit. With others every host holds the same part of the mean error, which is kept.

        Raises:
            ConfigurationError: it is of another codec, or of other parameters; its errors are not
                finite fp32; a step is under way, or the state was closed. What was held is
                still held.
            CollectiveMismatch: another rank refused its state, or was given another; likewise.
        """

        def fitting() -> Told[Saved]:
            saved = self._fitting(state)
            text = f"a state of {saved.steps} steps in a world of {saved.ranks} ranks"
            return Told(saved.digest(), text, saved)

        saved = self._together("load_state_dict", fitting)
        self._went_by = {
            **dict.fromkeys(saved.whole, WHOLE),
            **dict.fromkeys(saved.sharded, SHARDS),
        }
        self._held_scale = saved.loss_scale
        self._keeper.load(saved.residuals, saved.ranks, saved.hosts)
        self._steps = saved.steps
        self._undelivered = Undelivered.of(saved.undelivered, saved.loss_scale)
        if self._ends.places.hosts == 1:
            self._deliver_later(mean_of(saved.residuals, saved.ranks))

    def _fitting(self, state: Mapping[str, Any]) -> Saved:
        """What was saved, if this state can hold it."""
        check_saved(state, self.codec)
        saved = Saved.of(self._in_arrays(state), self._sizes(), self._keeper)
        names = [*saved.whole, *saved.sharded]
        if unknown := sorted(set(names) - set(self._shapes)):
            raise ConfigurationError(f"a state of other parameters: {unknown}")
        if len(set(names)) < len(names):
            raise ConfigurationError("a state whose parameters went whole and as shards")
        for name in saved.sharded:
            check_shards(name, math.prod(self._shapes[name]), self._ends.places)
        return saved

    def _in_arrays(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was saved, with elements in their order in memory."""
        return state

    def _sizes(self) -> dict[str, int]:
        """Elements of the parameters that are compressed."""
        return {n: math.prod(shape) for n, shape in self._shapes.items() if not self._dense[n]}

    def _together(self, what: str, given: Callable[[], Told[_T]]) -> _T:
        """See to it that all ranks call this between the same steps; what `given` found."""
        self._check_not_closed()

        def told() -> Told[_T]:
            self._check_between_steps(what)
            found = given()
            text = f"{found.text}: {what} after {self._steps} steps"
            return Told(digest_of([what, self._steps, found.digest]), text, found.value)

        if not self._dense_for_good:
            self._ends.meet_between_steps()
        with self._ends.hearing():
            return agree(self._ends.all, f"{type(self).__name__}.{what}", told).value

    def _check_between_steps(self, what: str) -> None:
        if self._in_step():
            raise ConfigurationError(
                f"{type(self).__name__}: {what} while a step is under way; end it first"
            )

    def close(self) -> None:
        """Leave the groups that the state made; collective. What is held is lost; `flush` first.

        Idempotent; all calls but `stats` and `set_loss_scale` are refused from then on.
        """
        if self._closed:
            return
        self._closed = True
        self._forget()
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
        if self._starting:
            way, why = "dense", f"the first {self._dense_steps} steps are dense"
        elif self._is_dense:
            way, why = "dense", "all ranks are on one host"
        else:
            way, why = "compressed", "asked for"
        return {
            **self._counts.all(),
            "residual_bytes": self._undelivered.nbytes
            + sum(e.nbytes for e in self._kinds.values()),
            "way": way,
            "why": why,
            "dense_parameters": sorted(name for name, dense in self._dense.items() if dense),
        }


def _nothing() -> Told[None]:
    """Given to a call without arguments."""
    return Told(0, "nothing", None)
