"""Install survival of out-of-memory errors in a Trainer, and take it out again."""

from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_ga.compat import closures, loops, transfer
from lightning_ga.errors import UserError
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.evaluation import EvaluationBatches, evaluate
from lightning_ga.fit.messages import OomReporter, in_a_hook, in_the_update
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.fit.window import TrainingWindow
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.memory.oom import is_out_of_memory


class OomHandler:
    """Puts the engine between the loops and the batches of all stages; ``data`` are those of training, if any."""

    def __init__(self, trainer: Any, *, retries: bool, reporter: OomReporter, data: TrainingData | None = None) -> None:
        self._trainer, self._retries, self._data = trainer, retries, data
        self.evaluation = batches = EvaluationBatches(trainer)
        self.engine = Engine(trainer, reporter, retries=retries, training=data or batches, evaluation=batches)
        self.window: TrainingWindow | None = None
        self._held, self._training_held = ExitStack(), ExitStack()  # what is to be given back, and what after training
        step = partial(evaluate, self.engine, batches)
        self._held.enter_context(transfer.intercepted_evaluation(trainer, step, self.engine.to_device))

    def guard_training(self, gradients: WindowGradients, changing: Collection[str]) -> None:
        """Guard training from here on; its step is known to change the tensors with the names ``changing``."""
        assert self._data is not None, "a stage without training has no windows"
        self.engine.guard_training(changing)
        source = self._data.source
        # Windows may hold micro-batches without a sample, which are not to be run.
        fills_up = source.keeps_groups and not source.cut_in_step
        if self._retries or source.cut_in_step or fills_up or self.engine.reducer is not None:
            self.window = TrainingWindow(self._trainer, self.engine, gradients, self._data, fills_up=fills_up)
            self._training_held.enter_context(closures.intercepted_closures(self._trainer, self.window.closure))

    def begin_epoch(self) -> None:
        """Begin an epoch of training."""
        if self.window is not None:
            self.window.begin_epoch()

    def end_batch(self) -> bool:
        """End a micro-batch of training, and return whether its window is over."""
        return loops.window_is_over(self._trainer) if self.window is None else self.window.end_batch()

    def explain(self, error: BaseException) -> None:
        """Add a note to an out-of-memory error that nothing could be done about: where it was, and the way out."""
        self.engine.reporter.tell()
        if self._retries and self.window is not None and not isinstance(error, UserError) and is_out_of_memory(error):
            note = in_the_update if self.window.is_updating else in_a_hook
            error.add_note(note(self.engine.memory()))

    def stop_training(self) -> None:
        """Give the training loop its own ways back."""
        self.engine.reporter.tell()
        self._training_held.close()

    def stop(self) -> None:
        """Take everything out."""
        self.stop_training()
        self.engine.stop()
        self._held.close()
