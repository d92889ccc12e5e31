"""Training data made of samples: one DataLoader, whose samples are collated into micro-batches."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler, default_collate

from lightning_ga.loading.batch_source import LOOKED_AT, CollatedBatches
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.sampler import FromBatches, FromSampler, Sequential, Shuffled, Stream
from lightning_ga.loading.samples import peekable, read_samples
from lightning_ga.loading.training_source import TrainingSource

_TOGETHER = 64  # samples of the first batches, where a batch sampler decides which are together


class MicroBatchSource(TrainingSource):
    """The user's DataLoader and the micro-batches it is cut into."""

    def __init__(self, loader: "DataLoader[Any]", settings: SourceSettings) -> None:
        loader = peekable(loader)
        super().__init__(loader, settings, generator=getattr(loader, "generator", None))
        self.keeps_place = not self.streams  # streams are read from their start
        self.can_fetch = not self.streams
        self.may_drop = loader.collate_fn is not default_collate
        self.batch_source = CollatedBatches(
            [loader], samples=lambda _: self.looks(self.sampler.epoch).some.read(LOOKED_AT)
        )

    def samples_at(self, index: int, seed: int = 0) -> CollatedAgain | None:
        """Return the samples of the ``index``-th micro-batch, fetched again; ``None`` of a stream."""
        if self.streams:
            return None
        return CollatedAgain(self._items, *read_samples(self._items, self.sampler.indices(index), seed=seed))

    def _scan_order(self, epoch: int) -> ScanOrder:
        order, total = self._recipe.order, self.total(epoch)
        if isinstance(order, Stream):
            return ScanOrder(self._items, None, order.size)
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
            assert isinstance(order, (FromSampler, FromBatches))
            met = order.draw(epoch, self.sampler.seed)
        together = met[:_TOGETHER] if isinstance(order, FromBatches) else None
        return ScanOrder(self._items, met, len(met), together)
