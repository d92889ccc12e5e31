"""The training data of a fit: the user's loader, the source that cuts it into micro-batches, and these."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_ga.batch.layout import length_of_first
from lightning_ga.compat import dataloaders, intervals, loops, ranks
from lightning_ga.errors import UserError
from lightning_ga.fit.exactness.training import TrainingExactness, is_inexact
from lightning_ga.fit.parts import StageBatches
from lightning_ga.loading.prebatched import PrebatchedSource
from lightning_ga.loading.reader import BatchReader, BatchSource, CollatedAgain
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.samples import are_made_by
from lightning_ga.loading.sized import SizedSource
from lightning_ga.loading.training_source import MicroBatchSource, TrainingSource
from lightning_ga.plan.checkpoint import Position
from lightning_ga.plan.config import Options, Request
from lightning_ga.plan.windows import Chunk


class TrainingData(StageBatches):
    """Sets the data of the fit loop up with a loader that is cut, and knows the batches that it yields."""

    def __init__(self, trainer: Any, exactness: TrainingExactness, request: Request, options: Options) -> None:
        self._trainer, self.exactness = trainer, exactness
        self._counts_micro_batches = request.factor(0) is not None
        self._size_of, self._tokens = options.size_of, options.tokens
        self._cut_in_step, self._recipe_factor = options.micro_batching == "step", int(trainer.accumulate_grad_batches)
        self.why_in_step = ""  # why batches can be cut in the step only, in a sentence
        self._source: TrainingSource | None = None
        self._given: Any = None  # the data as the user gave them
        self._loader_states: list[Any] = []
        self._changing: tuple[str, ...] = ()  # names of what changes between the pieces of a batch
        self._expected: dict[int, int | None] = {}  # samples of the current batch, by its number

    @property
    def source(self) -> TrainingSource:
        """The data as they are cut."""
        assert self._source is not None, "the training data are not set up yet"
        return self._source

    @property
    def keeps_sizes(self) -> bool:
        """Whether micro-batches keep their size if memory runs out: a factor counts them, or the step and its hooks."""
        training, splitting = self.exactness.training, self.exactness.splitting
        only_pieces = is_inexact(training) and splitting is not None and splitting.cause == "exact"
        return (self._counts_micro_batches or only_pieces) and not self.source.cut_in_step

    # --- loaders -------------------------------------------------------------------------------

    def cut(self, loader: Any, position: Position) -> TrainingSource:
        """Return the source that cuts the user's loader, in the order that the run has begun with."""
        self._source, self._given = self._make_source(loader, position), loader
        self._loader_states = []
        return self._source

    def set_up(self, set_up: Callable[[], None]) -> None:
        """Let the loop set its data up, with the recipe's limits read in the recipe's batches."""
        trainer, known = self._trainer, self._source
        if known is None:
            dataloaders.forget_loaders(trainer)
        with dataloaders.micro_batch_units(trainer) as (self._shard, self._limit_batches), warnings.catch_warnings():
            set_up()
        source = self._source
        if source is not None and source is not known:
            dataloaders.show_loaders(trainer, self._given)
            intervals.set_validation_interval(trainer, source.epoch_batches)
            dataloaders.resize_epoch(trainer, source.length, at_most=source.epoch_plan.length)

    def save_place(self, checkpoint: dict[str, Any]) -> None:
        """Let a checkpoint keep the place of loaders that have one."""
        if isinstance(self._source, PrebatchedSource):
            loops.save_loaders(checkpoint, dataloaders.states_of(self._trainer, self._source.loaders))

    def load_place(self, checkpoint: dict[str, Any]) -> None:
        """Read the place of loaders from a checkpoint, for those that are set up next."""
        self._loader_states = loops.take_loaders(checkpoint)

    def _make_source(self, loader: Any, position: Position) -> TrainingSource:
        trainer, is_made = self._trainer, are_made_by(self._trainer.lightning_module, loader)
        if is_made:
            self.why_in_step = (
                "The dataset holds the model, or a part of it: the loader would read samples before the model has "
                "learned from those before them."
            )
        settings = SourceSettings(
            recipe_factor=self._recipe_factor,
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            seed=position.seed,
            limit_batches=self._limit_batches,
            shard=self._shard,
            shuffle=not trainer.overfit_batches,
            shuffles=position.shuffles,
            largest_over_ranks=partial(ranks.largest_over_ranks, trainer),
            cut_in_step=self._cut_in_step or is_made,
        )
        size_of = self._size_of if isinstance(self._size_of, str) else None  # shown by batches, too
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        by_index = isinstance(loader, DataLoader) and loader.batch_sampler is not None and not is_stream
        if self._size_of is not None and not self._cut_in_step and (by_index or size_of is None or self._tokens):
            return SizedSource(loader, settings, self._size_of, self._tokens)
        try:
            source = MicroBatchSource(loader, settings, size_of)
        except UserError as why:
            self.why_in_step = str(why)
            return self._make_prebatched(loader, settings, size_of)
        dataloaders.warn_of_overfitting(trainer, loader)
        dataloaders.load_later(trainer, self._loader_states)
        return source

    def _make_prebatched(self, loader: Any, settings: SourceSettings, size_of: str | None) -> PrebatchedSource:
        batches = dataloaders.batches_of(self._trainer, loader)
        dataloaders.load_states(self._trainer, batches.loaders, self._loader_states)
        hook = getattr(self._trainer.lightning_module, "split_batch", None)
        source = PrebatchedSource(batches, settings, hook=hook, size_of=size_of)
        if not any(isinstance(getattr(part, "dataset", None), IterableDataset) for part in source.loaders):
            warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")  # it is ours
        return source

    # --- batches -------------------------------------------------------------------------------

    def batch_source(self, loader: int = 0) -> BatchSource:
        """Return how batches are made."""
        return self.source.batch_source

    def note(self, number: int, samples: int | None, chunk: Chunk) -> None:
        """Keep the samples that the batch which is trained on should hold, if they are known, and its share."""
        self._expected = {number: samples}
        self.logged_batch_sizes = self.source.logged_batch_sizes(chunk)

    def expected(self, number: int) -> int | None:
        """Return the samples that the batch of this number should hold, if they are known."""
        return self._expected.get(number)

    def samples_of_next(self, batch: Any, reader: BatchReader) -> int:
        """Count the batch that training goes on with, before the loop counts it."""
        number = loops.micro_batch_index(self._trainer) + 1
        size, of = self.relative_size(number)
        return -(-self.count(batch, self.source.chunk(number), reader, on_host=True) * size // of)

    def relative_size(self, number: int) -> tuple[int, int]:
        """Return the size of the longest sample in a batch, and that of the longest there is."""
        return self.source.relative_size(number)

    def count(self, batch: Any, chunk: Chunk, reader: BatchReader, *, on_host: bool) -> int:
        """Count the samples of a batch: those planned, minus those that a collate function has dropped."""
        source = self.source
        if not chunk.count or not (source.streams or source.may_drop):
            return chunk.count
        if not source.may_drop:  # stacked: every part is as long as the batch
            return min(chunk.count, length_of_first(batch))
        return reader.count(batch, expected=source.expected(chunk), otherwise=chunk.count, on_host=on_host)

    def fetch(self, number: int, loader: int = 0, seed: int = 0) -> CollatedAgain | None:
        """Fetch the samples of a batch again; ``None`` if they are not at hand."""
        return self.source.samples_at(number, seed)

    # --- what is told of errors ----------------------------------------------------------------

    def verdict(self, hooked: str | None) -> str:
        """Say whether a batch in pieces has the gradient of the whole, and whether what a hook has changed matters."""
        return self.exactness.sentence_on_pieces(hooked)

    def later_epochs(self) -> str:
        """Say who meets smaller batches from the next epoch on, after an out-of-memory error."""
        if self.source.cut_in_step or self.keeps_sizes:
            return ""
        plateaus = intervals.plateaus_by_step(self._trainer)
        named = f" ({', '.join(plateaus)})" if plateaus else ""
        return (
            f" From the next epoch on the loader yields smaller batches: whatever counts batches, or reads what one of "
            f"them logs{named}, meets more of them."
        )
