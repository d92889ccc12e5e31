"""The batches of evaluation loops: each is a window of its own, which ``window_run`` runs."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from lightning_ga.batch.merge import merge_outputs
from lightning_ga.compat import closures, dataloaders, loops, ranks
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.oom_messages import OomReporter
from lightning_ga.fit.parts import Part, Piece, StageBatches, Window
from lightning_ga.fit.window_run import run_window
from lightning_ga.loading.reader import BatchSource, CollatedAgain, CollatedBatches, ReadyMadeBatches, is_collated
from lightning_ga.loading.samples import collect_samples
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.config import Options
from lightning_ga.plan.weights import count_items


class Evaluation(Window, StageBatches):
    """Puts an engine between the loops and their batches, and runs those of evaluation; ``training`` has its own.

    What a piece logs and returns weighs what ``normalize`` counts in it, where that can be called on its batches.
    """

    def __init__(
        self, trainer: Any, reporter: OomReporter, options: Options, training: StageBatches | None = None
    ) -> None:
        self._trainer, self._normalize, retries = trainer, options.normalize, options.on_oom == "split"
        self.engine = Engine(trainer, reporter, retries=retries, training=training or self, evaluation=self)
        self.number = self.loader = 0  # of the current batch in its loader, and of that loader
        self.parts: list[Part] = []  # while a step runs
        self._step: Callable[..., Any] = lambda *_: None
        self._others: list[Any] = []  # what it takes besides the batch
        self._held = ExitStack()
        self._held.enter_context(dataloaders.intercepted_evaluation(trainer, self.evaluate, self.engine.to_device))

    def stop(self) -> None:
        """Take everything out."""
        self.engine.stop()
        self._held.close()

    def evaluate(self, name: str, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step of an evaluation loop."""
        trainer, engine, policy = self._trainer, self.engine, self.engine.policy
        engine.allocator.begin_again()  # evaluation has a limit of its own
        guarded = engine.is_active and (policy.retries or policy.refusal is not None)
        if not guarded or closures.takes_an_iterator(trainer.lightning_module, name):
            return step(*arguments)
        if policy.retries:
            ranks.share_buffers_before_forward(trainer)
        engine.has_validated = True
        batch, *self._others = arguments  # its number and that of its loader follow only if the step takes them
        self._step, self.stage, self.savepoint = step, loops.stage(trainer), engine.savepoint("evaluation")
        self.parts = [Part(batch, self.number, engine.move, self.loader, host=engine.host)]
        if policy.retries and self.number == 0:
            self.savepoint.look_again()
        result = run_window(engine, self, begins=True)
        self.parts = []
        if not result.sizes:
            return result.results[0]
        merge = partial(merge_outputs, averages=self.stage != "prediction")
        return engine.retry_once(lambda: merge(result.results, result.sizes, result.weights))

    def run_pass(self, part: Part, batch: Any, piece: Piece | None, weight: float) -> Any:
        """Run the step."""
        return self._step(batch, *self._others)

    def weigh(self, part: Part, cut: Any, piece: Piece) -> float:
        """Return what a piece weighs in means: its samples, unless its items can be counted."""
        try:
            return count_items(self._normalize, cut) if callable(self._normalize) else float(piece.samples)
        except Exception as error:  # the counter is made for batches of training, which others may not be like
            if is_out_of_memory(error):
                raise
        return float(piece.samples)

    def batch_source(self, loader: int) -> BatchSource:
        """Return how the batches of a loader are made."""
        loaders, combine = dataloaders.evaluation_loaders(self._trainer, loader)
        if all(map(is_collated, loaders)):
            return CollatedBatches(loaders, combine)
        return ReadyMadeBatches(lambda: [part.batch for part in self.parts], prepared=True)

    def fetch(self, number: int, loader: int = 0, seed: int = 0) -> CollatedAgain | None:
        """Fetch the samples of a batch again."""
        (source, *others), _ = dataloaders.evaluation_loaders(self._trainer, loader)
        if others or not is_collated(source) or isinstance(source.dataset, IterableDataset):
            return None
        indices = next(islice(source.batch_sampler, number, None), None)
        return None if indices is None else CollatedAgain(source, collect_samples(source, list(indices), seed=seed))
