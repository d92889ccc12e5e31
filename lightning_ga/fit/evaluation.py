"""One batch of an evaluation loop."""

from collections.abc import Callable
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from lightning_ga.compat import dataloaders, loops
from lightning_ga.fit.batch_task import BatchTask
from lightning_ga.fit.pieces import Piece
from lightning_ga.loading.batch_source import is_collated
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.loading.samples import collect_samples


class EvaluatedBatch(BatchTask):
    """A batch, and an attempt at any part of it, which changes nothing of its own.

    Args:
        trainer: The Trainer.
        step: Runs the loop's step.
        batch: The batch.
        number: The batch's number.
        loader: The number of its loader, where there are several.
    """

    def __init__(self, trainer: Any, step: Callable[..., Any], batch: Any, number: int, loader: int | None) -> None:
        super().__init__(batch, loops.stage(trainer), loader or 0)
        self._trainer, self._step, self._number = trainer, step, number
        self.is_first = number == 0
        self._others = (number,) if loader is None else (number, loader)

    def attempt(self, piece: Piece | None, *, from_start: bool) -> "EvaluatedBatch":
        """Return what runs any part."""
        return self

    def __call__(self, part: Any) -> Any:
        """Run these samples."""
        return self._step(part, *self._others)

    def undo(self) -> str | None:
        """Undo nothing."""
        return None

    def again(self) -> CollatedAgain | None:
        """Fetch its samples again."""
        (loader, *others), _ = dataloaders.evaluation_loaders(self._trainer, self.loader)
        if others or not is_collated(loader) or isinstance(loader.dataset, IterableDataset):
            return None
        indices = next(islice(loader.batch_sampler, self._number, None), None)
        return None if indices is None else CollatedAgain(loader, collect_samples(loader, list(indices)))
