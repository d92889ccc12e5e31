"""After an out-of-memory error, run the window again from its start, with a remedy (``remedies.py``).

Weights do not change within a window, so the window is the unit of undo. The savepoint keeps the other small state that
passes change. Gradients of a failed attempt are zeroed by the loop, as always, with the window's first backward pass.

Tested in tests/integration/test_survive.py and tests/integration/test_rewind_inputs.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ga.compat import advance, closures, ranks
from lightning_ga.compat.reduction import Exchange
from lightning_ga.compat.replicas import AnyExchange
from lightning_ga.errors import UserError
from lightning_ga.fit import messages
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.remedies import Remedies
from lightning_ga.fit.training_data import Windows
from lightning_ga.memory.allocator import RepeatedRetries
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import (
    is_out_of_memory,
    may_be_out_of_memory,
    release,
    retry_once,
)
from lightning_ga.snapshot.kept_batch import undo
from lightning_ga.snapshot.window_savepoint import Savepoint

LESS = 10  # retries of the allocator lower a micro-batch by one part in so many


class Rewinder:
    """Owns the one ``try`` around the loop's ``advance``, and the flag that the update has begun.

    ``members`` are called as a window begins, also if it begins again, in their order; the savepoint is the last.
    """

    def __init__(
        self,
        parts: FitParts,
        windows: Windows,
        remedies: Remedies,
        reporter: messages.OomReporter,
        exchange: AnyExchange | None,
        *,
        repeats: bool,
    ) -> None:
        trainer = parts.trainer
        self._parts = parts
        self._windows = windows
        self._remedies = remedies
        self._reporter = reporter
        self._exchange = exchange
        self._refusal: str | None = None  # why no window can run again on these ranks
        self._savepoint: Savepoint | None = None  # none if no window runs again
        self._allocator_retries: RepeatedRetries | None = None
        if repeats:
            self._refusal = ranks.obstacle(trainer)
        if repeats and self._refusal is None:
            loop = trainer.fit_loop.epoch_loop
            self._savepoint = Savepoint(trainer.lightning_module, lambda: loop._results)
            if trainer.strategy.root_device.type == "cuda":
                self._allocator_retries = RepeatedRetries(trainer.strategy.root_device)
        self._members: list[Callable[[], None]] = []
        self._is_updating = False  # whether the window's passes are done: what follows is the optimizer's update
        self._is_begun = False  # whether all members have begun the running window
        self._is_whole = True  # whether it began with its first batch: a run may be resumed within a window
        self._collectives = 0

    def guarding(self, members: Sequence[Callable[[], None]]) -> AbstractContextManager[None]:
        """Return a context in which the loop's ``advance`` is guarded, and these ``members`` begin each window."""
        self._members = [*members]
        if self._savepoint is None:
            return advance.guarded_advance(self._parts.trainer, self.run)
        self._members.append(self._savepoint.take)
        return advance.guarded_advance(self._parts.trainer, self.run, self._windows.keep)

    def run(self, stock_advance: Callable[[], None]) -> None:
        """Run the loop's next micro-batch; if memory runs out, the window's first one, smaller."""
        while True:
            kept_before = 0
            try:
                self._parts.place.require_planned_factor()
                if self._parts.place.begins_window or not self._is_begun:
                    self._begin_window()
                    if self._lower_after_retries():  # the next call counts no retries, so this happens once
                        continue  # the window begins again as it was planned anew
                kept_before = len(self._windows.batches)
                stock_advance()
                return
            except Exception as error:
                if isinstance(error, UserError) or not may_be_out_of_memory(error):
                    raise
                self._raise_if_final(error, kept_before)
                failure = error
            release(failure)
            self._go_back(failure)

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the window's passes are done; refuse an optimizer that repeats only the last of several."""
        factor = self._parts.place.factor
        if self._is_updating and factor > 1:
            raise UserError(
                f"{type(optimizer).__name__} evaluated its closure again, which repeats only the last of {factor} "
                'passes: use micro_batching="step", and let the loader yield whole effective batches.'
            )
        self._is_updating = True

    def end_window(self) -> None:
        """Take back what only this window needed."""
        self._remedies.end_window()

    def tensors_kept(self) -> list[Tensor]:
        """Return the tensors of the savepoint, which lie on the device while a window runs."""
        return [] if self._savepoint is None else [*self._savepoint.tensors()]

    def _begin_window(self) -> None:
        self._is_updating = False
        self._is_begun = False
        self._is_whole = self._parts.place.begins_window
        self._parts.place.begin_window()
        for begin_window in self._members:
            begin_window()
        self._is_begun = True
        self._collectives = ranks.collectives_run()

    def _lower_after_retries(self) -> bool:
        """Plan smaller micro-batches if the last two windows were short of memory; return whether that was done."""
        if self._allocator_retries is None or not self._allocator_retries.after_window():
            return False
        most = self._windows.largest_pass
        fits = most - max(1, most // LESS)
        if fits < 1:
            return False
        each = self._windows.planner.samples_of_unit
        rank_zero_warn(
            "The allocator had to free its cache in two windows running, so memory is fragmented: "
            f"{self._parts.limit.unit} have at most {fits * each} samples from here on, instead of {most * each}, with "
            "the same result."
        )
        self._remedies.fall(fits)
        self._windows.plan_again()
        return True

    def _raise_if_final(self, error: Exception, kept_before: int) -> None:
        """Raise the error, and say why, if the window cannot begin again.

        It can if its batches can be had again. If the loader cuts, it reads them by index. If the step cuts, they were
        kept. If the loader failed to make one, ``keep`` was not called in this ``advance``: the count of those that
        were kept is still ``kept_before``.
        """
        is_certain = is_out_of_memory(error)  # nothing is said of an error that may mean something else
        if is_certain:
            messages.end_run_if(self._refusal, self._parts.trainer, "training", messages.OTHERS_WAIT, error)
        if self._savepoint is None or self._parts.place.skips_backward:
            raise error
        if not self._is_begun:  # a member has failed
            return
        if not self._is_whole:
            raise error  # nothing is kept of what came before the resume
        batch_was_kept = len(self._windows.batches) > kept_before
        can_be_had_again = batch_was_kept or not self._windows.in_step
        if can_be_had_again and not self._is_updating:
            return
        if is_certain:
            sentence = messages.IN_THE_UPDATE if self._is_updating else messages.IN_THE_LOADER
            error.add_note(sentence.format(memory=describe_memory(self._parts.trainer.strategy.root_device)))
        raise error

    def _go_back(self, failure: Exception) -> None:
        """Begin the window again with a remedy; raise an error if there is none, or the window cannot be undone."""
        remedy = self._remedies.choose(self._windows.largest_pass, failure)
        messages.end_run_if(self._leave_ranks(), self._parts.trainer, "training", messages.OTHERS_WAIT, failure)
        messages.end_run_if(retry_once(self._undo), self._parts.trainer, "training", messages.CHANGED, failure)
        fits = self._remedies.apply(remedy)  # by trial steps, which need the state from before
        self._windows.plan_again()
        if self._allocator_retries is not None:
            self._allocator_retries.count_anew()
        each = self._windows.planner.samples_of_unit
        self._reporter.add(
            self._reporter.survived("training", remedy.before * each, fits * each, self._parts.limit.unit)
        )

    def _undo(self) -> str | None:
        """Put back what the window's passes have changed; return what cannot be put back."""
        assert self._savepoint is not None, "without one, no window begins again"
        if not self._is_begun:
            return None
        leaves_some = closures.zero_gradients(self._parts.trainer, self._parts.place.window_start)
        if leaves_some:
            kind = type(self._parts.trainer.lightning_module).__name__
            return f"gradients of earlier windows, which {kind} does not zero"
        return undo(self._savepoint, self._windows.batches)

    def _leave_ranks(self) -> str | None:
        """Leave the exchange of gradients, so that this rank repeats the window alone; return why it cannot."""
        if not self._is_begun:  # nothing of this window was exchanged
            return None
        if self._parts.trainer.world_size > 1 and ranks.collectives_run() != self._collectives:
            return messages.EXCHANGES
        if not isinstance(self._exchange, Exchange):  # one rank: ``ranks.obstacle`` has refused others
            return None
        return self._exchange.failed()
