"""What feeds training: micro-batches cut from samples, or ready-made batches, behind one protocol."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.reader import BatchSource, CollatedAgain
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.windows import Chunk


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How a Trainer reads its training data.

    Attributes:
        recipe_factor: ``Trainer(accumulate_grad_batches=…)`` as the user wrote it.
        world_size: Data-parallel ranks.
        rank: This rank.
        seed: Seed of the epochs' orders, the same on every rank.
        limit_batches: ``Trainer(limit_train_batches=…)``: a count of the recipe's batches, or a fraction.
        shard: Whether the trainer may share one order among ranks.
        shuffle: False where the trainer asks for the order of the dataset.
        largest_over_ranks: The largest of one number over all ranks.
        cut_in_step: Whether windows of the recipe are fed as the recipe's batches and cut in the training step.
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
        """Ranks with an order of their own: samples of all ranks for one of the order."""

    @property
    def cut_in_step(self) -> bool:
        """Whether the loader yields the recipe's batches, which are cut in the training step."""

    @property
    def streams(self) -> bool:
        """Whether samples are counted in each batch, as nothing tells them in advance."""

    @property
    def workers(self) -> int:
        """Processes that fetch data."""

    @property
    def counted_later(self) -> bool:
        """Whether the samples of a window are known only when it is over."""

    @property
    def keeps_place(self) -> bool:
        """Whether a resume in mid-epoch repeats no sample."""

    @property
    def keeps_groups(self) -> bool:
        """Whether a batch sampler of the user's own decides what is together."""

    @property
    def may_drop(self) -> bool:
        """Whether a batch may hold fewer samples than were fetched for it."""

    @property
    def may_grow(self) -> bool:
        """Whether a batch may hold more samples than the first."""

    @property
    def user_loader(self) -> "DataLoader[Any]":
        """The user's loader, for its dataset and the way it collates.

        Raises:
            LayoutError: If the samples of ready-made batches cannot be told apart.
        """

    @property
    def batch_source(self) -> BatchSource:
        """What is known of the batches."""

    @property
    def loader(self) -> "DataLoader[Any] | None":
        """What the fit loop reads."""

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
        """Effective batch of the recipe: batch size × factor × ranks; the largest where batches vary."""

    def recipe_batch(self, epoch: int) -> int:
        """Most samples that the user's loader yields to a rank at once."""

    def total(self, epoch: int) -> int | None:
        """Samples of an epoch that training uses; ``None`` for a stream of unknown length."""

    def steps(self, epoch: int, effective: int | None) -> int | None:
        """Optimizer steps of one epoch; ``None`` where the length is not known."""

    def check_effective(self, effective: int) -> None:
        """Refuse an effective batch that cannot be counted in samples."""

    def check_cut(self) -> None:
        """Refuse to cut what has no smaller parts."""

    def arrange(
        self, epoch: int, effective: int | None, micro_batch: int, *, samples_done: int = 0, enabled: bool = True
    ) -> AccumulationPlan:
        """Cut one epoch and return how its full windows are cut."""

    def chunk(self, index: int) -> Chunk:
        """The ``index``-th micro-batch of the arranged epoch on this rank."""

    def expected(self, chunk: Chunk) -> int | None:
        """Samples that a batch should hold; ``None`` where only the batch can tell."""

    def samples_at(self, index: int) -> CollatedAgain | None:
        """The samples of the ``index``-th micro-batch, fetched again; ``None`` where they are not at hand."""

    def batches_after(self, index: int) -> int:
        """Batches of the recipe that are done once each rank has done this micro-batch."""

    def recipe_batches(self, samples: int) -> int:
        """Batches of the recipe, on one rank, that so many samples of the arranged epoch make up."""

    def samples_of(self, batches: int) -> int:
        """Samples of an epoch that so many batches of the recipe on each rank hold."""

    def largest_extent(self, recipe_batch: int) -> int:
        """Most samples that a batch may hold."""

    def looks(self, epoch: int) -> ScanOrder:
        """Which samples to look at for the largest."""

    def sample_indices(self, epoch: int, most: int = 64) -> list[Any]:
        """Indices of some samples from all over the dataset."""

    def seeded_as_before(self) -> AbstractContextManager[None]:
        """Return a context in which the loop iterates the loader again with the workers' seed that it has drawn."""
