"""Weigh the micro-batches of a window, with samples known in advance or counted during the window. Pure.

Records are frozen: to undo a failed attempt, go on with the record from before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from lightning_ga.errors import UserError
from lightning_ga.plan.weights import known_weight, window_scale


@dataclass(frozen=True, slots=True)
class WindowWeights:
    """What the weights of all kinds of windows keep; a count is one of samples or tokens."""

    world_size: int = 1
    weight: float = 1.0  # of the micro-batch
    share: float = 1.0  # of the micro-batch in the next backward pass
    count: float = 0.0  # of the micro-batch
    pending: float = 0.0  # of it, what has not reached a backward pass
    reached: float = 0.0  # what has reached its backward passes in this window

    def weigh(self, count: float, *, window: float, factor: int, first: bool, planned: float | None = None) -> Self:
        """Weigh the next micro-batch of this rank, of a window of so many samples as planned over all ranks.

        Its samples as planned are given if a collate_fn has dropped some.
        """
        raise NotImplementedError

    def part(self, share: float) -> Self:
        """Set the share of the micro-batch in the next backward pass."""
        return replace(self, share=share, pending=share * self.count)

    def whole(self) -> Self:
        """Let the next backward pass cover the whole micro-batch."""
        return self if self.share == 1.0 else replace(self, share=1.0)

    def trained(self) -> Self:
        """Note that the backward pass has been reached; steps that return ``None`` do not reach it."""
        return replace(self, reached=self.reached + self.pending, pending=0.0)

    def close(self, factor: int) -> tuple[float, Self]:
        """Return the scale of the window's gradients, and the record for the next window; ranks call it together."""
        return 1.0, self


@dataclass(frozen=True, slots=True)
class StockWindow(WindowWeights):
    """Weights as in stock Lightning: every micro-batch counts as one of the nominal factor."""


@dataclass(frozen=True, slots=True)
class KnownWindow(WindowWeights):
    """Weights of windows whose samples are known in advance.

    Examples:
        >>> KnownWindow(world_size=1).weigh(43, window=128, factor=3, first=True).weight
        1.0078125
    """

    window: float = 0.0  # its samples as planned, over all ranks
    seen: float = 0.0  # samples of this rank's micro-batches so far, as planned

    def weigh(self, count: float, *, window: float, factor: int, first: bool, planned: float | None = None) -> Self:
        """Weigh the next micro-batch by its samples of those planned."""
        if count and planned == window:  # a window of one micro-batch is its own mean, to the bit
            window = planned = count
        weight = known_weight(count, window, factor=factor, world_size=self.world_size)
        reached, seen = (0.0, 0.0) if first else (self.reached, self.seen)
        seen += count if planned is None else planned
        # ``replace`` takes twice as long, and this is done for each pass.
        return type(self)(self.world_size, weight, 1.0, count, count, reached, window, seen)

    def part(self, share: float) -> Self:
        """Set the share of the micro-batch in the next backward pass."""
        return self._at(share, share * self.count, self.reached)

    def trained(self) -> Self:
        """Note that the backward pass has been reached."""
        return self._at(self.share, 0.0, self.reached + self.pending)

    def _at(self, share: float, pending: float, reached: float) -> Self:
        return type(self)(self.world_size, self.weight, share, self.count, pending, reached, self.window, self.seen)

    def close(self, factor: int) -> tuple[float, Self]:
        """Return a scale above one where micro-batches were skipped or samples dropped.

        It is computed without the other ranks, as Lightning allows a step to be skipped on one rank only.
        """
        skipped = self.seen - self.reached
        return self.window / (self.window - skipped) if 0 < skipped < self.window else 1.0, self


@dataclass(frozen=True, slots=True)
class LateWindow(WindowWeights):
    """Weights of windows whose samples or tokens are counted during the window.

    A micro-batch weighs its count ÷ a reference near the mean count, and the window's gradients are
    scaled once, when its total is known. The reference is twice the largest mean of a window so far:
    hardly any weight is then above one, and half precision overflows no more often than without.
    Without one at the start it is taken from the first micro-batch with a count above zero.

    Examples:
        >>> window = LateWindow(world_size=1, reference=2, fixed=True)
        >>> for count in (2, 2, 1):
        ...     window = window.weigh(count, window=8, factor=4, first=count == 2).trained()
        >>> window.weight
        0.5
        >>> window.close(4)[0]  # a stream that ended before the window was full
        2.6666666666666665
    """

    sum_over_ranks: Callable[[float], float] = float
    reference: float | None = None
    fixed: bool = False  # whether the reference stays
    largest_mean: float = 0.0  # count of a window ÷ its micro-batches, so far
    any_reached: bool = False  # whether a backward pass of the window has been reached

    def weigh(self, count: float, *, window: float, factor: int, first: bool, planned: float | None = None) -> Self:
        """Weigh the next micro-batch by its count; the window's samples are not needed."""
        if not 0 <= count < float("inf"):
            raise UserError(f"normalize counted {count} in a micro-batch: a count is a finite number of at least 0.")
        reference = self._reference_for(count, factor=factor, first=first)
        begun = replace(self, reached=0.0, any_reached=False) if first else self
        weight = 0.0 if reference is None else count / reference
        return replace(begun, reference=reference, weight=weight, share=1.0, count=count, pending=count)

    def trained(self) -> Self:
        """Note that the backward pass has been reached."""
        return replace(self, reached=self.reached + self.pending, pending=0.0, any_reached=True)

    def close(self, factor: int) -> tuple[float, Self]:
        """Return the scale that makes the weighted sum of all ranks the mean over what was counted."""
        if not self.any_reached and self.world_size == 1:
            return 1.0, self
        total = self.sum_over_ranks(self.reached)
        if not total:
            raise UserError(
                "normalize counted 0 in all micro-batches of a window, so its gradient is no mean of anything: check "
                "what it counts (the key, ignore_index), or leave such samples out."
            )
        assert self.reference is not None
        mean = total / (factor * self.world_size)
        scale = window_scale(total, reference=self.reference, factor=factor, world_size=self.world_size)
        return scale, replace(self, largest_mean=max(self.largest_mean, mean))

    def _reference_for(self, count: float, *, factor: int, first: bool) -> float | None:
        """Return the divisor of the next count; ``None`` while nothing was counted."""
        if factor == self.world_size == 1 and count:  # a window of one micro-batch is its own mean, to the bit
            return count
        if self.reference is None:
            return 2.0 * self.sum_over_ranks(count) / self.world_size or None
        return max(self.reference, 2.0 * self.largest_mean) if first and not self.fixed else self.reference
