"""How the fit loop and evaluation loops come to their loaders.

Read in lightning 2.6.6 and 2.5.0; ``tests/compat`` fails when a name or an order that is relied on here changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._pytree import tree_unflatten

from lightning_ga.compat import loops, patching
from lightning_ga.errors import UserError


def intercept_loaders(trainer: Any, cut: Callable[[Any], Any], around: Callable[[Callable[[], None]], None]) -> None:
    """Let the fit loop read its training loader through ``cut`` and set data up through ``around``.

    ``fit_loop.setup_data`` asks ``_data_source`` for the loader wherever it comes from: ``fit()``,
    the module or a datamodule (``loops/fit_loop.py:238``).
    """
    loop = trainer.fit_loop
    source, request, set_up = loop._data_source, type(loop._data_source).dataloader, type(loop).setup_data
    patching.shadow(source, "dataloader", lambda: cut(request(source)))
    patching.shadow(loop, "setup_data", lambda: around(lambda: set_up(loop)))


def forget_loaders(trainer: Any) -> None:
    """Let the fit loop set its data up again: the learning rate finder of Lightning 2.5 leaves what it trained on."""
    trainer.fit_loop._combined_loader = None


def batches_of(
    trainer: Any, loader: Any
) -> tuple[list[Any], Callable[[list[Any]], Any], Callable[[], Iterator[Any]], int | None]:
    """What the loop would make of any training data.

    Its loaders, what puts their batches together, what starts them anew and yields batches, and how many
    there are if that is known.

    As ``fit_loop.setup_data`` does (:235 to :257): collections of loaders are combined, each loader is
    prepared for the ranks, and samplers are told the epoch (:445).
    """
    module = patching.sibling(trainer, "utilities.combined_loader")
    connector = patching.sibling(trainer, "trainer.connectors.data_connector")
    states = patching.sibling(trainer, "trainer.states")
    combined = loader if isinstance(loader, module.CombinedLoader) else module.CombinedLoader(loader, "max_size_cycle")
    if combined._mode == "sequential":  # as in ``FitLoop.advance``, which never sees it
        raise UserError('The training data is a CombinedLoader(mode="sequential"), which fit() does not train on.')
    stages = states.TrainerFn.FITTING, states.RunningStage.TRAINING
    combined.flattened = [connector._process_dataloader(trainer, *stages, part) for part in combined.flattened]

    def batches() -> Iterator[Any]:
        for part in combined.flattened:
            for sampler in (getattr(part, "sampler", None), getattr(part, "batch_sampler", None)):
                getattr(sampler, "set_epoch", int)(loops.training_epoch(trainer))
        return _batches(iter(combined))

    lengths = [length_of(part) for part in combined.flattened]
    known = [length for length in lengths if length is not None]
    total = None
    if known and len(known) == len(lengths):
        total = {"min_size": min(known), "sequential": sum(known)}.get(combined._mode, max(known))
    return combined.flattened, combine_batches(combined), batches, total


def _batches(iterator: Iterator[Any]) -> Iterator[Any]:
    """The batches of a CombinedLoader; a ``for`` would start its loaders once more."""
    while True:
        try:
            batch, *_ = next(iterator)
        except StopIteration:
            return
        yield batch


def length_of(loader: Any) -> int | None:
    """Batches of any loader, ``None`` if it does not tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def load_later(trainer: Any, states: list[Any]) -> None:
    """Let the loop restore these states of loaders once it has set its data up (``fit_loop.py:553``)."""
    if states:
        trainer.fit_loop._combined_loader_states_to_load = states


def release_loaders(trainer: Any) -> None:
    """Undo ``intercept_loaders``."""
    patching.unshadow(trainer.fit_loop._data_source, "dataloader")
    patching.unshadow(trainer.fit_loop, "setup_data")


@contextmanager
def micro_batch_units(trainer: Any) -> Iterator[None]:
    """Set data up without sharding it again and without reading the recipe's limits as micro-batches.

    ``setup_data`` re-creates loaders for a distributed sampler (``connectors/data_connector.py``,
    ``_prepare_dataloader``), cuts epochs at ``limit_train_batches`` and checks ``val_check_interval``
    against the number of batches; here all three are the feed's.
    """
    connector = trainer._accelerator_connector
    kept = connector.use_distributed_sampler, trainer.limit_train_batches
    interval = getattr(trainer, "val_check_interval", None)  # not set where it is a time
    connector.use_distributed_sampler = False
    if trainer.limit_train_batches != 0:
        trainer.limit_train_batches = 1.0
    if interval is not None:
        trainer.val_check_interval = 1.0
    try:
        yield
    finally:
        connector.use_distributed_sampler, trainer.limit_train_batches = kept
        if interval is not None:
            trainer.val_check_interval = interval


def shards_data(trainer: Any) -> bool:
    """``Trainer(use_distributed_sampler=…)``."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def resize_epoch(trainer: Any, length: int | None, *, at_most: int | None = None) -> None:
    """Tell the loops how many micro-batches the epoch has: four places hold a copy of it.

    Args:
        trainer: The Trainer.
        length: How many; ``None`` for a stream, which ends where it pleases.
        at_most: After how many a stream is not read any further.
    """
    loop = trainer.fit_loop
    loop._combined_loader.limits = [float("inf") if length is None else length]
    known = at_most if length is None else length
    loop.max_batches = float("inf") if known is None else known
    if length is not None and loop._data_fetcher is not None:
        loop._data_fetcher.length = length


def iterate_again(trainer: Any) -> None:
    """Start the epoch's iterator anew, as ``loops/training_epoch_loop.py`` does from the second epoch on."""
    iter(trainer.fit_loop._data_fetcher)


def ran_out(trainer: Any) -> bool:
    """Return whether the epoch's loader has nothing more to yield (``loops/fetchers.py``)."""
    return bool(trainer.fit_loop._data_fetcher.done)


def warn_of_overfitting(trainer: Any, loader: Any) -> None:
    """Let Lightning warn if ``overfit_batches`` turns shuffling off (``connectors/data_connector.py``)."""
    if trainer.overfit_batches:
        combined = patching.sibling(trainer, "utilities.combined_loader").CombinedLoader(loader)
        stage = patching.sibling(trainer, "trainer.states").RunningStage.TRAINING
        patching.sibling(trainer, "trainer.connectors.data_connector")._resolve_overfit_batches(combined, mode=stage)


def combine_batches(combined: Any) -> Callable[[list[Any]], Any]:
    """What puts batches of a CombinedLoader's loaders together as it does (``utilities/combined_loader.py``)."""
    return lambda batches: tree_unflatten(batches, combined._spec)


def evaluation_loaders(trainer: Any, loader: int) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The loaders that the running evaluation's batches come from, and what puts their batches together."""
    combined = trainer._active_loop._combined_loader
    if combined._mode == "sequential":
        return [combined.flattened[loader]], lambda batches: batches[0]
    return combined.flattened, combine_batches(combined)


def show_loaders(trainer: Any, loader: Any) -> None:
    """Let ``trainer.train_dataloader`` be what the user gave, in its own structure.

    The property reads ``_iterables``, and the loop what is flattened (``utilities/combined_loader.py``).
    """
    combined = patching.sibling(trainer, "utilities.combined_loader").CombinedLoader
    given = loader.iterables if isinstance(loader, combined) else loader
    trainer.fit_loop._combined_loader._iterables = given
