"""Count and cut the batches of training, and make batches for the probe and the measurement of the same kind."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

from lightning_ga.batch.layout import HookLayout, Layout, leaves
from lightning_ga.batch.pytree import REMEDY, LayoutError, tensors_in
from lightning_ga.batch.read_layout import Comparison, read_hook_layout, read_layout, read_ready_made
from lightning_ga.loading.largest import Largest
from lightning_ga.loading.samples import Samples
from lightning_ga.memory.oom import attempt, is_out_of_memory
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

    def __init__(self, samples: Sequence[Samples], combine: Callable[[list[Any]], Any], transfer: Any) -> None:
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

    def halves(self, batch: Any, multiple: int = 1) -> CutBatch:
        """Cut a batch in two parts that are multiples, if there are two."""
        samples = self.count(batch)
        if samples < 2:
            raise LayoutError(f"A batch of {samples} samples cannot be cut in two.")
        middle = split_evenly(samples, 2, multiple)[0]
        parts = self.cut(batch, 0, middle), self.cut(batch, middle, samples)
        return CutBatch(batch, parts, (middle, samples - middle))

    def _layout(self, batch: Any) -> Layout | HookLayout:
        hook = self._transfer.split_batch
        shown = self._shown
        if hook is not None:
            if shown is None or isinstance(shown, str):
                return HookLayout(hook)
            return shown
        if isinstance(shown, str):
            raise LayoutError(shown)
        return shown or read_ready_made(batch)

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
        outcome = attempt(read, lambda error: not is_out_of_memory(error), comparison)
        state.restore()
        failure = outcome.failure
        if failure is not None and not _is_of_layout(failure):
            return (
                f"The batch cannot be cut into samples, as collating a few of them apart ended in "
                f"{type(failure).__name__}: {failure}: {REMEDY}."
            )
        return outcome.result or str(failure)  # the error itself would keep batches alive

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

    They are collated of samples that were read apart from training. If none were, they are cut out of a batch that
    training will run, as the loader made it.
    """

    def __init__(
        self, samples: Samples, cutter: BatchCutter, most: int, *, batch: Any = None, in_step: bool = False
    ) -> None:
        self.most = most  # samples of the largest micro-batch
        self.cutter = cutter
        self._samples = samples
        self._batch = batch
        self._largest: Largest | None = None
        if samples.first and batch is None:
            self._largest = Largest(samples)
        self._in_step = in_step  # whether micro-batches are cut out of batches of ``most``

    @property
    def empty(self) -> bool:
        """Whether there is no sample to make a batch of."""
        return self._largest is None and self._batch is None

    @property
    def unread(self) -> tuple[int, int] | None:
        """How many samples were read of how many, if there was no time to find the heaviest of all."""
        largest = self._largest
        if largest is None or largest.complete:
            return None
        return (largest.seen, largest.total)

    def look_further(self) -> None:
        """Look for the heaviest among all samples, and not just a few."""
        if self._largest is not None:
            self._largest.look_further()

    def make(self, samples: int, move: Move) -> tuple[Any, Any]:
        """Return a micro-batch of so many of the heaviest samples, moved, and the whole batch that it is cut from."""
        if self._largest is not None and not self._in_step:
            return move(self._largest.batch(samples)), None
        if self._largest is None:
            whole = move(copied_if_possible(self._batch))
        else:
            whole = move(self._largest.batch(self.most))
        is_whole = self._largest is None and samples >= self.most
        if is_whole:
            return whole, whole
        return self.cutter.cut(whole, 0, samples), whole

    def batch_in_two_parts(self, samples: int, move: Move, seed: int = 0, multiple: int = 1) -> CutBatch | None:
        """Return a batch of samples that differ, in two parts; whole and parts draw the random numbers of a seed."""
        collate = self._samples.collate
        found = self._unlike(samples)
        if self._largest is not None and len(found) < 2:
            return None
        if self._largest is not None and not self._in_step:
            middle = split_evenly(len(found), 2, multiple)[0]
            parts = found, found[:middle], found[middle:]
            whole, one, other = (move(collate(part, len(part), seed=seed)) for part in parts)
            return CutBatch(whole, (one, other), (middle, len(found) - middle))
        if found:
            whole = move(collate(found, len(found), seed=seed))
        else:
            whole = move(copied_if_possible(self._batch))
        number = self.cutter.count(whole)
        if min(number, samples) < 2:
            return None
        samples = whole_multiples(min(number, samples), multiple)
        if number != samples:
            whole = self.cutter.cut(whole, 0, samples)
        return self.cutter.halves(whole, multiple)

    def _unlike(self, number: int) -> list[Any]:
        """Return so many of the samples that were read and are not left out of batches; those differ."""
        known = []
        if self._largest is not None:
            known = [sample for sample in self._samples.first if sample is not None]
        found = unlike(known, number)
        if all(map(self._samples.is_kept, found)):
            return found
        return unlike([sample for sample in known if self._samples.is_kept(sample)], number)


def unlike(samples: Sequence[Any], number: int) -> list[Any]:
    """Return some of the samples, as unlike as possible: in size, numbers that losses ignore, labels.

    Those that are alike are neighbours, so that the halves differ most. The first half has only samples that are
    shorter than the longest, if there are any: it is padded less than the whole. If these are few, they are repeated.
    """
    number = min(number, len(samples))
    if not number:
        return []
    traits = sorted((_traits(sample), place) for place, sample in enumerate(samples))
    shorter = sum(each[0] < traits[-1][0][0] for each, _ in traits)  # they come first
    found = _spread_over(traits, number)
    half = (number + 1) // 2
    if shorter and found[half - 1] >= traits[shorter]:
        found[:half] = _spread_over(traits[: ceil_div(shorter, 2)], half)
    return [samples[place] for _, place in found]


def _spread_over(ordered: Sequence[Any], number: int) -> list[Any]:
    step = (len(ordered) - 1) / max(1, number - 1)
    return [ordered[round(place * step)] for place in range(number)]


def _traits(sample: Any) -> tuple[float, ...]:
    """Return traits in which samples differ: number of elements, ignored numbers, and labels."""
    tensors = [tensor for tensor in tensors_in(sample) if tensor.numel() <= _FEW_NUMBERS and not tensor.is_complex()]
    plain = [tensor.to_dense() for tensor in tensors if not tensor.is_nested]
    ignored = sum(int((each.isnan() if each.is_floating_point() else each < 0).sum()) for each in plain)
    whole = [each.double().mean().item() for each in plain if each.numel() and not each.is_floating_point()]
    fields: Iterable[Any] = ()
    if isinstance(sample, Mapping):
        fields = sample.values()
    elif isinstance(sample, (list, tuple)):
        fields = sample
    labels = [float(value) for value in fields if isinstance(value, int)]
    return sum(prod(shape) for _, shape in leaves(sample, text=False)), float(ignored), sum((*whole, *labels))
