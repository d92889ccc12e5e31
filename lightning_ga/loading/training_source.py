"""The training data behind one protocol: micro-batches made of samples, or ready-made batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from lightning_ga.loading.batch_source import BatchSource
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.windows import Chunk


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of a Trainer for its training data.

    Attributes:
        recipe_factor: ``Trainer(accumulate_grad_batches=…)`` as the user wrote it.
        world_size: Data-parallel ranks.
        rank: This rank.
        seed: Seed of the epochs' orders, the same on every rank.
        limit_batches: ``Trainer(limit_train_batches=…)``: a count of the recipe's batches, or a fraction.
        shard: Whether the trainer may share one order among ranks.
        shuffle: False where the trainer asks for the order of the dataset.
        largest_over_ranks: Returns the largest of one number over all ranks.
        cut_in_step: Whether the loader yields the recipe's batches, which are cut in the training step.
    """

    recipe_factor: int
    world_size: int
    rank: int
    seed: int
    limit_batches: int | float = 1.0
    shard: bool = True
    shuffle: bool = True
    largest_over_ranks: Callable[[int], int] = int
    cut_in_step: bool = False


class TrainingSource(Protocol):
    """Training data cut into windows and micro-batches, an epoch at a time.

    Samples are counted in the order that ranks share; where every rank has an order of its own (a
    sharded sampler, an iterable dataset on several ranks), in that of one rank.
    """

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""

    @property
    def sharded_ranks(self) -> int:
        """Ranks with an order of their own; one if they share an order."""

    @property
    def cut_in_step(self) -> bool:
        """True if the loader yields the recipe's batches, which are cut in the training step."""

    @property
    def streams(self) -> bool:
        """True if samples are counted in each batch, as they are not known in advance."""

    @property
    def workers(self) -> int:
        """Processes that fetch data."""

    @property
    def counted_later(self) -> bool:
        """True if the samples of a window are known only at its end."""

    @property
    def keeps_place(self) -> bool:
        """True if a resume in mid-epoch repeats no sample."""

    @property
    def keeps_groups(self) -> bool:
        """True if the user's own batch sampler decides which samples are together."""

    @property
    def may_drop(self) -> bool:
        """True if a batch may hold fewer samples than were fetched for it."""

    @property
    def may_grow(self) -> bool:
        """True if a batch may hold more samples than the first."""

    @property
    def user_loader(self) -> "DataLoader[Any]":
        """The user's loader, for its dataset and the way it collates.

        Raises:
            LayoutError: If the samples of ready-made batches cannot be separated.
        """

    @property
    def batch_source(self) -> BatchSource:
        """Samples or other batches, from which the layout of a batch can be read."""

    @property
    def loader(self) -> "DataLoader[Any] | None":
        """The loader that the fit loop reads."""

    @property
    def length(self) -> int | None:
        """Micro-batches of the arranged epoch on each rank; ``None`` for a stream."""

    @property
    def epoch_batches(self) -> int | None:
        """Batches of the recipe in the arranged epoch, on one rank; ``None`` for a stream."""

    @property
    def at_most(self) -> int | None:
        """Micro-batches after which the epoch is not read any further; ``None`` without a limit."""

    @property
    def done(self) -> int:
        """Micro-batches of the arranged epoch that an earlier run has trained on."""

    def recipe_effective(self, epoch: int) -> int:
        """Return the recipe's effective batch: batch size × factor × ranks; the largest where batches vary."""

    def recipe_batch(self, epoch: int) -> int:
        """Return the most samples that the user's loader yields to a rank at once."""

    def total(self, epoch: int) -> int | None:
        """Return the samples of an epoch that training uses; ``None`` for a stream of unknown length."""

    def steps(self, epoch: int, effective: int | None) -> int | None:
        """Return the optimizer steps of one epoch; ``None`` where the length is not known."""

    def check_effective(self, effective: int) -> None:
        """Refuse an effective batch that cannot be counted in samples."""

    def check_cut(self) -> None:
        """Refuse batches that cannot be cut."""

    def arrange(
        self, epoch: int, effective: int | None, micro_batch: int, *, samples_done: int = 0, enabled: bool = True
    ) -> AccumulationPlan:
        """Cut one epoch, and return how its full windows are cut.

        Args:
            epoch: The epoch.
            effective: Effective batch size; ``None`` for the recipe's.
            micro_batch: Most samples of a micro-batch.
            samples_done: Samples of the epoch that an earlier run has trained on.
            enabled: False while the micro-batch is not known: the loader then yields nothing.
        """

    def chunk(self, index: int) -> Chunk:
        """Return the ``index``-th micro-batch of the arranged epoch on this rank."""

    def expected(self, chunk: Chunk) -> int | None:
        """Return the samples that a batch should hold; ``None`` where only the batch shows them."""

    def samples_at(self, index: int) -> CollatedAgain | None:
        """Return the samples of the ``index``-th micro-batch, fetched again; ``None`` where they are not at hand."""

    def batches_after(self, index: int) -> int:
        """Return the batches of the recipe that are done once each rank has done this micro-batch."""

    def recipe_batches(self, samples: int) -> int:
        """Return the batches of the recipe, on one rank, that so many samples of the arranged epoch make up."""

    def samples_of(self, batches: int) -> int:
        """Return the samples of an epoch in so many batches of the recipe on each rank."""

    def largest_extent(self, recipe_batch: int) -> int:
        """Return the most samples that a batch may hold."""

    def looks(self, epoch: int) -> ScanOrder:
        """Return the order in which samples are scanned for the largest."""

    def sample_indices(self, epoch: int, most: int = 64) -> list[Any]:
        """Return indices of some samples from all over the dataset."""

    def seeded_as_before(self) -> AbstractContextManager[None]:
        """Return a context in which the loop iterates the loader again with the workers' seed that it has drawn."""
