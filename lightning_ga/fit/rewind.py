"""After an out-of-memory error, run the window again from its start, in smaller micro-batches.

Weights do not change within a window, so the window is the unit of undo. The savepoint keeps the other small state that
passes change. Gradients of a failed attempt are zeroed by the loop, as always, with the window's first backward pass.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat import advance, ranks
from lightning_ga.compat.place import LoopPlace
from lightning_ga.compat.reduction import Exchange
from lightning_ga.errors import UserError
from lightning_ga.fit import messages
from lightning_ga.fit.windows import TrainingWindows
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import (
    is_ambiguous_out_of_memory,
    is_out_of_memory,
    may_be_out_of_memory,
    release,
    retry_once,
)
from lightning_ga.snapshot.copies import versions, with_own_containers
from lightning_ga.snapshot.savepoint import Savepoint


class Rewinder:
    """Owns the one ``try`` around the loop's ``advance``, the savepoint, and the flag that the update has begun."""

    def __init__(
        self,
        trainer: Any,
        place: LoopPlace,
        windows: TrainingWindows,
        reporter: messages.OomReporter,
        *,
        retries: bool,
        exchange: Exchange | None,
    ) -> None:
        self._trainer, self._place, self._windows, self._reporter = trainer, place, windows, reporter
        self._exchange, self._refusal = exchange, ranks.obstacle(trainer) if retries else None
        module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
        self.savepoint = Savepoint(module, lambda: loop._results) if retries and self._refusal is None else None
        self.is_updating = False  # whether the window's passes are done: what follows is the optimizer's update
        self._is_taken = False
        self._window = -1  # none before the first; a resumed run may begin within one
        self._batches: list[tuple[Any, list[Tensor], Sequence[int]]] = []  # of the window, on the host
        self._collectives = 0

    def guarding(self, *, in_step: bool) -> AbstractContextManager[None]:
        """Return a context in which the loop's ``advance`` is guarded; batches that the step cuts are kept."""
        keeps = in_step and self.savepoint is not None
        return advance.guarded_advance(self._trainer, self.run, self._keep_batch if keeps else None)

    def run(self, stock_advance: Callable[[], None]) -> None:
        """Run the loop's next micro-batch; if memory runs out, the window's first one, smaller."""
        while True:
            seen = -1
            try:
                if self._place.begins_window:
                    self._begin_window()
                seen = len(self._batches)
                stock_advance()
                return
            except Exception as error:
                if not self._may_run_again(error, seen):
                    raise
                failure = error
            release(failure)
            self._go_back(failure)

    def _keep_batch(self, batch: Any) -> None:
        """Keep a batch as the loader made it, because steps change containers."""
        tensors = [*tensors_in(batch)]
        self._batches.append((with_own_containers(batch), tensors, versions(tensors)))

    def tensors_kept(self) -> list[Tensor]:
        """Return the tensors of the savepoint, which lie on the device while a window runs."""
        return [] if self.savepoint is None else [*self.savepoint.tensors()]

    def _begin_window(self) -> None:
        self.is_updating = self._is_taken = False
        self._batches = []
        self._windows.begin_window()
        self._window = self._place.next_window
        if self._exchange is not None:
            self._exchange.begin_window()
        if self.savepoint is not None:
            self.savepoint.take()
            self._is_taken = True
        self._collectives = ranks.collectives_run()

    def _may_run_again(self, error: Exception, seen: int) -> bool:
        """Return whether the window can run again, or raise why not; ``seen`` batches were kept before the error."""
        if isinstance(error, UserError):
            return False
        if self._refusal is not None and is_out_of_memory(error):
            raise self._error(messages.OTHERS_WAIT, self._refusal) from error
        if self.savepoint is None or self._window < 0 or self._place.skips_backward:
            return False
        is_read = self._windows.window is not None or len(self._batches) != seen  # so that it can be read again
        if self.is_updating or not is_read:
            if is_out_of_memory(error):
                sentence = messages.IN_THE_UPDATE if is_read else messages.IN_THE_LOADER
                error.add_note(sentence.format(memory=describe_memory(self._trainer.strategy.root_device)))
            return False
        return may_be_out_of_memory(error)

    def _go_back(self, failure: Exception) -> None:
        """Begin the window again in smaller micro-batches; raise an error if that is not possible."""
        sizes = self._windows.shrink()
        if sizes is None:
            one = messages.ONE_CHUNK if self._windows.unit == "chunks" else messages.ONE_SAMPLE
            raise failure if is_ambiguous_out_of_memory(failure) else self._error(one) from failure
        if why := self._why_not_alone():
            raise self._error(messages.OTHERS_WAIT, why) from failure
        if moved := self._restore():
            raise self._error(messages.CHANGED, moved) from failure
        memory = describe_memory(self._trainer.strategy.root_device)
        event = messages.OomEvent("training", self._trainer.global_step, *sizes, memory, self._windows.unit)
        self._reporter.pending.append(event)
        self._windows.begin_window_again(self._window)
        if self._batches:
            advance.unread(self._trainer, [batch for batch, *_ in self._batches])

    def _restore(self) -> str | None:
        """Put back what the window's passes have changed; return what cannot be put back."""
        if self._is_taken and self.savepoint is not None and (moved := retry_once(self.savepoint.restore)):
            return f"{moved}, of which no copy is kept"
        for _, tensors, before in self._batches:
            if versions(tensors) != before:
                return "a tensor of its batch in place, and the batch cannot be read again"
        return None

    def _why_not_alone(self) -> str | None:
        if ranks.collectives_run() != self._collectives:
            return "the step exchanges values with the other ranks (all_gather, all_reduce, a log with sync_dist)"
        return None if self._exchange is None else self._exchange.failed()

    def _error(self, sentence: str, what: object = "") -> UserError:
        return messages.out_of_memory(self._trainer, "training", sentence, what)
