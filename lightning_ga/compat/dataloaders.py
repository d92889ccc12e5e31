"""Intercept how the fit loop and evaluation loops get their loaders.

Lightning's ``loops/fit_loop.py``, ``trainer/connectors/data_connector.py`` and ``utilities/combined_loader.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils._pytree import tree_unflatten

from lightning_ga.compat import closures, loops, patching
from lightning_ga.errors import UserError
from lightning_ga.loading.prebatched import Batches


@contextmanager
def intercepted_loaders(
    trainer: Any, cut: Callable[[Any], Any], around: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """Return a context in which the fit loop reads ``cut(loader)`` and calls ``around(setup_data)`` to set data up.

    ``setup_data`` asks ``_data_source`` for the loader, wherever it comes from (``loops/fit_loop.py:238``).
    """
    loop = trainer.fit_loop
    source, request, set_up = loop._data_source, type(loop._data_source).dataloader, type(loop).setup_data
    with (
        patching.shadowed(source, "dataloader", lambda: cut(request(source))),
        patching.shadowed(loop, "setup_data", lambda: around(lambda: set_up(loop))),
    ):
        yield


def forget_loaders(trainer: Any) -> None:
    """Let the fit loop set its data up again: the learning-rate finder of Lightning 2.5 leaves its own in place."""
    trainer.fit_loop._combined_loader = None


def batches_of(trainer: Any, loader: Any) -> Batches:
    """Read any training data as the fit loop would.

    As in ``fit_loop.setup_data`` (:235 to :257), collections of loaders are combined, each loader is prepared for the
    ranks, and samplers are given the epoch (:445).
    """
    module = patching.sibling(trainer, "utilities.combined_loader")
    connector = patching.sibling(trainer, "trainer.connectors.data_connector")
    states = patching.sibling(trainer, "trainer.states")
    combined = loader if isinstance(loader, module.CombinedLoader) else module.CombinedLoader(loader, "max_size_cycle")
    if combined._mode == "sequential":  # as in ``FitLoop.advance``, which never sees it
        raise UserError('The training data is a CombinedLoader(mode="sequential"), which fit() does not train on.')
    stages = states.TrainerFn.FITTING, states.RunningStage.TRAINING
    put_in_order(trainer, combined)
    combined.flattened = [connector._process_dataloader(trainer, *stages, part) for part in combined.flattened]

    def batches() -> Iterator[Any]:
        for part in combined.flattened:
            for sampler in (getattr(part, "sampler", None), getattr(part, "batch_sampler", None)):
                getattr(sampler, "set_epoch", int)(loops.training_epoch(trainer))
        # Asked for by ``next``: a ``for`` over the iterator would start its loaders once more.
        return (batch for batch, *_ in iter(partial(next, iter(combined), None), None))

    lengths = [sized_len(part) for part in combined.flattened]
    total = None if None in lengths else module._SUPPORTED_MODES[combined._mode]["fn"](lengths)
    return Batches(combined.flattened, partial(tree_unflatten, treespec=combined._spec), batches, total)


def states_of(trainer: Any, loaders: Sequence[Any]) -> list[Any]:
    """Return the states of those loaders that have one."""
    combined = patching.sibling(trainer, "utilities.combined_loader").CombinedLoader(list(loaders))
    states: list[Any] = combined._state_dicts()
    return states


def load_states(trainer: Any, loaders: Sequence[Any], states: list[Any]) -> None:
    """Restore the positions of loaders; Lightning refuses another number of them."""
    patching.sibling(trainer, "utilities.combined_loader").CombinedLoader(list(loaders))._load_state_dicts(states)


def load_later(trainer: Any, states: list[Any]) -> None:
    """Let the loop restore these states of loaders once it has set its data up (``fit_loop.py:553``)."""
    if states:
        trainer.fit_loop._combined_loader_states_to_load = states


def shares_shuffled(trainer: Any) -> bool:
    """Return whether the Trainer shares one order among its ranks, and so shuffles it, also on one rank.

    Lightning 2.6, ``_DataConnector._requires_distributed_sampler``.
    """
    connector = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler and connector.is_distributed)


@contextmanager
def micro_batch_units(trainer: Any) -> Iterator[tuple[bool, int | float]]:
    """Yield ``Trainer(use_distributed_sampler=…, limit_train_batches=…)``, which are others while data are set up.

    So ``setup_data`` neither shards data, nor cuts epochs, nor checks ``val_check_interval``: the training source does.
    """
    connector = trainer._accelerator_connector
    recipe = connector.use_distributed_sampler, trainer.limit_train_batches
    units = {} if trainer.limit_train_batches == 0 else {"limit_train_batches": 1.0}
    if getattr(trainer, "val_check_interval", None) is not None:  # not set if it is a time
        units["val_check_interval"] = 1.0
    with patching.replaced(connector, use_distributed_sampler=False), patching.replaced(trainer, **units):
        yield recipe


def resize_epoch(trainer: Any, length: int | None, *, at_most: int | None = None) -> None:
    """Set the number of micro-batches in all loops; a stream of unknown length is not read further than ``at_most``."""
    loop = trainer.fit_loop
    loop._combined_loader.limits = [inf if length is None else length]
    known = at_most if length is None else length
    loop.max_batches = inf if known is None else known
    if length is not None and loop._data_fetcher is not None:
        loop._data_fetcher.length = length


def iterate_again(trainer: Any) -> None:
    """Start the epoch's iterator anew, as ``loops/training_epoch_loop.py`` does from the second epoch on."""
    iter(trainer.fit_loop._data_fetcher)


def ran_out(trainer: Any) -> bool:
    """Return whether the epoch's loader has nothing more to yield (``loops/fetchers.py``)."""
    return bool(trainer.fit_loop._data_fetcher.done)


def put_in_order(trainer: Any, combined: Any) -> None:
    """Let loaders be read in order under ``overfit_batches``, which repeats their first batches, with a warning."""
    if trainer.overfit_batches:
        stage = patching.sibling(trainer, "trainer.states").RunningStage.TRAINING
        patching.sibling(trainer, "trainer.connectors.data_connector")._resolve_overfit_batches(combined, mode=stage)


def warn_of_overfitting(trainer: Any, loader: Any) -> None:
    """Let Lightning warn if ``overfit_batches`` turns shuffling off (``connectors/data_connector.py``)."""
    put_in_order(trainer, patching.sibling(trainer, "utilities.combined_loader").CombinedLoader(loader))


def evaluation_loaders(trainer: Any, loader: int) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the loaders of the running evaluation's batches, and a function that combines one batch of each."""
    combined = trainer._active_loop._combined_loader
    if combined._mode == "sequential":
        return [combined.flattened[loader]], lambda batches: batches[0]
    return combined.flattened, partial(tree_unflatten, treespec=combined._spec)


def show_loaders(trainer: Any, loader: Any) -> None:
    """Let ``trainer.train_dataloader`` return the user's loaders in their own structure.

    The property reads ``_iterables``; the loop reads ``flattened`` (``utilities/combined_loader.py``).
    """
    combined = patching.sibling(trainer, "utilities.combined_loader").CombinedLoader
    given = loader.iterables if isinstance(loader, combined) else loader
    trainer.fit_loop._combined_loader._iterables = given


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """Moves the batches of one loader from the host to the step (``loops/training_epoch_loop.py:320``)."""

    trainer: Any
    loader: int = 0  # among those of its stage

    @property
    def has_hooks(self) -> bool:
        """True if the user's own hooks change a batch during the transfer or after it."""
        return hooks_move_batches(self.trainer)

    @property
    def split_batch(self) -> Any:
        """The module's own ``split_batch``; ``None`` if it has none."""
        return getattr(self.trainer.lightning_module, "split_batch", None)

    def on_host(self, batch: Any) -> Any:
        """Run the part that precedes the transfer."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        return self.trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=self.loader)

    def moved(self, batch: Any) -> Any:
        """Run the rest: the transfer, and the hook that follows it on the device."""
        call = patching.sibling(self.trainer, "trainer.call")
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=self.loader)

    def to_device(self, batch: Any) -> Any:
        """Run both."""
        return self.moved(self.on_host(batch))


def hooks_move_batches(trainer: Any) -> bool:
    """Return whether the module or the datamodule overrides the transfer of batches or the hook after it."""
    owners = trainer.lightning_module, trainer.datamodule
    return closures.has_hook(owners, "transfer_batch_to_device", "on_after_batch_transfer")


def hooks_see_batches(trainer: Any) -> bool:
    """Return whether the module or the datamodule overrides any hook that a batch passes before the step."""
    owners = trainer.lightning_module, trainer.datamodule
    return closures.has_hook(owners, "on_before_batch_transfer") or hooks_move_batches(trainer)


@contextmanager
def intercepted_evaluation(trainer: Any, around: Callable[..., Any], move: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which steps of evaluation go through ``around``, and transfers of batches through ``move``.

    They are called as ``around(name, step, *arguments)`` and ``move(to_device, batch, dataloader_idx)``.
    """
    strategy = trainer.strategy
    to_device = type(strategy).batch_to_device

    def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        moved = partial(to_device, strategy, device=device, dataloader_idx=dataloader_idx)
        return move(moved, batch, dataloader_idx)

    with ExitStack() as held:
        held.enter_context(patching.shadowed(strategy, "batch_to_device", batch_to_device))
        for name in ("validation_step", "test_step", "predict_step"):
            step = partial(getattr(type(strategy), name), strategy)
            held.enter_context(patching.shadowed(strategy, name, partial(around, name, step)))
        yield
