"""The training data of a fit: the user's loader, and the source that cuts it into micro-batches."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from lightning_ga.compat import agreement, dataloaders, intervals
from lightning_ga.compat import checkpoint as loop_state
from lightning_ga.errors import UserError
from lightning_ga.loading.prebatched import PrebatchedSource
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.streams import load_states, states_of
from lightning_ga.loading.training_source import MicroBatchSource, TrainingSource


class TrainingData:
    """Sets the data of the fit loop up with a loader that is cut."""

    def __init__(self, trainer: Any, *, cut_in_step: bool, recipe_factor: int) -> None:
        self._trainer, self._cut_in_step, self._recipe_factor = trainer, cut_in_step, recipe_factor
        self.source: TrainingSource | None = None  # the data as they are cut
        self.why_in_step = ""  # why batches can be cut in the step only, in a sentence
        self._given: Any = None  # as the user gave them
        self._loader_states: list[Any] = []

    def cut(self, loader: Any, seed: int) -> TrainingSource:
        """Return the source that cuts the user's loader, in an order that the seed draws."""
        dataloaders.warn_of_overfitting(self._trainer, loader)
        self.source, self._given = self._make_source(loader, seed), loader
        self._loader_states = []
        return self.source

    def set_up(self, set_up: Callable[[], None]) -> None:
        """Let the loop set its data up, with the recipe's limits read in the recipe's batches."""
        trainer, known = self._trainer, self.source
        if known is None:
            dataloaders.forget_loaders(trainer)
        with dataloaders.micro_batch_units(trainer) as (self._shard, self._limit_batches), warnings.catch_warnings():
            set_up()
        source = self.source
        if source is not None and source is not known:
            dataloaders.show_loaders(trainer, self._given)
            intervals.set_validation_interval(trainer, source.epoch_batches)
            dataloaders.resize_epoch(trainer, source.length, at_most=source.epoch_plan.length)

    def save_place(self, checkpoint: dict[str, Any]) -> None:
        """Let a checkpoint keep the place of loaders that have one."""
        if isinstance(self.source, PrebatchedSource):
            loop_state.save_loaders(checkpoint, states_of(self.source.loaders))

    def load_place(self, checkpoint: dict[str, Any]) -> None:
        """Read the place of loaders from a checkpoint, for those that are set up next."""
        self._loader_states = loop_state.take_loaders(checkpoint)

    def _make_source(self, loader: Any, seed: int) -> TrainingSource:
        trainer = self._trainer
        settings = SourceSettings(
            recipe_factor=self._recipe_factor,
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            seed=seed,
            limit_batches=self._limit_batches,
            shard=self._shard,
            shuffle=not trainer.overfit_batches,
            largest_over_ranks=partial(agreement.largest_over_ranks, trainer),
            cut_in_step=self._cut_in_step,
        )
        try:
            source = MicroBatchSource(loader, settings)
        except UserError as why:
            self.why_in_step = str(why)
            return self._make_prebatched(loader, settings)
        dataloaders.load_later(trainer, self._loader_states)
        return source

    def _make_prebatched(self, loader: Any, settings: SourceSettings) -> PrebatchedSource:
        batches = dataloaders.batches_of(self._trainer, loader)
        if self._loader_states:
            load_states(batches.loaders, self._loader_states)
        source = PrebatchedSource(batches, settings, hook=getattr(self._trainer.lightning_module, "split_batch", None))
        if not any(isinstance(getattr(part, "dataset", None), IterableDataset) for part in source.loaders):
            warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")  # it is ours
        return source
