"""What compression keeps from step to step, and the steps that use it.

A *step* is what an optimizer sees at once: all calls between its begin and its end. Only its end
makes the new residuals count, and only if every gradient of every call was finite on every rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective.communicator import Communicator
from pycollective.compression.agreeing import Told, agree, check_same_call, digest_of
from pycollective.compression.arrays import Flat, Item, Readable
from pycollective.compression.bucket import Agreement, Outcome
from pycollective.compression.counting import Counts
from pycollective.compression.ends import Among, Ends
from pycollective.compression.options import Common, Options, Shape, Shapes
from pycollective.compression.residuals import Reduced, Residuals
from pycollective.compression.saving import Keeper
from pycollective.compression.sharding import check_shards, items_of_shards
from pycollective.compression.undelivered import Undelivered
from pycollective.errors import ConfigurationError

_log = logging.getLogger("pycollective")

# What averages a parameter; what is held of it is another's.
WHOLE, SHARDS = "all_reduce", "reduce_scatter"

# Fewer elements than this go as they are: a message costs more than they do.
SMALL = 4096


def is_large(_name: str, shape: Shape) -> bool:
    """What is compressed if nothing else is said."""
    return len(shape) > 1 and math.prod(shape) >= SMALL


class Steps:
    """Error feedback for a set of named parameters; collective over the ranks it was made among.

    A codec's subclass says how gradients are exchanged, and makes `_kinds`.
    """

    codec = ""
    _kinds: dict[str, Residuals]  # this rank's part of each
    _chunk: int  # elements that parameters are cut by

    def __init__(
        self,
        parameters: Shapes,
        ranks: Communicator | Ends | Among,
        options: Options,
        common: Common,
    ) -> None:
        """Agree with the other ranks on all of it; only then make groups.

        Args:
            parameters: the shape of each, or what gives them.
            ranks: that average.
            options: of the codec.
            common: of all codecs.

        Raises:
            ConfigurationError: an option cannot be.
            CollectiveMismatch: ranks differ in parameters or options, or one refused its own.
        """
        among = Among.of(ranks)

        def given() -> Told[None]:
            described = {"codec": self.codec, **options.checked(), **common.checked()}
            shapes = parameters() if callable(parameters) else parameters
            wants = common.compress or is_large
            self._described = described
            self._shapes = {name: tuple(int(n) for n in shape) for name, shape in shapes.items()}
            self._dense = {n: not (math.prod(s) and wants(n, s)) for n, s in self._shapes.items()}
            told = [[name, self._shapes[name], self._dense[name]] for name in sorted(self._shapes)]
            text = f"{described} for {len(told)} parameters"
            return Told(digest_of([described, told, among.told()]), text, None)

        self._digest = agree(among.group, type(self).__name__, given).digest
        self._ends = among.ends(common.between)
        self._kinds = {}
        places = self._ends.places
        if common.between == "hosts" and places.hosts == 1 and places.ranks > 1 and not places.rank:
            _log.warning(
                "%s: all %d ranks are on one host, where nothing is compressed; between='ranks' "
                "compresses between all ranks",
                type(self).__name__,
                places.ranks,
            )
        self._steps = 0  # that have counted
        self._dense_steps = common.dense_steps if places.hosts > 1 else 0
        self._undelivered = Undelivered()
        self._loss_scale_of: Callable[[], float] = lambda: 1.0
        self._held_scale = 1.0  # of the last step that counted, and so of what is held
        self._step_scale = 1.0  # of the last step that began
        self._went_by: dict[str, str] = {}  # WHOLE or SHARDS, of parameters that have gone
        self._open, self._finite, self._closed = False, True, False
        self._counts = Counts()

    @property
    def _starting(self) -> bool:
        """Whether the step under way, or the next, is one of the dense ones at the start."""
        return self._steps < self._dense_steps

    @property
    def _is_dense(self) -> bool:
        """Whether the step under way, or the next, is."""
        return self._starting or self._ends.places.hosts == 1

    @property
    def _steps_since_start(self) -> int:
        """How many have counted since then."""
        return max(0, self._steps - self._dense_steps)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConfigurationError(f"{type(self).__name__}: the state was closed")

    # A step.

    def _begin(self) -> None:
        """Begin a step; what an unfinished one left is forgotten."""
        self._check_not_closed()
        with self._ends.telling():
            scale = float(np.float32(self._loss_scale_of()))  # as messages carry it
        if not (scale > 0 and math.isfinite(scale)):
            raise ConfigurationError(f"the loss scale {scale} is not a positive number")
        for each in self._kinds.values():
            each.begin(scale)
        self._undelivered.begin(scale)
        self._step_scale = scale
        self._open, self._finite = True, True
        self._reduced = Reduced()

    def _end(self) -> bool:
        """End the step: whether it counts. If not, what is held is what it was before."""
        self._check_open()
        self._open = False
        if self._finite:
            self._commit()
            self._steps += 1
            self._undelivered.commit()
            self._held_scale = self._step_scale
        self._counts["steps" if self._finite else "steps_given_up"] += 1
        return self._finite

    def _commit(self) -> None:
        for each in self._kinds.values():
            each.commit()

    def _check_open(self) -> None:
        self._check_not_closed()
        if not self._open:
            raise ConfigurationError(f"{type(self).__name__}: no step has begun")

    # Its calls.

    def _reduce(self, gradients: Mapping[str, Flat], whole: Flat | None = None) -> bool:
        """Average some gradients of the step over all ranks, in place; whether all were finite.

        Args:
            gradients: by parameter name.
            whole: the array that they make up together, if there is one.
        """
        self._check_open()
        items = [self._item(name, flat) for name, flat in gradients.items()]
        if not items:
            raise ConfigurationError(f"{type(self).__name__}: no gradients to average")
        self._go(gradients, WHOLE)
        flats = [whole] if whole else [item.flat for item in items]
        with self._ends.telling():
            if self._is_dense:
                outcome = self._average(items, flats)
            else:
                outcome = self._exchange(items, self._agreement(items))
            finite = outcome.finite and self._complete(items)
        self._finite &= finite
        self._counts.call(items, outcome, self._ends.places)
        return finite

    def _complete(self, items: Sequence[Item]) -> bool:
        """Add what is still owed; whether the averages are finite in their own types, too.

        All ranks have the same bytes here, and come to the same end.
        """
        finite = self._undelivered.deliver(items)
        finite &= all(item.flat.is_finite() for item in items if item.flat.narrow)
        for item in () if finite else items:
            item.flat.fill(float("nan"))
        return finite

    def _average(self, items: Sequence[Item], flats: Sequence[Flat]) -> Outcome:
        """Dense, in the group of all ranks."""
        self._check_same_call(items)
        self._ends.all.average([flat.part(0, flat.count) for flat in flats])
        finite = all(flat.is_finite() for flat in flats)
        if not finite:
            for flat in flats:
                flat.fill(float("nan"))
        return Outcome(finite, None)

    def _reduce_shard(self, out: Flat, x: Readable, name: str) -> bool:
        """Average one gradient of the step, this rank's shard to `out`; whether all were finite."""
        self._check_open()
        places = self._ends.places
        item = self._item(name, x)
        check_shards(name, x.count, places)
        if out.count * places.ranks != x.count:
            raise ConfigurationError(
                f"reduce_scatter: a shard of {name!r} has {x.count // places.ranks} elements, not "
                f"{out.count}"
            )
        self._go([name], SHARDS)
        items = items_of_shards(name, x, item.dense or self._is_dense, places)
        with self._ends.telling():
            if self._dense_for_good:
                check_same_call(self._ends, self._agreement(items), in_all=True)
            outcome = self._exchange_shards(items, self._agreement(items), out)
            if outcome.finite:
                self._undelivered.deliver_part(name, out, places.rank * out.count)
            fine = outcome.finite and out.is_finite()
            flags = self._ends.all.all_gather(np.array([fine], np.uint8))
        finite = bool(flags.all())
        if not finite:
            out.fill(float("nan"))
        self._finite &= finite
        self._counts.call(items, outcome, self._ends.places)
        return finite

    @property
    def _dense_for_good(self) -> bool:
        """Whether hooks only average, in the group of all ranks, where all calls then begin."""
        return self._ends.places.hosts == 1 and not self._undelivered

    def _check_same_call(self, items: Sequence[Item]) -> None:
        """Of a dense call, whose messages say nothing of what it is about."""
        agreement = self._agreement(items, of_types=True)
        check_same_call(self._ends, agreement, self._dense_for_good)

    def _go(self, names: Sequence[str] | Mapping[str, Any], way: str) -> None:
        """Note that parameters go, once in the step and always the same way."""
        for name in names:
            if (before := self._went_by.get(name, way)) != way:
                raise ConfigurationError(f"{type(self).__name__}: {name!r} went by {before} before")
        self._reduced.note(names)
        self._went_by.update(dict.fromkeys(names, way))

    def _item(self, name: str, flat: Readable) -> Item:
        shape = self._shapes.get(name)
        if shape is None:
            raise ConfigurationError(f"{type(self).__name__}: no parameter is named {name!r}")
        if flat.count != math.prod(shape):
            raise ConfigurationError(
                f"{type(self).__name__}: the gradient of {name!r} has {flat.count} elements, the "
                f"parameter {math.prod(shape)}"
            )
        return Item(name, flat, self._dense[name])

    def _agreement(self, items: Sequence[Item], of_types: bool = False) -> Agreement:
        """What a call is about; where elements travel as they are, their types are part of it."""
        names = [item.name for item in items]
        types = [str(item.flat.part(0, 0).dtype) for item in items] if of_types else []
        owed = sorted(self._undelivered)
        told = [self._digest, self._steps, names, types, owed]
        return Agreement(digest_of(told), self._step_scale)

    # What codecs do.

    def _exchange(self, items: list[Item], agreement: Agreement) -> Outcome:
        raise NotImplementedError

    def _exchange_shards(self, items: list[Item], agreement: Agreement, out: Flat) -> Outcome:
        raise NotImplementedError

    # What is held.

    @property
    def _keeper(self) -> Keeper:
        """Gathers and hands out what is held."""
        return Keeper(
            self._ends,
            self._shapes,
            self._dense,
            kinds=self._kinds,
            scale=self._held_scale,
            chunk=self._chunk,
            sharded=self._sharded(),
        )

    def _sharded(self) -> set[str]:
        """The parameters whose error is of shards."""
        return {name for name, way in self._went_by.items() if way == SHARDS}

    def _deliver_later(self, mean: Mapping[str, NDArray[np.float32]]) -> None:
        """Hold no residuals: what they add to the average goes with the next."""
        # What is zero is not owed: of a parameter that no rank used it would never be delivered.
        owed = {name: error for name, error in mean.items() if error.any()}
        self._undelivered.add(owed, self._held_scale)
        for each in self._kinds.values():
            each.clear()

    def _forget(self) -> None:
        """Hold nothing."""
        for each in self._kinds.values():
            each.clear()
        self._undelivered.clear()
        self._went_by.clear()
        self._open = False
