"""The batches of evaluation loops: each is a window of its own."""

from collections.abc import Callable
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from lightning_ga.batch.merge import merge_outputs
from lightning_ga.compat import closures, dataloaders, loops, ranks
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.parts import Part, Piece, StageBatches, Window
from lightning_ga.fit.window_run import run_window
from lightning_ga.loading.reader import BatchSource, CollatedAgain, CollatedBatches, ReadyMadeBatches, is_collated
from lightning_ga.loading.samples import collect_samples


class EvaluationBatches(StageBatches):
    """What is known of the batches of evaluation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.number = self.loader = 0  # of the current batch in its loader, and of that loader
        self.batch: Any = None  # while its step runs

    def batch_source(self, loader: int) -> BatchSource:
        """Return how the batches of a loader are made."""
        loaders, combine = dataloaders.evaluation_loaders(self._trainer, loader)
        if all(map(is_collated, loaders)):
            return CollatedBatches(loaders, combine)
        return ReadyMadeBatches(lambda: [self.batch], prepared=True)

    def fetch(self, number: int, loader: int = 0, seed: int = 0) -> CollatedAgain | None:
        """Fetch the samples of a batch again."""
        (source, *others), _ = dataloaders.evaluation_loaders(self._trainer, loader)
        if others or not is_collated(source) or isinstance(source.dataset, IterableDataset):
            return None
        indices = next(islice(source.batch_sampler, number, None), None)
        return None if indices is None else CollatedAgain(source, collect_samples(source, list(indices), seed=seed))


class EvaluatedBatch(Window):
    """One batch of evaluation, and the step that the loop runs on it."""

    def __init__(self, engine: Engine, stage: str, batches: EvaluationBatches, step: Callable[[Any], Any]) -> None:
        self.stage, self.savepoint = stage, engine.savepoint("evaluation")
        self._step = step
        self.parts = [Part(batches.batch, batches.number, engine.move, batches.loader, host=engine.host)]

    def run_pass(self, part: Part, batch: Any, piece: Piece | None, weight: float) -> Any:
        """Run the step."""
        return self._step(batch)


def evaluate(engine: Engine, batches: EvaluationBatches, name: str, step: Callable[..., Any], *arguments: Any) -> Any:
    """Run a step of an evaluation loop."""
    trainer, policy = engine.trainer, engine.policy
    engine.allocator.begin_again()  # evaluation has a limit of its own
    guarded = engine.is_active and (policy.retries or policy.refusal is not None)
    if not guarded or closures.takes_an_iterator(trainer.lightning_module, name):
        return step(*arguments)
    if policy.retries:
        ranks.share_buffers_before_forward(trainer)
    engine.has_evaluated = True
    batches.batch, *others = arguments  # its number and that of its loader follow only if the step takes them
    stage = loops.stage(trainer)
    window = EvaluatedBatch(engine, stage, batches, lambda batch: step(batch, *others))
    if policy.retries and batches.number == 0:
        window.savepoint.look_again()
    result = run_window(engine, window)
    batches.batch = None
    if not result.sizes:
        return result.results[0]
    return engine.retry_once(lambda: merge_outputs(result.results, result.sizes))
