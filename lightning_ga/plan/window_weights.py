"""Weigh the micro-batches of a window, so that its gradient is that of its samples in one pass. Pure.

A loss is a mean over the samples of one micro-batch. Lightning divides it by the accumulation factor A
(``loops/optimization/automatic.py`` of 2.6.6, ``ClosureResult``) and data parallelism averages gradients over W ranks,
so the optimizer sees Σ gᵢ / (A·W). The mean over the whole window of N samples is Σ nᵢ gᵢ / N: the micro-batch of nᵢ
samples must weigh A·W·nᵢ / N. The same is true for a mean over tokens, with nᵢ tokens of N.

An error begins the whole window again, and with it its weights: nothing of a failed pass has to be undone here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ga.errors import UserError


@dataclass(slots=True)
class WindowWeights:
    """Weights of the micro-batches of a window, and the scale of its gradients once its counts are known.

    If its samples are planned, a micro-batch weighs A × its count ÷ the mean share of a rank. If samples or tokens are
    counted as they come, a reference near that share takes its place: a rank that has run a window again has another A
    than the others. The reference is twice the largest mean over ranks of a window so far: hardly any weight is then
    above one, and half precision overflows no more often than without. Without one at the start it comes from the first
    micro-batch with a count above zero.
    """

    world_size: int = 1
    sum_over_ranks: Callable[[float], float] = float
    reference: float | None = None
    weight: float = 1.0  # of the micro-batch
    count: float = 0.0  # samples or tokens of the micro-batch
    pending: float = 0.0  # part of the count that has not reached a backward pass
    reached: float = 0.0  # counts that have reached their backward passes in this window
    any_reached: bool = False  # whether a backward pass of the window has been reached
    divisor: float | None = None  # what counts are divided by; ``None`` as in stock Lightning
    count_may_differ: bool = True  # whether the window's count may be another than was planned
    may_be_empty: bool = False  # whether the window may have no samples

    def weigh_share(self, count: float, *, of: float, first: bool) -> None:
        """Weigh a piece by its share in its batch, and do not rescale the window at its end."""
        self._begin(count, first=first)
        self.divisor = None
        self.weight = count / of if of else 1.0

    def weigh_known(
        self, count: float, *, planned: float, window: float, factor: int, first: bool, count_may_differ: bool = False
    ) -> None:
        """Weigh the next micro-batch of this rank by its samples.

        ``planned`` are its samples as planned: a collate_fn may have dropped some. ``window`` are those that were
        planned for the window over all ranks. ``count_may_differ`` is whether samples may be dropped, the same in
        all passes of a window.
        """
        self._begin(count, first=first)
        # On one rank a step may return ``None``, which leaves its samples out; on several, Lightning refuses that.
        self.count_may_differ = count_may_differ or self.world_size == 1
        self.may_be_empty = True
        if count and planned == window and self.world_size == 1:
            window = count  # it is its own mean, to the bit, of the samples that are left
        self.divisor = window / self.world_size
        self.weight = factor * count / self.divisor

    def weigh_late(self, count: float, *, factor: int, first: bool, may_be_empty: bool = False) -> None:
        """Weigh the next micro-batch by its count; ``may_be_empty`` is whether there may be none in the window."""
        self._begin(count, first=first)
        self.count_may_differ = True
        self.may_be_empty = may_be_empty
        if factor == self.world_size == 1 and count:  # a window of one micro-batch is its own mean, to the bit
            self.reference = count
        elif self.reference is None:  # ranks may differ in A
            self.reference = 2.0 * self.sum_over_ranks(factor * count) / self.world_size or None
        self.divisor = self.reference or 1.0  # nothing was counted yet
        self.weight = factor * count / self.divisor

    def reach(self) -> None:
        """Note that the backward pass is reached; a step that returns ``None`` does not reach it."""
        self.reached += self.pending
        self.pending = 0.0  # a closure that is evaluated again reaches nothing more
        self.any_reached = True

    def leave_out(self) -> None:
        """Let the micro-batch weigh nothing, and the window be the mean over the others, if there are any."""
        self.weight = 0.0
        self.pending = 0.0
        self.may_be_empty = True

    def close(self) -> float:
        """Return the scale that makes the weighted sum of all ranks the mean over what has reached a backward pass.

        Ranks have averaged their gradients and have the same scale: they call this together.
        """
        nothing_ran = self.world_size == 1 and not self.any_reached
        if self.divisor is None or not self.count_may_differ or nothing_ran:
            return 1.0
        total = self.sum_over_ranks(self.reached)
        if not total and self.may_be_empty:
            return 1.0
        if not total:
            raise UserError(
                "normalize counted 0 in all micro-batches of a window, so its gradient is no mean of anything: check "
                "what it counts (the key, ignore_index), or leave such samples out."
            )
        mean = total / self.world_size
        scale = self.divisor / mean
        self.reference = max(self.reference or 0.0, 2.0 * mean)
        return scale

    def _begin(self, count: float, *, first: bool) -> None:
        """Begin a micro-batch, and with the first one a window."""
        if not 0 <= count < float("inf"):
            raise UserError(f"normalize counted {count} in a micro-batch: a count is a finite number of at least 0.")
        self.count = count
        self.pending = count
        if first:
            self.reached = 0.0
            self.any_reached = False
