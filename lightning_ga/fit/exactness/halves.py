"""Batches in two parts, as the loader makes them or as the step cuts them, and the cut that tells most."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_ga.batch.counters import Kind, is_uneven, kinds_of
from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.split import BatchSlices
from lightning_ga.fit.exactness.passes import MicroBatches, PassRunner
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.samples import collate_samples

_CUTS = 16  # of some samples, of which the one that tells most is taken


@dataclass(frozen=True, slots=True)
class Halves:
    """A batch in two parts, mostly halves, as the loader makes them or as the step cuts them."""

    parts: MicroBatches
    sizes: tuple[int, int]  # in samples
    one_sample: Callable[[], Any]  # makes a batch of one of its samples
    make_batch: Callable[[int], Any]  # makes the whole batch once more, with random numbers of a seed
    batch_on_device: bool = False  # whether it is there

    @classmethod
    def of(
        cls,
        take: Callable[[int, int], Any],
        places: tuple[int, int | None, int],
        make_batch: Callable[[int], Any] | None = None,
        *,
        as_pieces: bool = False,
        on_device: bool = False,
    ) -> "Halves":
        """Return the parts of a batch that ``take`` makes: ``places`` are its start, where it is cut, and its end.

        Without ``make_batch``, it makes the whole batch, too, which then is where the parts are.
        """
        start, middle, stop = places
        middle = middle or (start + stop + 1) // 2
        return cls(
            parts=MicroBatches([take(start, middle), take(middle, stop)], as_pieces, on_device),
            sizes=(middle - start, stop - middle),
            one_sample=partial(take, stop - 1, stop),
            make_batch=make_batch or (lambda _: take(start, stop)),
            batch_on_device=make_batch is None and on_device,
        )

    def whole(self, *, seed: int = 0, times: int = 1) -> MicroBatches:
        """Return the whole batch, or several such as one batch of the loop."""
        batches = [self.make_batch(seed) for _ in range(times)]
        return MicroBatches(batches, as_pieces=times > 1, on_device=self.batch_on_device)


class SampleBatch:
    """A batch of samples, and its halves."""

    def __init__(
        self, samples: Sequence[Any], loader: "DataLoader[Any]", reader: BatchReader, passes: PassRunner
    ) -> None:
        self._samples, self._loader, self._reader, self._passes = samples, loader, reader, passes
        self._cut_on_device = passes.transfer.has_hooks  # these get the whole batch, before it is cut
        self.fetched = len(samples)
        self._collated = self._collate(0, self.fetched)
        self.whole = MicroBatches([self._collated])
        # The collate function may drop some.
        self.size = reader.count(self._collated, expected=self.fetched, on_host=True)

    def loaded(self) -> Halves:
        """Return the halves as the loader makes them."""
        return Halves.of(self._collate, (0, None, self.fetched), partial(self._collate, 0, self.fetched))

    def cut(self, take: Callable[[int, int], Any]) -> Halves:
        """Return the halves as the step gets them by ``take``, which comes from ``slices``."""
        on_device = self._cut_on_device
        return Halves.of(take, (0, None, self.size), lambda _: self._collated, as_pieces=True, on_device=on_device)

    def slices(self, *, anew: bool = False) -> Callable[[int, int], Any]:
        """Return the function by which the step cuts the batch, or makes parts of it ``anew`` out of its samples."""
        batch, on_host = self._collated, not self._cut_on_device
        if self._cut_on_device:
            batch = self._passes.on_device(batch)
        samples = partial(self._reader.samples_again, self._loader, [*self._samples])
        if not anew:
            return self._reader.slices(batch, expected=self.size, on_host=on_host, samples=samples).take
        again = samples()
        if again is None:
            raise LayoutError("There are no samples at hand to make parts of anew.")
        return self._reader.collated_anew(batch, again, on_host=on_host).take

    def _collate(self, start: int, stop: int, seed: int = 0) -> Any:
        batch = collate_samples(self._loader, self._samples[start:stop], stop - start, seed=seed)
        return self._passes.transfer.on_host(batch)


def uneven_kinds(parts: Sequence[Any], sizes: Sequence[int]) -> set[Kind]:
    """Return the kinds of values of which two parts of so many samples hold different shares: they show a weight."""
    one, other = map(kinds_of, parts)
    return {kind for kind in one | other if is_uneven(one[kind] / sizes[0], other[kind] / sizes[1])}


def telling_cut(slices: BatchSlices, size: int, kinds: Collection[Kind]) -> tuple[int, int, int] | None:
    """Return start, middle and stop of at most ``size`` samples, where the parts hold unlike shares of these kinds.

    Of the cuts that tell most, the one whose parts are least made up of such values: these may have no gradient.
    """
    for start in range(0, slices.samples, size):
        stop = min(start + size, slices.samples)
        whole = kinds_of(slices.take(start, stop))
        found = [kind for kind in kinds if whole[kind]]
        cuts: list[tuple[float, float, int]] = []
        for middle in range(start + 1, stop, -(-size // _CUTS)) if found else ():
            part = kinds_of(slices.take(start, middle))
            shares = [(part[kind] / (middle - start), (whole[kind] - part[kind]) / (stop - middle)) for kind in found]
            cuts += [(abs(one - other), max(one, other), middle) for one, other in shares if is_uneven(one, other)]
        if cuts:
            most = max(difference for difference, _, _ in cuts)
            return start, min(cut[1:] for cut in cuts if cut[0] >= most / 2)[1], stop
    return None
