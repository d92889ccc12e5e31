"""Batches in two parts, as the loader makes them or as the step cuts them, and the cut that tells most.

Beside it: the counter whose count a loss is a mean over, from the weights that parts turned out to have.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ga.batch.layout import BatchSlices, LayoutError
from lightning_ga.batch.pytree import open_container
from lightning_ga.fit.exactness.passes import MicroBatches, PassRunner
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.samples import collate_samples
from lightning_ga.plan.weights import AttentionMaskTokens, TargetTokens

Kind = tuple[str, str]  # the place of values in a batch, and what they are

_CUTS = 16  # of some samples, of which the one that tells most is taken
_OTHERS_IGNORED = (-1, 255, 0)
_NEAR = 1e-3
_EVEN = 0.1
_FEW, _MANY = 2**14, 2**20  # numbers of a tensor of which kinds are looked for: fractions, whole numbers


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
        make, is_there = make_batch or (lambda _: take(start, stop)), make_batch is None and on_device
        whole = MicroBatches([make(0)], on_device=is_there) if as_pieces else None
        return cls(
            parts=MicroBatches([take(start, middle), take(middle, stop)], as_pieces, on_device, whole=whole),
            sizes=(middle - start, stop - middle),
            one_sample=partial(take, stop - 1, stop),
            make_batch=make,
            batch_on_device=is_there,
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


def fitting_counter(batch: Any, parts: Sequence[Any], share: float) -> str:
    """Return the ``normalize=`` that gives the first of a batch's two parts its share of one; empty if none does.

    Examples:
        >>> first, second = torch.tensor([[1, 2, -100]]), torch.tensor([[1, -100, -100]])
        >>> fitting_counter({"labels": torch.cat([first, second])}, [{"labels": first}, {"labels": second}], 2 / 3)
        "normalize=TargetTokens('labels')"
    """
    for counter in _counters(_whole_numbers(batch)):
        counts = [counter(part) for part in parts]
        if sum(counts) and abs(counts[0] / sum(counts) - share) <= _NEAR:
            return f"normalize={_written(counter)}"
    return ""


def kinds_of(batch: Any, path: str = "") -> Counter[Kind]:
    """Count the values of a batch that losses may leave out or weigh otherwise, by their place and kind.

    These are missing numbers, False, and numbers that stand for padding or for "ignore"; in a tensor of one fraction a
    sample, those other than one, as weights may be. Nothing is said of large tensors.

    Examples:
        >>> kinds_of({"x": torch.tensor([[0.5, float("nan")]]), "y": torch.tensor([3, -100])})
        Counter({("['x']", 'nan'): 1, ("['y']", 'negative'): 1})
    """
    if isinstance(batch, torch.Tensor) and batch.layout is torch.strided and not batch.is_nested:
        if batch.numel() > (_FEW if batch.is_floating_point() else _MANY) or batch.is_complex():
            return Counter()
        counts = {name: int(found.sum()) for name, found in _marks(batch)}
        return Counter({(path, name): count for name, count in counts.items() if count})
    return sum((kinds_of(child, path + name) for name, child in open_container(batch) or ()), start=Counter())


def _marks(values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each kind of value, and where the values are of it."""
    if values.dtype == torch.bool:
        yield "False", ~values
    elif not values.is_floating_point():
        yield from (("0", values == 0), ("255", values == 255), ("negative", values < 0))
    else:
        yield from (("0", values == 0), ("-1", values == -1), ("nan", values.isnan()))
        if values.dim() and values.numel() == len(values):
            yield "other than 1", values != 1


def is_uneven(of_part: float, of_rest: float) -> bool:
    """Return whether two numbers of values a sample differ so much that parts with them differ in weight."""
    return abs(of_part - of_rest) > _EVEN * max(of_part, of_rest)


def _counters(fields: Mapping[Any, torch.Tensor]) -> Iterator[AttentionMaskTokens | TargetTokens]:
    """Yield possible counters: targets other than -100, tokens of a mask, targets with other ignored values."""
    for ignored in (-100, *_OTHERS_IGNORED):
        for key, field in fields.items():
            if bool((field == ignored).any()):
                yield from (TargetTokens(key, ignored, shift) for shift in (False, True) if field.dim() > shift)
        if ignored == -100:
            masks = (key for key, field in fields.items() if bool(((field == 0) | (field == 1)).all()))
            yield from map(AttentionMaskTokens, masks)


def _whole_numbers(batch: Any) -> dict[Any, torch.Tensor]:
    """Return the tensors of whole numbers in a mapping or a sequence."""
    fields = dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else batch
    tensors = fields.items() if isinstance(fields, Mapping) else ()
    return {key: x for key, x in tensors if isinstance(x, torch.Tensor) and not x.is_floating_point() and x.dim()}


def _written(counter: AttentionMaskTokens | TargetTokens) -> str:
    settings = [repr(counter.key)]
    if isinstance(counter, TargetTokens):
        settings += [f"ignore_index={counter.ignore_index}"] if counter.ignore_index != -100 else []
        settings += ["shift=True"] if counter.shift else []
    return f"{type(counter).__name__}({', '.join(settings)})"
