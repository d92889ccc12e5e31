"""Measure the verdict again while training goes on: what a few samples cannot show before it, it shows later.

A loss may begin to compare samples after a warm-up, a hook may come in later, and some samples are rare. So a
micro-batch of training is measured at a few moments, when memory has run out in it, when it holds samples of a kind
that no measurement has met, and when something has changed between the passes of a window.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from lightning_ga.batch.layout import BatchSlices
from lightning_ga.compat import closures, loops, ranks
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.exactness.check import ExactnessCheck, batch_norm_layers
from lightning_ga.fit.exactness.differences import norm
from lightning_ga.fit.exactness.halves import Halves, Kind, kinds_of, telling_cut
from lightning_ga.fit.exactness.passes import (
    MicroBatches,
    Sums,
    changed_names,
    numbers_of,
    rounding,
    settings_of,
    state_sums,
    traceless_passes,
)
from lightning_ga.fit.exactness.training import Remeasured, is_inexact
from lightning_ga.fit.parts import Part
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.exactness import GRADIENTS_CHANGED, LEFT_OUT_WHOLE, Exactness
from lightning_ga.snapshot.copies import versions

LOOKS = 8  # micro-batches before which the model is looked at, and again from each moment on
LOOKED_AT = 1000  # micro-batches of which the samples are looked at
TRIED = 4  # of them that are cut to show a kind of value; then it is given up: every sample may hold as many
MOST = 8  # places of a batch that ran in pieces which are measured, about
COST = 3  # passes of one measurement: the whole and two parts
AGAIN = 10  # times the tolerance of the check before training: gradients become small, and rounding does not
FREE, SHARE = 20 * COST, 2e-3  # passes that measurements may take: so many, and this share of training's


class LaterChecks:
    """Looks at a training before and after its micro-batches."""

    def __init__(self, trainer: Any, engine: Engine, data: TrainingData, *, wanted: bool) -> None:
        self._trainer, self._engine, self._data, self._exactness = trainer, engine, data, data.exactness
        self.are_made = wanted and not ranks.is_sharded(trainer)  # whether anything is looked at or measured
        self._passes = self._spent = 0  # of training so far, and of measurements
        self._looks = LOOKS if self.are_made else 0  # that are left
        self._before: Sums = {}  # of the module's state before the last micro-batch
        self._numbers: dict[str, float] = {}  # at its backward pass
        self._rates: dict[str, float] = {}  # by name, before the step in which the backward pass may run
        self._gradients: Any = None  # their versions before callbacks that the check does not call
        self._compared = -1  # the last micro-batch at whose backward pass they were read
        self._met: Counter[Kind] = Counter()  # micro-batches with new kinds of values
        self._kept: BatchSlices | None = None
        self._left_out: BatchSlices | None = None  # for which the step returned ``None``
        self._spreads: bool | None = None  # whether one such sample makes a batch return ``None``, if it is known
        self._on_host = False  # whether the micro-batch is moved to the device in parts
        self._epoch = 0  # in which it was last asked whether a moment has come
        self._is_awaited = False  # whether a micro-batch of this window is to be measured
        self._place = self._turns = 0  # of the micro-batch in its window; measurements that were due

    def look(self, batch: Any, *, accumulates: bool) -> None:
        """Look before a micro-batch at the model and at the samples, and measure the micro-batch if it is time to."""
        self._passes += 1
        self._on_host = self._engine.move is not None
        if not accumulates:
            return
        exactness, begins = self._exactness, loops.begins_window(self._trainer)
        if self._looks > 0 and self._trainer.accumulate_grad_batches > 1:
            self._looks -= 1
            self._compare_state()
        if begins:
            self._is_awaited, self._place = self._is_due(), 0
        is_due = self._is_awaited and self._place == self._turns % self._trainer.accumulate_grad_batches
        self._place += 1
        if is_inexact(exactness.training):
            return
        kinds = self._new_kinds(batch) if self._passes <= LOOKED_AT else set()
        if is_due or kinds or exactness.suspects:
            if is_due:  # the next looks at another place
                self._is_awaited, self._turns = False, self._turns + 1
            with self._engine.suspended():  # its parts may be moved to the device
                slices = attempt(self._slices, _any_error, batch).result
                if is_due or exactness.suspects or self._shows(kinds, slices):
                    self._measure(slices, is_told=False)

    def _new_kinds(self, batch: Any) -> set[Kind]:
        """Return the kinds of values in a micro-batch that no measurement has met; they are tried a few times."""
        host = self._engine.host
        kinds = kinds_of(batch if host is None else host).keys() - self._exactness.kinds
        self._met.update(kinds)
        self._exactness.kinds |= {kind for kind in kinds if self._met[kind] >= TRIED}
        return kinds

    def _shows(self, kinds: set[Kind], slices: BatchSlices | None) -> bool:
        """Return whether a batch can be cut so that its parts hold unlike shares of these kinds."""
        if slices is None:
            return False
        return attempt(telling_cut, _any_error, slices, self._largest(slices), kinds).result is not None

    def _largest(self, slices: BatchSlices) -> int:
        return min(slices.samples, self._engine.limit("training") or slices.samples)

    def note_left_out(self, batch: Any) -> None:
        """Keep a micro-batch for which the step returned ``None``, until its window ends."""
        if self.are_made and self._left_out is None and self._spreads is None:
            with self._engine.suspended():
                self._left_out = attempt(self._slices, _any_error, batch).result

    def found_left_out(self, batch: Any, *, is_one_batch: bool) -> bool:
        """Learn that the step returned ``None`` for some passes of a window, which ends with a batch.

        Return whether it is left out whole: it is one batch of the recipe, and one pass would have returned ``None``.
        """
        if not self.are_made:
            return False
        if self._spreads is None and "training" not in self._engine.lockstep:
            self.note_left_out(batch)
            slices, self._left_out = self._left_out, None
            self._spreads = slices is not None and bool(attempt(self._is_spread, _any_error, slices).result)
        whole = is_one_batch and bool(self._spreads)
        if whole:
            self._exactness.found_unknown(LEFT_OUT_WHOLE)
        else:
            self._exactness.found_left_out()
        return whole

    def _is_spread(self, slices: BatchSlices) -> bool:
        """Return whether the step leaves samples out together, and trains on some of them if they run apart."""
        with self._engine.suspended(), traceless_passes(self._trainer, plain=True, begins=False) as passes:

            def trains(start: int, stop: int) -> bool:
                batch = slices.take(start, stop)
                return norm(passes.run(MicroBatches([batch], on_device=not self._on_host)).gradients[0]) > 0

            size = self._largest(slices)
            starts = range(0, slices.samples, size)
            parts = [(start, stop) for start in starts if not trains(start, stop := min(start + size, slices.samples))]
            for start, stop in parts:
                middle = (start + stop) // 2
                halves = [(start, middle), (middle, stop)] if start < middle else []
                if any(trains(*half) for half in halves):
                    return True
                parts += halves
        return False

    def keep(self, batch: Any) -> None:
        """Keep a micro-batch in which memory has run out until all hooks of it have run: it is measured then."""
        if self.are_made and not is_inexact(self._exactness.splitting):
            with self._engine.suspended():
                self._kept = attempt(self._slices, _any_error, batch).result

    def measure_kept(self) -> None:
        """Measure the micro-batch that was kept, if there is one."""
        slices, self._kept = self._kept, None
        if slices is not None:
            with self._engine.suspended():
                self._measure(slices, is_told=True)

    def _measure(self, slices: BatchSlices | None, *, is_told: bool) -> None:
        """Measure a micro-batch, and tell what is wrong unless it ``is_told`` elsewhere."""
        exactness = self._exactness
        if "training" in self._engine.lockstep:  # ranks would wait for each other
            exactness.found(Remeasured(matters=tuple(exactness.suspects)), is_told=is_told)
            return
        self._looks, self._before = LOOKS, {}
        self._spent += COST
        exactness.found(self._measured(slices, cut=is_told), is_told=is_told)

    def _measured(self, slices: BatchSlices | None, *, cut: bool) -> Remeasured:
        """Run the check on a micro-batch of training, or on some of it if memory is short, and restore all state.

        Its parts are other batches of the loop, or pieces if it was ``cut``.
        """
        largest = 0 if slices is None else self._largest(slices)
        for size in filter(None, (largest, largest // 2, largest // 4)):
            outcome = attempt(self._check, _any_error, slices, size, cut)
            if outcome.failure is None:
                measured: Remeasured = outcome.result
                return measured
            if not is_out_of_memory(outcome.failure):
                break
        return Remeasured(matters=tuple(self._exactness.suspects))

    def _slices(self, batch: Any) -> BatchSlices:
        number, move = loops.micro_batch_index(self._trainer), self._engine.mover if self._on_host else None
        return self._engine.slices("training", Part(batch, number, move, expected=self._data.expected(number)))

    def _check(self, slices: BatchSlices, size: int, cut: bool) -> Remeasured:
        trainer, source, on_device = self._trainer, self._data.source, not self._on_host
        as_pieces = cut or source.cut_in_step or trainer.accumulate_grad_batches == 1
        reader, tolerance = self._engine.reader("training"), AGAIN * rounding(trainer)
        kinds = kinds_of(slices.take(0, slices.samples)).keys() - self._exactness.kinds
        first = self._turns * size % (slices.samples - size + 1) if not cut else 0
        cuts = [telling_cut(slices, size, kinds) or (first, None, first + size)]
        if cut:  # of what ran in pieces, also across their edges
            step = max(1, size // 2, (slices.samples - size) // MOST)
            cuts += [(start, None, start + size) for start in range(step, slices.samples - size + 1, step)]
        measured = Remeasured()
        with traceless_passes(trainer, plain=True, begins=False) as passes:
            check = ExactnessCheck(source, reader, passes, self._exactness.count, tolerance, while_training=True)
            for start, middle, stop in cuts:
                batch = MicroBatches([slices.take(start, stop)], on_device=on_device)
                batch_pass = passes.run(batch)
                matters = measured.matters or check.which_matter(batch_pass, batch, self._exactness.suspects)
                layers = batch_norm_layers(trainer.lightning_module)
                if stop - start < 2 or (layers and stop - start < 4):  # BatchNorm refuses one sample
                    known = Exactness(None, tolerance, "batch_norm", layers=layers) if layers else None
                    return Remeasured(known, matters)
                places = start, middle, stop
                halves = Halves.of(slices.take, places, as_pieces=as_pieces, on_device=on_device)
                verdict = check.judge(batch_pass, halves)
                if measured.verdict is None or verdict.cause != "unmeasured":
                    measured = Remeasured(verdict, matters)
                if is_inexact(verdict):
                    break
        self._exactness.kinds |= check.kinds
        return measured

    def _is_due(self) -> bool:
        """Return whether a moment has come: in the first window of some epochs, and after 1, 2, 4, 8, 16 … steps."""
        epoch, step = loops.training_epoch(self._trainer), int(self._trainer.global_step)
        begins = epoch > self._epoch and _is_round(epoch)
        self._epoch = epoch
        is_affordable = self._spent + COST <= FREE + SHARE * self._passes
        return is_affordable and (begins or step.bit_count() == 1)

    def after_backward(self) -> None:
        """Keep the versions of gradients before ``on_after_backward`` of other callbacks."""
        own = [self._trainer.lightning_module]  # of which the check knows
        if self._looks > 0 and not self._data.source.cut_in_step and not closures.has_hook(own, "on_after_backward"):
            self._gradients = self._versions()

    def _versions(self) -> Any:
        return versions(parameter.grad for parameter in self._trainer.lightning_module.parameters())

    def _compare_state(self) -> None:
        """Note what has changed since the micro-batch before, within a window."""
        before_hooks, self._gradients = self._gradients, None
        if before_hooks is not None and not loops.begins_window(self._trainer) and before_hooks != self._versions():
            self._exactness.found_unknown(GRADIENTS_CHANGED)
        before, self._before = self._before, state_sums(self._trainer.lightning_module)
        self._note_changes(before, self._before)

    def _note_changes(self, before: Mapping[str, Any], now: Mapping[str, Any], numbers: Collection[str] = ()) -> None:
        """Note what has changed, with the former values of these numbers, unless a window lies between."""
        if before and not loops.begins_window(self._trainer):
            changed = changed_names(before, now)
            self._exactness.found_changed({name: before[name] if name in numbers else None for name in changed})

    def read_rates(self) -> None:
        """Read learning rates and the like before the optimizer's step: ``optimizer_step`` may set them there."""
        if self._looks > 0:
            self._rates = settings_of(self._trainer.optimizers)

    def compare_numbers(self) -> None:
        """Note which numbers have changed since the backward pass of the micro-batch before, within a window.

        All hooks between two micro-batches lie between these moments, and no step of a schedule.
        """
        index = loops.micro_batch_index(self._trainer)
        if index == self._compared:
            return
        self._compared = index
        if not (self._looks > 0 and self._trainer.accumulate_grad_batches > 1):
            self._numbers = {}
            return
        numbers = numbers_of(self._trainer.lightning_module)
        before, self._numbers = self._numbers, {**numbers, **self._rates}
        self._note_changes(before, self._numbers, numbers)


def _is_round(number: int) -> bool:
    """Return whether a number is one of 1, 2, 3, 4, 6, 8, 12, 16, 24 …."""
    return number > 0 and number // (number & -number) in (1, 3)


def _any_error(_: Exception) -> bool:
    """Catch any: a measurement must never cost a run."""
    return True
