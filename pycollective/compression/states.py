"""NumPy's face of compression: a state for each codec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pycollective.communicator import Communicator
from pycollective.compression.arrays import FlatArray
from pycollective.compression.checkpoint import SavedByStateDict
from pycollective.compression.feedback import ErrorFeedback, Shapes
from pycollective.compression.groups import GroupMaker, Groups
from pycollective.compression.options import Common, Compress, Options
from pycollective.compression.quantized import QuantizedOptions
from pycollective.compression.top_k import TopKOptions
from pycollective.typing import Between, By, Exchange, Values


class State(SavedByStateDict):
    """Error feedback for a set of named parameters; collective over the group it was made for.

    All ranks make it with the same parameters and options, and call the same methods in the same
    order. Not thread-safe.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``:
    averages are dense then, and a warning says so.
    """

    codec: ClassVar[str] = ""

    def __init__(
        self,
        parameters: Shapes,
        ranks: Communicator | Groups | GroupMaker,
        options: Options,
        common: Common,
    ) -> None:
        name = type(self).__name__
        self._feedback = ErrorFeedback(name, parameters, ranks, options, common)

    @contextmanager
    def step(self) -> Iterator[State]:
        """``with state.step():`` begins and ends one; an exception discards the step."""
        with self._feedback.one_step():
            yield self

    def all_reduce(self, gradients: Mapping[str, NDArray[Any]]) -> bool:
        """Replace NumPy arrays by their average (not their sum) over all ranks, in place.

        Outside of `step` a call is a step by itself; inside it is a part of that step.

        Args:
            gradients: by parameter name, fp32, fp16 or bf16 (ml_dtypes), C-contiguous, with the
                parameter's number of elements.

        Returns:
            Whether all were finite on all ranks; if not, all are NaN now.

        Raises:
            ConfigurationError: an unknown name, another size or type; nothing has moved.
            CollectiveMismatch: ranks passed different parameters.
        """
        return bool(
            self._feedback.all_reduce({name: FlatArray(x) for name, x in gradients.items()})
        )

    def reduce_scatter(self, out: NDArray[Any], tensor: NDArray[Any], key: str) -> bool:
        """Give each rank its shard of the average (not the sum) of a NumPy array over all ranks.

        Outside of `step` a call is a step by itself; inside it is a part of that step. Use either
        `all_reduce` or `reduce_scatter` for a parameter, not both: they keep separate residuals.
        `flush`, `reset` and `load_state_dict` end that choice. There is one phase, so no server
        residual.

        Args:
            out: this rank's shard, ``tensor.size / ranks`` elements: rank r's begins at r times
                that.
            tensor: the gradient, C-contiguous; only read.
            key: the parameter's name.

        Returns:
            Whether all were finite on all ranks; if not, ``out`` is NaN everywhere.

        Raises:
            ConfigurationError: see `all_reduce`; the elements cannot be shared out evenly, or hosts
                have different numbers of ranks.
        """
        to, of = FlatArray(out), FlatArray(tensor, written=False)
        return bool(self._feedback.reduce_scatter(to, of, key))

    def set_loss_scale(self, scale: float | Callable[[], float]) -> None:
        """Say by what the loss is multiplied, or a function that does (``scaler.get_scale``).

        Looked at when a step begins. Residuals are kept in the scale of the step that left them:
        one in another scale adds them times the ratio, which is exact for powers of two. Where
        that is not finite the step is given up, and what is held is what it was.
        """
        self._feedback.set_loss_scale(scale)

    def flush(self) -> dict[str, NDArray[np.float32]]:
        """Give back what is held, and hold exactly nothing; collective, between steps.

        Returns:
            What all ranks' held error adds to the average, by parameter, in its shape, fp32, in the
            scale of the last step that counted. Add it to a gradient, or drop it.

        Raises:
            ConfigurationError: a step is under way, or the state was closed.
            CollectiveMismatch: another rank refused it, or called something else.
        """
        shapes = self._feedback.shapes
        return {n: error.reshape(shapes[n]) for n, error in self._feedback.flush().items()}

    def reset(self) -> None:
        """Hold nothing. Local: call it on all ranks, between steps.

        Raises:
            ConfigurationError: a step is under way, or the state was closed.
        """
        self._feedback.reset()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the same on every rank; collective, between steps.

        Of parameters that are compressed it takes 4 bytes x elements x hosts for worker residuals,
        and 4 bytes x elements each for server residuals, if any, and for undelivered errors.

        Raises:
            ConfigurationError: a step is under way, or the state was closed.
            CollectiveMismatch: another rank refused it, or called something else.
        """
        return self._feedback.state_dict()

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
        self._feedback.load_state_dict(state, lambda saved: saved)

    def close(self) -> None:
        """Leave the groups that the state made; collective. What is held is lost; `flush` first.

        Idempotent; all calls but `stats` and `set_loss_scale` are refused from then on.
        """
        self._feedback.close()

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
        return self._feedback.stats()


class OneBitState(State):
    """A sign an element and a scale a chunk: 31 times fewer bytes than fp32.

    The scale is the mean magnitude. There are two residuals: one of what this rank sends of its
    host's sum (worker), one of the average that it owns (server). Each takes 8 bytes for each
    element that it is of: 4 for the old residual and 4 for the step's new one.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "one_bit"

    def __init__(
        self,
        parameters: Shapes,
        communicator: Communicator | Groups | GroupMaker,
        *,
        chunk: int = 1024,
        between: Between = "hosts",
        compress: Compress | None = None,
        dense_steps: int = 0,
    ) -> None:
        """Collective over the communicator, which it splits once all ranks have agreed.

        Args:
            parameters: the shape of each by name, such as ``{"w": w.shape}``.
            communicator: of the ranks that average.
            chunk: elements to a scale, a multiple of 64.
            between: "hosts": dense and exact within a host, compressed between hosts. "ranks":
                compressed between all.
            compress: whether a parameter of this name and shape is compressed; None for those of
                two dimensions or more and at least 4,096 elements.
            dense_steps: the first so many steps that count are dense, and nothing is held.

        Raises:
            ConfigurationError: an option cannot be.
            CollectiveMismatch: ranks differ in parameters or options, or one refused its own.
        """
        options = QuantizedOptions(self.codec, chunk)
        super().__init__(parameters, communicator, options, Common(between, compress, dense_steps))


class Int8State(State):
    """8 bits an element and a scale for 256 of them: 3.9 times fewer bytes than fp32.

    As `OneBitState`; an element is off by half a 127th of its chunk's largest, at most.
    """

    codec = "int8"

    def __init__(
        self,
        parameters: Shapes,
        communicator: Communicator | Groups | GroupMaker,
        *,
        chunk: int = 256,
        between: Between = "hosts",
        compress: Compress | None = None,
        dense_steps: int = 0,
    ) -> None:
        """Collective over the communicator; the arguments are those of `OneBitState`."""
        options = QuantizedOptions(self.codec, chunk)
        super().__init__(parameters, communicator, options, Common(between, compress, dense_steps))


class TopKState(State):
    """The elements of the largest magnitude, as places and values.

    Nothing is compressed where all ranks are on one host, unless made with ``between="ranks"``.
    """

    codec = "top_k"

    def __init__(
        self,
        parameters: Shapes,
        communicator: Communicator | Groups | GroupMaker,
        *,
        density: float,
        by: By = "tensor",
        chunk: int = 4096,
        values: Values = "bfloat16",
        exchange: Exchange = "auto",
        warm_up: int = 0,
        decay: float = 1.0,
        between: Between = "hosts",
        compress: Compress | None = None,
        dense_steps: int = 0,
    ) -> None:
        """Collective over the communicator; arguments that are not told here as `OneBitState`'s.

        Args:
            parameters: see there.
            communicator: see there.
            density: how much of each parameter a host sends, 0.0001 to 1: by tensor
                max(1, round(density x elements)) of them; by chunk round(density x chunk) of each
                chunk, and at least one, so density x chunk must be 1 or more.
            by: "tensor", the largest of the whole parameter, or "chunk", of each chunk.
            chunk: elements of a chunk, a multiple of 64.
            values: how they travel: "float32", "bfloat16" or "float16". What rounding drops stays
                in the residual.
            exchange: nothing to choose: "auto" and "gather" are the same.
            warm_up: so many steps after ``dense_steps`` the density falls from nearly 1 to its
                value, by equal ratios.
            decay: what is held is multiplied by it each step.
            between: see there.
            compress: see there.
            dense_steps: see there.
        """
        self._options = TopKOptions(density, by, chunk, values, exchange, warm_up, decay)
        common = Common(between, compress, dense_steps)
        super().__init__(parameters, communicator, self._options, common)

    @property
    def density(self) -> float:
        """The density of the step under way, or of the next."""
        return self._options.density_after(self._feedback.steps_since_start)


def compressed_all_reduce(tensor: Any, state: State, key: str) -> bool:
    """Average one NumPy array over all ranks, compressed: ``state.all_reduce({key: tensor})``."""
    return state.all_reduce({key: tensor})


def compressed_reduce_scatter(out: Any, tensor: Any, state: State, key: str) -> bool:
    """The rank's shard of the average, compressed: ``state.reduce_scatter(out, tensor, key)``."""
    return state.reduce_scatter(out, tensor, key)
