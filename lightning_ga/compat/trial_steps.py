"""Run passes outside training, unseen by callbacks and loggers: the probe's trial steps, the exactness check's passes.

They go through Lightning's ``loops/training_epoch_loop.py`` and ``trainer/connectors/logger_connector/``; callbacks and
warnings are muted in ``trainer/call.py`` and ``utilities/rank_zero.py``.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_ga.compat import closures, patching
from lightning_ga.snapshot.copies import coalesce_gradients
from lightning_ga.snapshot.state import Attributes


@dataclass(frozen=True, slots=True)
class PassPlace:
    """The place of a pass in its window, and in its batch of the loop, which may run in several pieces."""

    index: int = 0  # in the window; the first pass zeroes gradients
    steps: bool = False  # whether the optimizer steps after it
    begins: bool = True  # whether it begins a batch of the loop, so that ``on_train_batch_start`` runs
    ends: bool = True  # whether it ends one, so that ``on_train_batch_end`` runs
    continues: bool = False  # whether more pieces of its batch follow, for which ``on_after_backward`` waits
    batches: int = 1  # of the loop that one of the recipe makes
    weight: float = 1.0  # factor of its backward signal
    ahead: int = 0  # batches of the epoch that count as trained before it
    may_be_last: bool = False  # whether it is the last batch of the epoch if so many are
    amid: int = 0  # in the middle of so many times as many batches, and accumulated; hooks at the start count these


_WARN_ONCE = (  # what a step may come by
    *("loops.optimization.automatic", "core.module", "utilities.data"),
    *("trainer.connectors.logger_connector.logger_connector", "trainer.connectors.logger_connector.result"),
)
FIRST_OF_WINDOW = PassPlace(ends=False)
LAST_OF_WINDOW = PassPlace(index=1, steps=True)
WHOLE_WINDOW = PassPlace(steps=True)


def run_pass(
    trainer: Any, batch: Any, place: PassPlace, *, whole: Any = None, observe: Callable[[], object] = lambda: None
) -> None:
    """Run forward and backward of a micro-batch on the device, and the optimizer's step if the place says so.

    To be called after ``enter_trial``. ``observe`` is called before and after the pass, between the hooks of the loop.
    These get the ``whole`` batch, if the micro-batch is a piece of one.
    """
    whole = batch if whole is None else whole
    loop, optimization = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.automatic_optimization
    zeroing = optimization._make_zero_grad_fn
    with (
        muted(trainer),
        _without_collectives(trainer),
        _counting(trainer, place) as batch_idx,
        patching.shadowed(optimization, "_make_zero_grad_fn", lambda _, optimizer: zeroing(place.index, optimizer)),
    ):
        trainer._logger_connector.on_batch_start(batch)
        if place.begins:
            _call_module_hook(trainer, "on_train_batch_start", whole, batch_idx)
        observe()
        kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx)
        waiting = closures.before_the_last(trainer, lambda _: None) if place.continues else nullcontext()
        with _backward_as_in_training(trainer, place.weight * place.batches), waiting:
            outputs = optimization.run(trainer.optimizers[0], batch_idx if place.steps else place.index, kwargs)
        observe()
        if place.ends:
            _call_module_hook(trainer, "on_train_batch_end", outputs, whole, batch_idx)
        trainer._logger_connector.on_batch_end()


def call_before_step(trainer: Any) -> None:
    """Call the module's hook that sees the gradient of a window before the optimizer's step; it may refuse this one."""
    with muted(trainer), suppress(Exception):  # it is of a few samples
        _call_module_hook(trainer, "on_before_optimizer_step", trainer.optimizers[0])


def count_as_taken(trainer: Any, steps: int) -> None:
    """Let so many optimizer steps count as taken: ``trainer.global_step``."""
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps


def step_schedules(trainer: Any, place: PassPlace) -> None:
    """Step schedules by step as the module's own hook does after a pass at this place."""
    if closures.has_hook([trainer.lightning_module], "lr_scheduler_step"):
        with muted(trainer), _counting(trainer, place):
            for config in trainer.lr_scheduler_configs:
                if config.interval == "step" and not config.reduce_on_plateau:
                    _call_module_hook(trainer, "lr_scheduler_step", config.scheduler, None)


def end_epoch_of(trainer: Any, gathered: set[str], batches: int | None = None) -> int:
    """Let the module end an epoch and begin the next, if its hook reads what steps have gathered.

    ``batches`` sets the loop's count of all batches so far, for it not to tell apart how many parts there were.
    Return that count.
    """
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    total.ready = total.ready if batches is None else batches
    hook = getattr(trainer.lightning_module.on_train_epoch_end, "__func__", None)
    if gathered & set(getattr(getattr(hook, "__code__", None), "co_names", ())):
        with muted(trainer), suppress(Exception):  # it may look for what only an epoch leaves
            _call_module_hook(trainer, "on_train_epoch_end")
            _call_module_hook(trainer, "on_train_epoch_start")
    return int(total.ready)


@contextmanager
def without_logs(trainer: Any) -> Iterator[None]:
    """Log nothing in passes that are pieces of a batch: training logs when all have run."""
    with patching.shadowed(trainer.fit_loop.epoch_loop._results, "log", lambda *_, **__: None):
        yield


@contextmanager
def _counting(trainer: Any, place: PassPlace) -> Iterator[int]:
    """Let the loop count as at this place, and yield the number of the batch that the step gets.

    If one batch of the recipe makes several of the loop, an epoch and a window count as many times more. So both
    together tell the same number of steps.
    """
    loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress
    if place.steps:
        trainer.accumulate_grad_batches = (place.index + 1) * place.batches
        ready = place.index + 1 + place.ahead
    else:
        trainer.accumulate_grad_batches = 4 * place.batches  # the loop divides the loss by it
        before = place.batches * max(0, progress.current.ready - 1) + place.ahead
        ready = before + 1 + (place.index if place.begins else 0)
    progress.total.ready += place.begins
    goes_on = nullcontext() if place.steps else patching.shadowed(epoch_loop, "_should_accumulate", lambda: True)
    with (
        patching.replaced(loop, max_batches=loop.max_batches * place.batches),
        patching.replaced(progress.current, ready=ready),
        patching.replaced(progress.total, ready=progress.total.ready + place.steps * place.ahead),
        patching.replaced(progress, is_last_batch=place.may_be_last and ready >= loop.max_batches),
        goes_on,
    ):
        yield ready - 1


@contextmanager
def _backward_as_in_training(trainer: Any, weight: float) -> Iterator[None]:
    """Return a context in which losses are weighted before backward passes, and sparse gradients coalesced after."""
    strategy, module = trainer.strategy, trainer.lightning_module
    prepare, finish = strategy.pre_backward, strategy.post_backward

    def pre_backward(loss: torch.Tensor) -> None:
        if weight != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
        prepare(loss)

    def post_backward(loss: torch.Tensor) -> None:
        finish(loss)
        coalesce_gradients(module.parameters())

    with (
        patching.shadowed(strategy, "pre_backward", pre_backward),
        patching.shadowed(strategy, "post_backward", post_backward),
    ):
        yield


def owners(trainer: Any) -> list[Any]:
    """Return the objects whose attributes a step may set: trainer, datamodule, optimizers, schedules, datasets."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    loaders = getattr(trainer.fit_loop._combined_loader, "flattened", ())
    datasets: list[Any] = [getattr(loader, "dataset", None) for loader in loaders]
    for dataset in datasets:  # what wraps another one keeps it so
        inner = getattr(dataset, "__dict__", {}).get("dataset")
        datasets += [] if inner is None or any(inner is known for known in datasets) else [inner]
    found = [trainer, *trainer.optimizers, *schedulers, trainer.datamodule, *datasets]
    return [each for each in found if hasattr(each, "__dict__") and not isinstance(each, IterableDataset)]


def remember_progress(trainer: Any) -> Attributes:
    """Keep all attributes of loops and connectors that a training step changes; trials work on copies of counters."""
    attributes, loop = Attributes(), trainer.fit_loop.epoch_loop
    attributes.take(loop, "_results")
    attributes.take(loop, "batch_progress", copied=True)
    attributes.take(loop.automatic_optimization, "optim_progress", copied=True)
    connector = trainer._logger_connector
    attributes.take(connector, "_progress_bar_metrics", "_logged_metrics", "_callback_metrics", copied=True)
    attributes.take(connector, "_first_loop_iter")
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        attributes.take(trainer.precision_plugin, "scaler", copied=True)
    return attributes


def enter_trial(trainer: Any, *, begins: bool = True) -> None:
    """Make a Trainer ready for passes, without loggers and profilers; training ``begins`` with hooks, or goes on."""
    loop = trainer.fit_loop.epoch_loop
    trainer._loggers = [patching.sibling(trainer, "loggers.logger").DummyLogger() for _ in trainer._loggers]
    trainer.profiler = patching.sibling(trainer, "profilers").PassThroughProfiler()
    loop._results = type(loop._results)(training=True)
    log = loop._results.log  # ranks run different numbers of passes: what they log is not exchanged
    vars(loop._results)["log"] = lambda *given, **settings: log(*given, **{**settings, "sync_dist": False})
    loop.batch_progress.is_last_batch = False
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():  # a low copy, so that no step is skipped: optimizer state must exist
        scaler._init_scale = 1.0
        if scaler._scale is not None:
            scaler._scale.fill_(1.0)
    if begins:
        _begin(trainer)


def begin_amid(trainer: Any, times: int) -> None:
    """Begin again as if an epoch had so many ``times`` as many batches, and half of its steps were done."""
    loop, factor = trainer.fit_loop, trainer.accumulate_grad_batches
    batches = loop.max_batches if isinstance(loop.max_batches, int) else 100 * factor
    loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed += max(
        1, batches // factor // 2
    )
    trainer.accumulate_grad_batches = times * factor
    with patching.replaced(loop, max_batches=times * batches):
        _begin(trainer)


def _begin(trainer: Any) -> None:
    with muted(trainer):
        _call_module_hook(trainer, "on_train_start")
        _call_module_hook(trainer, "on_train_epoch_start")


def _call_module_hook(trainer: Any, name: str, *arguments: Any) -> None:
    """Call a hook of the module alone, since steps may need what it sets up."""
    patching.sibling(trainer, "trainer.call")._call_lightning_module_hook(trainer, name, *arguments)


@contextmanager
def muted(trainer: Any) -> Iterator[None]:
    """Return a context in which this trainer's callbacks are not called and nothing warns: training will.

    The callbacks stay in ``trainer.callbacks``, where steps may look. The loops and plugins call them through one
    function of ``trainer/call.py``; calls of other trainers pass through.
    """
    call = patching.sibling(trainer, "trainer.call")
    hooks = call._call_callback_hooks

    def unless_muted(other: Any, *arguments: Any, **settings: Any) -> Any:
        return None if other is trainer else hooks(other, *arguments, **settings)

    # What was said already is not said again (``utilities/rank_zero.py``: ``WarningCache``).
    holders = [patching.sibling(trainer, name) for name in _WARN_ONCE]
    caches = [holder.warning_cache for holder in (holders[0].Closure, *holders[1:])]
    said = [set(cache) for cache in caches]
    try:
        with patching.shadowed(call, "_call_callback_hooks", unless_muted), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for cache, before in zip(caches, said):
            cache.intersection_update(before)


@contextmanager
def without_gradient_hooks(trainer: Any) -> Iterator[bool]:
    """Run no hooks that change gradients: those of weights, and the module's ``on_after_backward``.

    Yields whether there are any.
    """
    plugin, parameters = trainer.precision_plugin, list(trainer.lightning_module.parameters())
    tables = [table for p in parameters for table in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    hooks = [(table, dict(table)) for table in tables if table]
    for table, _ in hooks:
        table.clear()
    try:
        with patching.shadowed(plugin, "post_backward", lambda loss, _: loss.detach()):
            yield bool(hooks) or closures.has_hook([trainer.lightning_module], "on_after_backward")
    finally:
        for table, before in hooks:
            table.update(before)


def forget_used(trainer: Any) -> None:
    """Let DDP's search for unused parameters begin anew: passes under ``no_sync`` count, too (``c10d/reducer.cpp``)."""
    module = trainer.strategy.model
    if getattr(module, "find_unused_parameters", False) and not module.static_graph:
        module.reducer._reset_state()


@contextmanager
def _without_collectives(trainer: Any) -> Iterator[None]:
    """Return a context in which a step waits for no other rank: no reduction, no broadcast of buffers."""
    strategy = trainer.strategy
    if not hasattr(strategy, "block_backward_sync"):
        yield
        return
    # With static_graph a first backward pass reduces all the same, unless the second flag says that it has.
    flags = {"require_forward_param_sync": False, "_static_graph_delay_allreduce_enqueued": True}
    there = {name: value for name, value in flags.items() if hasattr(strategy.model, name)}
    with strategy.block_backward_sync(), patching.replaced(strategy.model, **there):
        yield
