"""Count and cut the batches of training, and make batches for the probe and the measurement of the same kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

from lightning_ga.batch.layout import HookLayout, Layout, leaves
from lightning_ga.batch.pytree import REMEDY, LayoutError, tensors_in
from lightning_ga.batch.read_layout import Comparison, read_hook_layout, read_layout, read_ready_made
from lightning_ga.loading.known_samples import KnownSamples, is_no_lack_of_memory
from lightning_ga.loading.largest import Largest
from lightning_ga.memory.oom import attempt
from lightning_ga.plan.accumulation import ceil_div, split_evenly, whole_multiples
from lightning_ga.snapshot.copies import copied_if_possible
from lightning_ga.snapshot.random_numbers import RandomState

Move = Callable[[Any], Any]
_FEW_NUMBERS = 2**14  # of a tensor: larger ones are data


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A batch, and two parts of it as training would get them; all on the device."""

    whole: Any
    parts: tuple[Any, Any]
    sizes: tuple[int, int]  # samples of the parts


class BatchCutter:
    """Counts and cuts the batches that ``combine`` makes of one batch of each loader.

    The layout is read once, from a few samples. If no samples are known, each batch is read by itself.
    """

    def __init__(self, samples: Sequence[KnownSamples], combine: Callable[[list[Any]], Any], transfer: Any) -> None:
        self._samples = samples
        self._combine = combine
        self._transfer = transfer

    @property
    def drops_samples(self) -> bool:
        """Whether some of the samples that are known are left out of batches."""
        return any(each.are_dropped for each in self._samples)

    def count(self, batch: Any) -> int:
        """Return the samples of a batch; raise ``LayoutError`` if they cannot be separated."""
        return self._layout(batch).samples(batch)

    def count_left(self, batch: Any) -> int | None:
        """Return how many samples the collate function has left in a batch; ``None`` if that is not known.

        It is known if a few samples, collated apart, have shown how batches grow with them.
        """
        if self._shown is None or isinstance(self._shown, str):
            return None
        counted: int | None = attempt(self.count, _is_of_layout, batch).result
        return counted

    def weight(self, batch: Any, samples: int) -> int:
        """Return a batch's weight in samples: with several loaders, the most that one of them gives."""
        if len(self._samples) == 1:
            return samples
        return max(self._layout(batch).sizes(batch).values())

    def cut(self, batch: Any, start: int, stop: int) -> Any:
        """Return the samples ``start`` to ``stop - 1`` of a batch, as views of it if possible."""
        return self._layout(batch).cut(batch, start, stop)

    def halves(self, batch: Any, most: int, multiple: int = 1) -> CutBatch | None:
        """Cut at most so many samples of a batch in two parts that are multiples; ``None`` if there is only one."""
        count = self.count(batch)
        samples = whole_multiples(min(count, most), multiple)
        if samples < 2:
            return None
        if samples < count:
            batch = self.cut(batch, 0, samples)
        middle = split_evenly(samples, 2, multiple)[0]
        parts = self.cut(batch, 0, middle), self.cut(batch, middle, samples)
        return CutBatch(batch, parts, (middle, samples - middle))

    def _layout(self, batch: Any) -> Layout | HookLayout:
        hook = self._transfer.split_batch
        shown = self._shown
        if isinstance(shown, str) and hook is None:
            raise LayoutError(shown)
        if isinstance(shown, (Layout, HookLayout)):
            return shown
        return read_ready_made(batch) if hook is None else HookLayout(hook)

    @cached_property
    def _shown(self) -> Layout | HookLayout | str | None:
        """The layout that small batches show, or why they show none; ``None`` if no samples are known."""
        hook = self._transfer.split_batch
        kinds = [each.kinds for each in self._samples]
        if not all(kinds):
            return None
        comparison = Comparison(self._batch, len(kinds), max(map(len, kinds)))
        state = RandomState()  # hooks of the transfer may draw
        read = read_layout if hook is None else partial(read_hook_layout, hook)
        outcome = attempt(read, is_no_lack_of_memory, comparison)
        state.restore()
        if outcome.failure is None or _is_of_layout(outcome.failure):
            return outcome.result or str(outcome.failure)  # the error itself would keep batches alive
        return (
            f"The batch cannot be cut into samples, as collating a few of them apart ended in "
            f"{type(outcome.failure).__name__}: {outcome.failure}: {REMEDY}."
        )

    def _batch(self, counts: Sequence[int], kinds: Sequence[int], seed: int) -> Any:
        batches = []
        for samples, count in zip(self._samples, counts):
            chosen = [samples.kinds[kind % len(samples.kinds)] for kind in kinds]
            batches.append(samples.collate(chosen, count, seed=seed))
        return self._transfer.to_device(self._combine(batches))


def _is_of_layout(error: Exception) -> bool:
    return isinstance(error, LayoutError)


class TrialBatches:
    """Batches for probe and measurement, which leave no trace in dataset, collate function or random numbers.

    They are collated of samples that were read apart from training, or cut out of a batch that training will run, as
    the loader made it. Those of data that are cut in the step are always cut, out of batches of ``most`` samples.
    """

    def __init__(
        self, samples: KnownSamples, cutter: BatchCutter, most: int, *, batch: Any = None, in_step: bool = False
    ) -> None:
        self.most = most  # samples of the largest micro-batch
        self.cutter = cutter
        self._samples = samples
        self._batch = batch
        self.largest: Largest | None = None  # the samples that batches are collated of
        if samples.first and batch is None:
            self.largest = Largest(samples)
        self._is_cut = in_step or self.largest is None

    @property
    def empty(self) -> bool:
        """Whether there is no sample to make a batch of."""
        return self.largest is None and self._batch is None

    def make(self, samples: int, move: Move) -> tuple[Any, Any]:
        """Return a micro-batch of so many of the heaviest samples, moved, and the whole batch that it is cut from."""
        if self.largest is None:
            whole = move(copied_if_possible(self._batch))
        elif self._is_cut:
            whole = move(self.largest.batch(self.most))
        else:
            return move(self.largest.batch(samples)), None
        if samples >= self.most and self.largest is None:
            return whole, whole
        return self.cutter.cut(whole, 0, samples), whole

    def batch_in_two_parts(self, samples: int, move: Move, seed: int = 0, multiple: int = 1) -> CutBatch | None:
        """Return a batch of samples that differ, in two parts; whole and parts draw the random numbers of a seed."""
        if self.largest is None:
            return self.cutter.halves(move(copied_if_possible(self._batch)), samples, multiple)

        def made(samples: Sequence[Any]) -> Any:
            return move(self._samples.collate(samples, len(samples), seed=seed))

        chosen = self._unlike(samples)
        if len(chosen) < 2:
            return None
        if self._is_cut:
            return self.cutter.halves(made(chosen), samples, multiple)
        middle = split_evenly(len(chosen), 2, multiple)[0]
        whole = made(chosen)
        parts = made(chosen[:middle]), made(chosen[middle:])
        return CutBatch(whole, parts, (middle, len(chosen) - middle))

    def _unlike(self, number: int) -> list[Any]:
        """Return so many of the samples that were read and are not left out of batches; those differ."""
        samples = self._samples
        known = [sample for sample in samples.first if sample is not None]
        chosen = unlike(known, number)
        if all(map(samples.is_kept, chosen)):
            return chosen
        return unlike(list(filter(samples.is_kept, known)), number)


def unlike(samples: Sequence[Any], number: int) -> list[Any]:
    """Return some of the samples, as unlike as possible: in size, numbers that losses ignore, labels.

    Those that are alike are neighbours, so that the halves differ most. The first half has only samples that are
    shorter than the longest, if there are any: it is padded less than the whole. If these are few, they are repeated.
    """
    number = min(number, len(samples))
    if not number:
        return []
    traits = sorted(zip(map(_traits, samples), range(len(samples))))
    largest = traits[-1][0][0]
    smaller = [each for each in traits if each[0][0] < largest]  # they come first
    chosen = _spread_over(traits, number)
    half = (number + 1) // 2
    if smaller and chosen[half - 1] not in smaller:
        chosen[:half] = _spread_over(smaller[: ceil_div(len(smaller), 2)], half)
    return [samples[place] for _, place in chosen]


def _spread_over(ordered: Sequence[Any], number: int) -> list[Any]:
    step = (len(ordered) - 1) / max(1, number - 1)
    return [ordered[round(place * step)] for place in range(number)]


def _traits(sample: Any) -> tuple[float, ...]:
    """Return traits in which samples differ: number of elements, ignored numbers, and labels."""
    size = sum(prod(shape) for _, shape in leaves(sample, text=False))
    ignored = 0
    labels = 0.0
    for tensor in tensors_in(sample):
        if tensor.numel() > _FEW_NUMBERS or tensor.is_complex() or tensor.is_nested:
            continue
        values = tensor.to_dense()
        if values.is_floating_point():
            ignored += int(values.isnan().sum())
        elif values.numel():
            ignored += int((values < 0).sum())
            labels += values.double().mean().item()
    fields: Any = ()
    if isinstance(sample, Mapping):
        fields = sample.values()
    elif isinstance(sample, (list, tuple)):
        fields = sample
    labels += sum(value for value in fields if isinstance(value, int))
    return size, ignored, labels
