"""The training data of a fit: the user's loader, cut in the loader or in the step, and the loop that reads it.

Tested in tests/integration/test_features.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from lightning_ga.compat import loaders, ranks
from lightning_ga.compat.closures import evaluates_again
from lightning_ga.compat.loaders import BatchTransfer
from lightning_ga.errors import UserError
from lightning_ga.fit.loader_windows import LoaderWindows
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.step_windows import StepWindows
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.rebatch import SourceSettings
from lightning_ga.loading.source import LoaderSource, read_source
from lightning_ga.loading.step_source import StepSource
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.plan.config import Options
from lightning_ga.probe.trials import older_objects_frozen
from lightning_ga.snapshot.random_numbers import RandomState, generators_in

Windows = LoaderWindows | StepWindows


class TrainingData:
    """Gives the fit loop a loader of micro-batches, or the user's own loader if batches are cut in the step."""

    def __init__(self, parts: FitParts, options: Options) -> None:
        self._parts = parts
        self._options = options
        self.recipe_factor: int = self._parts.trainer.accumulate_grad_batches
        self._windows: Windows | None = None
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

    def intercepted(self, is_installed: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context in which the loop gets these data, while the callback is installed."""
        held = ExitStack()  # what ``read`` enters, to the end of the loop's set-up

        def read(loader: Any) -> Any:
            if not is_installed():
                return loader
            self._read_loader(loader)
            held.enter_context(self.windows.setting_up(loader))
            return self.windows.planner.source.loader

        def around(set_up: Callable[[], None]) -> None:
            windows = self._windows
            if isinstance(windows, LoaderWindows) and self._why_in_step():
                # ``configure_optimizers`` has asked for the data, before the optimizer was known that needs the step.
                # Random numbers that the set-up draws were drawn then.
                held.callback(RandomState(generators_in([windows.planner.source.loader.generator])).restore)
                self._windows = None
                self._parts.place.set_factor(self.recipe_factor)
                loaders.forget_data(self._parts.trainer)
            with held, older_objects_frozen():
                set_up()  # Lightning's set-up of the data calls ``read``, unless the loop keeps the data that it has

        return loaders.intercepted_loaders(self._parts.trainer, read, around)

    def _read_loader(self, loader: Any) -> None:
        """Decide where the user's loader is cut, each time that data are loaded."""
        trainer = self._parts.trainer
        if not self.is_set_up:
            self.recipe_factor = trainer.accumulate_grad_batches  # the module's ``setup`` may have set it
        position = self._parts.progress.position
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
            epoch=self._parts.place.epoch,
            of_first_rank=partial(ranks.of_first_rank, trainer),
        )
        source = read_source(loader, settings, why=self._why_in_step(), size_of=self._options.size_of)
        if self._parts.shares.differ and isinstance(source, StepSource):
            raise UserError(
                f"shares={self._options.shares!r} needs windows that the loader cuts, and these data are cut in the "
                f"step ({source.why}): leave it out."
            )
        self._cutter = None
        self._windows = self._windows_of(source)

    def _windows_of(self, source: LoaderSource | StepSource) -> Windows:
        """Return the windows of a loader: new ones, or those of before if data are loaded again."""
        windows = self._windows
        if windows is None:
            if isinstance(source, LoaderSource):
                return LoaderWindows(self._parts, self.cutter, source)
            return StepWindows(self._parts, self.cutter, source)
        if windows.in_step != isinstance(source, StepSource):
            raise UserError(
                "Data that are loaded again must be cut where they were, or always in the step: micro_batching='step'."
            )
        windows.use(source)
        return windows

    def cutter(self) -> BatchCutter:
        """Return the cutter of the batches that the training step gets."""
        if self._cutter is None:
            source = self.windows.planner.source
            found, combine = loaders.loaders_of(self._parts.trainer)
            is_only_loader = found == [source.loader]  # the loop's own loaders, not those that others are shown
            samples = [source.samples] if is_only_loader else [*map(KnownSamples, found)]
            self._cutter = BatchCutter(samples, combine, BatchTransfer(self._parts.trainer))
        return self._cutter

    def _why_in_step(self) -> str:
        """Return why batches are cut in the step whatever the loader is; empty if that depends on the loader."""
        if self._options.whole:
            return "whole="
        if self._options.micro_batching == "step":
            return 'micro_batching="step"'
        for optimizer in self._parts.trainer.optimizers:
            if evaluates_again(optimizer):
                return f"{type(optimizer).__name__} evaluates each batch several times"
        return ""
