"""The training data of a fit: the user's loader, cut in the loader or in the step, and the loop that reads it.

Tested in tests/integration/test_features.py.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_ga.compat import advance, loaders, ranks
from lightning_ga.compat.compiled import CompiledModules
from lightning_ga.compat.loaders import BatchTransfer
from lightning_ga.compat.step_values import StepValues
from lightning_ga.errors import UserError
from lightning_ga.fit.gradients import Gradients
from lightning_ga.fit.limit import Limit
from lightning_ga.fit.loader_windows import LoaderWindows
from lightning_ga.fit.progress import Progress
from lightning_ga.fit.step_windows import StepWindows
from lightning_ga.fit.window_protocol import FitParts, Windows
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.rebatch import SourceSettings, evaluates_again
from lightning_ga.loading.source import LoaderSource, read_source
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.plan.config import Options, Request


class TrainingData:
    """Gives the fit loop a loader of micro-batches, or the user's own loader if batches are cut in the step."""

    def __init__(
        self,
        trainer: Any,
        request: Request,
        options: Options,
        limit: Limit,
        progress: Progress,
        gradients: Gradients,
        values: StepValues,
    ) -> None:
        self.recipe_factor: int = trainer.accumulate_grad_batches
        self._trainer = trainer
        self._options = options
        self._progress = progress
        self._parts = FitParts(
            request,
            limit,
            progress,
            gradients,
            values,
            CompiledModules(trainer),
            self.cutter_of_training,
            partial(advance.first_batch, trainer),
            leaves_out=options.on_oom == "skip",
        )
        self._windows: Windows | None = None
        self._read: Any = None  # the user's loader that the loop is being set up with
        self._setting_up = ExitStack()
        self._cutter: BatchCutter | None = None  # of batches of training, once it has been asked for

    @property
    def is_set_up(self) -> bool:
        """Whether the loop has asked for the data."""
        return self._windows is not None

    @property
    def windows(self) -> Windows:
        """The windows into which the data are cut."""
        assert self._windows is not None, "the training data are not set up yet"
        return self._windows

    def read_loader(self, loader: Any) -> Any:
        """Decide where the user's loader is cut, once; return the loader that the loop reads."""
        trainer = self._trainer
        position = self._progress.position
        world_size, rank = ranks.data_ranks(trainer)
        settings = SourceSettings(
            recipe_factor=self.recipe_factor,
            world_size=world_size,
            rank=rank,
            seed=position.seed,
            limit_batches=trainer.limit_train_batches,
            shard=loaders.shards(trainer),
            may_shuffle=not trainer.overfit_batches,
            must_shuffle=position.shuffles,
            epoch=self._progress.place.epoch,
        )
        source = read_source(loader, settings, in_step=self._why_in_step(), size_of=self._options.size_of)
        if self._options.shares != "equal" and not isinstance(source, LoaderSource):
            raise UserError(
                f"shares={self._options.shares!r} needs windows that the loader cuts, and these data are cut in the "
                f"step ({source.why}): leave it out."
            )
        self._cutter = None
        self._source = source
        self._read = loader
        if self._windows is not None:
            self._windows.use(source)
        elif isinstance(source, LoaderSource):
            self._windows = LoaderWindows(self._parts, source)
        else:
            self._windows = StepWindows(self._parts, source)
        self._setting_up.enter_context(self._windows.setting_up())
        return source.loader

    def set_up(self, set_up: Callable[[], None]) -> None:
        """Let the loop set its data up, with limits and intervals in batches of the recipe."""
        self._read = None
        with self._setting_up:
            set_up()
        if self._read is not None:
            self.windows.data_are_set_up(self._read)

    def cutter_of_training(self) -> BatchCutter:
        """Return the cutter of the batches that the training step gets."""
        if self._cutter is None:
            found, combine = loaders.loaders_of(self._trainer)
            samples = [self._source.samples] if found == [self._source.loader] else list(map(KnownSamples, found))
            self._cutter = BatchCutter(samples, combine, BatchTransfer(self._trainer))
        return self._cutter

    def _why_in_step(self) -> str:
        """Return why batches are cut in the step whatever the loader is; empty if that depends on the loader."""
        if self._options.whole:
            return "whole="
        if self._options.micro_batching == "step":
            return 'micro_batching="step"'
        repeating = [each for each in self._trainer.optimizers if evaluates_again(each)]
        return f"{type(repeating[0]).__name__} evaluates each batch several times" if repeating else ""
