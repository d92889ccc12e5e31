"""The batches of evaluation loops: each is a transaction."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from lightning_ga.batch.merge import merge_outputs
from lightning_ga.compat import closures, dataloaders, loops, ranks
from lightning_ga.fit.engine import Engine, Part
from lightning_ga.loading.batch_source import BatchSource, CollatedBatches, ReadyMadeBatches, is_collated
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.loading.samples import collect_samples


class Evaluation:
    """Runs the steps of evaluation loops through the engine."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._batch: Any = None

    def step(self, engine: Engine, name: str, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step of an evaluation loop."""
        trainer, policy = self._trainer, engine.policy
        guarded = engine.is_active and (policy.retries or policy.refusal is not None)
        if not guarded or closures.takes_an_iterator(trainer.lightning_module, name):
            return step(*arguments)
        if policy.retries:
            ranks.share_buffers_before_forward(trainer)
        batch, number, *loader = arguments  # a loop's loaders are numbered where there are several
        part = Part(batch, lambda _, cut, *__: step(cut, number, *loader), engine.move, number, *loader or (0,))
        part.again = partial(self._again, number, part.loader)
        savepoint = engine.savepoint("evaluation")
        if policy.retries and number == 0:
            savepoint.look_again()
        self._batch = batch
        done = engine.run(loops.stage(trainer), [part], savepoint, lambda: None)
        self._batch = None
        if not done.sizes:
            return done.results[0]
        return engine.once_more(lambda: merge_outputs(done.results, done.sizes))

    def source(self, loader: int) -> BatchSource:
        """What is known of the batches of a loader."""
        loaders, combine = dataloaders.evaluation_loaders(self._trainer, loader)
        if all(map(is_collated, loaders)):
            return CollatedBatches(loaders, combine)
        return ReadyMadeBatches(lambda: [self._batch], prepared=True)

    def _again(self, number: int, loader_number: int) -> CollatedAgain | None:
        """Fetch the samples of a batch again."""
        (loader, *others), _ = dataloaders.evaluation_loaders(self._trainer, loader_number)
        if others or not is_collated(loader) or isinstance(loader.dataset, IterableDataset):
            return None
        indices = next(islice(loader.batch_sampler, number, None), None)
        return None if indices is None else CollatedAgain(loader, collect_samples(loader, list(indices)))
