"""Error feedback: what compression keeps from step to step, and the steps that use it.

A *step* is what an optimizer sees at once: all calls between its begin and its end. Only its end
makes the new residuals count, and only if every gradient of every call was finite on every rank.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from pycollective.communicator import Communicator
from pycollective.compression.arrays import Flat, Floats, Item, whole
from pycollective.compression.checkpoint import Keeper, Saved, check_saved, mean_of
from pycollective.compression.given import Given, compare
from pycollective.compression.groups import GroupMaker, Groups
from pycollective.compression.header import Agreement, digest_of, header_bytes
from pycollective.compression.kernels import CpuKernels, Kernels
from pycollective.compression.message import AtOnce, Call, Found, Learning
from pycollective.compression.options import Common, Options, Shape
from pycollective.compression.partition import Partition
from pycollective.compression.residuals import CarriedErrors
from pycollective.errors import CollectiveMismatch, ConfigurationError
from pycollective.segments import DTYPES, unused_at

# Of parameters, by name; a face may look them up when the ranks compare them.
Shapes = Mapping[str, Sequence[int]] | Callable[[], Mapping[str, Sequence[int]]]
_T = TypeVar("_T")
_log = logging.getLogger("pycollective")

# What averages a parameter; what is held of it is another's.
_WHOLE, _SHARDS = "all_reduce", "reduce_scatter"
# Fewer elements than this go as they are: a message costs more than they do.
_SMALL = 4096
# Bytes of the message that says what a dense call is about. Calls of other kinds begin with
# messages of other lengths, by which ranks find out: `pycollective.agree` with 9, exchanges of
# lengths with a multiple of 8.
_CALL_BYTES = header_bytes(0) + 2


def _is_large(_name: str, shape: Shape) -> bool:
    """Whether a parameter is compressed, unless the caller decides."""
    return len(shape) > 1 and math.prod(shape) >= _SMALL


class Step:
    """A step under way.

    Attributes:
        scale: the loss scale.
        finite: whether all gradients so far were, as far as the host knows.
        of_backward: whether DDP's hook has begun it.
    """

    def __init__(self, scale: float, of_backward: bool) -> None:
        self.scale, self.finite, self.of_backward = scale, True, of_backward
        self._names: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Note that parameters go: a second time would overwrite what the first leaves.

        Raises:
            ConfigurationError: one of them went before.
        """
        for name in names:
            if name in self._names:
                raise ConfigurationError(
                    f"{name!r} went in this step already: add gradients up before, or end the step"
                )
            self._names.add(name)


class ErrorFeedback:
    """A codec, a partition, residuals and a step, for a set of named parameters.

    The faces for NumPy and torch hold one of these. All ranks make it with the same parameters and
    options, and call the same methods in the same order. Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        parameters: Shapes,
        ranks: Communicator | Groups | GroupMaker,
        options: Options,
        common: Common,
        kernels: Callable[[], Kernels] = CpuKernels,
        learning: Callable[[Groups], Learning] = lambda _: AtOnce(),
    ) -> None:
        """Agree with the other ranks on all of it; only then make groups.

        Args:
            name: what errors call it.
            parameters: the shape of each, or what gives them.
            ranks: that average.
            options: of the codec.
            common: of all codecs.
            kernels: makes those for where the gradients are; raises `ConfigurationError` where
                there are none.
            learning: when the host learns what calls have found; given the state's groups.

        Raises:
            ConfigurationError: an option cannot be.
            CollectiveMismatch: ranks differ in parameters or options, or one refused its own.
        """
        self.name, self._options = name, options
        maker = GroupMaker.of(ranks)

        def given() -> Given[None]:
            described = {"codec": options.codec, **options.checked(), **common.checked()}
            shapes = parameters() if callable(parameters) else parameters
            self._kernels = kernels()
            wants = common.compress or _is_large
            self._described = described
            self.shapes = {name: tuple(int(n) for n in shape) for name, shape in shapes.items()}
            self._uncompressed = {
                n: not (math.prod(s) and wants(n, s)) for n, s in self.shapes.items()
            }
            told = [
                [name, self.shapes[name], self._uncompressed[name]] for name in sorted(self.shapes)
            ]
            where = maker.told()
            text = f"{described} for {len(told)} parameters"
            text += f" on {where}" if where else ""
            return Given(digest_of([described, told, where]), text, None)

        self._digest = compare(maker.group, name, given).digest
        self._sizes = {n: math.prod(s) for n, s in self.shapes.items() if not self._uncompressed[n]}
        self.groups = maker.make(common.between)
        self.hosts = self.groups.hosts
        self.partition = Partition(self.hosts, options.chunk)
        self._learning = learning(self.groups)
        self.codec = options.make(self.groups, self.partition, self._kernels, self._learning)
        if common.between == "hosts" and self.hosts.count == 1 < self.hosts.ranks:
            self._warn_of_one_host()
        self.steps = 0  # that the host knows to have counted
        self._dense_steps = common.dense_steps if self.hosts.count > 1 else 0
        self.step: Step | None = None
        self._to_learn: list[Callable[[], bool]] = []  # of the step under way
        # The last step, and what to learn of it; of one that was given up only this.
        self._ended: tuple[Step | None, list[Callable[[], bool]]] | None = None
        self._mismatch: CollectiveMismatch | None = None  # which the next collective call raises
        self.carried = CarriedErrors()
        self._loss_scale_of: Callable[[], float] = lambda: 1.0
        self._held_scale = 1.0  # of the last step that counted, and so of what is held
        self._went_by: dict[str, str] = {}  # _WHOLE or _SHARDS, of parameters that have gone
        self._closed = False
        self.counts: Counter[str] = Counter()

    def _warn_of_one_host(self) -> None:
        if self.hosts.rank == 0:
            _log.warning(
                "%s: all %d ranks are on one host, where nothing is compressed; between='ranks' "
                "compresses between all ranks",
                self.name,
                self.hosts.ranks,
            )

    @property
    def steps_since_start(self) -> int:
        """How many steps have counted since the dense ones at the start; waits for the last."""
        self.settle()
        return max(0, self.steps - self._dense_steps)

    @property
    def _is_dense(self) -> bool:
        """Whether the step under way, or the next, is dense."""
        return self.hosts.count == 1 or self.steps < self._dense_steps

    @property
    def is_dense_for_good(self) -> bool:
        """Whether hooks only average: then all calls begin in the group of all ranks."""
        return self.hosts.count == 1 and not self.carried

    def check_open(self) -> None:
        """Refuse a call after `close`."""
        if self._closed:
            raise ConfigurationError(f"{self.name}: the state was closed")

    # A step.

    def set_loss_scale(self, scale: float | Callable[[], float]) -> None:
        """Say by what the loss is multiplied, or a function that does."""
        self._loss_scale_of = scale if callable(scale) else lambda: float(scale)

    def begin(self, of_backward: bool = False) -> None:
        """Begin a step; the new residuals of an unfinished one are forgotten."""
        self.check_open()
        self.give_up()  # one that is unfinished
        self.meet()
        with self.groups.telling():
            scale = float(np.float32(self._loss_scale_of()))  # as messages carry it
        if not (scale > 0 and math.isfinite(scale)):
            raise ConfigurationError(f"the loss scale {scale} is not a positive number")
        for each in self.codec.residuals.values():
            each.begin(scale)
        self.carried.begin(scale)
        self.step, self._to_learn = Step(scale, of_backward), []

    def end(self) -> None:
        """End the step, which counts if all was finite; else all residuals stay as they were."""
        step, self.step = self._step_under_way(), None
        self._ended = step, self._to_learn
        if self._learning.at_once:
            self.settle()

    def give_up(self) -> None:
        """Discard the step; the next one to begin discards its new residuals."""
        if self.step is not None:  # ranks may differ in it, and others hear of that
            self._ended = None, self._to_learn
        self.step = None

    def settle(self) -> None:
        """Learn how the last step did, and make it count if it has ended and was finite.

        Raises:
            CollectiveTimeout: the device has not ended its calls in time; `settle` again.
        """
        if self._ended is None:
            return
        step, to_learn = self._ended
        finite = True
        with self._learning.looking():
            try:
                for learn in to_learn:
                    finite &= learn()
            except CollectiveMismatch as error:
                self._mismatch = error
                step = None
            self._ended, self._to_learn = None, []
            if step is not None:
                step.finite &= finite
                self._conclude(step)

    def _conclude(self, step: Step) -> None:
        """Make a step that has ended count, if all of it was finite."""
        if step.finite:
            self.codec.commit()
            self.carried.commit()
            self.steps += 1
            self._held_scale = step.scale
        self.counts["steps" if step.finite else "steps_given_up"] += 1

    def meet(self) -> None:
        """Settle, and raise once what that finds: all ranks do, at their next collective call.

        Raises:
            CollectiveMismatch: ranks called different things in the last step.
        """
        self.settle()
        error, self._mismatch = self._mismatch, None
        if error is not None:
            with self.groups.telling():
                raise error

    def in_step(self) -> bool:
        """Whether a step of the caller is under way; one of an unfinished backward is given up."""
        if self.step is not None and self.step.of_backward:
            self.give_up()
        return self.step is not None

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Begin a step and end it; an exception discards it."""
        self.begin()
        try:
            yield
        except BaseException:
            self.give_up()
            raise
        self.end()

    def _step_under_way(self) -> Step:
        self.check_open()
        if self.step is None:
            raise ConfigurationError(f"{self.name}: no step has begun")
        return self.step

    # Its calls.

    def all_reduce(self, gradients: Mapping[str, Flat]) -> bool | None:
        """Average gradients as a part of the step under way, or as one of their own."""
        if self.in_step():
            return self.reduce(gradients)
        with self.one_step():
            return self.reduce(gradients)

    def reduce_scatter(self, out: Flat, x: Flat, name: str) -> bool | None:
        """Average one gradient, this rank's shard to `out`, as `all_reduce` does."""
        if self.in_step():
            return self._reduce_shard(out, x, name)
        with self.one_step():
            return self._reduce_shard(out, x, name)

    def reduce(self, gradients: Mapping[str, Flat], together: Flat | None = None) -> bool | None:
        """Average some gradients of the step over all ranks, in place; whether all were finite.

        None where a device knows that, and the host does not yet.

        Args:
            gradients: by parameter name.
            together: the array that they make up, if there is one.
        """
        step = self._step_under_way()
        items = [self.item(name, flat) for name, flat in gradients.items()]
        if not items:
            raise ConfigurationError(f"{self.name}: no gradients to average")
        self._go(step, gradients, _WHOLE)
        flats = [together] if together else [item.flat for item in items]
        with self.groups.telling():
            if self._is_dense:
                call = self._average(items, flats)
            else:
                agreement = self._agreement(step, items)
                call = self.codec.all_reduce(items, agreement, self.steps_since_start)
            finite = self._complete(items, flats, call)
        self._count(items, call)
        return finite

    def _complete(self, items: Sequence[Item], flats: Sequence[Flat], call: Call) -> bool | None:
        """Add carried errors, and make all NaN if something is not finite.

        All ranks have the same bytes here, and find the same. `flats` is the memory of all items.
        """
        first, delivered = unused_at(len(items)), {}
        for number, item in enumerate(items):
            error = self.carried.part(item.name, 0, item.flat.count)
            if error is not None:
                # All zero may be a parameter that no rank used: DDP ignores what comes back.
                delivered[item.name] = first + number
                self._kernels.add_error(item.flat, error, call.found, first + number)
        self._kernels.fill_nan(whole(flats), call.found)

        def read(found: Found) -> None:
            for name, unused in delivered.items():
                if not found[unused]:
                    self.carried.note_delivered(name)

        more = f" and {len(items) - 1} more" if len(items) > 1 else ""
        return self._learn(call, f"all_reduce of {items[0].name!r}{more}", items, read)

    def _learn(
        self,
        call: Call,
        what: str,
        items: Sequence[Item],
        read: Callable[[Found], None] = lambda found: None,
    ) -> bool | None:
        """Let the host learn what a call has found, at once or when the step has ended.

        Args:
            call: that was made.
            what: it is, in errors.
            items: its parameters.
            read: does what else there is to do.

        Returns:
            Whether all was finite; None if the host does not know yet.
        """
        found_there = self._learning.send(call.found, f"{what} in step {self.steps + 1}")

        def learn() -> bool:
            found = found_there()
            finite = call.check(found)
            # What is all zero on every host may be a parameter that no rank used: DDP then ignores
            # what comes back, so its residuals stay as they were.
            for number in call.all_zero(found):
                for each in self.codec.residuals.values():
                    each.skip_update(items[number].name)
            read(found)
            return finite

        if not self._learning.at_once:
            call.release()
            self._to_learn.append(learn)
            return None
        finite = learn()
        self._step_under_way().finite &= finite
        return finite

    def _average(self, items: Sequence[Item], flats: Sequence[Flat]) -> Call:
        """Average densely, in the group of all ranks."""
        # No message says what the call is about: the types of elements are a part of that here.
        agreement = self._agreement(self._step_under_way(), items, of_types=True)
        call = self._compare_calls(agreement, self.is_dense_for_good)
        self.groups.all.average([flat.array for flat in flats])
        self._kernels.check_finite(whole(flats), call.found)
        return call

    def _compare_calls(self, agreement: Agreement, in_all: bool) -> Call:
        """Compare what a dense call is about, whose messages do not say it.

        Args:
            agreement: what the call is about.
            in_all: whether calls begin in the group of all ranks, as those of hooks that only
                average do, and not where `Groups` says; the same on all ranks.
        """
        everybody = (range(self.groups.all.size), self.groups.all)
        groups = [everybody] if in_all else list(self.groups.where_calls_begin())
        if not in_all and not self._learning.at_once:
            # A difference that some ranks alone have met goes to all others, which would count the
            # step. Where the host looks at once it tells them.
            groups.append(everybody)
        told = agreement._replace(items=0)
        heads = sum(group.size for _, group in groups)
        sizes = [_CALL_BYTES] * len(groups)
        call = Call(self._kernels, self._learning, told, heads, sizes, items=agreement.items)
        for (senders, group), row in zip(groups, call.messages, strict=True):
            call.headers(row.reshape(1, -1))
            came = group.all_gather(row).reshape(-1)
            call.note(came, np.arange(group.size) * _CALL_BYTES, senders)
        call.headers()
        return call

    def _reduce_shard(self, out: Flat, x: Flat, name: str) -> bool | None:
        """Average one gradient of the step, this rank's shard to `out`; whether all were finite."""
        step = self._step_under_way()
        item = self.item(name, x)
        self.partition.check_scatter(name, x.count)
        if out.count * self.hosts.ranks != x.count:
            raise ConfigurationError(
                f"reduce_scatter: a shard of {name!r} has {x.count // self.hosts.ranks} elements, "
                f"not {out.count}"
            )
        self._go(step, [name], _SHARDS)
        items = self.partition.scatter(name, x, item.uncompressed or self._is_dense)
        agreement = self._agreement(step, items)
        with self.groups.telling():
            before = self._compare_calls(agreement, True) if self.is_dense_for_good else None
            call = self.codec.reduce_scatter(items, agreement, self.steps_since_start, out)
            finite = self._complete_shard(name, items, out, call, before)
        self._count(items, call)
        return finite

    def _complete_shard(
        self, name: str, items: Sequence[Item], out: Flat, call: Call, before: Call | None
    ) -> bool | None:
        """Add a carried error to this rank's shard, and make it NaN if any is not finite.

        `before` has compared what a dense call is about.
        """
        kernels, what = self._kernels, f"reduce_scatter of {name!r}"
        if before is not None:
            kernels.join(call.found, kernels.verdict(before.found))
            self._learn(before, what, items)
        start = self.hosts.rank * out.count
        error = self.carried.part(name, start, start + out.count)
        if error is not None:
            self.carried.note_delivered(name)
            kernels.add_error(out, error, call.found, 0)
        call.hear(self.groups.all)
        kernels.fill_nan(whole([out]), call.found)
        return self._learn(call, what, items)

    def _go(self, step: Step, names: Collection[str], way: str) -> None:
        """Note that parameters go, once in the step and always the same way."""
        for name in names:
            if (before := self._went_by.get(name, way)) != way:
                raise ConfigurationError(f"{self.name}: {name!r} went by {before} before")
        step.note(names)
        self._went_by.update(dict.fromkeys(names, way))

    def item(self, name: str, flat: Flat) -> Item:
        """A parameter's gradient in a call.

        Raises:
            ConfigurationError: no parameter has this name, or it has another size.
        """
        shape = self.shapes.get(name)
        if shape is None:
            raise ConfigurationError(f"{self.name}: no parameter is named {name!r}")
        if flat.count != math.prod(shape):
            raise ConfigurationError(
                f"{self.name}: the gradient of {name!r} has {flat.count} elements, the parameter "
                f"{math.prod(shape)}"
            )
        return Item(name, flat, self._uncompressed[name])

    def _agreement(self, step: Step, items: Sequence[Item], of_types: bool = False) -> Agreement:
        """What the messages of a call say that it is about."""
        names = [item.name for item in items]
        types = [DTYPES[item.flat.dtype] for item in items] if of_types else []
        told = [self._digest, self.steps, names, types, sorted(self.carried)]
        return Agreement(digest_of(told), step.scale, len(items))

    def _count(self, items: Sequence[Item], call: Call) -> None:
        if call.sent is None:
            self.counts["dense_calls"] += 1
            return
        self.counts["payload_bytes"] += call.sent
        self.counts["compressed_calls"] += any(not item.uncompressed for item in items)
        if self.hosts.shard is not None:
            elements = sum(item.flat.count for item in items) / self.hosts.shards
            phases, hosts = 1 if items[0].owner else 2, self.hosts.count
            self.counts["dense_bytes"] += round(4 * phases * elements * (hosts - 1) / hosts)

    # What is held between steps.

    @property
    def keeper(self) -> Keeper:
        """Gathers and hands out what is held."""
        return Keeper(
            self.groups,
            self.partition,
            self._sizes,
            self.codec.residuals,
            self._held_scale,
            self.sharded(),
        )

    def sharded(self) -> set[str]:
        """The parameters whose error is of shards."""
        return {name for name, way in self._went_by.items() if way == _SHARDS}

    def flush(self) -> dict[str, Floats]:
        """Give back what is held, flat, and hold exactly nothing; collective."""
        self._together("flush", _nothing)
        with self.groups.telling():
            self.carried.add(self.keeper.mean(), self._held_scale)
        found = self.carried.to(self._held_scale)
        self._forget()
        return found

    def reset(self) -> None:
        """Hold nothing; local."""
        self.check_open()
        self.settle()
        self._check_between_steps("reset")
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the same on every rank; collective."""
        self._together("state_dict", _nothing)
        with self.groups.telling():
            residuals = self.keeper.gather()
        zeros = {name: np.zeros(size, np.float32) for name, size in self._sizes.items()}
        carried = self.carried.to(self._held_scale)
        return {
            "version": 1,
            "steps": self.steps,
            "loss_scale": self._held_scale,
            "ranks": self.hosts.ranks,
            "hosts": self.hosts.count,
            "codec": dict(self._described),
            "residuals": residuals,
            "undelivered": {
                name: np.array(carried.get(name, zero)) for name, zero in zeros.items()
            },
            "whole": sorted(name for name, way in self._went_by.items() if way == _WHOLE),
            "sharded": sorted(self.sharded()),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], flat: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> None:
        """Hold what `state_dict` gave; collective.

        Args:
            state: the same on every rank.
            flat: makes its errors arrays with elements in their order in memory.
        """

        def fitting() -> Given[Saved]:
            saved = self._fitting(state, flat)
            text = f"a state of {saved.steps} steps in a world of {saved.ranks} ranks"
            return Given(saved.digest(), text, saved)

        saved = self._together("load_state_dict", fitting)
        self._went_by = {
            **dict.fromkeys(saved.whole, _WHOLE),
            **dict.fromkeys(saved.sharded, _SHARDS),
        }
        self._held_scale = saved.loss_scale
        self.keeper.load(saved.residuals, saved.ranks, saved.hosts)
        self.steps = saved.steps
        self.carried = CarriedErrors.of(saved.undelivered, saved.loss_scale)
        if self.hosts.count == 1:
            self._carry(mean_of(saved.residuals, saved.ranks))

    def _carry(self, mean: Mapping[str, Floats]) -> None:
        """Hold no residuals: what they add to the average goes with the next."""
        # What is zero is not owed: of a parameter that no rank used it would never be delivered.
        self.carried.add({n: error for n, error in mean.items() if error.any()}, self._held_scale)
        for each in self.codec.residuals.values():
            each.clear()

    def _fitting(
        self, state: Mapping[str, Any], flat: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> Saved:
        """The checkpoint, if this state can hold it."""
        check_saved(state, self._options.codec)
        self._check_options(state["codec"])
        saved = Saved.of(flat(state), self._sizes, self.keeper)
        names = [*saved.whole, *saved.sharded]
        if unknown := sorted(set(names) - set(self.shapes)):
            raise ConfigurationError(f"a state of other parameters: {unknown}")
        if len(set(names)) < len(names):
            raise ConfigurationError("a state whose parameters went whole and as shards")
        for name in saved.sharded:
            self.partition.check_scatter(name, math.prod(self.shapes[name]))
        return saved

    def _check_options(self, saved: Mapping[str, Any]) -> None:
        """Refuse options that no state has; they may be others than this one's."""
        # Top-k had two exchanges, which held the same.
        saved = {name: each for name, each in saved.items() if name != "exchange"}
        if saved.keys() != self._described.keys():
            differ = sorted(map(str, saved.keys() ^ self._described.keys()))
            raise ConfigurationError(f"a state of other options: {differ}")
        try:
            of_codec = {each.name for each in fields(self._options)} & saved.keys()
            replace(self._options, **{name: saved[name] for name in of_codec}).checked()
            Common(saved["between"], None, saved["dense_steps"]).checked()
        except ConfigurationError as error:
            raise ConfigurationError(f"a state of options that cannot be: {error}") from error

    def _together(self, what: str, given: Callable[[], Given[_T]]) -> _T:
        """Call `given` on all ranks between the same steps, or on none; what it found."""
        self.check_open()
        self.in_step()  # gives up what an unfinished backward has begun
        self.meet()

        def described() -> Given[_T]:
            self._check_between_steps(what)
            found = given()
            text = f"{found.text}: {what} after {self.steps} steps"
            return Given(digest_of([what, self.steps, found.digest]), text, found.value)

        if not self.is_dense_for_good:
            self.groups.meet_between_steps()
        with self.groups.hearing():
            return compare(self.groups.all, f"{self.name}.{what}", described).value

    def _check_between_steps(self, what: str) -> None:
        if self.in_step():
            raise ConfigurationError(f"{self.name}: {what} while a step is under way; end it first")

    def _forget(self) -> None:
        """Hold nothing."""
        for each in self.codec.residuals.values():
            each.clear()
        self.carried.clear()
        self._went_by.clear()
        self.step = None

    def close(self) -> None:
        """Leave the groups; collective. What is held is lost. Idempotent."""
        if self._closed:
            return
        try:
            self.settle()
            # Also calls of a step that some rank has given up: groups end what is under way.
            self._learning.finish("all calls before close")
        finally:
            self._ended = None  # what was not learnt in time is lost with what was held
            self._closed = True
            self._forget()
            self.groups.close()

    def stats(self) -> dict[str, Any]:
        """What this rank has sent and held so far."""
        self.settle()
        if self.hosts.count == 1:
            way, why = "dense", "all ranks are on one host"
        elif self._is_dense:
            way, why = "dense", f"the first {self._dense_steps} steps are dense"
        else:
            way, why = "compressed", "asked for"
        counted = (
            *("steps", "steps_given_up", "compressed_calls", "dense_calls"),
            *("payload_bytes", "dense_bytes"),
        )
        held = sum(each.nbytes for each in self.codec.residuals.values())
        return {
            **{name: self.counts[name] for name in counted},
            "residual_bytes": self.carried.nbytes + held,
            "way": way,
            "why": why,
            "dense_parameters": sorted(name for name, whole in self._uncompressed.items() if whole),
        }


def _nothing() -> Given[None]:
    """Given to a call without arguments."""
    return Given(0, "nothing", None)
