"""What is known of the exactness of a training: as measured before it, and as training shows."""

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.layout import LayoutError
from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.precision import rounding
from lightning_ga.fit.verify import CONSIDERED, SAMPLES, measure_exactness
from lightning_ga.fit.window_watch import WindowWatch
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.config import Options
from lightning_ga.plan.exactness import INEXACT, Exactness, both, found_to_change, splitting_sentence, uncuttable


class TrainingExactness:
    """Measures exactness once, and watches the first micro-batches for what no measurement sees.

    Args:
        trainer: The Trainer.
        options: How accumulation is to be done.
    """

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer, self._options = trainer, options
        self.training: Exactness | None = None  # of training, as measured
        self._splitting: Exactness | None = None  # of batches that are cut in the step, be it after an error
        self._changing: tuple[str, ...] = ()  # names of what its passes changed
        self._watch = WindowWatch(trainer)
        self._is_told = False  # whether the user knows that accumulation is not exact, if it is not
        self.is_looking = False  # whether the first micro-batches of a training that was measured are still to come

    @property
    def is_measured(self) -> bool:
        """Whether nothing is left to be measured."""
        return self.training is not None and self.training.cause != "unmeasured"

    @property
    def changing(self) -> set[str]:
        """Names of what the step was seen to change."""
        tensors = {name for found in (self.training, self._splitting) if found is not None for name in found.tensors}
        return tensors | set(self._changing)

    def measure(self, source: TrainingSource, reader: BatchReader, *, epoch: int, limit: int) -> None:
        """Measure exactness.

        Args:
            source: The training data.
            reader: Counts and cuts their batches.
            epoch: The epoch that begins.
            limit: Most samples of a pass.
        """
        normalize = self._options.normalize
        try:
            verdicts = measure_exactness(
                self._trainer,
                source.user_loader,
                source.looks(epoch).some,
                considered=SAMPLES if source.keeps_groups else CONSIDERED,
                reader=reader,
                count=normalize if callable(normalize) else None,
                limit=limit,
                in_step=source.cut_in_step,
            )
        except LayoutError as why:
            verdicts = both(uncuttable(rounding(self._trainer), str(why)))
        self.training, self._splitting = verdicts.training, verdicts.splitting
        self._changing = verdicts.changing
        self._watch.pass_by(verdicts.tables)
        self.is_looking = True

    def look(self, *, accumulates: bool) -> None:
        """Look before a micro-batch whether the model has changed within its window."""
        self.found_changed(self._watch.changed(), accumulates=accumulates)
        self.is_looking = self._watch.is_looking

    def found_changed(self, tensors: tuple[str, ...], *, accumulates: bool) -> None:
        """Warn once where training shows that not all passes of a window meet the same model."""
        found = found_to_change(self.training, tensors)
        if found is self.training or not accumulates:
            return
        self.training = found
        rank_zero_warn(f"Accumulation is not exact for this training, {found}.", category=ExactnessWarning)

    def untold(self, *, accumulates: bool) -> str | None:
        """Return the sentence on windows that are not exact, once, where the first of several passes begins.

        That may be in a later epoch, where memory ran out meanwhile.
        """
        found = self.training
        if found is None or not accumulates or self._is_told:
            return None
        self._is_told = True
        is_known = found.cause == "batch_norm" and self._options.batch_norm != "warn"
        return None if is_known or found.cause not in INEXACT else f"Accumulation is not exact for this model, {found}."

    def splitting_sentence(self, changing: tuple[str, ...]) -> str:
        """Say whether a batch in parts has the gradient of the whole, where passes were seen to change weights."""
        self._is_told |= self._splitting is not None and self._splitting.cause in INEXACT
        return splitting_sentence(found_to_change(self._splitting, changing))
