"""What is known of the exactness of a training: as measured before it, and as its first micro-batches show.

The check calls no callbacks and steps no schedules. A callback that lets a teacher follow its student after every
batch now does so factor times a step, and so does a hook that steps a schedule of the learning rate: the first
micro-batches of training show it.
"""

from collections.abc import Collection
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import agreement, loops
from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.exactness.arithmetic import rounding
from lightning_ga.fit.exactness.measure import measure_exactness
from lightning_ga.fit.exactness.passes import state_sums
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.config import Options
from lightning_ga.plan.exactness import INEXACT, Exactness, Verdicts, both, found_to_change, uncuttable
from lightning_ga.plan.exactness import splitting_sentence as sentence_on_splitting
from lightning_ga.snapshot.checksums import differ

LOOKS = 8  # micro-batches before which the model is looked at


class TrainingExactness:
    """Measures exactness once, and watches the first micro-batches for what no measurement sees."""

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer, self._options = trainer, options
        self._measured: Verdicts | None = None
        self.training: Exactness | None = None  # the verdict on training, as measured or as training has shown
        self._watch: WindowWatch | None = None  # from the measurement on
        self._user_knows = False  # that accumulation is not exact, if it is not

    @property
    def is_measured(self) -> bool:
        """Whether nothing is left to be measured."""
        return self.training is not None and self.training.cause != "unmeasured"

    @property
    def changing(self) -> set[str]:
        """Names of what the step was seen to change."""
        if self._measured is None or self.training is None:
            return set()
        return {*self.training.tensors, *self._measured.splitting.tensors, *self._measured.changing}

    def measure(self, source: TrainingSource, reader: BatchReader, *, epoch: int, limit: int) -> None:
        """Measure exactness at the begin of an epoch, in passes of at most ``limit`` samples."""
        count = self._options.normalize if callable(self._options.normalize) else None
        try:
            self._measured = measure_exactness(self._trainer, source, reader, count, epoch=epoch, limit=limit)
        except LayoutError as why:
            self._measured = both(uncuttable(rounding(self._trainer), str(why)))
        self.training = self._measured.training
        self._watch = WindowWatch(self._trainer, self._measured.tables)

    def look(self, *, accumulates: bool) -> None:
        """Look before a micro-batch whether the model has changed within its window."""
        if self._watch is not None and self._watch.looks:
            self.found_changed(self._watch.changed(), accumulates=accumulates)

    def found_changed(self, tensors: tuple[str, ...], *, accumulates: bool) -> None:
        """Warn once if training shows that not all passes of a window meet the same model."""
        verdict = found_to_change(self.training, tensors)
        if verdict is self.training or not accumulates:
            return
        self.training = verdict
        rank_zero_warn(f"Accumulation is not exact for this training, {verdict}.", category=ExactnessWarning)

    def untold(self, *, accumulates: bool) -> str | None:
        """Return the sentence on windows that are not exact, once, when the first of several passes begins.

        That may be in a later epoch, if memory ran out meanwhile.
        """
        verdict = self.training
        if verdict is None or not accumulates or self._user_knows:
            return None
        self._user_knows = True
        is_expected = verdict.cause == "batch_norm" and self._options.batch_norm != "warn"
        if is_expected or verdict.cause not in INEXACT:
            return None
        return f"Accumulation is not exact for this model, {verdict}."

    def splitting_sentence(self, changing: tuple[str, ...]) -> str:
        """Say whether a batch in parts has the gradient of the whole, if passes were seen to change weights."""
        verdict = None if self._measured is None else self._measured.splitting
        self._user_knows |= verdict is not None and verdict.cause in INEXACT
        return sentence_on_splitting(found_to_change(verdict, changing))


class WindowWatch:
    """Sees what changes the model between the micro-batches of a window, which should all meet the same one.

    It passes by ``tables``, which are filled when they are first needed.
    """

    def __init__(self, trainer: Any, tables: Collection[str]) -> None:
        self._trainer, self._tables = trainer, tables
        self.looks = 0 if agreement.is_sharded(trainer) else LOOKS  # that are left
        self._before: dict[str, float | None] = {}

    def changed(self) -> tuple[str, ...]:
        """Return the names of what has changed since the micro-batch before, within a window."""
        factor = self._trainer.accumulate_grad_batches
        if factor == 1:
            return ()
        self.looks -= 1
        before, self._before = self._before, {**state_sums(self._trainer.lightning_module), **self._learning_rates()}
        if loops.micro_batch_index(self._trainer) % factor == 0:
            return ()
        changed = (name for name, value in self._before.items() if differ(before.get(name), value))
        return tuple(name for name in changed if name not in self._tables)

    def _learning_rates(self) -> dict[str, float]:
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        rates = ((f"the learning rate of group {number}", group.get("lr")) for number, group in enumerate(groups))
        return {name: float(rate) for name, rate in rates if rate is not None}
