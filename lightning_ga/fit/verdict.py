"""The verdict on the exactness of a training: measured at its start, at later moments, and after an error.

Tested in tests/integration/test_true_programs.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import ranks
from lightning_ga.compat.loaders import BatchTransfer
from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.exactness.measure import SAMPLES, measure, unmeasured
from lightning_ga.fit.limit import NO_LIMIT
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.loading.trial_batches import CutBatch, TrialBatches
from lightning_ga.plan.config import Options
from lightning_ga.plan.exactness_verdicts import WEIGHS_ALIKE, Cause, Exactness, combined, is_inexact, warning

ENOUGH_SAMPLES = 3
"""Of a measurement that replaces an "unmeasured" verdict: two, each a part, may agree by chance."""


class Verdict:
    """Keeps the verdict, and warns once a cause if micro-batches may not give the gradient of the whole batch."""

    def __init__(self, parts: FitParts, options: Options, data: TrainingData) -> None:
        self._parts = parts
        self._options = options
        self._data = data
        self.exactness: Exactness | None = None  # none without ``verify``, and while nothing is accumulated
        self._next_step = 1  # optimizer steps after which it is measured again: 1, 2, 4, 8, …
        self._told: Cause | None = None  # of the verdict that a warning, or the report of an error, has told last

    def measure_at_start(self) -> None:
        """Measure before training, if windows of some rank are cut, or later ones may be; all ranks call it."""
        windows = self._data.windows
        is_bounded = self._parts.limit.of_pass < NO_LIMIT
        later_may_be_cut = windows.planner.source.first_may_be_smaller and is_bounded
        is_cut = windows.has_several_passes or later_may_be_cut or self._parts.limit.chunked is not None
        if self._options.verify and ranks.sum_over_ranks(self._parts.trainer, float(is_cut)) > 0:
            found = self._measure_trial(windows.trial_batches(self._parts.place.epoch), begins=True)
            self.exactness = combined(ranks.of_all_ranks(self._parts.trainer, found))

    def begin_window(self, batch: Any, *, after_error: bool) -> None:
        """Measure on the micro-batch that begins a window, if that is due; a rank may be the only one that does."""
        if not self._options.verify or self._parts.limit.chunked is not None or is_inexact(self.exactness):
            return
        steps = int(self._parts.trainer.global_step)
        if self.exactness is None:  # nothing was accumulated so far: measure as at the start
            if after_error or self._data.windows.has_several_passes:
                batches = self._data.windows.trial_batches(self._parts.place.epoch)
                if batches.empty:  # training alone reads samples
                    self.exactness = self._measure_batch(batch)[0]
                else:
                    self.exactness = self._measure_trial(batches, begins=False)
        elif after_error or steps >= self._next_step:
            while self._next_step <= steps:
                self._next_step *= 2
            found, samples = self._measure_batch(batch)
            tells_more = self.exactness.cause == "unmeasured" and samples >= ENOUGH_SAMPLES
            if tells_more or is_inexact(found):
                self.exactness = found
                self.warn()

    def _measure_trial(self, batches: TrialBatches, *, begins: bool) -> Exactness:
        return self._measure(batches.batch_in_two_parts, batches.most, begins=begins)[0]

    def _measure_batch(self, batch: Any) -> tuple[Exactness, int]:
        """Measure on a batch of training; return what was found, and on how many samples."""
        cutter = self._data.cutter()
        try:
            available = min(cutter.count(batch), self._parts.limit.samples)
        except LayoutError as error:
            return unmeasured(self._parts.trainer, str(error)), 0

        def halves(count: int, *_: object, multiple: int) -> CutBatch | None:
            return cutter.halves(batch, count, multiple)

        return self._measure(halves, available, at_first=available, begins=False)

    def _measure(
        self, halves: Callable[..., CutBatch | None], available: int, *, at_first: int = SAMPLES, begins: bool
    ) -> tuple[Exactness, int]:
        multiple = self._parts.request.multiple
        windows = self._data.windows
        normalize = self._options.normalize  # by which parts are weighed, as training weighs micro-batches
        weigh_alike = normalize is None and windows.has_unequal_passes
        if weigh_alike:
            normalize = _alike
        found, samples = measure(
            self._parts.trainer,
            partial(halves, multiple=multiple),
            BatchTransfer(self._parts.trainer).for_trial,
            normalize,
            available=available,
            limit=self._parts.limit.samples,
            at_first=at_first,
            in_step=windows.in_step,
            chunked=self._parts.limit.chunked,
            begins=begins,
            multiple=multiple,
        )
        if found.cause == "weighted" and weigh_alike:
            found = replace(found, reason=WEIGHS_ALIKE)
        return found, samples

    def agree(self) -> None:
        """Combine the verdicts of all ranks, which call this together as an epoch begins."""
        known = [*filter(None, ranks.of_all_ranks(self._parts.trainer, self.exactness))]
        if known:
            self.exactness = combined(known)

    def at_end(self) -> Exactness | None:
        """Return the verdict for errors that are still pending: training ended before their window was measured."""
        if self.exactness is None and self._options.verify:
            return unmeasured(self._parts.trainer, "training ended before the window began again")
        return self.exactness

    def warn(self) -> None:
        """Warn, once a cause, that accumulation is not exact, or not known to be, if windows take several passes."""
        exactness = self.exactness
        if exactness is None or exactness.cause == self._told or not self._data.windows.has_several_passes:
            return
        self._told = exactness.cause
        sentence = warning(exactness, batch_norm=self._options.batch_norm)
        if sentence is not None:
            rank_zero_warn(sentence, category=ExactnessWarning)

    def note_told(self) -> None:
        """Note that the report of an error has told the verdict, so that no warning repeats it."""
        if self.exactness is not None:
            self._told = self.exactness.cause


def _alike(_: Any) -> float:
    return 1.0
