"""After an out-of-memory error, run the window again from its start: smaller, or with submodules computed again.

Weights do not change within a window, so the window is the unit of undo. The savepoint keeps the other small state that
passes change. Gradients of a failed attempt are zeroed by the loop, as always, with the window's first backward pass.

Tested in tests/integration/test_survive.py and tests/integration/test_rewind_inputs.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ga.compat import advance, ranks
from lightning_ga.compat.place import LoopPlace
from lightning_ga.compat.replicas import AnyExchange
from lightning_ga.errors import UserError
from lightning_ga.fit import messages
from lightning_ga.fit.limit import Limit
from lightning_ga.fit.retry import go_back
from lightning_ga.fit.window_protocol import Windows
from lightning_ga.memory.allocator import RepeatedRetries
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory, may_be_out_of_memory, release
from lightning_ga.plan.piece_sizes import halved
from lightning_ga.snapshot.kept_batch import undo
from lightning_ga.snapshot.savepoint import Savepoint

LESS = 10  # retries of the allocator lower a micro-batch by one part in so many


class Rewinder:
    """Owns the one ``try`` around the loop's ``advance``, and the flag that the update has begun.

    ``members`` live through a window. They begin it in their order, also if it begins again; the savepoint is the last.
    """

    def __init__(
        self,
        trainer: Any,
        place: LoopPlace,
        windows: Windows,
        limit: Limit,
        reporter: messages.OomReporter,
        *,
        retries: bool,
        exchange: AnyExchange | None,
        search: Callable[[int], int | None],
        last_resort: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._place = place
        self._windows = windows
        self._limit = limit
        self._reporter = reporter
        self._exchange = exchange
        self._search = search  # looks for a limit below a pass that failed; ``None`` halves
        self._last_resort = last_resort  # of a pass of one sample; returns whether there is one
        self._refusal = ranks.obstacle(trainer) if retries else None
        self._savepoint: Savepoint | None = None  # none if no window runs again
        if retries and self._refusal is None:
            loop = trainer.fit_loop.epoch_loop
            self._savepoint = Savepoint(trainer.lightning_module, lambda: loop._results)
        device = trainer.strategy.root_device
        watches = self._savepoint is not None and device.type == "cuda"
        self._retried = RepeatedRetries(device) if watches else None
        self._members: list[Callable[[], None]] = []
        self._is_updating = False  # whether the window's passes are done: what follows is the optimizer's update
        self._is_begun = False  # a resumed run may start within a window, which cannot run again
        self._collectives = 0

    def guarding(self, members: Sequence[Callable[[], None]]) -> AbstractContextManager[None]:
        """Return a context in which the loop's ``advance`` is guarded, and these ``members`` begin each window."""
        self._members = [*members]
        if self._savepoint is None:
            return advance.guarded_advance(self._trainer, self.run)
        self._members.append(self._savepoint.take)
        return advance.guarded_advance(self._trainer, self.run, self._windows.keeps)

    def run(self, stock_advance: Callable[[], None]) -> None:
        """Run the loop's next micro-batch; if memory runs out, the window's first one, smaller."""
        while True:
            batches = 0
            try:
                if self._place.begins_window:
                    self._begin_window()
                    if self._lower_after_retries():
                        continue
                batches = len(self._windows.batches)
                stock_advance()
                return
            except Exception as error:
                if not self._may_run_again(error, batches):
                    raise
                failure = error
            release(failure)
            self._go_back(failure)

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the window's passes are done; refuse an optimizer that repeats only the last of several."""
        factor = self._place.factor
        if self._is_updating and factor > 1:
            raise UserError(
                f"{type(optimizer).__name__} evaluated its closure again, which repeats only the last of {factor} "
                'passes: use micro_batching="step", and let the loader yield whole effective batches.'
            )
        self._is_updating = True

    def tensors_kept(self) -> list[Tensor]:
        """Return the tensors of the savepoint, which lie on the device while a window runs."""
        return [] if self._savepoint is None else [*self._savepoint.tensors()]

    def _begin_window(self) -> None:
        self._is_updating = False
        self._is_begun = False
        self._place.begin_window()
        for begin_window in self._members:
            begin_window()
        self._is_begun = True
        if self._trainer.world_size > 1:
            self._collectives = ranks.collectives_run()

    def _lower_after_retries(self) -> bool:
        """Plan smaller micro-batches if the last two windows were short of memory; return whether that was done."""
        if self._retried is None or not self._retried.after_window():
            return False
        most = self._windows.largest_pass
        fits = most - max(1, most // LESS)
        if fits < 1:
            return False
        rank_zero_warn(
            "The allocator had to free its cache in two windows running, so memory is fragmented: micro-batches have "
            f"at most {fits} samples from here on, instead of {most}, with the same result."
        )
        self._limit.fall(fits)
        self._windows.begin_again()
        return True

    def _may_run_again(self, error: Exception, batches: int) -> bool:
        """Return whether the window can run again, or raise why not; so many batches were kept before the error."""
        if isinstance(error, UserError):
            return False
        if self._refusal is not None and is_out_of_memory(error):
            raise self._error(messages.OTHERS_WAIT, self._refusal) from error
        if self._savepoint is None or self._place.skips_backward:
            return False
        if self._place.begins_window and not self._is_begun:  # the members of a window ran out of memory
            return may_be_out_of_memory(error)
        if not self._is_begun:
            return False
        is_read = self._windows.can_read_again(batches)
        if self._is_updating or not is_read:
            if is_out_of_memory(error):
                sentence = messages.IN_THE_UPDATE if is_read else messages.IN_THE_LOADER
                error.add_note(sentence.format(memory=describe_memory(self._trainer.strategy.root_device)))
            return False
        return may_be_out_of_memory(error)

    def _go_back(self, failure: Exception) -> None:
        """Begin the window again in smaller micro-batches, or as a last resort says; else raise an error."""
        failed = self._windows.largest_pass
        fits = halved(failed)
        if fits is None and not is_ambiguous_out_of_memory(failure) and self._last_resort():
            fits = failed
        event = go_back(
            self._trainer,
            "training",
            failure,
            failed=failed,
            fits=fits,
            why_not_alone=self._why_not_alone,
            undo=self._undo,
            unit=self._limit.unit,
        )
        found = self._search(failed) if event.fits < failed else None
        if found is not None:
            event = replace(event, fits=found)
        self._limit.fall(event.fits)
        self._windows.begin_again()
        self._reporter.pending.append(event)

    def _undo(self) -> str | None:
        """Put back what the window's passes have changed; return what cannot be put back."""
        if self._savepoint is None or not self._is_begun:
            return None
        return undo(self._savepoint, self._windows.batches)

    def _why_not_alone(self) -> str | None:
        if self._is_begun and self._trainer.world_size > 1 and ranks.collectives_run() != self._collectives:
            what = "all_gather, all_reduce, a metric with dist_sync_on_step"
            return f"the step exchanges values with the other ranks ({what})"
        return None if self._exchange is None else self._exchange.failed()

    def _error(self, sentence: str, what: object = "") -> UserError:
        return messages.out_of_memory(self._trainer, "training", sentence, what)
