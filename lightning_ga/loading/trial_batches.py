"""Count and cut the batches of training, and make batches of the same kind for the probe and the measurement.

These leave no trace in dataset, collate function or random numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.layout import HookLayout, Layout, elements
from lightning_ga.batch.pytree import REMEDY, LayoutError, open_container, tensors_in
from lightning_ga.batch.read_layout import (
    FAR_MORE,
    ONE_MORE,
    Comparison,
    read_hook_layout,
    read_layout,
    read_ready_made,
)
from lightning_ga.errors import ExactnessWarning
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.largest import Largest
from lightning_ga.loading.sample_reader import anything_but_out_of_memory
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt
from lightning_ga.plan.accumulation import ceil_div, split_evenly, whole_multiples
from lightning_ga.snapshot.copies import copied_if_possible
from lightning_ga.snapshot.user_objects import untouched

Move = Callable[[Any], Any]
_FEW_NUMBERS = 2**14  # of a tensor: larger ones are data


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A batch, and two parts of it as training would get them; all on the device."""

    whole: Any
    parts: tuple[Any, Any]
    sizes: tuple[int, int]  # samples of the parts


class BatchCutter:
    """Counts and cuts the batches that ``combine`` makes of one batch of each loader, and ``transfer`` moves.

    The latter is a ``compat.loaders.BatchTransfer``, which knows the module's own ``split_batch``, too.
    The layout is read once, from a few samples. While no samples are known, each batch is read by itself.
    """

    def __init__(self, known: Sequence[KnownSamples], combine: Callable[[list[Any]], Any], transfer: Any) -> None:
        self._known = known  # of each loader
        self._combine = combine
        self._transfer = transfer
        self._has_warned = False

    @property
    def were_seen_dropped(self) -> bool:
        """Whether some of the samples that are known are left out of batches."""
        return any(each.were_seen_dropped for each in self._known)

    def count(self, batch: Any) -> int:
        """Return the samples of a batch, of several loaders their greatest common divisor (see ``Layout.samples``).

        Raise ``LayoutError`` if they cannot be separated.
        """
        return self._layout(batch).samples(batch)

    def count_moved(self, batch: Any) -> int:
        """Return the samples of a batch that is not moved yet."""
        with uncounted(), untouched(*self._transfer.owners):
            return self.count(self._transfer.to_device(copied_if_possible(batch)))

    def left(self, batch: Any, planned: int) -> int:
        """Return how many of the ``planned`` samples the collate function has left in a batch; all if that is unknown.

        It is known if a few samples, collated apart, have shown how batches grow with them. A number that cannot be
        counted, or more samples than were planned, is said once.
        """
        counted: int | None = None
        if isinstance(self._layout_or_reason, (Layout, HookLayout)):
            counted = attempt(self.count, _is_of_layout, batch).result
        if counted is None:
            if self.were_seen_dropped:
                self._warn(planned, "a number that cannot be counted")
            return planned
        if counted > planned > 0:  # planned with none, the rank runs one, weighed 0, to keep step with others
            self._warn(planned, str(counted))
        return min(counted, planned)

    def _warn(self, planned: int, made: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        rank_zero_warn(
            f"A micro-batch was planned with {planned} samples, and the collate function made {made} of them. It "
            f"weighs {planned}: let the collate function make one entry of each sample that it keeps, or count "
            "what the loss is a mean over (normalize=).",
            category=ExactnessWarning,
        )

    def weight(self, batch: Any, samples: int) -> int:
        """Return a batch's weight in samples: with several loaders, the most that one of them gives."""
        if len(self._known) == 1:
            return samples
        return max(self._layout(batch).sizes(batch).values())

    def cut(self, batch: Any, start: int, stop: int) -> Any:
        """Return the samples ``start`` to ``stop - 1`` of a batch, as views of it if possible."""
        return self._layout(batch).cut(batch, start, stop)

    def halves(self, batch: Any, most: int, multiple: int = 1) -> CutBatch | None:
        """Cut at most so many samples of a batch in two parts that are multiples; ``None`` if there is only one."""
        size = self.count(batch)
        count = whole_multiples(min(size, most), multiple)
        if count < 2:
            return None
        if count < size:
            batch = self.cut(batch, 0, count)
        middle = split_evenly(count, 2, multiple)[0]
        parts = self.cut(batch, 0, middle), self.cut(batch, middle, count)
        return CutBatch(batch, parts, (middle, count - middle))

    def _layout(self, batch: Any) -> Layout | HookLayout:
        found = self._layout_or_reason
        if isinstance(found, (Layout, HookLayout)):
            return found
        hook = self._transfer.split_batch
        if hook is not None:
            return HookLayout(hook)
        if found is not None:
            raise LayoutError(found)
        return read_ready_made(batch)

    @property
    def _layout_or_reason(self) -> Layout | HookLayout | str | None:
        """The layout that small batches show, or why they show none; ``None`` while no samples are known."""
        if not all(each.examples for each in self._known):
            return None
        return self._of_examples

    @cached_property
    def _of_examples(self) -> Layout | HookLayout | str:
        hook = self._transfer.split_batch
        examples = [each.examples for each in self._known]
        larger = [ONE_MORE]
        if not any(each.takes_only_some(FAR_MORE) for each in self._known):
            larger.append(FAR_MORE)
        comparison = Comparison(self._batch, len(examples), max(map(len, examples)), larger)
        read = read_layout if hook is None else partial(read_hook_layout, hook)
        with untouched(*self._transfer.owners):
            outcome = attempt(read, anything_but_out_of_memory, comparison)
        if outcome.failure is None or _is_of_layout(outcome.failure):
            return outcome.result or str(outcome.failure)  # the error itself would keep batches alive
        return (
            f"The batch cannot be cut into samples, as collating a few of them apart ended in "
            f"{type(outcome.failure).__name__}: {outcome.failure}: {REMEDY}."
        )

    def _batch(self, counts: Sequence[int], kinds: Sequence[int], seed: int) -> Any:
        """Return a batch of ``counts`` samples of the loaders, made of examples of these ``kinds`` in turn."""
        batches = []
        for known, count in zip(self._known, counts):
            chosen = [known.examples[kind % len(known.examples)] for kind in kinds]
            batches.append(known.collate(chosen, count, seed=seed))
        return self._transfer.to_device(self._combine(batches))


def _is_of_layout(error: Exception) -> bool:
    return isinstance(error, LayoutError)


class TrialBatches:
    """Batches for trials: collated of samples that were read apart from training, or cut out of one batch of training.

    Args:
        cutter: Counts and cuts batches.
        most: Samples of the largest micro-batch that any rank has planned.
        known: Samples that were read apart, repeated if they are too few; without them, ``batch`` is cut.
        batch: One of training, as the loader made it; ``None`` if there is none.
        planned: Samples that went into ``batch`` on this rank; a collate function may have left fewer in it.
        in_step: Whether training cuts batches in the step: then ``most`` of the ``known`` are collated, and cut, too.
    """

    def __init__(
        self,
        cutter: BatchCutter,
        most: int,
        *,
        known: KnownSamples | None = None,
        batch: Any = None,
        planned: int = 0,
        in_step: bool = False,
    ) -> None:
        self.cutter = cutter
        self.largest = None if known is None else Largest(known)
        self._known = known
        self._batch = batch
        self._planned_on_any_rank = most
        self._planned_here = planned
        self._in_step = in_step

    @cached_property
    def _held(self) -> int:
        """The samples of a batch that is cut; the most if they cannot be counted."""
        most = self._planned_on_any_rank
        if self._batch is None:
            return most
        counted = attempt(self.cutter.count_moved, lambda _: True, self._batch)
        return most if counted.failure else min(most, counted.result)

    @property
    def most(self) -> int:
        """Samples of the largest micro-batch on any rank; if a batch of training has lost some, those left in it.

        Ranks vote on one size, so one that has planned fewer returns the largest, too.
        """
        return self._held if self._held < self._planned_here else self._planned_on_any_rank

    @property
    def empty(self) -> bool:
        """Whether there is no sample to make a batch of."""
        return self._known is None and (self._batch is None or self.most == 0)

    def at_most(self, count: int) -> int:
        """Return ``count``, or how many samples a batch of training has, if these are fewer."""
        return count if self._batch is None else min(count, self.most)

    def make(self, count: int, move: Move) -> tuple[Any, Any]:
        """Return a micro-batch, moved, and the whole batch if it is cut from one: the same if all of it is wanted.

        Of samples that are read it has the heaviest. A batch may not be cuttable.
        """
        if self.largest is not None and not self._in_step:
            return move(self.largest.batch(count)), None
        whole = move(self._whole())
        if count >= self._held:
            return whole, whole
        return self.cutter.cut(whole, 0, count), whole

    def _whole(self) -> Any:
        if self.largest is None:
            return copied_if_possible(self._batch)
        return self.largest.batch(self._planned_on_any_rank)

    def batch_in_two_parts(self, count: int, move: Move, seed: int = 0, multiple: int = 1) -> CutBatch | None:
        """Return a batch of at most so many samples and two parts of it, which draw the random numbers of one seed.

        Samples that are read differ. ``None`` if there are less than two samples.
        """
        known = self._known
        if known is None:
            return self.cutter.halves(move(self._whole()), count, multiple)
        samples = [sample for sample in known.reader.first if sample is not None]
        chosen = unlike(samples, count, multiple)
        if not all(map(known.is_kept, chosen)):
            chosen = unlike(list(filter(known.is_kept, samples)), count, multiple)
        if len(chosen) < 2:
            return None
        whole = move(known.collate(chosen, len(chosen), seed=seed))
        if self._in_step:
            return self.cutter.halves(whole, count, multiple)
        middle = split_evenly(len(chosen), 2, multiple)[0]
        halves = chosen[:middle], chosen[middle:]
        first, second = (move(known.collate(half, len(half), seed=seed)) for half in halves)
        return CutBatch(whole, (first, second), (middle, len(chosen) - middle))


def unlike(samples: Sequence[Any], count: int, multiple: int = 1) -> list[Any]:
    """Return at most ``count`` samples, as unlike as possible: in size, numbers that losses ignore, labels.

    Those that are alike are neighbours, so that the halves differ most. The first half has only samples that are
    shorter than the longest, if there are any: it is padded less than the whole. If these are few, they are repeated.
    """
    count = whole_multiples(min(count, len(samples)), multiple)
    if not count:
        return []
    traits = sorted(zip(map(_traits, samples), range(len(samples))))
    largest = traits[-1][0][0]
    smaller = [each for each in traits if each[0][0] < largest]  # they come first
    chosen = _spread_over(traits, count)
    half = split_evenly(count, 2, multiple)[0]
    first_half_has_longest = chosen[half - 1] not in smaller
    if smaller and first_half_has_longest:
        # The longer of them differ less from the longest.
        chosen[:half] = _spread_over(smaller[: ceil_div(len(smaller), 2)], half)
    return [samples[place] for _, place in chosen]


def _spread_over(ordered: Sequence[Any], count: int) -> list[Any]:
    step = (len(ordered) - 1) / max(1, count - 1)
    return [ordered[round(place * step)] for place in range(count)]


def _traits(sample: Any) -> tuple[float, ...]:
    """Return traits in which samples differ: number of elements, ignored numbers, and labels."""
    size = elements(sample, text=False)
    ignored = 0
    labels = 0.0
    for tensor in tensors_in(sample):
        if tensor.numel() > _FEW_NUMBERS or tensor.is_complex() or tensor.is_nested:
            continue
        values = tensor.to_dense()
        if values.is_floating_point():
            ignored += int(values.isnan().sum())
        elif values.numel():
            numbers = values.double()  # unsigned types compare with nothing
            ignored += int((numbers < 0).sum())
            labels += numbers.mean().item()
    fields = dict(open_container(sample) or ()).values()
    labels += sum(value for value in fields if isinstance(value, int))
    return size, ignored, labels
