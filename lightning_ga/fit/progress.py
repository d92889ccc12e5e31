"""The position of a fit in its data, in samples of all ranks; checkpoints keep it for a resume."""

from dataclasses import replace
from typing import Any

from lightning_ga.compat import loaders, ranks
from lightning_ga.compat.place import LoopPlace
from lightning_ga.loading.source import LoaderSource
from lightning_ga.plan.state import Position, RunState


class Progress:
    """The position of a fit: its epoch, and the samples and windows done in it and before."""

    def __init__(self, trainer: Any, place: LoopPlace) -> None:
        self.trainer, self.place = trainer, place
        self.position = Position(
            ranks.shared_seed(trainer),
            place.epoch,
            steps_before=trainer.global_step,
            shuffles=loaders.shares_shuffled(trainer),
        )
        self.restored: RunState | None = None  # what was read from a checkpoint

    def restore(self, state: RunState) -> None:
        """Continue at the position of a checkpoint."""
        self.restored, self.position = state, state.position

    @property
    def samples_seen(self) -> int:
        """The samples that training has seen from its start on, over all ranks."""
        return self.position.samples_before + self.position.samples_done

    def position_in(self, epoch: int) -> Position:
        """Return the current position, or the start of another epoch."""
        if epoch == self.position.epoch:
            return self.position
        return replace(
            self.position,
            epoch=epoch,
            samples_done=0,
            windows_done=0,
            windows_before=self.position.windows_before + self.position.windows_done,
            steps_before=int(self.trainer.global_step),
            samples_before=self.samples_seen,
        )

    def enter(self, epoch: int) -> None:
        """Begin an epoch."""
        self.position = self.position_in(epoch)

    def end_window(self, samples_done: int) -> None:
        """Note that a window is done, and how many samples of the epoch are done with it."""
        self.position = replace(self.position, samples_done=samples_done, windows_done=self.position.windows_done + 1)

    def take_over(self, source: LoaderSource | None, recipe_factor: int) -> bool:
        """Adopt the position of a restored loop; return whether the run continues within an epoch.

        A checkpoint of stock Lightning contains the loop's position only, in batches of the recipe.
        """
        trainer, place = self.trainer, self.place
        if place.restarts:
            place.reopen_epoch()
            if self.restored is None and source is not None:
                done, epoch = place.batches_done(), place.epoch
                samples = min(source.total(), (done - done % recipe_factor) * source.batch_size * trainer.world_size)
                windows = done // recipe_factor
                steps = max(0, trainer.global_step - windows)
                self.position = replace(
                    self.position,
                    epoch=epoch,
                    samples_done=samples,
                    windows_done=windows,
                    windows_before=steps,
                    steps_before=steps,
                    samples_before=source.total() * epoch,
                )
        within = self.restored is not None or self.position.samples_done > 0
        return within and self.position.epoch == place.epoch
