"""A few samples of a loader, and what it collates of them: read apart from training, or shown by its first batch."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any

from lightning_ga.batch.layout import elements, leaves
from lightning_ga.loading.rebatch import collates, finishes_batches, has_own_collate
from lightning_ga.loading.sample_reader import SampleReader, anything_but_out_of_memory
from lightning_ga.loading.shown_samples import ShownSamples
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt
from lightning_ga.snapshot.copies import copied
from lightning_ga.snapshot.user_objects import untouched

_FEW = 8  # samples of which it is seen whether they are collated
_EXAMPLES = 3  # samples that are collated, of different shapes if there are any
_MOST_ELEMENTS = 2**26  # of a batch that is collated to see how batches grow


class KnownSamples:
    """A few samples of a loader, and what it collates of them. For the arguments see ``SampleReader``."""

    def __init__(
        self, loader: Any, indices: Callable[[], Sequence[Any]] | None = None, *, trusted: bool = False
    ) -> None:
        self.loader = loader
        self.reader = SampleReader(loader, indices, trusted=trusted)
        self._shown: ShownSamples | None = None

    def with_shown_batch(self) -> Any:
        """Return a copy of the loader whose first batch shows its samples, or the loader itself.

        It is returned itself if samples are known already, if batches are not made of samples by the user's collate
        function alone, and with torch's own function, whose batches show their samples.
        """
        loader = self.loader
        shows_samples = collates(loader) and not finishes_batches(loader) and not self.reader.reads_lists
        if not shows_samples or not self.has_own_collate or self.reader.first:
            return loader
        self._shown = ShownSamples(loader, _FEW)
        return self._shown.loader

    @property
    def has_own_collate(self) -> bool:
        """Whether collating may drop samples, or make tensors of text."""
        return has_own_collate(self.loader)

    @property
    def can_be_read_apart(self) -> bool:
        """Whether samples can be read apart from training, and make batches as those of training."""
        return bool(self.reader.first) and self.collates_unlike and self.reader.lists_change_nothing

    def why_in_step(self, batch_size: int) -> str:
        """Return why only the loader's batches, of so many samples, are right; empty if others seem to be, too."""
        if self.reader.are_handed_out:
            return "a dataset that hands out its samples one after the other"
        if not self.reader.lists_change_nothing:
            return "a dataset whose __getitems__ lets a sample depend on others, or changes their number"
        if not self.collates_unlike:
            return "samples of different shapes, which are collated only in the DataLoader's own batches"
        if self.can_be_read_apart and self.takes_only_some(batch_size):
            return "a collate function that takes only so many samples of a batch"
        return ""

    # --- examples ------------------------------------------------------------------------------

    @property
    def examples(self) -> list[Any]:
        """A few samples that collating keeps, of different shapes if there are any; none before some are known."""
        return self._examples if self._few else []

    @property
    def were_seen_dropped(self) -> bool:
        """Whether some of the few samples that were collated are left out of batches."""
        return bool(self._few) and len(self._kept) < len(self._few)

    @property
    def _few(self) -> list[Any]:
        """The samples that are known: if the first batch is to show them, none before it has been collated."""
        return self._few_read if self._shown is None else self._shown.samples()

    @cached_property
    def _few_read(self) -> list[Any]:
        return _one_of_each_first(self._by_shapes(self.reader.first))[:_FEW]

    # What follows is cached, and so it must not be asked for while ``_few`` is empty.

    @cached_property
    def _kept(self) -> list[Any]:
        kept = list(filter(self.is_kept, self._few))
        # If each one ends in an error, the layout is read from all of them, and says which.
        return kept or [sample for sample in self._few if sample is not None]

    @cached_property
    def _examples(self) -> list[Any]:
        groups = self._by_shapes(self._kept)
        if not self.collates_unlike:
            return max(groups, key=len)[:_EXAMPLES]
        return _one_of_each_first(groups)[:_EXAMPLES]

    def _by_shapes(self, samples: Iterable[Any]) -> list[list[Any]]:
        """Return samples in groups of one shape; text has one only if collating may make tensors of it."""
        groups: dict[str, list[Any]] = {}
        for sample in samples:
            groups.setdefault(str(list(leaves(sample, text=self.has_own_collate))), []).append(sample)
        return list(groups.values())

    # --- collating -----------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any], count: int, *, seed: int = 0) -> Any:
        """Return a batch of ``count`` samples as the loader makes it, repeating the given ones in turn."""
        collate = self.loader.collate_fn
        with untouched(getattr(collate, "__self__", collate), seed=seed):
            with uncounted():  # copies, as a collate function may change its input; they lie on the host
                chosen = list(map(copied, islice(cycle(samples), count)))
            return collate(chosen)

    def elements_of(self, samples: Sequence[Any], count: int) -> int:
        """Return the elements of a batch of the given samples in turn; 0 if collating them ends in an error."""
        batch = attempt(self.collate, anything_but_out_of_memory, samples, count).result
        return 0 if batch is None else elements(batch)

    def is_kept(self, sample: Any) -> bool:
        """Return whether the collate function makes a batch of a sample, of which it gets two: some make pairs.

        For the largest samples ``growing`` is the better test. Short ones may be packed in a row, which does not grow.
        """
        if sample is None or not self.has_own_collate:
            return sample is not None
        return self.elements_of([sample], 2) > 0

    def growing(self, samples: Iterable[Any]) -> list[Any]:
        """Return those of the largest samples that are kept: a batch has more elements with one of them twice.

        A batch that has elements but does not grow may be of zeros, by a function that drops all samples.
        """
        if not self.has_own_collate:
            return list(samples)
        return [sample for sample in samples if self.elements_of([sample], 1) < self.elements_of([sample], 2)]

    @property
    def may_drop(self) -> bool:
        """Whether batches may lack samples: a user's ``collate_fn`` or ``__getitems__`` may leave some out."""
        return self.has_own_collate or self.reader.reads_lists

    @cached_property
    def collates_unlike(self) -> bool:
        """Whether samples of different shapes make a batch, as far as it is known.

        Also if equal ones make none: then shapes are not the reason.
        """
        if not self.reader.first or len(self._by_shapes(self._kept)) < 2:
            return True
        count = len(self._kept)
        makes_batch = self.elements_of(self._kept, count) > 0
        fails_for_equal_ones = self.elements_of(self._kept[:1], count) == 0
        return makes_batch or fails_for_equal_ones

    def takes_only_some(self, count: int) -> bool:
        """Return whether a batch of so many samples was seen to have fewer elements than batches of few predict.

        Of samples with many elements a smaller batch is looked at.
        """
        return any(0 < found < of_all for found, of_all in self._seen_and_expected(count))

    def joins_batches(self, batch_size: int) -> bool:
        """Return whether two batches of so many samples were seen to make one: some functions take only the first.

        Only samples that are read apart show it: those of the first batch come after its size is planned, and each rank
        has others. Two batches that are too large to be looked at show nothing.
        """
        if not self.has_own_collate:
            return True
        if not self.can_be_read_apart or not self.examples:
            return False
        count = 2 * batch_size
        is_seen = count <= min(map(_most_collated, self.examples))
        return is_seen and all(found == of_all > 0 for found, of_all in self._seen_and_expected(count))

    def _seen_and_expected(self, count: int) -> list[tuple[int, int]]:
        """Return what ``_seen_and_expected_of`` does of the largest example and, if it is smaller, of the smallest.

        A function that takes so many tokens takes more samples of the smallest.
        """
        if not self.has_own_collate or not self.examples:
            return []
        largest = max(self.examples, key=elements)
        smallest = min(self.examples, key=elements)
        by_elements = {elements(example): example for example in (largest, smallest)}
        return [self._seen_and_expected_of(example, count) for example in by_elements.values()]

    def _seen_and_expected_of(self, example: Any, count: int) -> tuple[int, int]:
        """Return the elements of a batch of one sample ``count`` times, and those that it has if none is dropped.

        If it would be too large, a smaller batch is looked at. What is expected follows from batches of one to four:

        - 5, 10, 15, 20 elements: 5 more for each sample.
        - 5, 10, 10, 10: the function takes two samples, and 5 more for each are expected.
        - Anything else: nothing is known, and both numbers are 0.
        """
        count = min(max(4, count), _most_collated(example))
        one, two, three, four = (self.elements_of([example], few) for few in (1, 2, 3, 4))
        by_fourth = four - three
        takes_fewer = by_fourth == 0 and one > 0
        added = two - one if takes_fewer else by_fourth
        is_steady = takes_fewer or by_fourth == three - two
        if added <= 0 or not is_steady:
            return 0, 0
        return self.elements_of([example], count), two + added * (count - 2)


def _most_collated(example: Any) -> int:
    """Return how many times a sample is collated at most, to see how batches grow."""
    return max(4, _MOST_ELEMENTS // max(1, elements(example)))


def _one_of_each_first(groups: list[list[Any]]) -> list[Any]:
    return [*(group[0] for group in groups), *chain.from_iterable(group[1:] for group in groups)]
