"""Count the batches that the user's loader would yield: how many, how large, and which make up a window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch.utils.data import DataLoader

from lightning_ga.errors import UserError
from lightning_ga.loading.rebatch import LoaderRecipe
from lightning_ga.loading.sampler import FromBatches
from lightning_ga.plan.accumulation import require_effective_batch
from lightning_ga.plan.schedule import Growth
from lightning_ga.plan.windows import GivenWindows, GrowingWindows, RegularWindows, Windows


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of a Trainer for its training data."""

    recipe_factor: int  # ``Trainer(accumulate_grad_batches=…)`` as the user wrote it
    world_size: int  # data-parallel ranks
    rank: int
    seed: int  # of the epochs' orders, the same on every rank
    limit_batches: int | float = 1.0  # ``Trainer(limit_train_batches=…)``: of the recipe's batches
    shard: bool = True  # whether the trainer may share one order among ranks
    shuffle: bool = True  # false where the trainer asks for the order of the dataset
    shuffles: bool = False  # whether it shuffles whatever the loader says, as it does on several ranks
    largest_over_ranks: Callable[[int], int] = int
    cut_in_step: bool = False  # whether the loader yields the recipe's batches, which are cut in the training step


class RecipeBatches:
    """The batches of a DataLoader, in the order of samples that ranks share, or else in that of one rank."""

    def __init__(self, loader: "DataLoader[Any]", recipe: LoaderRecipe, settings: SourceSettings) -> None:
        self.loader, self.settings = loader, settings  # the user's
        self.order, self.shared, self.batch_size = recipe.order, recipe.shared, recipe.batch_size
        self.ranks_per_order = settings.world_size if recipe.shared else 1
        self.sharded_ranks = settings.world_size // self.ranks_per_order
        self._drop_last = recipe.drop_last
        self._ends: tuple[int, list[int]] | None = None

    def effective(self, epoch: int) -> int:
        """Return the recipe's effective batch: batch size × factor × ranks; the largest where batches vary."""
        if self.batch_size is not None:
            return self.batch_size * self.settings.recipe_factor * self.settings.world_size
        windows = GivenWindows.of(self._sizes(epoch), per_window=self._per_window(epoch, None))
        return windows.largest * self.sharded_ranks

    def largest_batch(self, epoch: int) -> int:
        """Return the most samples that the user's loader yields to a rank at once."""
        return -(-self.effective(epoch) // (self.settings.recipe_factor * self.settings.world_size))

    def total(self, epoch: int) -> int | None:
        """Return the samples of an epoch that training uses; ``None`` for a stream of unknown length."""
        if self.batch_size is None:
            return self.ends(epoch)[-1]
        size, used = self.order.size, self.used()
        if used is None or used == self._count():
            return size
        samples = used * self.batch_size * self.ranks_per_order
        return samples if size is None else min(size, samples)

    def within(self, effective: int, epoch: int) -> int:
        """Return an effective batch that is no larger than the epoch, unless that is to drop its last window."""
        total = self.total(epoch)
        if total is None or self._drop_last or self.batch_size is None:
            return effective
        return max(min(effective, total * self.sharded_ranks), self.settings.world_size)

    def used(self) -> int | None:
        """Return the batches of an epoch on one rank that the Trainer's limit lets through; ``None`` if not known."""
        batches = self._count()
        if batches is not None and type(self.loader).__len__ is not DataLoader.__len__:
            batches = min(batches, len(self.loader))
        return self._limited(batches)

    def ends(self, epoch: int) -> list[int]:
        """Return the samples before each batch of a custom batch sampler, and after the last."""
        if self._ends is None or self._ends[0] != epoch:
            self._ends = epoch, [0, *accumulate(self._sizes(epoch))]
        return self._ends[1]

    def windows(self, epoch: int, effective: int | None, samples_done: int = 0) -> Windows:
        """Return the windows of an epoch; an ``effective`` of ``None`` keeps those of the recipe."""
        if self.batch_size is None:
            per_window = self._per_window(epoch, effective)
            return GivenWindows.of(self._sizes(epoch), per_window=per_window, samples_done=samples_done)
        size, total = self._share(effective or self.effective(epoch)), self.total(epoch)
        samples_done -= samples_done % self.order.per_item
        return RegularWindows(total, size, self.drops_last(epoch), samples_done)

    def drops_last(self, epoch: int) -> bool:
        """Return whether the last window of an epoch is dropped if it is ragged."""
        return self._drop_last and self.batch_size is not None and self.total(epoch) == self.order.size

    def growing_windows(self, epoch: int, growth: Growth, samples_done: int = 0) -> GrowingWindows:
        """Return the windows of an epoch in which a schedule may change their size."""

        def size_at(windows: int, samples: int) -> int:
            return self._share(growth.at(windows, samples * self.sharded_ranks))

        total = self.total(epoch)
        samples_done -= samples_done % self.order.per_item
        return GrowingWindows(total, size_at, self.drops_last(epoch), samples_done, growth.windows_done)

    def _share(self, effective: int) -> int:
        """Return the samples of a window in the order that ranks share, or else in that of one rank."""
        world_size = self.settings.world_size
        require_effective_batch(effective, world_size)
        size, left = divmod(effective * self.ranks_per_order, world_size)
        if left:
            raise UserError(
                f"effective_batch_size={effective} is not a multiple of the {world_size} ranks, and every rank "
                "has an order of samples of its own, so a window cannot be shared out: use "
                f"{effective - effective % world_size}."
            )
        return size

    def _count(self) -> int | None:
        """Return the batches of an epoch on one rank, before any limit; ``None`` for a stream of unknown length."""
        size, batch = self.order.size, self.batch_size
        if size is None or batch is None:
            return None
        share = -(-size // self.ranks_per_order)
        return share // batch if self._drop_last else -(-share // batch)

    def _limited(self, batches: int | None) -> int | None:
        """Return how many batches on one rank the Trainer's limit lets through."""
        limit = self.settings.limit_batches
        if isinstance(limit, int):
            return limit if batches is None else min(batches, limit)
        if limit == 1.0:
            return batches
        if batches is None:
            raise UserError(
                f"limit_train_batches={limit} is a fraction, and the length of the training data is not "
                "known: use a whole number of batches."
            )
        used = int(batches * limit)
        if batches and not used:
            raise UserError(
                f"limit_train_batches={limit} of {batches} batches leaves none: use at least {1 / batches:.3g}."
            )
        return used

    def _sizes(self, epoch: int) -> list[int]:
        """Return the sizes of the batches that a custom batch sampler yields and the Trainer's limit lets through."""
        assert isinstance(self.order, FromBatches)
        sizes = [len(batch) for batch in self.order.batches(epoch, self.settings.seed)]
        used = self._limited(-(-len(sizes) // self.ranks_per_order)) or 0
        return sizes[: used * self.ranks_per_order]

    def _per_window(self, epoch: int, effective: int | None) -> int:
        """Return the batches of a custom batch sampler in one window: they belong together, and are never mixed."""
        if effective is None:
            return self.settings.recipe_factor * self.ranks_per_order
        sizes = self._sizes(epoch)
        largest = max(sizes, default=1)
        number, left = divmod(effective * self.ranks_per_order, largest * self.settings.world_size)
        if left or not number or any(size != largest for size in sizes[:-1]):
            raise self._refusal(effective, sizes, largest)
        return number

    def _refusal(self, effective: int, sizes: Sequence[int], largest: int) -> UserError:
        even = min(sizes[:-1], default=largest) == largest
        way_out = (
            f"use a multiple of {largest * self.sharded_ranks}."
            if even
            else "say with Trainer(accumulate_grad_batches=…) how many batches make up a step."
        )
        return UserError(
            f"effective_batch_size={effective} is no whole number of batches of "
            f"{largest if even else f'{min(sizes)} to {largest}'} samples, as the batch sampler "
            f"{type(self.loader.batch_sampler).__name__} makes them, and these are not mixed: {way_out}"
        )
