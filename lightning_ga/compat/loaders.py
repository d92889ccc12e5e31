"""Intercept how the fit loop and evaluation loops get their loaders, and how batches reach the device.

Lightning's ``loops/fit_loop.py``, ``trainer/connectors/data_connector.py`` and ``utilities/combined_loader.py``.

Tested in tests/integration/test_features.py.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils._pytree import tree_unflatten

from lightning_ga.compat import patching
from lightning_ga.snapshot.user_objects import put_back_after


@contextmanager
def intercepted_loaders(
    trainer: Any, cut: Callable[[Any], Any], around: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """Return a context in which the fit loop reads ``cut(loader)`` and calls ``around(setup_data)`` to set data up.

    ``setup_data`` asks ``_data_source`` for the loader, wherever it comes from (``loops/fit_loop.py:238``).
    """
    loop = trainer.fit_loop
    source = loop._data_source
    with (
        patching.shadowed(source, "dataloader", lambda: cut(type(source).dataloader(source))),
        patching.shadowed(loop, "setup_data", lambda: around(lambda: type(loop).setup_data(loop))),
    ):
        yield


def forget_data(trainer: Any) -> None:
    """Let the fit loop set up its data anew; ``setup_data`` does nothing while it has some."""
    trainer.fit_loop._combined_loader = None


def shards(trainer: Any) -> bool:
    """Return whether the Trainer may share one order among its ranks: ``Trainer(use_distributed_sampler=…)``."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def shares_shuffled(trainer: Any) -> bool:
    """Return whether ranks share one shuffled order (``_DataConnector._requires_distributed_sampler``)."""
    return shards(trainer) and bool(trainer._accelerator_connector.is_distributed)


def unsharded(trainer: Any) -> AbstractContextManager[None]:
    """Return a context in which ``setup_data`` does not share data out among ranks."""
    return patching.replaced(trainer._accelerator_connector, use_distributed_sampler=False)


def show_loaders(trainer: Any, loader: Any) -> None:
    """Let ``trainer.train_dataloader`` return the user's loader.

    The property reads ``_iterables``; the loop reads ``flattened`` (``utilities/combined_loader.py``).
    """
    trainer.fit_loop._combined_loader._iterables = loader


def loaders_of(trainer: Any, loader_index: int | None = None) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the loaders of a batch, and a function that combines one batch of each.

    They are those of training, or of the running evaluation if a ``loader_index`` among its loaders is given.
    """
    loop = trainer.fit_loop if loader_index is None else trainer._active_loop
    combined = loop._combined_loader
    if loader_index is not None and combined._mode == "sequential":
        return [combined.flattened[loader_index]], lambda batches: batches[0]
    return combined.flattened, partial(tree_unflatten, treespec=combined._spec)


def loader_index_of_step(trainer: Any, arguments: tuple[Any, ...]) -> int:
    """Return the index of the loader whose batch a step of evaluation gets: its last argument if there are several."""
    combined = trainer._active_loop._combined_loader
    is_one_of_several = combined._mode == "sequential" and len(combined.flattened) > 1
    return int(arguments[-1]) if is_one_of_several else 0


def batches_begun(trainer: Any) -> int:
    """Return how many batches the running evaluation has begun (``loops/evaluation_loop.py:423``)."""
    return int(trainer._active_loop.batch_progress.current.ready)


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """Moves the batches of one loader from the host to the step (``loops/training_epoch_loop.py:322``)."""

    trainer: Any
    loader_index: int = 0  # among those of its stage

    @property
    def owners(self) -> tuple[Any, Any]:
        """The module and the data module, if any, whose hooks a transfer runs."""
        return self.trainer.lightning_module, self.trainer.datamodule

    @property
    def split_batch(self) -> Any:
        """The module's own ``split_batch``; ``None`` if it has none."""
        return getattr(self.trainer.lightning_module, "split_batch", None)

    def to_device(self, batch: Any) -> Any:
        """Run the hooks of a transfer and the transfer."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=self.loader_index)
        return patching.sibling(self.trainer, "trainer.call")._call_strategy_hook(
            self.trainer, "batch_to_device", batch, dataloader_idx=self.loader_index
        )

    def for_trial(self, batch: Any) -> Any:
        """Move a batch that training does not get; what the hooks have changed is put back."""
        with put_back_after(*self.owners):
            return self.to_device(batch)


@contextmanager
def intercepted_evaluation(trainer: Any, around: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which steps of evaluation run as ``around(name, step, *arguments)``."""
    strategy = trainer.strategy
    with ExitStack() as held:
        for name in ("validation_step", "test_step", "predict_step"):
            step = partial(getattr(type(strategy), name), strategy)
            held.enter_context(patching.shadowed(strategy, name, partial(around, name, step)))
        yield
