"""The shares of ranks in a window: equal, or in proportion to their limits or to their speeds (``shares=``).

Tested in tests/integration/test_shares.py.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_ga.compat import ranks
from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import ratio_of_speeds
from lightning_ga.plan.config import Options
from lightning_ga.probe.speed import Speed


class Shares:
    """What the ranks know of each other if their shares of a window may differ; nothing if these are equal.

    All ranks call ``follow_limits`` together, and ``follow_speeds`` too.
    """

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer = trainer
        self._kind = options.shares
        self.differ = options.shares != "equal"  # whether each rank has a limit of its own
        self.limits: tuple[int, ...] = ()  # of all ranks, once they are known
        self.ratio: tuple[int, ...] = ()  # of all ranks' shares
        self._speed: Speed | None = None  # of this rank, if shares follow it
        if options.shares == "speed":
            self._speed = Speed(trainer.strategy.root_device)

    def check(self) -> None:
        """Refuse shares that differ if there is one rank, or if ranks wait for each other within a window."""
        if not self.differ:
            return
        trainer = self._trainer
        why = ranks.obstacle(trainer)
        if ranks.data_ranks(trainer)[0] == 1:
            why = "this training has one rank"
        elif why is None and self._speed is not None and not ranks.gradients_are_private(trainer):
            why = "a communication hook of DDP sends the gradients"
        if why is not None:
            raise UserError(
                f"shares={self._kind!r} divides a window among ranks by their {self._kind}, and {why}: leave it out."
            )

    def follow_limits(self, samples: int) -> None:
        """Tell each rank the limits of all; this rank has a limit of so many samples.

        Shares are in proportion to limits, or equal until speeds are known.
        """
        if not self.differ:
            return
        self.limits = tuple(ranks.of_all_ranks(self._trainer, samples))
        if self._speed is None:
            self.ratio = self.limits
        elif not self.ratio:
            self.ratio = (1,) * len(self.limits)

    def follow_speeds(self) -> bool:
        """Let shares follow the speeds of ranks, if these have been measured; return whether shares have changed."""
        if self._speed is None or not self._speed.is_measured:
            return False
        before = self.ratio
        self.ratio = ratio_of_speeds(ranks.of_all_ranks(self._trainer, self._speed.take()), before=before)
        return self.ratio != before

    # --- the speed of this rank ----------------------------------------------------------------

    def begin_window(self) -> None:
        """Begin to measure a window, or begin again after an error."""
        if self._speed is not None:
            self._speed.begin_window()

    def note_sending(self) -> None:
        """Count the time up to now as this rank's own, without waiting for others."""
        if self._speed is not None:
            self._speed.note_sending()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which ranks may wait for each other."""
        return nullcontext() if self._speed is None else self._speed.waiting()

    def end_window(self, sizes: Sequence[int]) -> None:
        """Note the micro-batches that this rank has run in the window; one of no sample runs one all the same."""
        if self._speed is not None:
            self._speed.end_window(sum(max(1, size) for size in sizes))
