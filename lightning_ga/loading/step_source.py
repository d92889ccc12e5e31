"""Training data that is cut in the step: the user's loaders are left to Lightning, and yield their own batches."""

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_ga.batch.layout import LayoutError, length_of_first
from lightning_ga.errors import UserError
from lightning_ga.loading.cutter import BatchCutter
from lightning_ga.loading.rebatch import SourceSettings, collates_by_index, length_of
from lightning_ga.loading.trials import SampleTrials, SeenTrials, TrialBatches
from lightning_ga.memory.oom import attempt


class StepSource:
    """Batches as the user's loader yields them, a whole number of which makes up a window."""

    cut_in_step, sizes, may_drop_samples = True, None, False

    def __init__(self, loader: Any, why: str, settings: SourceSettings) -> None:
        self.loader, self.why, self.settings = loader, why, settings
        self.batch_size = _batch_size(loader)  # samples of a rank's batch; ``None`` until one is seen
        self.varies = self.batch_size is None  # whether the first batch may be smaller than others
        self.batch: Any = None  # the first, until training begins

    def see(self, batch: Any, cutter: BatchCutter) -> None:
        """Keep a batch that training will run, as it is on the host."""
        self.batch = batch
        if self.batch_size is None:
            counted = attempt(cutter.count, lambda error: isinstance(error, LayoutError), batch)
            self.batch_size = max(1, counted.result or length_of_first(batch))

    def recipe_effective(self) -> int | None:
        """Return the samples of a window as the user wrote it, over all ranks; ``None`` if they are not known."""
        size, settings = self.batch_size, self.settings
        return None if size is None else size * settings.recipe_factor * settings.world_size

    def factor_for(self, effective: int, world_size: int) -> int:
        """Return the batches of a window of so many samples over all ranks; refuse a number that is no multiple."""
        each = (self.batch_size or 1) * world_size
        if effective % each:
            raise UserError(
                f"effective_batch_size={effective} is no whole number of batches: with {self.why}, the loader's "
                f"batches of {self.batch_size} samples on {world_size} ranks are kept. Use a multiple of {each}."
            )
        return effective // each

    def trial_batches(self, epoch: int, cutter: BatchCutter) -> TrialBatches:
        """Return the source of batches for probe and measurement: a map-style dataset, or the batch seen."""
        loader, size = self.loader, self.batch_size or 1
        total = length_of(getattr(loader, "dataset", ()))
        if collates_by_index(loader) and not self.varies and total:
            return SampleTrials(loader, range(total), size, cutter=cutter)
        return SeenTrials(self.batch, cutter, size)


def _batch_size(loader: Any) -> int | None:
    """Return the samples of a DataLoader's batches but the last; ``None`` if they are not known."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    size: int | None = loader.batch_size
    if size is None and type(loader.batch_sampler) is BatchSampler:
        size = loader.batch_sampler.batch_size
    length = length_of(loader.dataset)
    return size if size is None or length is None else min(size, length) or None
