"""Cut a window whose samples differ in size so that little of its batches is padding: pure arithmetic.

The gradient of a window does not depend on the order of its samples. So they are sorted by size, the largest first, and
cut where a micro-batch would pass a budget of *samples × longest*, which is what it holds once it is padded. All
windows of an epoch are cut into as many micro-batches: as the one that needs most, and more while one more saves the
padding that a pass costs.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.units import counted
from lightning_ga.plan.windows import Cuts, EpochPlan, EvenShares, GrowingEpoch, GrowingWindows

SHARE_OF_PASS = 12  # a pass counts as a twelfth of its budget if what it costs is not measured
_FEW_PASSES = 8  # of a window: so many may save padding if what a pass costs is not measured
_LOOKED_AT = 16  # windows

RankChunks = tuple[tuple[int, ...], ...]
"""The micro-batches of a rank, each as the places of its samples."""


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """What a micro-batch may hold; one sample is always allowed."""

    budget: int  # samples × (longest + offset)
    samples: int
    offset: int = 0  # what a sample takes whatever its size, as a size
    pass_cost: int | None = None  # what a pass costs beside its samples, as samples × longest, if that was measured

    def lowered(self, micro_batch: int, *, of: int) -> "SizeLimits":
        """Return the limits if only ``micro_batch`` of the longest samples fit, and not as many as ``of``."""
        budget, samples = (max(1, limit * min(micro_batch, of) // of) for limit in (self.budget, self.samples))
        return replace(self, budget=budget, samples=samples)


@dataclass(frozen=True, slots=True, eq=False)
class SizedShares(EvenShares):
    """Each rank has as many micro-batches, each of samples of similar size."""

    sizes: Sequence[int]  # of the samples in the epoch's order
    limits: SizeLimits
    more: int = 0  # micro-batches on each rank beyond those needed, where each window has its own number
    packs: bool = False  # whether batches hold what their samples hold, without padding
    __eq__, __hash__ = object.__eq__, object.__hash__

    def factor_of(self, plan: EpochPlan, start: int, samples: int) -> int:
        """Return the micro-batches per rank that some samples need."""
        needed = -(-chunks_needed(self.sizes[start : start + samples], self.limits) // plan.world_size)
        return max(1, needed, min(needed + self.more, samples // plan.world_size))

    def cut(self, plan: EpochPlan, window: int, rank: int) -> Cuts:
        """Cut a window; the starts are places in ``sample_order``."""
        ranks, start = _ranks(plan, self, window), plan.windows.span(window)[0]
        first = start + sum(len(chunk) for chunks in ranks[:rank] for chunk in chunks)
        done = accumulate((sum(map(len, chunks)) for chunks in zip(*ranks)), initial=start)
        for chunk, (_, after) in zip(ranks[rank], pairwise(done)):
            yield first, len(chunk), after
            first += len(chunk)


def token_windows(
    sizes: Sequence[int], tokens: int, *, drop_last: bool = False, samples_done: int = 0
) -> GrowingWindows:
    """Cut an epoch into windows of as many samples as stay within ``tokens``, one at least.

    The last is ragged if the samples end before the tokens do. ``samples_done`` ends a window.

    Examples:
        >>> windows = token_windows([3, 4, 2, 9, 1], tokens=8)
        >>> [windows.span(window) for window in range(windows.count)]
        [(0, 2), (2, 1), (3, 1), (4, 1)]
    """
    before = array("q", accumulate(sizes, initial=0))

    def size_at(_: int, start: int) -> int:
        end = max(start + 1, bisect_right(before, before[start] + tokens) - 1)
        is_ragged = end == len(sizes) and before[end] - before[start] < tokens
        return end - start + is_ragged

    return GrowingWindows(len(sizes), size_at, drop_last, samples_done)


@lru_cache(maxsize=8)  # windows: the chunks and the order of each are asked for
def _ranks(plan: EpochPlan, cut: SizedShares, window: int) -> tuple[RankChunks, ...]:
    start, samples = plan.windows.span(window)
    sizes, factor = cut.sizes[start : start + samples], plan.factor_of(window)
    return cut_by_size(sizes, cut.limits, factor=factor, world_size=plan.world_size)


def sample_order(plan: EpochPlan, window: int) -> Sequence[int]:
    """Return the places of a window's samples from its start on, as its chunks hold them."""
    if not isinstance(plan.cut, SizedShares):
        return range(plan.windows.span(window)[1])
    return [place for chunks in _ranks(plan, plan.cut, window) for chunk in chunks for place in chunk]


def chunks_needed(sizes: Sequence[int], limits: SizeLimits) -> int:
    """Return the fewest micro-batches within the limits."""
    costs = sorted((size + limits.offset for size in sizes), reverse=True)
    return len(_greedy(costs, limits.budget, limits.samples))


def cut_by_size(
    sizes: Sequence[int], limits: SizeLimits, *, factor: int, world_size: int = 1
) -> tuple[RankChunks, ...]:
    """Cut samples into ``factor`` micro-batches for each rank with little padding, each sample in one.

    With fewer samples than micro-batches, the last hold none. If ``factor`` is too small, the limits are raised.

    Examples:
        >>> cut_by_size([3, 9, 2, 8, 1, 2], SizeLimits(budget=12, samples=4), factor=3)
        (((0, 2, 5, 4), (1,), (3,)),)
    """
    order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    descending = [sizes[place] + limits.offset for place in order]
    spans = _spans(descending, limits, factor * world_size)
    chunks = [tuple(order[start:end]) for start, end in sorted(spans, key=lambda span: -_cost(descending, span))]
    chunks += [()] * (factor * world_size - len(chunks))
    # By turns, in turned order each time: so the costs of ranks differ little.
    rows = [chunks[row * world_size : (row + 1) * world_size][:: -1 if row % 2 else 1] for row in range(factor)]
    return tuple(zip(*rows))


def piece_sizes(descending: Sequence[int], limits: SizeLimits, number: int = 1) -> list[int]:
    """Cut sorted samples into the fewest micro-batches within the limits, or into ``number`` if these suffice.

    If the cost of a pass was measured, into more while one more saves so much.

    Examples:
        >>> piece_sizes([9, 8, 3, 2, 2, 1], SizeLimits(budget=12, samples=4))
        [1, 1, 4]
    """
    costs = [size + limits.offset for size in descending]
    spans = _spans(costs, limits, max(len(_greedy(costs, limits.budget, limits.samples)), number))
    while limits.pass_cost is not None and len(spans) < len(costs):
        finer = _spans(costs, limits, len(spans) + 1)
        if sum(_cost(costs, span) for span in spans) - sum(_cost(costs, span) for span in finer) <= limits.pass_cost:
            break
        spans = finer
    return [end - start for start, end in spans]


def _greedy(descending: Sequence[int], budget: int, most: int) -> list[int]:
    """Return where micro-batches start, each as large as the limits allow."""
    starts, start = [], 0
    while start < len(descending):
        starts.append(start)
        start += _fitting(descending[start], budget, most)
    return starts


def _fitting(longest: int, budget: int, most: int) -> int:
    """Return how many samples a micro-batch may hold, one at least."""
    return max(1, min(most, budget // longest)) if longest else most


def _spans(descending: Sequence[int], limits: SizeLimits, number: int) -> list[tuple[int, int]]:
    """Cut sorted samples into ``number`` spans, or as many as there are samples, with little padding.

    It begins with the smallest budget that suffices; then each edge moves to where the spans beside it hold least.
    """
    low, high, most = 0, limits.budget, limits.samples
    while len(_greedy(descending, high, most)) > number:
        low, high, most = high, 2 * high, 2 * most
    budget = high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_greedy(descending, middle, most)) <= number else (middle + 1, high)
    edges = [*_greedy(descending, high, most), len(descending)]
    while len(edges) <= min(number, len(descending)):  # halve the costliest of several samples
        start, end = max(pairwise(edges), key=lambda span: (span[1] - span[0] > 1) * (1 + _cost(descending, span)))
        edges.insert(edges.index(end), (start + end) // 2)
    for place in range(1, len(edges) - 1):
        start, end = edges[place - 1], edges[place + 1]
        size, reach = descending[start], start + _fitting(descending[start], budget, most)
        rights = ((at, (end - at) * descending[at]) for at in range(start + 1, min(reach + 1, end)))
        fitting = ((at, cost) for at, cost in rights if at + 1 == end or (cost <= budget and end - at <= most))
        edges[place] = min(fitting, key=lambda each: (each[0] - start) * size + each[1])[0]
    return list(pairwise(edges))


def _cost(descending: Sequence[int], span: tuple[int, int]) -> int:
    return (span[1] - span[0]) * descending[span[0]]


@dataclass(frozen=True, slots=True)
class SizedPlan(AccumulationPlan):
    """The cut of an epoch by sizes; ``chunks`` are those of its first window.

    Attributes:
        fewest_samples: Samples of the smallest micro-batch; ``micro_batch_size`` are those of the largest.
        most_padded: Most that samples × longest are in a micro-batch.
        padding: Share of the padded batches that is padding; ``None`` if they are packed, and so have none.
        padding_as_drawn: The same if windows were cut in the order of the samples.
        window_tokens: Most tokens of a window, if these decide where it ends; ``effective_batch_size`` and ``factor``
            are then the largest of the epoch.
        smallest_window: Samples of the smallest window but the last.
        fewest_chunks: Chunks per rank of the window that has fewest.
    """

    fewest_samples: int = 0
    most_padded: int = 0
    padding: float | None = 0.0
    padding_as_drawn: float | None = 0.0
    window_tokens: int | None = None
    smallest_window: int = 0
    fewest_chunks: int = 0

    def __str__(self) -> str:
        samples = _between(self.fewest_samples, self.micro_batch_size, "sample")
        ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        window, passes = f"window {self.effective_batch_size}", counted(self.factor, "micro-batch", "es")
        if self.window_tokens is not None:
            held = _between(self.smallest_window, self.effective_batch_size, "sample")
            window = f"windows of {self.window_tokens:,} tokens ({held})"
            passes = _between(self.fewest_chunks, self.factor, "micro-batch", "es")
        text = f"{window} in {passes} of {samples}{ranks}, at most {self.most_padded:,}"
        if self.padding is None or self.padding_as_drawn is None:
            return f"{text} as samples × the largest of them each"
        before = f"(was {100 * self.padding_as_drawn:.0f} %)"
        return f"{text} padded tokens each; padding {100 * self.padding:.0f} % {before}"


@dataclass(frozen=True, slots=True)
class SizedBatchesPlan(AccumulationPlan):
    """The cut of ready-made batches, each by the sizes found in it; ``factor`` is the largest there may be."""

    batches: int = 1  # of a window on each rank

    def __str__(self) -> str:
        ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        return (
            f"window {self.effective_batch_size} in {counted(self.batches, 'batch', 'es')}{ranks}, each sorted by size "
            f"and cut into micro-batches of at most {self.size_budget:,} padded tokens"
        )


def plan_of_batches(plan: AccumulationPlan, limits: SizeLimits, *, batches: int) -> SizedBatchesPlan:
    """Plan windows of so many batches on each rank, which ``plan`` cuts as if all samples were of the longest."""
    return SizedBatchesPlan(
        plan.effective_batch_size,
        plan.world_size,
        plan.micro_batch_size,
        plan.factor,
        plan.chunks,
        samples_at_most=min(limits.samples, plan.effective_batch_size),
        size_budget=limits.budget,
        batches=batches,
    )


def _between(few: int, many: int, thing: str, plural: str = "s") -> str:
    return f"{few} to {counted(many, thing, plural)}" if few < many else counted(many, thing, plural)


def plan_by_size(
    plan: AccumulationPlan,
    epoch: EpochPlan,
    cut: SizedShares,
    *,
    tokens: int | None = None,
    largest_over_ranks: Callable[[int], int] = int,
) -> tuple[SizedPlan, EpochPlan]:
    """Cut an epoch by sizes that was planned without, for as many samples at once as the longest allow.

    If ``tokens`` decide where windows end, each has as many micro-batches as it needs itself.
    """
    windows, limits = range(epoch.windows.done, epoch.windows.count or 0), cut.limits
    some = windows[:: len(windows) // _LOOKED_AT + 1]
    each = limits.budget // SHARE_OF_PASS if limits.pass_cost is None else limits.pass_cost

    needed = [cut.factor_of(epoch, *epoch.windows.span(window)) for window in windows]
    least, more = max(needed, default=1), 0

    def with_more(more: int) -> EpochPlan:
        own = replace(cut, more=more) if isinstance(epoch, GrowingEpoch) else cut
        return replace(epoch, factor=least + more, cut=own)

    def cost(more: int) -> int:
        sized = with_more(more)
        passes = sum(map(sized.factor_of, some)) if isinstance(sized, GrowingEpoch) else sized.factor * len(some)
        return sum(_chunks(sized, cut.sizes, some)[1]) + each * passes * epoch.world_size

    most = max(_FEW_PASSES, epoch.factor // 3)  # a third of those in the order of the samples
    while (limits.pass_cost is not None or least + more < most) and cost(more + 1) < cost(more):
        more += 1
    sized = with_more(largest_over_ranks(least + more) - least)
    factors = [sized.factor_of(window) for window in windows]
    (counts, padded), (_, drawn) = _chunks(sized, cut.sizes, windows), _chunks(epoch, cut.sizes, windows)
    held = sum(sum(cut.sizes[start : start + samples]) for start, samples in map(epoch.windows.span, windows))
    paddings = [None if cut.packs else 1 - held / (sum(each) or 1) if held else 0.0 for each in (padded, drawn)]
    return SizedPlan(
        plan.effective_batch_size,
        plan.world_size,
        max(counts, default=1),
        sized.factor if tokens is None else max(factors, default=1),
        tuple(
            tuple(chunk.count for chunk in sized.chunks(windows[0], rank))
            for rank in range(epoch.world_size)
            if windows
        ),
        samples_at_most=min(limits.samples, -(-plan.effective_batch_size // plan.world_size)),
        size_budget=limits.budget,
        fewest_samples=min(counts, default=0),
        most_padded=max(padded, default=0),
        padding=paddings[0],
        padding_as_drawn=paddings[1],
        window_tokens=tokens,
        smallest_window=min((epoch.windows.span(window)[1] for window in windows[:-1] or windows), default=0),
        fewest_chunks=min(factors, default=1),
    ), sized


def _chunks(plan: EpochPlan, sizes: Sequence[int], windows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the samples of each micro-batch of some windows on all ranks, and these × their longest."""
    counts, padded = [], []
    for window in windows:
        start, order = plan.windows.span(window)[0], sample_order(plan, window)
        for chunk in (chunk for rank in range(plan.world_size) for chunk in plan.chunks(window, rank) if chunk.count):
            first = chunk.start - start
            counts.append(chunk.count)
            padded.append(chunk.count * max(sizes[start + place] for place in order[first : first + chunk.count]))
    return counts, padded
