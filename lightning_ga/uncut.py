"""Training data whose batches cannot be cut anew: they are fed as they come, and cut in the training step.

Dictionaries of loaders, loaders that yield whole batches, iterables of any kind. Their feed counts in
batches, as others do in samples; a real batch taken apart stands for the dataset that the probe and
the exactness check ask for samples.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ga.errors import UserError
from lightning_ga.feed import Feed
from lightning_ga.heaviest import Looks
from lightning_ga.merge import merge_outputs
from lightning_ga.plan import AccumulationPlan
from lightning_ga.sample_axis import Layout, read_layout
from lightning_ga.snapshot import RandomState
from lightning_ga.split import split_batch
from lightning_ga.windows import Chunk


class BatchStream(IterableDataset[Any]):
    """The batches of any loader, each as one item.

    Args:
        batches: Starts the loader anew and yields its batches.
        length: How many there are; ``None`` if that is not known.
    """

    def __init__(self, batches: Callable[[], Iterator[Any]], length: int | None) -> None:
        self.batches = batches
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class SizedBatchStream(BatchStream):
    """The same with a length."""

    def __len__(self) -> int:
        assert self.length is not None
        return self.length


class UncutFeed:
    """The feed of such data: what a ``Feed`` is to samples, in windows of whole batches.

    Samples are counted in each batch; where a number of them is needed in advance, all batches are
    taken to be as large as the first.

    Args:
        loader: What the user gave to ``fit``.
        batches: Starts it anew and yields its batches.
        length: How many there are on this rank; ``None`` if that is not known.
        settings: As for any feed.

    Raises:
        UserError: If the data can be read only once, or its first batch cannot be split.
    """

    streams = counted_later = True

    def __init__(self, loader: Any, batches: Callable[[], Iterator[Any]], length: int | None, **settings: Any) -> None:
        kind = BatchStream if length is None else SizedBatchStream
        self._feed = Feed(DataLoader(kind(batches, length), batch_size=1, collate_fn=_only), **settings)
        first = first_batch(loader, batches)
        self._layout = read_layout(first)
        self._samples = _Samples(first, self._layout, lambda: first_batch(loader, batches))
        self.user_loader: DataLoader[Any] = DataLoader(
            self._samples, batch_size=len(self._samples), collate_fn=_put_together
        )
        self._each: int = settings["largest_over_ranks"](self._layout.samples)

    def recipe_effective(self, epoch: int) -> int:
        """Samples of a window."""
        return self._feed.recipe_effective(epoch) * self._each

    def total(self, epoch: int) -> int | None:
        """Samples of an epoch on this rank."""
        batches = self._feed.total(epoch)
        return None if batches is None else batches * self._each

    def arrange(
        self, epoch: int, effective: int | None, micro_batch: int, *, samples_done: int = 0, armed: bool = True
    ) -> AccumulationPlan:
        """Arrange one epoch in windows of whole batches.

        Raises:
            UserError: If no whole number of batches makes up an effective batch.
        """
        done = samples_done // self._each
        if armed:
            self._samples.let_go()
        plan = self._feed.arrange(epoch, self._in_batches(effective), 1, samples_done=done, armed=armed)
        chunks = ((self._each,) * plan.factor,) * plan.world_size
        size = plan.effective_batch_size * self._each
        return replace(plan, effective_batch_size=size, micro_batch_size=self._each, chunks=chunks)

    def chunk(self, index: int) -> Chunk:
        """The ``index``-th batch of the epoch; its place is told in samples."""
        chunk = self._feed.chunk(index)
        return replace(chunk, window_end=chunk.window_end * self._each)

    def count(self, batch: Any, chunk: Chunk) -> int:
        """Samples of a batch."""
        return read_layout(batch, like=self._layout).samples

    def looks(self, epoch: int) -> Looks:
        """The samples of the first batch."""
        return Looks(range(self._layout.samples), self._layout.samples)

    def sample_indices(self, epoch: int, most: int = 64) -> list[int]:
        """Indices of samples of the first batch."""
        return list(range(min(most, self._layout.samples)))

    def recipe_batches(self, samples: int) -> int:
        """Batches that so many samples make up."""
        return self._feed.recipe_batches(samples // self._each)

    def batches_after(self, index: int) -> int:
        """Batches that are done after this one."""
        return self._feed.batches_after(index)

    def steps(self, epoch: int, effective: int | None) -> int | None:
        """Optimizer steps of one epoch; ``None`` where the length is not known."""
        return self._feed.steps(epoch, self._in_batches(effective))

    @property
    def loader(self) -> "DataLoader[Any] | None":
        """What the loop reads."""
        return self._feed.loader

    @property
    def length(self) -> int | None:
        """Batches of the arranged epoch; ``None`` if that is not known."""
        return self._feed.length

    @property
    def done(self) -> int:
        """Batches that an earlier run has trained on."""
        return self._feed.done

    @property
    def ranks_apart(self) -> int:
        """Ranks with data of their own."""
        return self._feed.ranks_apart

    def _in_batches(self, effective: int | None) -> int | None:
        if effective is None:
            return None
        batches, left = divmod(effective, self._each)
        if left or batches % self._feed.world_size:
            step = self._each * self._feed.world_size
            raise UserError(
                f"effective_batch_size={effective} is no whole number of batches: the training data yields batches of "
                f"{self._each} samples on each of {self._feed.world_size} ranks, which cannot be cut anew. Use a "
                f"multiple of {step}."
            )
        return batches


def first_batch(loader: Any, batches: Callable[[], Iterator[Any]]) -> Any:
    """The first batch of the data, without a trace in random numbers.

    Raises:
        UserError: If the data can be read only once, or hold nothing.
    """
    if isinstance(loader, Iterator) and not hasattr(loader, "flattened"):  # a CombinedLoader starts anew
        raise UserError(
            f"The training data is a {type(loader).__name__}, which can be read only once: give fit() something that "
            "can be iterated in every epoch, such as a DataLoader."
        )
    before = RandomState()
    batch = next(batches(), None)
    before.restore()
    if batch is None:
        raise UserError("The training data yields no batch: check the dataset and the sampler.")
    return batch


class _Samples(Dataset[Any]):
    """The samples of the first batch, which is read again if it is asked for after it was let go."""

    def __init__(self, first: Any, layout: Layout, again: Callable[[], Any]) -> None:
        self._layout = layout
        self._again = again
        self._kept = self._split(first)

    def __len__(self) -> int:
        return self._layout.samples

    def __getitem__(self, index: int) -> Any:
        self._kept = self._kept or self._split(self._again())
        return self._kept[index]

    def _split(self, batch: Any) -> list[Any]:
        return list(split_batch(batch, [1] * self._layout.samples, like=self._layout))

    def let_go(self) -> None:
        """Free the batch: training needs its memory."""
        self._kept = []


def _only(batches: Iterable[Any]) -> Any:
    (batch,) = batches
    return batch


def _put_together(samples: Sequence[Any]) -> Any:
    return merge_outputs(samples, [1] * len(samples))
