"""Cut one epoch into windows, and each window into micro-batches on every rank: pure arithmetic, a window at a time.

A plan is a function of the epoch's samples, the size of a window and the micro-batch. Windows do not depend on the
micro-batch: whatever changes the micro-batch leaves window k with the same samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_ga.plan.accumulation import (
    ceil_div,
    micro_batch_sizes,
    split_evenly,
    split_in_proportion,
    split_share,
    usable_multiple,
)


@dataclass(frozen=True, slots=True)
class RegularWindows:
    """Windows of one size; the last may have fewer samples.

    An earlier run has trained on ``samples_done`` samples in ``done`` windows; windows start anew after these.
    """

    total: int  # samples of the epoch
    largest: int  # samples of a full window
    samples_done: int = 0
    done: int = 0

    @property
    def count(self) -> int:
        """Windows of the epoch, those already done included."""
        return self.done + ceil_div(max(0, self.total - self.samples_done), self.largest)

    def span(self, window: int) -> tuple[int, int]:
        """Return start and number of samples of one window that is not done, counted in the epoch's order."""
        start = self.samples_done + (window - self.done) * self.largest
        return start, min(self.largest, self.total - start)


@dataclass(slots=True, eq=False)
class GrowingWindows:
    """Windows whose sizes a schedule gives one by one; the last may have fewer samples."""

    total: int  # samples of the epoch
    size_at: Callable[[int, int], int]  # samples of a full window that begins after so many windows and samples
    samples_done: int = 0  # that an earlier run has trained on,
    done: int = 0  # in so many windows
    _spans: list[tuple[int, int]] = field(init=False, default_factory=list)  # start and size in full

    def __post_init__(self) -> None:
        start = self.samples_done
        while start < self.total:
            size = self.size_at(self.done + len(self._spans), start)
            self._spans.append((start, size))
            start += size

    @property
    def count(self) -> int:
        """Windows of the epoch, those already done included."""
        return self.done + len(self._spans)

    @property
    def largest(self) -> int:
        """Samples of the largest window in full; none if all are done."""
        return max((size for _, size in self._spans), default=0)

    def span(self, window: int) -> tuple[int, int]:
        """Return start and number of samples of one window that is not done, counted in the epoch's order."""
        start, size = self._spans[window - self.done]
        return start, min(size, self.total - start)


Windows = RegularWindows | GrowingWindows


@dataclass(frozen=True, slots=True)
class Window:
    """One window as one rank runs it."""

    index: int  # in its epoch
    start: int  # its first sample in the epoch's order
    samples: int  # over all ranks
    sizes: tuple[int, ...]  # samples of this rank's micro-batches; 0 for a stand-in of weight 0
    before: int = 0  # samples of the window on lower ranks

    @property
    def end(self) -> int:
        """Samples of the epoch that are done once the window is."""
        return self.start + self.samples


NO_WINDOW = Window(-1, 0, 0, ())
"""Before the first window of a training."""


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The windows of an epoch and their micro-batches, on every rank.

    Ranks have near-equal shares of a window, or shares in a ``ratio``. A share is cut into near-equal micro-batches:
    the fewest that keep the largest within ``micro_batch``, as many on all ranks if shares are near-equal. A ragged
    window has as many as its own samples need. Shares and micro-batches are multiples of ``multiple``, unless
    ``micro_batch`` is less; the last one may have fewer samples.
    """

    windows: Windows
    micro_batch: int  # most samples of one
    world_size: int = 1
    multiple: int = 1
    ratio: tuple[int, ...] = ()  # of the shares of ranks, if they may be unequal
    rank: int = 0  # whose factor is meant if shares are unequal

    @cached_property
    def factor(self) -> int:
        """Micro-batches of a full window on each rank; in a growing epoch, of the largest."""
        return self._factor(self.windows.largest)

    @property
    def count(self) -> int:
        """Windows of the epoch, those already done included."""
        return self.windows.count

    @property
    def done(self) -> int:
        """Windows that an earlier run has trained on; those that follow start at its last sample."""
        return self.windows.done

    def factor_of(self, window: int) -> int:
        """Return the micro-batches of one window on each rank."""
        if self.done <= window < self.count:
            return self._factor(self.windows.span(window)[1])
        return self.factor

    def window(self, index: int, rank: int = 0) -> Window:
        """Return one window as one rank runs it."""
        start, samples = self.windows.span(index)
        shares = self.shares(samples)
        sizes = split_share(shares[rank], self.factor_of(index), self._multiple)
        return Window(index, start, samples, sizes, sum(shares[:rank]))

    def places(self, window: Window, index_in_window: int) -> Sequence[int]:
        """Return the places, in the epoch's order, of one micro-batch; of a stand-in, that of the last sample."""
        start = window.start + window.before + sum(window.sizes[:index_in_window])
        size = window.sizes[index_in_window]
        return range(start, start + size) if size else range(window.end - 1, window.end)

    @cached_property
    def length(self) -> int:
        """Micro-batches of the epoch on each rank; windows already done are treated as full."""
        if isinstance(self.windows, GrowingWindows):
            return self.done * self.factor + sum(map(self.factor_of, range(self.done, self.count)))
        if self.count == 0:
            return 0
        return (self.count - 1) * self.factor + self.factor_of(self.count - 1)

    def _factor(self, samples: int) -> int:
        return len(micro_batch_sizes(self.shares(samples)[self.rank], self.micro_batch, self._multiple))

    def shares(self, samples: int) -> tuple[int, ...]:
        """Return the samples of each rank in a window of so many."""
        if self.ratio:
            return split_in_proportion(samples, self.ratio, self.multiple)
        return split_evenly(samples, self.world_size, self._multiple)

    @property
    def _multiple(self) -> int:
        return usable_multiple(self.multiple, self.micro_batch)
