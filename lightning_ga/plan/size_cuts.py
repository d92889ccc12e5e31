"""Cut a window whose samples differ in size so that little of its batches is padding: pure arithmetic.

The gradient of a window does not depend on the order of its samples. So they are sorted by size, the largest first, and
cut so that no micro-batch exceeds a budget of *samples × largest size*, its size once it is padded. All windows of an
epoch have the same number of micro-batches: that of the window that needs most, and more while one more saves more
padding than a pass costs.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise, product

from lightning_ga.plan.accumulation import AccumulationPlan, ceil_div
from lightning_ga.plan.units import counted
from lightning_ga.plan.windows import EpochPlan, Window

SHARE_OF_PASS = 12  # a pass counts as a twelfth of its budget
_MAX_PASSES = 8  # passes of a window up to which more of them may save padding
_WINDOWS_COMPARED = 16

RankChunks = tuple[tuple[int, ...], ...]  # the micro-batches of a rank, each as the places of its samples


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Limits of a micro-batch; one sample is always allowed."""

    budget: int  # samples × (largest size + offset)
    samples: int
    offset: int = 0  # constant part of the memory of a sample, as a size

    def costs(self, sizes: Sequence[int], places: Sequence[int]) -> list[int]:
        """Return what each of some samples takes, as a size."""
        return [sizes[place] + self.offset for place in places]

    def lowered(self, micro_batch: int, *, of: int) -> "SizeLimits":
        """Return the limits if only ``micro_batch`` of the largest samples fit, and not as many as ``of``."""
        fewer = min(micro_batch, of)
        return replace(self, budget=max(1, self.budget * fewer // of), samples=max(1, self.samples * fewer // of))


@dataclass(frozen=True, eq=False)
class SizedEpoch(EpochPlan):
    """The micro-batches of an epoch, each of samples of similar size; as many in every full window on each rank."""

    sizes: Sequence[int] = ()  # of the samples in the epoch's order
    limits: SizeLimits = SizeLimits(1, 1)
    more: int = 0  # micro-batches on each rank beyond those needed

    @cached_property
    def factor(self) -> int:
        """Micro-batches of a full window on each rank."""
        return max(map(self._needed, range(self.done, self.count)), default=1) + self.more

    def factor_of(self, window: int) -> int:
        """Return the micro-batches of one window on each rank."""
        is_last = self.done < window == self.count - 1
        return self._needed(window) if is_last else self.factor

    def window(self, index: int, rank: int = 0) -> Window:
        """Return one window as one rank runs it."""
        start, samples = self.windows.span(index)
        ranks = _ranks(self, index)
        before = sum(map(len, chain.from_iterable(ranks[:rank])))
        return Window(index, start, samples, tuple(map(len, ranks[rank])), before)

    def places(self, window: Window, position: int) -> Sequence[int]:
        """Return the places, in the epoch's order, of one micro-batch of a window."""
        order = [*chain.from_iterable(chain.from_iterable(_ranks(self, window.index)))]
        return [window.start + order[place - window.start] for place in super().places(window, position)]

    def _needed(self, window: int) -> int:
        start, samples = self.windows.span(window)
        sizes = self.sizes[start : start + samples]
        most = 1
        for share in _shares(sizes, self.world_size):
            costs = self.limits.costs(sizes, share)
            most = max(most, len(_greedy(costs, self.limits.budget, self.limits.samples)))
        return most


@lru_cache(maxsize=8)  # windows: the sizes and the places of each are asked for
def _ranks(plan: SizedEpoch, window: int) -> tuple[RankChunks, ...]:
    start, samples = plan.windows.span(window)
    sizes = plan.sizes[start : start + samples]
    return cut_by_size(sizes, plan.limits, factor=plan.factor_of(window), world_size=plan.world_size)


def _shares(sizes: Sequence[int], world_size: int) -> list[list[int]]:
    """Return the places of each rank's samples, the largest first; how a rank cuts its own changes no other's."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for number, place in enumerate(sorted(range(len(sizes)), key=lambda place: -sizes[place])):
        row, turn = divmod(number, world_size)
        rank = world_size - 1 - turn if row % 2 else turn  # so the costs of ranks differ little
        shares[rank].append(place)
    return shares


def cut_by_size(
    sizes: Sequence[int], limits: SizeLimits, *, factor: int, world_size: int = 1
) -> tuple[RankChunks, ...]:
    """Cut samples into ``factor`` micro-batches for each rank with little padding, each sample in one.

    ``factor`` is at least what the limits need. With fewer samples than micro-batches, the last hold none.
    """
    ranks = []
    for share in _shares(sizes, world_size):
        descending = limits.costs(sizes, share)
        spans = sorted(_spans(descending, limits, factor), key=lambda span: -_cost(descending, span))
        chunks = tuple(tuple(share[start:end]) for start, end in spans)
        ranks.append(chunks + ((),) * (factor - len(chunks)))
    return tuple(ranks)


def _greedy(descending: Sequence[int], budget: int, most: int) -> list[int]:
    """Return the starts of micro-batches that are as large as the limits allow."""
    starts = []
    start = 0
    while start < len(descending):
        starts.append(start)
        start += _fitting(descending[start], budget, most)
    return starts


def _fitting(largest: int, budget: int, most: int) -> int:
    """Return the most samples of a micro-batch, one at least."""
    return most if not largest else max(1, min(most, budget // largest))


def _spans(descending: Sequence[int], limits: SizeLimits, number: int) -> list[tuple[int, int]]:
    """Cut sorted samples into ``number`` spans, or as many as there are samples, with little padding.

    It begins with the smallest budget that suffices; then each edge moves so that the spans beside it cost least.
    """
    budget = limits.budget
    most = limits.samples
    enough = bisect_left(range(budget), True, key=lambda each: len(_greedy(descending, each, most)) <= number)
    edges = [*_greedy(descending, enough, most), len(descending)]
    while len(edges) <= min(number, len(descending)):  # halve the costliest of several samples
        start, end = max(pairwise(edges), key=lambda span: (span[1] - span[0] > 1) * (1 + _cost(descending, span)))
        edges.insert(edges.index(end), (start + end) // 2)
    for place in range(1, len(edges) - 1):
        start = edges[place - 1]
        end = edges[place + 1]
        size = descending[start]
        reach = start + _fitting(size, budget, most)
        costs = {}
        for edge in range(start + 1, min(reach + 1, end)):
            right = (end - edge) * descending[edge]
            if edge + 1 == end or (right <= budget and end - edge <= most):
                costs[edge] = (edge - start) * size + right
        edges[place] = min(costs, key=costs.__getitem__)
    return list(pairwise(edges))


def _cost(descending: Sequence[int], span: tuple[int, int]) -> int:
    return (span[1] - span[0]) * descending[span[0]]


@dataclass(frozen=True, slots=True)
class SizedPlan(AccumulationPlan):
    """The cut of an epoch by sizes; ``chunks`` are those of its first window, ``micro_batch_size`` the most samples."""

    fewest_samples: int = 0  # of a micro-batch
    most_padded: int = 0  # samples × largest size of a micro-batch
    padding: float = 0.0  # share of the batches that is padding, if each is padded to its largest sample
    padding_as_drawn: float = 0.0  # the same if windows were cut in the order of the samples

    def __str__(self) -> str:
        samples = counted(self.micro_batch_size, "sample")
        if self.fewest_samples < self.micro_batch_size:
            samples = f"{self.fewest_samples} to {samples}"
        if self.world_size > 1:
            samples += f" on each of {self.world_size} ranks"
        passes = counted(self.factor, "micro-batch", "es")
        return (
            f"window {self.effective_batch_size} in {passes} of {samples}, at most {self.most_padded:,} "
            f"tokens each if padded; padding {100 * self.padding:.0f} % (was {100 * self.padding_as_drawn:.0f} %)"
        )


def plan_by_size(
    plan: AccumulationPlan, epoch: EpochPlan, sizes: Sequence[int], limits: SizeLimits
) -> tuple[SizedPlan, SizedEpoch]:
    """Cut an epoch by ``sizes`` that was planned without, for as many samples at once as the largest allow."""
    windows = range(epoch.done, epoch.count)
    some = windows[:: len(windows) // _WINDOWS_COMPARED + 1]
    of_pass = limits.budget // SHARE_OF_PASS
    sized = SizedEpoch(epoch.windows, epoch.micro_batch, epoch.world_size, sizes=sizes, limits=limits)

    def cost(cut: SizedEpoch) -> int:
        return sum(_padded(cut, sizes, some)[1]) + of_pass * cut.factor * len(some) * epoch.world_size

    most = max(_MAX_PASSES, epoch.factor // 3)  # a third of those in the order of the samples
    finer = replace(sized, more=1)
    while sized.factor < most and cost(finer) < cost(sized):
        sized = finer
        finer = replace(sized, more=sized.more + 1)
    counts, padded = _padded(sized, sizes, windows)
    _, drawn = _padded(epoch, sizes, windows)
    held = sum(sizes[epoch.windows.samples_done : epoch.windows.total])
    found = SizedPlan(
        plan.effective_batch_size,
        plan.world_size,
        max(counts, default=1),
        sized.factor,
        tuple(sized.window(windows[0], rank).sizes for rank in range(epoch.world_size) if windows),
        samples_at_most=min(limits.samples, ceil_div(plan.effective_batch_size, plan.world_size)),
        size_budget=limits.budget,
        fewest_samples=min(counts, default=0),
        most_padded=max(padded, default=0),
        padding=_padding(held, padded),
        padding_as_drawn=_padding(held, drawn),
    )
    return found, sized


def _padding(held: int, padded: Sequence[int]) -> float:
    """Return the share of padded micro-batches that is padding."""
    return 1 - held / sum(padded) if held else 0.0


def _padded(plan: EpochPlan, sizes: Sequence[int], windows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the samples of each micro-batch of some windows on all ranks, and these × their largest size."""
    counts = []
    padded = []
    for index, rank in product(windows, range(plan.world_size)):
        window = plan.window(index, rank)
        for position, count in enumerate(window.sizes):
            if count:
                counts.append(count)
                padded.append(count * max(sizes[place] for place in plan.places(window, position)))
    return counts, padded
