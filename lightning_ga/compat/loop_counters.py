"""The place of the fit loop in its data: ``window × factor`` micro-batches. Nothing else writes these counters.

Lightning's ``loops/fit_loop.py``, ``loops/training_epoch_loop.py``, ``loops/progress.py`` and ``loops/fetchers.py``.

Tested in tests/integration/test_resume.py.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from lightning_ga.compat import patching
from lightning_ga.errors import UserError

_left: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()  # by Trainer, between two fits: where the first ended
_COUNTS = ("ready", "started", "processed", "completed")
_REPEATS = "You're resuming from a checkpoint that ended before the epoch ended"  # ``training_epoch_loop.py:225``


class LoopReader:
    """Reads the loop's place: windows of an epoch, each of as many micro-batches as the factor says."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fit_loop = trainer.fit_loop
        self._loop = trainer.fit_loop.epoch_loop
        self._first_micro_batch = 0  # micro-batches of the epoch before the first window of this factor
        self.window_start = 0  # micro-batches of the epoch before the running window

    @property
    def factor(self) -> int:
        """Micro-batches of a window."""
        return int(self._trainer.accumulate_grad_batches)

    @property
    def epoch(self) -> int:
        """The epoch that the loop sets on samplers (``fit_loop.py:445``)."""
        return int(self._fit_loop.epoch_progress.current.processed)

    @property
    def ready(self) -> int:
        """Micro-batches of the epoch that have reached the device, including the running one."""
        return int(self._loop.batch_progress.current.ready)

    @property
    def begins_window(self) -> bool:
        """Whether the micro-batch that the loop fetches next is the first of a window."""
        return (self.ready - self._first_micro_batch) % self.factor == 0

    @property
    def index_in_window(self) -> int:
        """The place of the running micro-batch in its window."""
        return (self.ready - self._first_micro_batch - 1) % self.factor

    @property
    def window_is_over(self) -> bool:
        """Whether the optimizer steps on the micro-batch that runs (``training_epoch_loop.py:447``)."""
        return not self._loop._should_accumulate()

    @property
    def skips_backward(self) -> bool:
        """Whether batches run forward alone, as in the last pass of ``StochasticWeightAveraging`` for BatchNorm."""
        return bool(self._loop.automatic_optimization._skip_backward)

    @property
    def epochs(self) -> range:
        """The epochs that training is known to run, from the current one on."""
        return range(self.epoch, max(self.epoch + 1, self._trainer.max_epochs or 0))

    @property
    def loop_batches_of_epoch(self) -> int | None:
        """Micro-batches of an epoch that the loop has set up; ``None`` if that is not known."""
        known = self._fit_loop.max_batches
        return None if known == inf else int(known)


class LoopPlace(LoopReader):
    """Moves the loop's place."""

    def set_factor(self, factor: int) -> None:
        """Set the micro-batches of a window; nothing else sets ``trainer.accumulate_grad_batches``."""
        self._trainer.accumulate_grad_batches = factor
        self._planned_factor = factor

    def require_planned_factor(self) -> None:
        """Refuse a factor that other code has set, because windows are planned with ours."""
        if self.factor != self._planned_factor and not self.skips_backward:
            raise UserError(
                f"trainer.accumulate_grad_batches was set to {self.factor} during training, where AutoAccumulate has "
                f"set {self._planned_factor}: give a schedule instead, such as accumulate={{0: 1, 5: 4}}, by epoch."
            )

    def take_back(self) -> Any:
        """Restore the recipe's factor after an earlier fit of this Trainer; return where that fit ended, if any."""
        left = _left.pop(self._trainer, None)
        if left is None:
            return None
        factor, recipe_factor, steps, position = left
        if self.factor == factor:  # the user has set no other since
            self.set_factor(recipe_factor)
        return position if steps == self._trainer.global_step else None  # steps without the callback move on

    def leave(self, recipe_factor: int, position: object) -> None:
        """Note for the next fit where this one ends. The factor stays, as with Lightning's own scheduler."""
        _left[self._trainer] = (self.factor, recipe_factor, self._trainer.global_step, position)

    def begin_epoch(self) -> None:
        """Count windows from the first micro-batch of the epoch on."""
        self._first_micro_batch = 0
        self.window_start = 0

    def begin_window(self) -> None:
        """Note that a window begins with the micro-batch that the loop fetches next."""
        self.window_start = self.ready

    def count_windows_from_here(self) -> None:
        """Count windows from the micro-batch on that the loop fetches next; see ``windows_begin_anywhere``."""
        self._first_micro_batch = self.ready

    def size_epoch(self, length: int) -> None:
        """Set the number of micro-batches of an epoch that the loop begins."""
        self._fit_loop._combined_loader.limits = [length]
        self._fit_loop.max_batches = length
        self._fit_loop._data_fetcher.length = length  # of the iterator that it may have already

    def relocate(self, factor: int, *, at: int, end: int | None) -> None:
        """Let the loop continue ``at`` a micro-batch, as windows of another factor count; the epoch ends after ``end``.

        Totals over all epochs are corrected by the same amount. Windows are counted from the same micro-batch as
        before: from the epoch's first if the loader cuts. Where the step cuts windows that grow,
        ``count_windows_from_here`` follows.
        """
        self.set_factor(factor)
        self.window_start = at
        fetcher = self._fit_loop._data_fetcher
        self._set(at)
        self._loop.batch_progress.is_last_batch = False
        fetcher.fetched = at
        fetcher.length = end
        fetcher.done = False
        self._fit_loop.max_batches = inf if end is None else end
        counts = self._loop.automatic_optimization.optim_progress.optimizer
        for counter in (counts.step, counts.zero_grad):  # of a failed step
            for each in (counter.current, counter.total):
                each.reset_on_restart()  # to what is completed

    def before_reading(self, call: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which ``call`` runs after hooks of an epoch's start, before it reads its first batch."""
        stock = self._loop.on_run_start

        def on_run_start(fetcher: Any) -> None:
            call()
            stock(fetcher)

        return patching.shadowed(self._loop, "on_run_start", on_run_start)

    def windows_begin_anywhere(self) -> AbstractContextManager[None]:
        """Return a context in which windows may begin anywhere, so that the factor may change within an epoch."""
        # The count of ready batches has the running one: it ends a window if the next begins one.
        return patching.shadowed(self._loop, "_accumulated_batches_reached", lambda: self.begins_window)

    def begin_at(self, at: int, *, continues_epoch: bool) -> None:
        """Let a restored loop begin after so many of this run's micro-batches, at the start of a window.

        They are those of the loop's epoch if the run ``continues_epoch``, else of the next.
        """
        loop = self._loop
        batch_end_is_due = loop.restarted_on_train_batch_end  # before ``_set``: Lightning 2.5 reads it off the counts
        if not continues_epoch:
            self._begin_next_epoch()
        loop.batch_progress.is_last_batch = continues_epoch and loop.batch_progress.is_last_batch
        # In the next epoch totals keep the epoch that is over, whose counts the loop still has.
        self._set(at, batch_end_is_due=batch_end_is_due, total=continues_epoch)
        self._align_logger_steps()

    def begin_epoch_after_last_batch(self) -> None:
        """Let a loop restored after its epoch's last batch count from zero, also from a stock checkpoint.

        Lightning does so itself if the count of the checkpoint is the number of batches that the loop has now. It ends
        the epoch itself if the checkpoint was written before that, as by the validation after the last batch.
        """
        progress = self._loop.batch_progress
        is_over = self.restarts and progress.is_last_batch and not self.loop_batches_done
        if is_over and progress.current.ready != self._fit_loop.max_batches:
            self.begin_at(0, continues_epoch=False)

    def iterate_again(self) -> None:
        """Start the epoch's iterator anew, as ``training_epoch_loop.py`` does from the second epoch on."""
        iter(self._fit_loop._data_fetcher)

    def _set(self, at: int, *, batch_end_is_due: bool = False, total: bool = True) -> None:
        """Set the counts of the epoch's batches, and with ``total`` those of the whole training."""
        progress = self._loop.batch_progress
        before = progress.total.ready - progress.current.ready
        for name in _COUNTS:
            count = at
            if batch_end_is_due and name == "completed":
                count -= 1  # the loop's reset adds 1 for the end of the last batch; -1 if the epoch begins
            setattr(progress.current, name, count)
            if total:
                setattr(progress.total, name, before + count)

    # --- restarts ------------------------------------------------------------------------------

    @property
    def restarts(self) -> bool:
        """Whether the loops were restored from a checkpoint and continue with its counters."""
        return bool(self._loop.restarting)

    @property
    def keeps_iterator(self) -> bool:
        """Whether the epoch reads on in the iterator of the set-up (``training_epoch_loop.py``, ``on_run_start``)."""
        return self.restarts or getattr(self._fit_loop, "is_resuming", False)  # Lightning 2.5 has no such property

    @property
    def loop_batches_done(self) -> int:
        """Micro-batches that a restored loop has trained on in its epoch; none if that is over."""
        epochs = self._fit_loop.epoch_progress.current
        if epochs.started > epochs.processed:
            return int(self._loop.batch_progress.current.processed)
        return 0

    @property
    def loop_batches_before_epoch(self) -> int:
        """Micro-batches that the loop has begun in earlier epochs and fits; asked for before the epoch begins."""
        begun = int(self._loop.batch_progress.total.ready)
        return begun - self.loop_batches_done if self.restarts else begun

    def reopen_epoch(self) -> None:
        """Let a restored loop continue in an epoch that ``max_steps`` ended early, as stock Lightning does.

        A checkpoint of ``on_train_epoch_end`` counts that epoch as processed (``fit_loop.py``: ``on_run_start``).
        """
        progress = self._fit_loop.epoch_progress
        if progress.current.completed < progress.current.processed and not self._loop.batch_progress.is_last_batch:
            progress.current.processed -= 1
            progress.total.processed -= 1

    def _begin_next_epoch(self) -> None:
        """If the checkpoint's epoch was over, let a restored loop begin the next epoch like any other.

        Without this it acts as if it were in the middle of the old epoch (``fit_loop.py:400``, ``:447``).
        """
        progress = self._fit_loop.epoch_progress.current
        if progress.ready != progress.processed:  # Lightning itself will end that epoch
            return
        if progress.completed < progress.processed:  # with max_steps, a checkpoint written in on_train_epoch_end
            self._fit_loop.epoch_progress.increment_completed()
        if hasattr(self._fit_loop, "reset_restart_stage"):  # 2.5.0 has no stages
            self._fit_loop.reset_restart_stage()

    def _align_logger_steps(self) -> None:
        """Give loggers the right number of optimizer steps: checkpoints are written before it rises.

        The loop adds one, on its reset (``training_epoch_loop.py:201``) or by ending the micro-batch once more (:415).
        """
        loop = self._loop
        rises_on_reset = loop.restarted_on_train_batch_end or not loop.restarted_on_last
        # Else the micro-batch's end runs again only if validation is due (:281).
        rises = rises_on_reset or loop._should_check_val_fx(self._fit_loop._data_fetcher)
        loop._batches_that_stepped = loop.global_step - int(rises)


@contextmanager
def positions_are_kept() -> Iterator[None]:
    """Return a context without Lightning's warning that a resume in mid-epoch repeats samples."""
    warnings.filterwarnings("ignore", message=_REPEATS)
    entry = warnings.filters[0]
    try:
        yield
    finally:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
