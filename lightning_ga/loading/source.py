"""Training data made of samples: one DataLoader, whose samples are collated into micro-batches."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler, default_collate

from lightning_ga.loading.batch_source import CollatedBatches, spread
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.sampler import FromSampler, Sequential, Shuffled, Stream
from lightning_ga.loading.samples import collect_samples, peekable
from lightning_ga.loading.training_source import TrainingSource


class MicroBatchSource(TrainingSource):
    """The user's DataLoader and the micro-batches it is cut into."""

    def __init__(self, loader: "DataLoader[Any]", settings: SourceSettings) -> None:
        loader = peekable(loader)
        super().__init__(loader, settings, generator=getattr(loader, "generator", None))
        self.keeps_place = not self.streams  # streams are read from their start
        self.may_drop = loader.collate_fn is not default_collate
        self.batch_source = CollatedBatches([loader], indices=lambda _: self.sample_indices(self.sampler.epoch, most=8))

    def sample_indices(self, epoch: int, most: int = 64) -> list[Any]:
        """Return indices of some samples from all over the dataset."""
        order = self._recipe.order
        if isinstance(order, (Sequential, Shuffled)):
            return spread(order.size, most)
        return list(order.draw(epoch, self.sampler.seed)[0:most])

    def samples_at(self, index: int) -> CollatedAgain | None:
        """Return the samples of the ``index``-th micro-batch, fetched again; ``None`` of a stream."""
        if self.streams:
            return None
        return CollatedAgain(self._items, collect_samples(self._items, self.sampler.indices(index)))

    def looks(self, epoch: int) -> ScanOrder:
        """Return the order in which all samples are scanned that training may meet, as far as these are known."""
        order, total = self._recipe.order, self.total(epoch)
        if isinstance(order, Stream):
            return ScanOrder(None, order.size)
        sampler = order.sampler if isinstance(order, FromSampler) else None
        if isinstance(order, Sequential):
            met: Sequence[Any] = range(order.size if total is None else total)
        elif isinstance(order, Shuffled):
            met = range(order.whole)
        elif type(sampler) is RandomSampler:
            met = range(len(sampler.data_source))
        elif type(sampler) is WeightedRandomSampler:
            met = sampler.weights.nonzero().flatten().tolist()
        else:
            met = order.draw(epoch, self.sampler.seed)
        return ScanOrder(met, len(met))
