"""The training data of a fit: the user's loader, cut in the loader or in the step, and the loop that reads it."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import advance, loaders
from lightning_ga.compat.loaders import BatchTransfer
from lightning_ga.compat.place import LoopPlace
from lightning_ga.errors import UserError
from lightning_ga.loading.cutter import BatchCutter
from lightning_ga.loading.rebatch import SourceSettings, collates_by_index
from lightning_ga.loading.source import LoaderSource, read_source
from lightning_ga.loading.step_source import StepSource
from lightning_ga.loading.trials import TrialBatches
from lightning_ga.plan.config import Options
from lightning_ga.plan.state import Position
from lightning_ga.probe.limit import evaluates_again


class TrainingData:
    """Gives the fit loop a loader of micro-batches, or the user's own loader if batches are cut in the step."""

    def __init__(self, trainer: Any, place: LoopPlace, options: Options, position: Callable[[], Position]) -> None:
        self._trainer, self._place, self._options, self._position = trainer, place, options, position
        self.recipe_factor: int = trainer.accumulate_grad_batches
        self._source: LoaderSource | StepSource | None = None
        self._user_loader: Any = None  # the data as the user gave them
        self._setup_patches = ExitStack()
        self.validates_every: int | None = None  # batches of the recipe, if the loader cuts; ``None`` if by time
        self.cutter: BatchCutter | None = None  # of batches of training, once it has been asked for

    @property
    def source(self) -> LoaderSource | StepSource:
        """The data as they are cut."""
        assert self._source is not None, "the training data are not set up yet"
        return self._source

    @property
    def batch_size(self) -> int:
        """The samples of the loader's batches on a rank; 1 if they are not known."""
        return self.source.batch_size or 1

    @property
    def is_set_up(self) -> bool:
        """Whether the loop has asked for the data."""
        return self._source is not None

    def read_loader(self, loader: Any) -> LoaderSource | StepSource:
        """Decide where the user's loader is cut, and let Lightning set it up accordingly."""
        trainer, position = self._trainer, self._position()
        settings = SourceSettings(
            recipe_factor=self.recipe_factor,
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            seed=position.seed,
            limit_batches=trainer.limit_train_batches,
            shard=loaders.shards(trainer),
            may_shuffle=not trainer.overfit_batches,
            must_shuffle=position.shuffles,
        )
        source = read_source(loader, settings, in_step=self._why_in_step(), size_of=self._options.size_of)
        if self._source is not None and self._source.cut_in_step is not source.cut_in_step:
            raise UserError(
                "Data that are loaded again must be cut where they were, or always in the step: micro_batching='step'."
            )
        if isinstance(source, StepSource) and isinstance(self._source, StepSource):
            source.batch_size = source.batch_size or self._source.batch_size  # of a loader that is loaded again
        self._source, self._user_loader, self.cutter = source, loader, None
        if isinstance(source, LoaderSource):
            self._setup_patches.enter_context(loaders.unsharded(trainer))
            self._setup_patches.enter_context(source.in_recipe_batches(self._place.epoch))
        return source

    def set_up(self, set_up: Callable[[], None]) -> None:
        """Let the loop set its data up, with limits and intervals in batches of the recipe."""
        known = self._source
        with self._setup_patches:
            set_up()
        source = self._source
        if source is not known and isinstance(source, LoaderSource):
            loaders.show_loaders(self._trainer, self._user_loader)
            self._place.size_epoch(len(source.loader))
            self.validates_every = getattr(self._trainer, "val_check_batch", None)  # 2.5 has none without batches

    def see_first_batch(self) -> None:
        """Show the first batch to a source whose batches come ready-made; training still gets it."""
        source = self._source
        if isinstance(source, StepSource) and (source.batch_size is None or not collates_by_index(source.loader)):
            batch = advance.first_batch(self._trainer)
            if batch is not None:
                with suppress(LayoutError):  # its number of samples may not be known
                    source.see(batch, self.cutter_of_training())

    def cutter_of_training(self) -> BatchCutter:
        """Return the cutter of the batches that the training step gets."""
        if self.cutter is None:
            self.cutter = BatchCutter(*loaders.loaders_of(self._trainer), BatchTransfer(self._trainer))
        return self.cutter

    def trial_batches(self, epoch: int) -> TrialBatches:
        """Return the source of batches for probe and measurement."""
        source = self.source
        if isinstance(source, LoaderSource):
            return source.trial_batches(epoch)
        return source.trial_batches(epoch, self.cutter_of_training())

    def _why_in_step(self) -> str:
        """Return why batches are cut in the step whatever the loader is; empty if that depends on the loader."""
        if self._options.whole:
            return "whole="
        if self._options.micro_batching == "step":
            return 'micro_batching="step"'
        repeating = [each for each in self._trainer.optimizers if evaluates_again(each)]
        return f"{type(repeating[0]).__name__} evaluates each batch several times" if repeating else ""
