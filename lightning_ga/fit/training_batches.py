"""What is known of the batches of training: how they are made, how many samples each holds, how to fetch them again."""

from typing import Any

from lightning_ga.batch.sizes import length_of_first
from lightning_ga.compat import intervals, loops
from lightning_ga.fit.exactness.training import TrainingExactness
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.loading.reader import BatchReader, BatchSource, CollatedAgain
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.exactness import SAME_RESULT
from lightning_ga.plan.windows import Chunk


class TrainingBatches:
    """The batches of the loop while a fit runs."""

    def __init__(self, trainer: Any, data: TrainingData, exactness: TrainingExactness) -> None:
        self._trainer, self._data, self._exactness = trainer, data, exactness
        self.reader: BatchReader | None = None  # counts samples, from the start of training on
        self._changing: tuple[str, ...] = ()  # names of what changes between the pieces of a batch
        self._expected: dict[int, int | None] = {}  # samples of the batches of this window, by the batch's number

    @property
    def training_source(self) -> TrainingSource:
        """The data as they are cut."""
        assert self._data.source is not None, "the training data are not set up yet"
        return self._data.source

    def source(self, loader: int = 0) -> BatchSource:
        """Return how batches are made."""
        return self.training_source.batch_source

    def verdict(self, hooked: str | None) -> str:
        """Say whether a batch in pieces has the gradient of the whole, and whether what a hook has changed matters."""
        verdict = self._exactness.splitting_sentence(self._changing)
        if hooked is None or self._exactness.is_harmless(hooked):
            return verdict
        sentence = f"A hook had changed {hooked} since the window began; the result may depend on it."
        return sentence if verdict == SAME_RESULT else f"{verdict} {sentence}"

    def found_hooked(self, name: str) -> None:
        """Let it be measured whether it matters that a hook has changed a tensor."""
        self._exactness.found_changed((name,))

    def found_changing(self, names: tuple[str, ...]) -> None:
        """Note what changes between the pieces of a batch, which is told."""
        self._changing = names
        self._exactness.found_changed(names)

    def note(self, number: int, samples: int | None) -> None:
        """Keep the samples that a batch should hold, if they are known; forget those of the window before."""
        if loops.begins_window(self._trainer):
            self._expected.clear()
        self._expected[number] = samples

    def expected(self, number: int) -> int | None:
        """Return the samples that a batch of this window should hold, if they are known."""
        return self._expected.get(number)

    def samples_of_next(self, batch: Any) -> int:
        """Count the batch that training goes on with, before the loop counts it."""
        chunk = self.training_source.chunk(loops.micro_batch_index(self._trainer) + 1)
        return self.count(batch, chunk, on_host=True)

    def count(self, batch: Any, chunk: Chunk, *, on_host: bool) -> int:
        """Count the samples of a batch: those planned, minus those that a collate function has dropped."""
        source = self.training_source
        if not chunk.count or not (source.streams or source.may_drop):
            return chunk.count
        if not source.may_drop:  # stacked: every part is as long as the batch
            return min(chunk.count, length_of_first(batch))
        assert self.reader is not None
        return self.reader.count(batch, expected=source.expected(chunk), otherwise=chunk.count, on_host=on_host)

    def is_empty(self, number: int) -> bool:
        """Return whether a batch holds no sample, and only fills its window up."""
        return not self.training_source.chunk(number).count

    @property
    def can_fetch(self) -> bool:
        """Whether the samples of a batch can be read again."""
        return not self.training_source.streams

    def fetch(self, number: int, seed: int = 0) -> CollatedAgain | None:
        """Fetch the samples of a batch again; ``None`` if they are not at hand."""
        return self.training_source.samples_at(number, seed)

    def later_epochs(self) -> str:
        """Say who meets smaller batches from the next epoch on, after an out-of-memory error."""
        if self.training_source.cut_in_step:
            return ""
        plateaus = intervals.plateaus_by_step(self._trainer)
        named = f" ({', '.join(plateaus)})" if plateaus else ""
        return (
            f" From the next epoch on the loader yields smaller batches: whatever counts batches, or reads what one of "
            f"them logs{named}, meets more of them."
        )
