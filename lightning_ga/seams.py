"""Every touch of Lightning's private parts, in one place.

Read in lightning 2.6.6 and 2.5.0; ``tests/test_seams.py`` fails when a name or an order that is
relied on here changes. Patches are set on instances, never on classes, and are taken back by
deleting the attribute that shadows the method.
"""

import inspect
import os
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from lightning_ga.errors import UserError
from lightning_ga.snapshot import Attributes


def shadow(instance: Any, method: str, replacement: Callable[..., Any]) -> None:
    """Let one instance answer a method with a replacement."""
    instance.__dict__[method] = replacement


def unshadow(instance: Any, method: str) -> None:
    """Give an instance its class's method back."""
    instance.__dict__.pop(method, None)


def intercept_loaders(trainer: Any, cut: Callable[[Any], Any], around: Callable[[Callable[[], None]], None]) -> None:
    """Let the fit loop read its training loader through ``cut`` and set data up through ``around``.

    ``fit_loop.setup_data`` asks ``_data_source`` for the loader wherever it comes from: ``fit()``,
    the module or a datamodule (``loops/fit_loop.py:238``).
    """
    loop = trainer.fit_loop
    source, request, set_up = loop._data_source, type(loop._data_source).dataloader, type(loop).setup_data
    shadow(source, "dataloader", lambda: cut(request(source)))
    shadow(loop, "setup_data", lambda: around(lambda: set_up(loop)))


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
    module = sibling(trainer, "utilities.combined_loader")
    connector, states = sibling(trainer, "trainer.connectors.data_connector"), sibling(trainer, "trainer.states")
    combined = loader if isinstance(loader, module.CombinedLoader) else module.CombinedLoader(loader, "max_size_cycle")
    if combined._mode == "sequential":  # as in ``FitLoop.advance``, which never sees it
        raise UserError('The training data is a CombinedLoader(mode="sequential"), which fit() does not train on.')
    stages = states.TrainerFn.FITTING, states.RunningStage.TRAINING
    combined.flattened = [connector._process_dataloader(trainer, *stages, part) for part in combined.flattened]

    def batches() -> Iterator[Any]:
        for part in combined.flattened:
            for sampler in (getattr(part, "sampler", None), getattr(part, "batch_sampler", None)):
                getattr(sampler, "set_epoch", int)(training_epoch(trainer))
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
    unshadow(trainer.fit_loop._data_source, "dataloader")
    unshadow(trainer.fit_loop, "setup_data")


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


def training_epoch(trainer: Any) -> int:
    """The epoch whose order the loop asks samplers for (``loops/fit_loop.py:445``)."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def micro_batch_index(trainer: Any) -> int:
    """Index in the epoch of the micro-batch that is being trained on."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready) - 1


def window_is_over(trainer: Any) -> bool:
    """Whether the optimizer stepped on the micro-batch just trained on."""
    return not trainer.fit_loop._should_accumulate()


def restarts_in_epoch(trainer: Any) -> bool:
    """Whether the loops were restored from a checkpoint and go on with its counters."""
    return bool(trainer.fit_loop.epoch_loop.restarting)


def batches_done(trainer: Any) -> tuple[int, int]:
    """Batches of the epoch that a restored loop has trained on (none of one that is over), and those before it."""
    progress, epochs = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.epoch_progress.current
    done = int(progress.current.ready) if epochs.started > epochs.processed else 0
    return done, int(progress.total.ready) - done


def shared_seed(trainer: Any) -> int:
    """Rank 0's seed, on every rank: that of ``seed_everything``, which spawned ranks begin with, or torch's."""
    return int(trainer.strategy.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))))


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


def move_to_micro_batch(trainer: Any, done: int, *, same_epoch: bool) -> None:
    """Let a restored epoch go on after ``done`` micro-batches, in this run's own units.

    A checkpoint counts the micro-batches of the run that wrote it; the loop's totals move along.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    pending = loop.restarted_on_train_batch_end
    moved = done - progress.current.ready if same_epoch else 0
    progress.is_last_batch = same_epoch and progress.is_last_batch
    for name in ("ready", "started", "processed", "completed"):
        value = done - (1 if pending and name == "completed" else 0)
        setattr(progress.current, name, value)
        setattr(progress.total, name, getattr(progress.total, name) + moved)


def begin_next_epoch(trainer: Any) -> None:
    """Let a restored loop begin its next epoch as any other, if the one of the checkpoint was over.

    Restored from a checkpoint of an epoch's last micro-batch, the loop takes itself for in the middle of
    the next epoch (``fit_loop.py:398`` and ``:447``). Nobody is told that it starts, and the count of
    epochs that have begun stays behind: a checkpoint written in it would be taken for one between
    epochs, and the next resume would lose its place and an optimizer step.
    """
    loop = trainer.fit_loop
    progress = loop.epoch_progress.current
    if progress.ready != progress.processed:
        return
    if progress.completed < progress.processed:  # with max_steps, a checkpoint written in on_train_epoch_end
        loop.epoch_progress.increment_completed()
    if hasattr(loop, "reset_restart_stage"):  # 2.5.0 has no stages
        loop.reset_restart_stage()


def reopen_epoch(trainer: Any) -> None:
    """Let a restored loop go on in an epoch that ``max_steps`` ended early, as stock Lightning does.

    A checkpoint of its ``on_train_epoch_end`` counts the epoch as processed. With ``max_steps`` the loop
    trains on in it all the same (``fit_loop.py``: ``on_run_start``, ``_iteration_based_training``), but
    counts it twice; without, it begins the next one.
    """
    loop = trainer.fit_loop
    progress, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    if progress.current.completed < progress.current.processed and not batches.is_last_batch:
        progress.current.processed -= 1
        progress.total.processed -= 1


def align_logger_steps(trainer: Any) -> None:
    """Let a restored loop give loggers the number of optimizer steps, once it has restarted.

    A checkpoint is written before that count rises. The loop makes up for it by adding one, on its
    reset (``training_epoch_loop.py:190``) or, where validation was due, by going through the end of
    the micro-batch once more (:277).
    """
    loop = trainer.fit_loop.epoch_loop
    on_reset = loop.restarted_on_train_batch_end or not loop.restarted_on_last
    rises = on_reset or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    loop._batches_that_stepped = loop.global_step - int(rises)


_REPEATS = "You're resuming from a checkpoint that ended before the epoch ended"


def warn_of_overfitting(trainer: Any, loader: Any) -> None:
    """Let Lightning warn if ``overfit_batches`` turns shuffling off (``connectors/data_connector.py``)."""
    if trainer.overfit_batches:
        combined = sibling(trainer, "utilities.combined_loader").CombinedLoader(loader)
        stage = sibling(trainer, "trainer.states").RunningStage.TRAINING
        sibling(trainer, "trainer.connectors.data_connector")._resolve_overfit_batches(combined, mode=stage)


def expect_positions_to_be_kept() -> None:
    """Silence Lightning's warning that a resume in mid-epoch repeats samples: here it does not.

    ``training_epoch_loop.py:215`` warns for every loader that keeps no state of its own.
    """
    warnings.filterwarnings("ignore", message=_REPEATS)


def expect_nothing_of_positions() -> None:
    """Undo ``expect_positions_to_be_kept``."""
    ours = [entry for entry in warnings.filters if isinstance(entry[1], re.Pattern) and entry[1].pattern == _REPEATS]
    for entry in ours:
        warnings.filters.remove(entry)  # type: ignore[attr-defined]


def largest_over_ranks(trainer: Any, value: int) -> int:
    """The largest of one number over all ranks."""
    if not is_distributed(trainer):
        return value
    largest = torch.tensor(value, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(largest, reduce_op="max"))


def smallest_over_ranks(trainer: Any, value: int) -> int:
    """The smallest of one number over all ranks."""
    return -largest_over_ranks(trainer, -value)


def is_distributed(trainer: Any) -> bool:
    """Whether gradients are averaged over several ranks."""
    return int(trainer.world_size) > 1


def is_sharded(trainer: Any) -> bool:
    """Whether ranks hold parts of the model, so that no rank can run a step alone, or fail alone without a hang."""
    return any(base.__name__ in ("FSDPStrategy", "ModelParallelStrategy") for base in type(trainer.strategy).__mro__)


def sum_over_ranks(trainer: Any, value: float) -> float:
    """One number summed over all ranks."""
    if not is_distributed(trainer):
        return value
    total = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(total, reduce_op="sum"))


def to_device(trainer: Any, batch: Any) -> Any:
    """A batch as ``training_step`` gets it (``loops/training_epoch_loop.py:320``)."""
    return transferred(trainer, before_transfer(trainer, batch))


def before_transfer(trainer: Any, batch: Any, *, loader: int = 0) -> Any:
    """What ``to_device`` does on the host."""
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=loader)


def transferred(trainer: Any, batch: Any, *, loader: int = 0) -> Any:
    """The rest of it: the transfer, and what comes after it on the device."""
    return sibling(trainer, "trainer.call")._call_strategy_hook(
        trainer, "batch_to_device", batch, dataloader_idx=loader
    )


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """The way of a loader's batches from the host to the step.

    Attributes:
        trainer: The Trainer.
        loader: The loader's number among those of its stage.
    """

    trainer: Any
    loader: int = 0

    @property
    def has_hooks(self) -> bool:
        """Whether something of the user's own is done to a batch while it is moved or afterwards."""
        return hooks_move_batches(self.trainer)

    @property
    def split_batch(self) -> Any:
        """The module's own way to cut a batch; ``None`` if it has none."""
        return getattr(self.trainer.lightning_module, "split_batch", None)

    def on_host(self, batch: Any) -> Any:
        """Do what is done before the batch is moved."""
        return before_transfer(self.trainer, batch, loader=self.loader)

    def to_device(self, batch: Any) -> Any:
        """Do that, and move the batch."""
        return transferred(self.trainer, self.on_host(batch), loader=self.loader)


def combine_batches(combined: Any) -> Callable[[list[Any]], Any]:
    """What puts batches of a CombinedLoader's loaders together as it does (``utilities/combined_loader.py``)."""
    return lambda batches: tree_unflatten(batches, combined._spec)


def evaluation_loaders(trainer: Any, loader: int) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The loaders that the running evaluation's batches come from, and what puts their batches together."""
    combined = trainer._active_loop._combined_loader
    if combined._mode == "sequential":
        return [combined.flattened[loader]], lambda batches: batches[0]
    return combined.flattened, combine_batches(combined)


def sibling(trainer: Any, name: str) -> Any:
    """A module of the namespace that the trainer is from: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root = type(trainer.fit_loop).__module__.removesuffix(".loops.fit_loop")
    return import_module(f"{root}.{name}")


def owners(trainer: Any) -> list[Any]:
    """Objects whose attributes a step may set: the trainer, the datamodule, schedules of the learning rate."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [trainer, *schedulers, *([] if trainer.datamodule is None else [trainer.datamodule])]


def remember_progress(trainer: Any, kept: Attributes) -> Attributes:
    """All attributes of loops and connectors that a training step changes; counters are copied for each trial."""
    loop = trainer.fit_loop.epoch_loop
    kept.keep(loop, "_results")
    kept.keep(loop, "batch_progress", copied=True)
    kept.keep(loop.automatic_optimization, "optim_progress", copied=True)
    connector = trainer._logger_connector
    kept.keep(connector, "_progress_bar_metrics", "_logged_metrics", "_callback_metrics", copied=True)
    kept.keep(connector, "_first_loop_iter")
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        kept.keep(trainer.precision_plugin, "scaler", copied=True)
    return kept


def enter_trial(trainer: Any) -> None:
    """Let the next step be the last micro-batch of a window, seen by no callback, logger or profiler."""
    loop = trainer.fit_loop.epoch_loop
    trainer._loggers = [sibling(trainer, "loggers.logger").DummyLogger() for _ in trainer._loggers]
    trainer.profiler = sibling(trainer, "profilers").PassThroughProfiler()
    loop._results = type(loop._results)(training=True)
    trainer.accumulate_grad_batches = 2
    loop.batch_progress.current.ready = 2
    loop.batch_progress.is_last_batch = False
    _never_overflow(getattr(trainer.precision_plugin, "scaler", None))
    with muted(trainer):
        call_module_hook(trainer, "on_train_start")
        call_module_hook(trainer, "on_train_epoch_start")


@contextmanager
def muted(trainer: Any) -> Iterator[None]:
    """Within, no hook calls this trainer's callbacks, and no one is warned: training will say what there is to say.

    The callbacks stay in ``trainer.callbacks``, where steps may look.

    The loops and plugins call them through this function of ``trainer/call.py``; those of other trainers pass through.
    """
    call = sibling(trainer, "trainer.call")
    hooks = call._call_callback_hooks
    if not hasattr(hooks, "muted"):
        hooks = call._call_callback_hooks = _Unless(hooks)
    hooks.muted.append(trainer)
    told = [(cache, set(cache)) for cache in _warning_caches(trainer)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for cache, texts in told:
            cache.clear()
            cache.update(texts)
        hooks.muted.remove(trainer)
        if not hooks.muted:
            call._call_callback_hooks = hooks.call


def _warning_caches(trainer: Any) -> list[set[str]]:
    """What Lightning has warned of and will not warn of again (``utilities/rank_zero.py``: ``WarningCache``)."""
    root = sibling(trainer, "trainer").__name__.removesuffix(".trainer")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{root}.")]
    caches = [getattr(module, "warning_cache", None) for module in modules]
    return [cache for cache in caches if isinstance(cache, set)]


class _Unless:
    """Calls a hook of callbacks unless the trainer is muted.

    Attributes:
        call: What calls it.
        muted: Trainers that are muted, each as often as it was.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.muted: list[Any] = []

    def __call__(self, trainer: Any, *arguments: Any, **settings: Any) -> Any:
        return None if any(other is trainer for other in self.muted) else self.call(trainer, *arguments, **settings)


def call_module_hook(trainer: Any, name: str, *arguments: Any) -> None:
    """A hook of the module alone: steps may need what it sets up; callbacks see no trial."""
    sibling(trainer, "trainer.call")._call_lightning_module_hook(trainer, name, *arguments)


def _never_overflow(scaler: Any) -> None:
    """Let a trial's copy of the scaler start low: a step that is skipped makes no optimizer state."""
    if scaler is not None and scaler.is_enabled():
        scaler._init_scale = 1.0
        if scaler._scale is not None:
            scaler._scale.fill_(1.0)


def intercept_closures(trainer: Any, wrap: Callable[..., Any]) -> None:
    """Let the loop take its closures from ``wrap(make, kwargs, optimizer, batch_idx)`` (``automatic.py:163``)."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = type(loop)._make_closure

    def make_ours(*given: Any) -> Any:
        """A closure of Lightning's own class, which says so if an ``optimizer_step`` forgets to call it."""
        ours, closure = wrap(lambda *again: make(loop, *again), *given), make(loop, *given)
        shadow(closure, "closure", lambda *arguments, **_: _Ran(ours(*arguments), ours.consume_result()))
        return closure

    shadow(loop, "_make_closure", make_ours)


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a closure hands to the loop: what the optimizer is told, and what came of the micro-batch."""

    loss: Any
    result: Any

    def asdict(self) -> dict[str, Any]:
        """As the results of the loop's own closures."""
        return dict(self.result.asdict())


def release_closures(trainer: Any) -> None:
    """Undo ``intercept_closures``."""
    unshadow(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure")


def accumulating(trainer: Any) -> AbstractContextManager[None]:
    """Within, backward passes do not reduce gradients over ranks."""
    block = getattr(trainer.strategy, "block_backward_sync", None)
    return nullcontext() if block is None else block()


def backward_only(trainer: Any, batch: Any) -> None:
    """Forward and backward of one micro-batch that begins a window, without an optimizer step.

    To be called after ``enter_trial``.
    """
    loop = trainer.fit_loop.epoch_loop
    # No multiple of the trial's factor of 2, and not the epoch's last: an epoch of one batch would take the step.
    loop.batch_progress.current.ready = 3 if trainer.num_training_batches == 1 else 1
    trainer._logger_connector.on_batch_start(batch)
    with muted(trainer), without_collectives(trainer):
        call_module_hook(trainer, "on_train_batch_start", batch, 0)
        loop.automatic_optimization.run(trainer.optimizers[0], 0, loop._build_kwargs(OrderedDict(), batch, 0))
    trainer._logger_connector.on_batch_end()


def accumulate_only(
    trainer: Any, batch: Any, batch_idx: int, observe: Callable[[], None], *, begins: bool = True, ends: bool = True
) -> None:
    """Forward and backward of one micro-batch of a window, the first of which has gradients zeroed; nothing steps.

    To be called after ``enter_trial``. Where it begins or ends a batch of the loop, the module's hooks of that run,
    too; ``observe`` is called between them, before and after the step.
    """
    loop = trainer.fit_loop.epoch_loop
    trainer.accumulate_grad_batches = 4
    loop.batch_progress.current.ready = next(ready for ready in (2, 3) if ready != trainer.num_training_batches)
    trainer._logger_connector.on_batch_start(batch)
    with muted(trainer), without_collectives(trainer):
        if begins:
            call_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
        observe()
        kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx if begins else 0)
        outputs = loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        observe()
        if ends:
            call_module_hook(trainer, "on_train_batch_end", outputs, batch, batch_idx)
    trainer._logger_connector.on_batch_end()


def step_schedulers_when_due(trainer: Any, frequencies: dict[int, int], window: int) -> None:
    """Let ``frequency=n`` of schedules by step mean n optimizer steps.

    The loop tests its count of micro-batches against the frequency (``training_epoch_loop.py:474``),
    so that number is set to one that divides the count or not.

    Args:
        trainer: The Trainer.
        frequencies: What the user wrote, by position among the trainer's schedules.
        window: The window in its epoch that the micro-batch belongs to.
    """
    count = micro_batch_index(trainer) + 1
    for position, frequency in frequencies.items():
        due = (window + 1) % frequency == 0
        trainer.lr_scheduler_configs[position].frequency = count if due else count + 1


def frequencies_by_step(trainer: Any) -> dict[int, int]:
    """Frequencies of the schedules by step that do not run on every one, by position."""
    configs = enumerate(trainer.lr_scheduler_configs)
    return {at: config.frequency for at, config in configs if config.interval == "step" and config.frequency > 1}


def restore_frequencies(trainer: Any, frequencies: dict[int, int]) -> None:
    """What the user wrote, again."""
    for position, frequency in frequencies.items():
        trainer.lr_scheduler_configs[position].frequency = frequency


@contextmanager
def without_collectives(trainer: Any) -> Iterator[None]:
    """Run a step on one rank without waiting for the others: no reduction, no broadcast of buffers."""
    strategy = trainer.strategy
    if not hasattr(strategy, "block_backward_sync"):
        yield
        return
    # With static_graph a first backward pass reduces even so, unless it looks as if it had.
    kept = Attributes()
    with strategy.block_backward_sync():
        for name, value in (("require_forward_param_sync", False), ("_static_graph_delay_allreduce_enqueued", True)):
            if hasattr(strategy.model, name):
                kept.keep(strategy.model, name)
                setattr(strategy.model, name, value)
        try:
            yield
        finally:
            kept.restore()


def validate_when_due(trainer: Any, before: int, after: int, epoch_batches: int | None) -> None:
    """Let validation run after this micro-batch exactly if it is due by the recipe's batches.

    The loop tests its own count of micro-batches against ``trainer.val_check_batch``
    (``training_epoch_loop.py:560``), so that number is set to one that divides the count or not.

    Args:
        trainer: The Trainer.
        before: Batches of the recipe before this micro-batch.
        after: Batches of the recipe after it.
        epoch_batches: Batches of the recipe in one epoch; ``None`` if that is not known.
    """
    if getattr(trainer, "_val_check_time_interval", None) is not None:  # 2.5 has no interval by time
        return
    interval = _validation_interval(trainer, epoch_batches)
    loop = trainer.fit_loop.epoch_loop
    index = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
    if (before, after) == (index, index + 1):  # nothing is cut
        set_validation_interval(trainer, epoch_batches)
        return
    over = bool(loop.batch_progress.is_last_batch)
    due = over if interval is None else after // interval > before // interval  # a stream is validated when it is over
    trainer.val_check_batch = index + 1 if due else index + 2


def set_validation_interval(trainer: Any, epoch_batches: int | None) -> None:
    """Let validation run as ``setup_data`` has it where nothing is cut (``fit_loop.py:289``)."""
    if getattr(trainer, "_val_check_time_interval", None) is None:
        interval = _validation_interval(trainer, epoch_batches)
        trainer.val_check_batch = float("inf") if interval is None else interval


def _validation_interval(trainer: Any, epoch_batches: int | None) -> int | None:
    """``val_check_interval`` in batches of the recipe; ``None`` where that is not known."""
    interval: int | float = trainer.val_check_interval
    if not isinstance(interval, float):
        return interval
    return None if epoch_batches is None else max(1, int(epoch_batches * interval))


def end_training(trainer: Any) -> None:
    """Let the fit end before its first training step, when its start is over."""
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step


def stop_only_unless(trainer: Any, holds: Callable[[], bool]) -> Callable[[], None]:
    """Let ``trainer.should_stop`` end an epoch only where ``holds`` is false: not within a batch that the loader cuts.

    The epoch loop looks at it after each micro-batch, and validates before it ends (``training_epoch_loop.py:120``
    and :553).

    Returns:
        What undoes this.
    """
    loop = trainer.fit_loop.epoch_loop
    cls = type(loop)

    def asked(question: Callable[..., Any], *arguments: Any) -> bool:
        stops, trainer.should_stop = trainer.should_stop, trainer.should_stop and not holds()
        try:
            return bool(question(loop, *arguments))
        finally:
            trainer.should_stop = trainer.should_stop or stops

    own = {
        "done": property(lambda _: asked(cls.done.fget)),
        "_should_check_val_fx": lambda _, fetcher: asked(cls._should_check_val_fx, fetcher),
        "__module__": cls.__module__,
    }
    loop.__class__ = type(cls.__name__, (cls,), own)

    def undo() -> None:
        loop.__class__ = cls

    return undo


def leave_factor(trainer: Any, recipe: int) -> None:
    """Remember beside the factor that a fit leaves in the trainer which one the user wrote."""
    trainer.__dict__["_recipe_factor"] = (trainer.accumulate_grad_batches, recipe)


def take_factor_back(trainer: Any) -> None:
    """Let the trainer have the user's factor again, unless it was set anew meanwhile."""
    left, recipe = trainer.__dict__.pop("_recipe_factor", (None, None))
    if trainer.accumulate_grad_batches == left:
        trainer.accumulate_grad_batches = recipe


def run_first(trainer: Any, callback: Any) -> int:
    """Move a callback before all others, as Lightning does with its tuners, so that they see its gradients.

    Returns:
        Its place before, for ``run_at``.
    """
    place: int = trainer.callbacks.index(callback)
    run_at(trainer, callback, 0)
    return place


def run_at(trainer: Any, callback: Any, place: int) -> None:
    """Move a callback, if the trainer still has it, to a place among the others."""
    if callback in trainer.callbacks:
        others = [other for other in trainer.callbacks if other is not callback]
        trainer.callbacks = [*others[:place], callback, *others[place:]]


def show_loaders(trainer: Any, loader: Any) -> None:
    """Let ``trainer.train_dataloader`` be what the user gave, in its own structure.

    The property reads ``_iterables``, and the loop what is flattened (``utilities/combined_loader.py``).
    """
    combined = sibling(trainer, "utilities.combined_loader").CombinedLoader
    given = loader.iterables if isinstance(loader, combined) else loader
    trainer.fit_loop._combined_loader._iterables = given


def check_validation_interval(trainer: Any, epoch_batches: int | None) -> None:
    """The check that ``setup_data`` makes of ``val_check_interval``, in batches of the recipe."""
    interval = getattr(trainer, "val_check_interval", None)
    if epoch_batches is None or not isinstance(interval, int) or trainer.check_val_every_n_epoch is None:
        return
    if interval > epoch_batches and trainer.limit_val_batches > 0:
        raise UserError(
            f"val_check_interval={interval} is more than the {epoch_batches} training batches of an epoch: use at "
            "most that, or check_val_every_n_epoch=None to count batches over epochs."
        )


def takes_an_iterator(module: Any, step: str = "training_step") -> bool:
    """Whether a step fetches batches itself (``loops/utilities.py``, ``_select_data_fetcher``)."""
    return "dataloader_iter" in inspect.signature(getattr(module, step)).parameters


def all_epochs(trainer: Any) -> range | None:
    """Every epoch of the training, those before a resume too; ``None`` where there is no end."""
    last = trainer.max_epochs
    return None if last is None or last < 0 else range(max(1, last))


def schedules_by_step(trainer: Any) -> list[Any]:
    """Learning-rate schedules that step with every optimizer step."""
    return [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step" and c.frequency == 1]


def training_epochs(trainer: Any) -> range:
    """The epochs that training is known to run, from the current one on."""
    first = training_epoch(trainer)
    last = trainer.max_epochs
    return range(first, first + 1) if last is None or last < 0 else range(first, max(first + 1, last))


@contextmanager
def logs_held_back(trainer: Any, note: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Within, ``log`` calls ``note`` instead of the results of the running loop; yields what would have been called.

    ``LightningModule.log`` ends in ``results.log(fx, name, value, **settings)`` (``core/module.py:380``).
    """
    results = trainer._results
    if results is None:
        yield lambda *_, **__: None
        return
    shadow(results, "log", note)
    try:
        yield partial(_log_or_nothing, results)
    finally:
        unshadow(results, "log")


def _log_or_nothing(results: Any, fx: str, name: str, *arguments: Any, **settings: Any) -> None:
    """Log one value; if that fails half-way, put the sums of that name back (``logger_connector/result.py:234``)."""
    key = f"{fx}.{name}"
    before = {known: dict(vars(metric)) for known, metric in results.items() if known.startswith(key)}
    try:
        type(results).log(results, fx, name, *arguments, **settings)
    except Exception:
        for known in [known for known in results if known.startswith(key)]:
            if known in before:
                vars(results[known]).update(before[known])
            else:
                del results[known]
        raise


def stage(trainer: Any) -> str:
    """What a batch is for now."""
    if trainer.predicting:
        return "prediction"
    if trainer.testing:
        return "test"
    return "validation" if trainer.validating or trainer.sanity_checking else "training"


def zero_no_gradients(closure: Any) -> None:
    """Let a closure of the loop leave gradients as they are: an earlier part of its batch has zeroed them."""
    closure._zero_grad_fn = None


def zeroes_gradients(closure: Any) -> bool:
    """Whether a closure of the loop zeroes gradients before its backward pass."""
    return closure._zero_grad_fn is not None


def intercept_optimizer_step(trainer: Any, around: Callable[..., Any], ready: Callable[[], None]) -> Callable[[], None]:
    """Let the optimizer's step go through ``around(step, *arguments)``, whoever calls it; returns what undoes that.

    ``ready`` is called between clipping and the update (``plugins/precision/precision.py``, ``_after_closure``).
    """
    optimizer, plugin = trainer.optimizers[0], trainer.precision_plugin
    after_closure, earlier = type(plugin)._after_closure, vars(optimizer).get("step")
    step, active = optimizer.step, True

    def after(*arguments: Any) -> None:
        after_closure(plugin, *arguments)
        ready()

    @wraps(step)
    def through(_: Any, *arguments: Any, **settings: Any) -> Any:
        return around(step, *arguments, **settings) if active else step(*arguments, **settings)

    def release() -> None:
        nonlocal active
        active = False
        unshadow(plugin, "_after_closure")
        if vars(optimizer).get("step") is not method:  # a schedule has wrapped it since
            return
        if earlier is None:
            unshadow(optimizer, "step")
        else:
            shadow(optimizer, "step", earlier)

    # A method, as schedules of the learning rate wrap it by its ``__func__`` (``torch/optim/lr_scheduler.py``).
    method = MethodType(through, optimizer)
    shadow(optimizer, "step", method)
    shadow(plugin, "_after_closure", after)
    return release


def hooks_move_batches(trainer: Any) -> bool:
    """Whether the module or the datamodule has a part of its own in the way of batches to the device."""
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    hooks = [
        getattr(owner, hook) for owner in owners for hook in ("transfer_batch_to_device", "on_after_batch_transfer")
    ]
    return not all(hook.__module__.startswith(("lightning.", "pytorch_lightning.")) for hook in hooks)


def hooks_see_batches(trainer: Any) -> bool:
    """Whether the module or the datamodule has a part of its own in what is done to a batch before the step."""
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    before = [owner.on_before_batch_transfer for owner in owners]
    own = not all(hook.__module__.startswith(("lightning.", "pytorch_lightning.")) for hook in before)
    return own or hooks_move_batches(trainer)


STEPS = ("validation_step", "test_step", "predict_step")


def intercept_evaluation(trainer: Any, around: Callable[..., Any], move: Callable[..., Any]) -> None:
    """Let steps of evaluation loops go through ``around(name, step, *arguments)``, and batches through ``move``.

    The loops call both on the strategy (``trainer/call.py``, ``_call_strategy_hook``).
    """
    strategy = trainer.strategy
    for name in STEPS:
        shadow(strategy, name, partial(around, name, partial(getattr(type(strategy), name), strategy)))
    to_device = type(strategy).batch_to_device

    def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        def to_there(part: Any) -> Any:
            return to_device(strategy, part, device=device, dataloader_idx=dataloader_idx)

        return move(to_there, batch, dataloader_idx)

    shadow(strategy, "batch_to_device", batch_to_device)


def release_evaluation(trainer: Any) -> None:
    """Undo ``intercept_evaluation``."""
    for name in (*STEPS, "batch_to_device"):
        unshadow(trainer.strategy, name)


def parameters(trainer: Any) -> list[torch.Tensor]:
    """The module's parameters, and tensors that only an optimizer knows."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    known = [*trainer.lightning_module.parameters(), *(tensor for group in groups for tensor in group["params"])]
    return list({id(tensor): tensor for tensor in known}.values())
