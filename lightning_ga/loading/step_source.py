"""Training data that is cut in the step: the user's loaders are left to Lightning, and yield their own batches.

Tested in tests/loading/test_batch_cutter.py.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from lightning_ga.batch.layout import LayoutError, length_of_first
from lightning_ga.errors import UserError
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.rebatch import SourceSettings, collates, length_of
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.memory.oom import attempt
from lightning_ga.snapshot.user_objects import borrowed, seeded


class StepSource:
    """Batches as the user's loader yields them, a whole number of which makes up a window."""

    sizes = None  # of samples: only the loader cuts by these

    def __init__(self, loader: Any, why: str, settings: SourceSettings) -> None:
        self._given = loader
        self.loader = loader
        self.why = why  # the step cuts them
        self.recipe_factor = settings.recipe_factor
        self.world_size = settings.world_size
        # Samples of a rank's batch as the user wrote it, and as the loader makes it: at most all that there are.
        self._written_size = _written_batch_size(loader)
        self.batch_size = self._written_size  # ``None`` until a batch is seen
        length = length_of(loader.dataset) if self._written_size else None
        if self.batch_size is not None and length is not None:
            self.batch_size = min(self.batch_size, length) or None
        # Pieces that a batch can be cut into; of several loaders, the greatest common divisor: see ``Layout.samples``.
        self.units = self.batch_size
        self.first_may_be_smaller = self.batch_size is None  # than other batches
        self.samples = KnownSamples(loader)
        if collates(loader) and isinstance(loader.dataset, IterableDataset):
            self.loader = self.samples.with_shown_batch()

    def see(self, batch: Any, cutter: BatchCutter) -> None:
        """Read the batch size off the first batch, if the loader does not say it.

        If its samples cannot be counted, the length of its first tensor is taken.
        """
        if self.batch_size is None:
            counted = attempt(cutter.count, lambda error: isinstance(error, LayoutError), batch)
            self.units = max(1, counted.result or length_of_first(batch))
            may_drop = collates(self._given) and self.samples.may_drop
            may_have_lost_samples = (bool(counted.result) and may_drop) or cutter.were_seen_dropped
            # Another batch may have more. Without a count, units may be rows of many samples, which a sampler does not
            # count, unless samples were seen dropped.
            if may_have_lost_samples:
                self.units = max(self.units, _first_of_batch_sampler(self._given))
            self.batch_size = self.units
            if counted.result:
                self.batch_size = cutter.weight(batch, self.units)  # of several loaders, more than the units

    def follow(self, earlier: "StepSource") -> None:
        """Use the batch size of data that were loaded before, if none is known.

        If the user's loader is the same object, keep the earlier copy of it, whose workers run.
        """
        self.units = self.units or earlier.units
        self.batch_size = self.batch_size or earlier.batch_size
        if self._given is earlier._given:
            self.loader = earlier.loader
            self.samples = earlier.samples

    def factor_for(self, effective: int) -> int:
        """Return the batches of a window of so many samples over all ranks; refuse a number that is no multiple."""
        size = self._written_size or self.batch_size or 1
        each = size * self.world_size
        if effective % each:
            raise UserError(
                f"effective_batch_size={effective} is no whole number of batches: with {self.why}, the loader's "
                f"batches of {size} samples on {self.world_size} ranks are kept. Use a multiple of {each}."
            )
        return effective // each


def _first_of_batch_sampler(loader: Any) -> int:
    """Return of how many samples a batch sampler makes its first batch; 0 if there is none that can be asked again."""
    sampler = getattr(loader, "batch_sampler", None)
    if not collates(loader) or sampler is None or isinstance(sampler, Iterator):
        return 0
    with borrowed(sampler, loader.dataset) as lent, seeded(0, lent):
        return len(next(iter(lent), ()))


def _written_batch_size(loader: Any) -> int | None:
    """Return the batch size that a DataLoader, or its BatchSampler, was given; ``None`` if that is not known."""
    if not collates(loader):  # a loader with an __iter__ of its own may yield anything
        return None
    size: int | None = loader.batch_size
    if size is None and type(loader.batch_sampler) is BatchSampler:
        size = loader.batch_sampler.batch_size
    return size
