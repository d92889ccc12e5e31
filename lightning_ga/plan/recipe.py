"""The recipe as the user wrote it, and its clock: how many of its batches are done. Pure.

Lightning counts validation, frequencies of schedules and limits in batches of the user's own loader. A window of this
package may be another size, and so may a micro-batch. Whatever is counted in batches asks this clock. What falls due
between two ends of windows is due at the later one.
"""

from dataclasses import dataclass
from math import lcm

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import ceil_div


@dataclass(frozen=True, slots=True)
class Recipe:
    """A DataLoader's batches, and how many of them the Trainer accumulates."""

    batch_size: int  # samples of a batch on one rank
    factor: int = 1  # ``Trainer(accumulate_grad_batches=…)``
    world_size: int = 1  # data-parallel ranks
    drop_last: bool = False  # whether the loader leaves out its last batch if that is smaller
    limit: int | float = 1.0  # ``Trainer(limit_train_batches=…)``

    @property
    def effective(self) -> int:
        """The effective batch: batch size × factor × ranks."""
        return self.batch_size * self.factor * self.world_size

    def batches(self, samples: int) -> int:
        """Return the batches on each rank of an epoch of so many samples over all ranks, without the limit."""
        share = ceil_div(samples, self.world_size)
        return share // self.batch_size if self.drop_last else ceil_div(share, self.batch_size)

    def batches_within_limit(self, samples: int) -> int:
        """Return the batches on each rank that the Trainer's limit leaves of an epoch.

        Raises:
            UserError: If the limit is a share that leaves no batch.
        """
        batches = self.batches(samples)
        if isinstance(self.limit, int):
            return min(batches, self.limit)
        used = int(batches * self.limit)
        if batches and not used:
            raise UserError(f"limit_train_batches={self.limit} of {batches} batches leaves none: 1 is one batch.")
        return used

    def epoch(self, samples: int, most: int | None = None) -> "RecipeEpoch":
        """Return an epoch of so many samples; the loop was set up for at ``most`` so many batches."""
        batches = self.batches_within_limit(samples) if most is None else min(most, self.batches(samples))
        return RecipeEpoch(self, batches, min(samples, self.samples_of(batches)))

    def samples_of(self, batches: int) -> int:
        """Return the samples of so many full batches, over all ranks."""
        return batches * self.batch_size * self.world_size


@dataclass(frozen=True, slots=True)
class RecipeEpoch:
    """One epoch of a recipe, within the Trainer's limit."""

    recipe: Recipe
    batches: int  # on each rank
    samples: int  # that are in them, over all ranks

    def batches_done(self, samples: int) -> int:
        """Return the batches that have ended when so many samples of the epoch are done, over all ranks."""
        return self.batches if samples >= self.samples else samples // self.recipe.samples_of(1)


@dataclass(frozen=True, slots=True)
class WindowSpan:
    """The batches of the recipe that are done before and after a window, in its epoch, and those of earlier epochs."""

    factor: int  # of the recipe
    before: int = 0
    after: int = 0
    earlier: int = 0

    def validates(self, every: int, *, over_epochs: bool) -> bool:
        """Return whether validation is due after the window, ``every`` so many batches."""
        offset = self.earlier if over_epochs else 0
        return is_due(every, before=offset + self.before, after=offset + self.after)

    def steps_schedule(self, frequency: int, *, is_last: bool) -> bool:
        """Return whether a schedule by step is due after the window, which may be the last of its epoch.

        Lightning asks at the ends of the recipe's windows whether the frequency divides the batches that are done
        (``loops/training_epoch_loop.py``). An epoch's last window ends at its last batch.
        """
        if is_last and self.after % frequency == 0:
            return True
        return is_due(lcm(frequency, self.factor), before=self.before, after=self.after)


def is_due(every: int, *, before: int, after: int) -> bool:
    """Return whether a multiple of ``every`` lies above ``before`` and not above ``after``.

    Examples:
        >>> is_due(3, before=2, after=4), is_due(3, before=3, after=5)
        (True, False)
    """
    return after // every > before // every
