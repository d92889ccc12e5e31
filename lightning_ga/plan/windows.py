"""Cut one epoch into windows and micro-batches: pure arithmetic, a window at a time."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class RegularWindows:
    """Windows of one size; the last may hold fewer samples, or is dropped."""

    total: int | None  # samples of the epoch; ``None`` for a stream of unknown length
    size: int  # samples of a full window
    drop_last: bool = False
    samples_done: int = 0  # that an earlier run has already trained on

    @property
    def done(self) -> int:
        """Windows that an earlier run has already trained on, the last perhaps of another size."""
        return -(-self.samples_done // self.size)

    @property
    def count(self) -> int | None:
        """Windows of the epoch, those already done included; ``None`` for a stream of unknown length."""
        if self.total is None:
            return None
        left = max(0, self.total - self.samples_done)
        return self.done + (left // self.size if self.drop_last else -(-left // self.size))

    def span(self, window: int) -> tuple[int, int]:
        """Return start and number of samples of one window, counted in the epoch's order."""
        if window < self.done:
            start = window * self.size
            return start, min(self.size, self.samples_done - start)
        start = self.samples_done + (window - self.done) * self.size
        return start, self.size if self.total is None else min(self.size, self.total - start)


@dataclass(frozen=True, slots=True)
class GivenWindows:
    """Windows given by the user's own batch sampler, each of its own size."""

    starts: tuple[int, ...]  # of all windows, and the end of the last
    done: int = 0  # windows that an earlier run has already trained on

    @classmethod
    def of(cls, sizes: Sequence[int], *, per_window: int, samples_done: int = 0) -> "GivenWindows":
        """Join ``per_window`` batches of the given sizes into each window.

        Windows start anew at ``samples_done``, where windows of another size may have ended.
        """
        ends = list(accumulate(sizes))
        samples_done = min(samples_done, sum(sizes))
        before, left = ends[: bisect_left(ends, samples_done)], ends[bisect_right(ends, samples_done) :]
        done = [*before[per_window - 1 :: per_window], samples_done] if samples_done else []
        ragged = left[-1:] if len(left) % per_window else []
        return cls((0, *done, *left[per_window - 1 :: per_window], *ragged), len(done))

    @property
    def count(self) -> int:
        """Windows of the epoch, those already done included."""
        return len(self.starts) - 1

    def span(self, window: int) -> tuple[int, int]:
        """Return start and number of samples of one window, counted in the epoch's order."""
        return self.starts[window], self.starts[window + 1] - self.starts[window]

    def batches(self, ends: Sequence[int]) -> list[list[int]]:
        """Return the sizes of the batches between ``ends`` in each window that is still to come."""
        found = []
        for window in range(self.done, self.count):
            start, samples = self.span(window)
            inner = ends[bisect_right(ends, start) : bisect_left(ends, start + samples)]
            edges = [start, *inner, start + samples]
            found.append([stop - begin for begin, stop in pairwise(edges)])
        return found

    @property
    def largest(self) -> int:
        """Samples of the largest window."""
        return max((self.span(window)[1] for window in range(self.count)), default=0)


@dataclass(slots=True, eq=False)
class GrowingWindows:
    """Windows whose sizes a schedule gives one by one; the last may hold fewer samples, or is dropped."""

    total: int | None  # samples of the epoch; ``None`` for a stream of unknown length
    size_at: Callable[[int, int], int]  # samples of a full window that begins after so many windows and samples
    drop_last: bool = False
    samples_done: int = 0  # that an earlier run has already trained on
    windows_done: int = 0  # in which it did so, by another schedule perhaps
    done: int = field(init=False, default=0)  # windows that hold those samples here
    _starts: list[int] = field(init=False)
    _sizes: list[int] = field(init=False, default_factory=list)  # in full

    def __post_init__(self) -> None:
        self._starts = [0]
        while self._starts[-1] < self.samples_done:
            self._add(len(self._sizes), self.samples_done)
        self.done = len(self._sizes)

    @property
    def count(self) -> int | None:
        """Windows of the epoch, those already done included; ``None`` for a stream of unknown length."""
        if self.total is None:
            return None
        while self._starts[-1] < self.total:
            self._add_next()
        count = bisect_left(self._starts, self.total)
        is_ragged = count > self.done and self.span(count - 1)[1] < self._sizes[count - 1]
        return count - (self.drop_last and is_ragged)

    def span(self, window: int) -> tuple[int, int]:
        """Return start and number of samples of one window, counted in the epoch's order."""
        self.nominal(window)
        return self._starts[window], self._starts[window + 1] - self._starts[window]

    def nominal(self, window: int) -> int:
        """Return the samples that a window holds if it is not the last."""
        while len(self._sizes) <= window:
            self._add_next()
        return self._sizes[window]

    def _add_next(self) -> None:
        self._add(self.windows_done + len(self._sizes) - self.done, self.total)

    def _add(self, windows: int, end: int | None) -> None:
        start = self._starts[-1]
        size = self.size_at(windows, start)
        self._sizes.append(size)
        self._starts.append(start + size if end is None else min(start + size, end))


Windows = RegularWindows | GivenWindows | GrowingWindows


@dataclass(slots=True)  # not frozen, as one is made in every micro-batch: that would take five times as long
class Chunk:
    """One micro-batch of one rank."""

    window: int  # counted from the start of the epoch
    start: int  # its first sample in the epoch's order
    count: int  # its samples; zero where a ragged window leaves the rank without one
    done: int  # samples of the epoch that are done once each rank has done this micro-batch
    window_samples: int  # over all ranks that share the order
    window_end: int  # samples of the epoch that are done once the window is


Cuts = Iterator[tuple[int, int, int]]
"""Start and size of each chunk, and samples of the epoch that are done once it is."""


@dataclass(frozen=True, slots=True)
class EvenShares:
    """Each rank has a near-equal share of a window, in near-equal chunks."""

    def factor_of(self, plan: "EpochPlan", start: int, samples: int) -> int:
        """Return the chunks per rank of an epoch's last window."""
        share = -(-samples // plan.world_size)
        return max(1, min(plan.factor, -(-share // plan.micro_batch)))

    def cut(self, plan: "EpochPlan", window: int, rank: int) -> Cuts:
        """Cut a window."""
        (start, samples), factor = plan.windows.span(window), plan.factor_of(window)
        first, share = part(samples, plan.world_size, rank)
        least, larger = divmod(samples, plan.world_size)
        for position in range(factor):
            inner, count = part(share, factor, position)
            done = start + (plan.world_size - larger) * part(least, factor, position + 1)[0]
            if larger:
                done += larger * part(least + 1, factor, position + 1)[0]
            yield start + first + inner, count, done


@dataclass(frozen=True, slots=True)
class FullChunks(EvenShares):
    """On one rank, all chunks of a window but the last have as many samples as a micro-batch may."""

    def cut(self, plan: "EpochPlan", window: int, rank: int) -> Cuts:
        """Cut a window."""
        start, samples = plan.windows.span(window)
        for position in range(plan.factor_of(window)):
            first = min(start + position * plan.micro_batch, start + samples)
            end = min(first + plan.micro_batch, start + samples)
            yield first, end - first, end


@dataclass(frozen=True, slots=True)
class WithinBatches:
    """On one rank, no chunk crosses a batch of the recipe, each of which is cut into as many pieces."""

    edges: Sequence[int]  # starts and ends of the recipe's batches in the epoch's order
    pieces: int

    def factor_of(self, plan: "EpochPlan", start: int, samples: int) -> int:
        """Return the chunks of an epoch's last window."""
        return (bisect_left(self.edges, start + samples) - bisect_right(self.edges, start) + 1) * self.pieces

    def cut(self, plan: "EpochPlan", window: int, rank: int) -> Cuts:
        """Cut a window.

        A batch counts as done after its last chunk, even an empty one: only then may the optimizer have stepped.
        """
        start, samples = plan.windows.span(window)
        for position in range(plan.factor_of(window)):
            number, piece = divmod(position, self.pieces)
            first, end = self._batch(number, start, start + samples)
            inner, count = part(end - first, self.pieces, piece)
            is_last = piece + 1 == self.pieces
            yield first + inner, count, end if is_last else min(first + inner + count, end - 1)

    def _batch(self, number: int, start: int, end: int) -> tuple[int, int]:
        """Return start and end of one of a window's batches; a resumed window may start in the middle of one."""
        after = bisect_right(self.edges, start) + number
        first = self.edges[after - 1] if number else start
        return min(first, end), min(self.edges[min(after, len(self.edges) - 1)], end)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The micro-batches of an epoch, on every rank.

    Every window is cut into the same number of chunks, the accumulation factor, but for the last,
    which has only as many as its samples need. That one has as many as the others, too, if each rank has data of
    its own (``pads_last_window``), because a rank does not know the last windows of other ranks.
    """

    windows: Windows
    micro_batch: int  # most samples of a chunk
    factor: int  # chunks per rank of every window but the last
    world_size: int
    pads_last_window: bool = False
    cut: EvenShares | WithinBatches = EvenShares()

    def place(self, index: int) -> tuple[int, int]:
        """Return the window of a micro-batch of the epoch, and its position in that."""
        return divmod(index, self.factor)

    @property
    def length(self) -> int | None:
        """Micro-batches of the epoch on each rank, those already done included."""
        count = self.windows.count
        return None if count is None else self.starts_at(count)

    @property
    def done(self) -> int:
        """Micro-batches that an earlier run has already trained on."""
        return self.starts_at(self.windows.done)

    def starts_at(self, window: int) -> int:
        """Return the number of micro-batches before a window."""
        if not window or window != self.windows.count:
            return window * self.factor
        return (window - 1) * self.factor + self.factor_of(window - 1)

    def factor_of(self, window: int) -> int:
        """Return the chunks per rank of one window."""
        count = self.windows.count
        if self.pads_last_window or count is None or window < count - 1:
            return self.factor
        return self.cut.factor_of(self, *self.windows.span(window))

    def chunks(self, window: int, rank: int) -> tuple[Chunk, ...]:
        """Return the micro-batches of one window on one rank."""
        start, samples = self.windows.span(window)
        cut = self.cut.cut(self, window, rank)
        return tuple(Chunk(window, first, count, done, samples, start + samples) for first, count, done in cut)


@dataclass(frozen=True, slots=True)
class GrowingEpoch(EpochPlan):
    """The micro-batches of an epoch whose windows are each cut into their own number of chunks, at most ``factor``."""

    _starts: list[int] = field(default_factory=lambda: [0], init=False, compare=False)  # micro-batches before each

    def place(self, index: int) -> tuple[int, int]:
        """Return the window of a micro-batch of the epoch, and its position in that."""
        while self._starts[-1] <= index:
            self.starts_at(len(self._starts))
        window = bisect_right(self._starts, index) - 1
        return window, index - self._starts[window]

    def starts_at(self, window: int) -> int:
        """Return the number of micro-batches before a window."""
        while len(self._starts) <= window:
            self._starts.append(self._starts[-1] + self.factor_of(len(self._starts) - 1))
        return self._starts[window]

    def nominal(self, window: int) -> int:
        """Return the samples that a window holds if it is not the last, in the order that ranks share or each has."""
        assert isinstance(self.windows, GrowingWindows)
        return self.windows.nominal(window)

    def factor_of(self, window: int) -> int:
        """Return the chunks per rank of one window; one of a window that would begin after the epoch's end."""
        start, samples = self.windows.span(window)
        if self.pads_last_window:
            samples = self.nominal(window)
        return max(1, self.cut.factor_of(self, start, samples))


def part(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and size of one of ``parts`` near-equal parts, the larger ones first."""
    quotient, larger = divmod(total, parts)
    return index * quotient + min(index, larger), quotient + (index < larger)
