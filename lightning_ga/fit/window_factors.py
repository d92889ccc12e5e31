"""The accumulation factor of each window: that of its epoch, or one of its own where a schedule lets windows grow."""

from typing import Any

from lightning_ga.compat import loops
from lightning_ga.fit import checks
from lightning_ga.plan.windows import EpochPlan, GrowingEpoch


class WindowFactors:
    """Sets the factor of the window that is trained on, and refuses one that others set."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._factor: int = trainer.accumulate_grad_batches
        self._plan: GrowingEpoch | None = None  # of an epoch in which windows grow
        self._next: int | None = None  # first micro-batch of the next window, where that may have another factor
        self._size = 0  # samples of the last full window

    def begin_epoch(self, plan: EpochPlan, factor: int) -> None:
        """Set the factor of an epoch; where windows grow, that of its next window."""
        self._factor = self._trainer.accumulate_grad_batches = factor
        self._plan = plan if isinstance(plan, GrowingEpoch) else None
        self._next, self._size = None, 0
        if self._plan is not None:
            self._set(self._plan, plan.done)
            self._next = plan.done  # to be entered

    def enter(self, index: int) -> int | None:
        """Set the factor if a window of its own begins with this micro-batch; return a full one of another size."""
        if self._next is None or index < self._next or loops.skips_backward(self._trainer):
            return None
        assert self._plan is not None, "it has set the next window"
        window = self._set(self._plan, index)
        size, samples = self._plan.nominal(window), self._plan.windows.span(window)[1]
        if samples < size or size == self._size:
            return None
        self._size = size
        return window

    def check(self) -> None:
        """Refuse a factor that a hook has set."""
        checks.check_factor(self._trainer, self._factor)

    def close(self) -> None:
        """Let remainders count from the start of the epoch again."""
        if self._plan is not None:
            self._trainer.accumulate_grad_batches = int(self._trainer.accumulate_grad_batches)

    def _set(self, plan: GrowingEpoch, index: int) -> int:
        window, position = plan.place(index)
        start, self._factor = index - position, plan.factor_of(window)
        self._trainer.accumulate_grad_batches = found = loops.WindowFactor(self._factor)
        found.start = start
        self._next = start + self._factor
        return window
