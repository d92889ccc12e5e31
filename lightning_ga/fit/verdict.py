"""The verdict on the exactness of a training: measured at its start, at later moments, and after an error.

Tested in tests/integration/test_true_programs.py.
"""

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.layout import LayoutError
from lightning_ga.chunks import ChunkedModules
from lightning_ga.compat import ranks
from lightning_ga.compat.loaders import BatchTransfer
from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.exactness.measure import Moments, measure, measure_at_start
from lightning_ga.loading.trial_batches import BatchCutter, TrialBatches
from lightning_ga.plan.config import Options
from lightning_ga.plan.exactness import Exactness, combined, is_inexact, warning

ENOUGH = 3  # samples that take an "unmeasured" back: two, each a part, may agree by chance


class Verdict:
    """Keeps the verdict, and warns once if micro-batches do not give the gradient of the whole batch."""

    def __init__(self, trainer: Any, options: Options, multiple: int, several_passes: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._options = options
        self._multiple = multiple  # of which micro-batches, and so the measured parts, are multiples
        self._several_passes = several_passes
        self.exactness: Exactness | None = None  # none without ``verify``, and while nothing is accumulated
        self._moments = Moments()
        self._warned = False
        self._passes = 0

    def measure_at_start(
        self, batches: TrialBatches, *, limit: int, in_step: bool, chunked: ChunkedModules | None
    ) -> None:
        """Measure before training, in passes of at most ``limit`` samples; all ranks call it."""
        found = self._on_samples(batches, limit=limit, in_step=in_step, chunked=chunked)
        self.exactness = combined(ranks.of_all_ranks(self._trainer, found))

    def measure_first(self, batches: TrialBatches, *, limit: int, in_step: bool) -> None:
        """Measure as at the start, because nothing was accumulated then; a rank may be the only one that calls it."""
        self.exactness = self._on_samples(batches, limit=limit, in_step=in_step, begins=False)

    def _on_samples(self, batches: TrialBatches, **settings: Any) -> Exactness:
        move = BatchTransfer(self._trainer).to_device
        normalize = self._options.normalize
        return measure_at_start(self._trainer, batches, move, normalize, multiple=self._multiple, **settings)

    def is_due(self, *, after_error: bool) -> bool:
        """Return whether the micro-batch that begins a window is to be measured; called as each window begins."""
        self._passes += int(self._trainer.accumulate_grad_batches)
        wanted = self._options.verify and not self._options.whole
        if not wanted or is_inexact(self.exactness):
            return False
        if self.exactness is None:  # nothing was accumulated so far
            return after_error or self._several_passes()
        return self._moments.due(int(self._trainer.global_step), self._passes) or after_error

    def measure_in_training(self, batch: Any, cutter: BatchCutter, *, limit: int, in_step: bool) -> None:
        """Measure on a batch of training, and warn if the gradient is inexact."""
        samples = 0
        try:
            samples = cutter.count(batch)
            halves = cutter.halves(batch, limit, self._multiple)
            if halves is None:
                raise LayoutError("a micro-batch of one sample has no parts")
            normalize = self._options.normalize
            found = measure(self._trainer, halves, normalize=normalize, begins=False, in_step=in_step)
        except LayoutError as error:
            found = Exactness(None, 0.0, "unmeasured", reason=str(error))
        is_unknown = self.exactness is None or self.exactness.cause == "unmeasured"
        if is_inexact(found) or (is_unknown and min(samples, limit) >= ENOUGH):
            self.exactness = found
            self.warn()

    def agree(self) -> None:
        """Combine the verdicts of all ranks, which call this together as an epoch begins."""
        known = [each for each in ranks.of_all_ranks(self._trainer, self.exactness) if each is not None]
        if known:
            self.exactness = combined(known)

    def warn(self) -> None:
        """Warn once that accumulation is not exact, or not known to be, if windows take several passes."""
        accepted = self._options.batch_norm
        if self._several_passes() and not self._warned and (sentence := warning(self.exactness, batch_norm=accepted)):
            self._warned = True
            rank_zero_warn(sentence, category=ExactnessWarning)
