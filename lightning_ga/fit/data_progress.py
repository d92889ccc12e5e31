"""The position of a fit in its data, in samples of all ranks; checkpoints keep it for a resume.

Tested in tests/integration/test_resume.py.
"""

from dataclasses import replace
from typing import Any

from lightning_ga.compat import loaders, ranks
from lightning_ga.compat.loop_counters import LoopPlace
from lightning_ga.plan.recipe import RecipeEpoch
from lightning_ga.plan.run_state import Position, RunState


class DataProgress:
    """The position of a fit: its epoch, and the samples and batches done in it and before.

    A fit that follows another of the same Trainer continues its counts, as Lightning's loops do.
    """

    def __init__(self, trainer: Any, place: LoopPlace, earlier: Position | None) -> None:
        self.trainer = trainer
        self.place = place
        self.restored: RunState | None = None  # what was read from a checkpoint
        self._follows_fit = earlier is not None  # whether a fit before has ended here, and counted earlier epochs
        seed = ranks.shared_seed(trainer)
        before = earlier or Position(seed, place.epoch)
        start = before.at_start_of(place.epoch, int(trainer.global_step))
        self.position = replace(start, seed=seed, shuffles=loaders.shares_shuffled(trainer))

    @property
    def window(self) -> tuple[int, int]:
        """The epoch and the number in it of the window that runs, or comes next."""
        return self.position.epoch, self.position.windows_done

    def restore(self, state: RunState) -> None:
        """Continue at the position of a checkpoint."""
        self.restored = state
        self.position = state.position

    def position_in(self, epoch: int) -> Position:
        """Return the current position, or the start of another epoch."""
        if epoch == self.position.epoch:
            return self.position
        return self.position.at_start_of(epoch, int(self.trainer.global_step))

    def enter(self, epoch: int) -> None:
        """Begin an epoch."""
        self.position = self.position_in(epoch)

    def end_window(self, *, samples: int, batches: int) -> None:
        """Note that a window is done, and how many samples and batches of the epoch are done with it."""
        self.position = self.position.after_window(samples=samples, batches=batches)

    def take_over(self, epoch: RecipeEpoch) -> bool:
        """Adopt the position of a restored loop; return whether the run continues the epoch of its position.

        A checkpoint of stock Lightning contains the loop's position only, in batches of the recipe; so does a Trainer
        whose earlier fits ran without the callback. Their epochs were as long as this ``epoch``.
        """
        place = self.place
        if place.restarts:
            place.reopen_epoch()
        is_restored = self.restored is not None
        loop_alone_knows = place.restarts or not self._follows_fit
        if not is_restored and loop_alone_knows:
            self._read_loop(epoch)
        # A checkpoint may have been written before the epoch's first sample.
        may_continue = is_restored or self.position.samples_done > 0
        return may_continue and self.position.epoch == place.epoch

    def _read_loop(self, epoch: RecipeEpoch) -> None:
        place = self.place
        factor = epoch.recipe.factor
        done = place.loop_batches_done if place.restarts else 0
        windows = done // factor
        self.position = replace(
            self.position,
            epoch=place.epoch,
            samples_done=min(epoch.samples, epoch.recipe.samples_of(windows * factor)),
            batches_done=windows * factor,
            windows_done=windows,
            samples_before=epoch.samples * place.epoch,
            batches_before=place.loop_batches_before_epoch,
            steps_before=max(0, self.trainer.global_step - windows),
        )
