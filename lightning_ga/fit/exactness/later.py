"""Measure the verdict again while training goes on: what a few samples cannot show before it, it shows later.

A loss may begin to compare samples after a warm-up, a hook may come in later, and some samples are rare. So a
micro-batch of training is measured at a few moments, when memory has run out in it, when it holds samples of a kind
that no measurement has met, and when something has changed between the passes of a window.
"""

from collections import Counter
from typing import Any

from lightning_ga.batch.counters import Kind, kinds_of
from lightning_ga.batch.split import BatchSlices
from lightning_ga.compat import agreement, loops
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.exactness.arithmetic import rounding
from lightning_ga.fit.exactness.check import ExactnessCheck, Halves, telling_cut
from lightning_ga.fit.exactness.passes import state_sums, traceless_passes
from lightning_ga.fit.exactness.training import Remeasured, is_inexact
from lightning_ga.fit.parts import Part
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.exactness import LEFT_OUT, Exactness
from lightning_ga.snapshot.checksums import differ

LOOKS = 8  # micro-batches before which the model is looked at, and again from each moment on
LOOKED_AT = 1000  # micro-batches of which the samples are looked at
TRIED = 4  # of them that are cut so that a kind of value would show; every sample may have as many of it
FIRST_STEP = 4  # after it a micro-batch is measured, and after 8, 16, 32 … steps
COST = 3  # passes of one measurement: the whole and two parts
AGAIN = 10  # times the tolerance of the check before training: gradients become small, and rounding does not
FREE, SHARE = 20 * COST, 2e-3  # passes that measurements may take: so many, and this share of training's


class LaterChecks:
    """Looks at a training before and after its micro-batches."""

    def __init__(self, trainer: Any, engine: Engine, data: TrainingData, *, wanted: bool) -> None:
        self._trainer, self._engine, self._data, self._exactness = trainer, engine, data, data.exactness
        self.are_made = wanted and not agreement.is_sharded(trainer)  # whether anything is looked at or measured
        self._passes = self._spent = 0  # of training so far, and of measurements
        self._looks = LOOKS  # that are left
        self._before: dict[str, float | None] = {}
        self._met: Counter[Kind] = Counter()  # micro-batches with new kinds of values
        self._kept: BatchSlices | None = None
        self._on_host = False  # whether the micro-batch is moved to the device in parts
        self._epoch = 0  # the last in which a moment was due

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
        is_due = begins and self._is_due()
        if is_inexact(exactness.training):
            return
        kinds = self._new_kinds(batch) if self._passes <= LOOKED_AT else set()
        if is_due or kinds or exactness.suspects:
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

    def found_left_out(self) -> None:
        """Learn that the step returned ``None`` for some passes of a window."""
        if self.are_made:
            verdict = Exactness(None, rounding(self._trainer), "stateful", reason=LEFT_OUT)
            self._exactness.found(Remeasured(verdict), is_told=False)

    def keep(self, batch: Any) -> None:
        """Keep a micro-batch in which memory has run out until all hooks of it have run: it is measured then."""
        if self.are_made and not is_inexact(self._exactness.splitting):
            self._kept = attempt(self._slices, _any_error, batch).result

    def measure_kept(self) -> None:
        """Measure the micro-batch that was kept, if there is one."""
        slices, self._kept = self._kept, None
        if slices is not None:
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
        reader, tolerance = self._engine.reader("training"), AGAIN * rounding(trainer)
        kinds = kinds_of(slices.take(0, slices.samples)).keys() - self._exactness.kinds
        start, middle, stop = telling_cut(slices, size, kinds) or (0, None, size)
        with self._engine.suspended(), traceless_passes(trainer, plain=True, begins=False) as passes:
            check = ExactnessCheck(source, reader, passes, self._exactness.count, tolerance, while_training=True)
            batch, take = slices.take(start, stop), lambda a, b: slices.take(start + a, start + b)
            batch_pass = passes.run([batch], seed=0, on_device=on_device)
            matters = check.which_matter(batch_pass, batch, self._exactness.suspects, on_device=on_device)
            if stop - start < 2:
                return Remeasured(matters=matters)
            halves = Halves.of(
                take,
                stop - start,
                middle=middle and middle - start,
                cut=cut or source.cut_in_step,
                on_device=on_device,
                batch_on_device=on_device,
            )
            verdict = check.judge(batch_pass, halves)
            self._exactness.kinds |= check.kinds
            return Remeasured(verdict, matters)

    def _is_due(self) -> bool:
        """Return whether a moment has come: in the first window of some epochs, and after some steps."""
        epoch, step = loops.training_epoch(self._trainer), int(self._trainer.global_step)
        begins = epoch > self._epoch and _is_round(epoch)
        self._epoch = epoch
        is_affordable = self._spent + COST <= FREE + SHARE * self._passes
        return is_affordable and (begins or (step >= FIRST_STEP and step.bit_count() == 1))

    def _compare_state(self) -> None:
        """Note what has changed since the micro-batch before, within a window."""
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        rates = {f"the learning rate of group {n}": group.get("lr") for n, group in enumerate(groups)}
        now = state_sums(self._trainer.lightning_module) | {n: float(r) for n, r in rates.items() if r is not None}
        before, self._before = self._before, now
        if before and not loops.begins_window(self._trainer):
            self._exactness.found_changed(tuple(n for n, value in now.items() if differ(before.get(n), value)))


def _is_round(number: int) -> bool:
    """Return whether a number is one of 1, 2, 3, 4, 6, 8, 12, 16, 24 …."""
    return number > 0 and number // (number & -number) in (1, 3)


def _any_error(_: Exception) -> bool:
    """Catch any: a measurement must never cost a run."""
    return True
