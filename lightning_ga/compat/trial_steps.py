"""Run steps outside training, unseen by callbacks and loggers: what the loop changes in them is listed here.

Lightning's ``loops/training_epoch_loop.py``, ``trainer/connectors/logger_connector/`` and ``trainer/call.py``.
"""

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from lightning_ga.compat import closures, patching
from lightning_ga.snapshot.state import Attributes


def owners(trainer: Any) -> list[Any]:
    """Return the objects whose attributes a step may set: the trainer, the datamodule, learning-rate schedules."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [trainer, *schedulers, *([] if trainer.datamodule is None else [trainer.datamodule])]


def remember_progress(trainer: Any, kept: Attributes) -> Attributes:
    """Keep all attributes of loops and connectors that a training step changes; trials work on copies of counters."""
    loop = trainer.fit_loop.epoch_loop
    kept.take(loop, "_results")
    kept.take(loop, "batch_progress", copied=True)
    kept.take(loop.automatic_optimization, "optim_progress", copied=True)
    connector = trainer._logger_connector
    kept.take(connector, "_progress_bar_metrics", "_logged_metrics", "_callback_metrics", copied=True)
    kept.take(connector, "_first_loop_iter")
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        kept.take(trainer.precision_plugin, "scaler", copied=True)
    return kept


def enter_trial(trainer: Any) -> None:
    """Make the next step the last micro-batch of a window, unseen by callbacks, loggers and profilers."""
    loop = trainer.fit_loop.epoch_loop
    trainer._loggers = [patching.sibling(trainer, "loggers.logger").DummyLogger() for _ in trainer._loggers]
    trainer.profiler = patching.sibling(trainer, "profilers").PassThroughProfiler()
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
    """Return a context in which this trainer's callbacks are not called and nothing warns: training will.

    The callbacks stay in ``trainer.callbacks``, where steps may look. The loops and plugins call them through one
    function of ``trainer/call.py``; calls of other trainers pass through.
    """
    call = patching.sibling(trainer, "trainer.call")
    hooks = call._call_callback_hooks
    if not hasattr(hooks, "muted"):
        hooks = call._call_callback_hooks = _Unless(hooks)
    hooks.muted.append(trainer)
    warned = [(cache, set(cache)) for cache in _warning_caches(trainer)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for cache, texts in warned:
            cache.clear()
            cache.update(texts)
        hooks.muted.remove(trainer)
        if not hooks.muted:
            call._call_callback_hooks = hooks.call


def _warning_caches(trainer: Any) -> list[set[str]]:
    """Return the texts that Lightning will not warn of again (``utilities/rank_zero.py``: ``WarningCache``)."""
    root = patching.sibling(trainer, "trainer").__name__.removesuffix(".trainer")
    of_steps = patching.sibling(trainer, "loops.optimization.automatic").Closure.warning_cache
    return [of_steps, *_caches_below(root, len(sys.modules))]


@lru_cache(maxsize=2)
def _caches_below(root: str, _loaded: int) -> list[set[str]]:
    """Look through all modules once, and again after others were imported: a look takes as long as a small step."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{root}.")]
    caches = [getattr(module, "warning_cache", None) for module in modules]
    return [cache for cache in caches if isinstance(cache, set)]


class _Unless:
    """Calls the hooks of callbacks, except for trainers that are muted.

    Attributes:
        call: Lightning's own function.
        muted: Trainers that are muted, each as often as it was.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.muted: list[Any] = []

    def __call__(self, trainer: Any, *arguments: Any, **settings: Any) -> Any:
        return None if any(other is trainer for other in self.muted) else self.call(trainer, *arguments, **settings)


def call_module_hook(trainer: Any, name: str, *arguments: Any) -> None:
    """Call a hook of the module alone: steps may need what it sets up, and callbacks see no trial."""
    patching.sibling(trainer, "trainer.call")._call_lightning_module_hook(trainer, name, *arguments)


def _never_overflow(scaler: Any) -> None:
    """Let a trial's copy of the scaler start low, so that no step is skipped: optimizer state must exist."""
    if scaler is not None and scaler.is_enabled():
        scaler._init_scale = 1.0
        if scaler._scale is not None:
            scaler._scale.fill_(1.0)


def backward_only(trainer: Any, batch: Any) -> None:
    """Run forward and backward of one micro-batch that begins a window, without an optimizer step.

    To be called after ``enter_trial``.
    """
    accumulate_only(trainer, batch, 0, lambda: None, begins=True, ends=False, weight=1.0)


def accumulate_only(
    trainer: Any,
    batch: Any,
    batch_idx: int,
    observe: Callable[[], None],
    *,
    begins: bool,
    ends: bool,
    continues: bool = False,
    batches: int = 1,
    weight: float,
) -> None:
    """Run forward and backward of one micro-batch of a window; the first zeroes gradients, and nothing steps.

    To be called after ``enter_trial``.

    Args:
        trainer: The Trainer.
        batch: The micro-batch, on the device.
        batch_idx: Its index in the window.
        observe: Called before and after the step, between the hooks of the loop.
        begins: Whether it begins a batch of the loop, so that ``on_train_batch_start`` runs.
        ends: Whether it ends one.
        continues: Whether more pieces of its batch follow, for which ``on_after_backward`` waits.
        batches: Batches of the loop that one of the recipe makes; an epoch counts as many times more, and so does a
            window, so that both together tell the same number of steps.
        weight: Factor of its backward signal.
    """
    loop = trainer.fit_loop.epoch_loop
    trainer.accumulate_grad_batches = 4 * batches  # the loop divides the loss by it
    planned, index = trainer.num_training_batches, batch_idx if begins else 0
    first = next(ready for ready in (1, 5, 9) if not {ready, ready + 1} & {planned, planned * 2})  # neither steps
    loop.batch_progress.current.ready = first + index
    loop.batch_progress.total.ready += begins
    trainer._logger_connector.on_batch_start(batch)
    with muted(trainer), without_collectives(trainer), _epoch_of(trainer, planned * batches):
        if begins:
            call_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
        observe()
        kwargs = loop._build_kwargs(OrderedDict(), batch, index)
        follow = closures.before_the_last(trainer, lambda _: None) if continues else nullcontext()
        with _weighing(trainer, weight * batches), follow:
            outputs = loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        observe()
        if ends:
            call_module_hook(trainer, "on_train_batch_end", outputs, batch, batch_idx)
    trainer._logger_connector.on_batch_end()


@contextmanager
def _epoch_of(trainer: Any, batches: float) -> Iterator[None]:
    """Return a context in which an epoch has so many batches of the loop."""
    loop = trainer.fit_loop
    before, loop.max_batches = loop.max_batches, batches
    try:
        yield
    finally:
        loop.max_batches = before


@contextmanager
def _weighing(trainer: Any, weight: float) -> Iterator[None]:
    """Return a context in which losses are weighted before backward, as in ``on_before_backward`` in training."""
    strategy = trainer.strategy
    prepare = strategy.pre_backward

    def pre_backward(loss: torch.Tensor) -> None:
        if weight != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
        prepare(loss)

    with patching.shadowed(strategy, "pre_backward", pre_backward):
        yield


@contextmanager
def without_gradient_hooks(trainer: Any) -> Iterator[bool]:
    """Return a context in which hooks change no gradients: those of weights, and ``on_after_backward`` of the module.

    Yields:
        Whether there are any.
    """
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    listed = [(one._backward_hooks, one._post_accumulate_grad_hooks) for one in module.parameters()]
    kept = [(hooks, dict(hooks)) for pair in listed for hooks in pair if hooks]
    stock = patching.sibling(trainer, "core.module").LightningModule.on_after_backward
    for hooks, _ in kept:
        hooks.clear()
    try:
        with patching.shadowed(plugin, "post_backward", lambda loss, _: loss.detach()):
            yield bool(kept) or getattr(module.on_after_backward, "__func__", None) is not stock
    finally:
        for hooks, before in kept:
            hooks.update(before)


@contextmanager
def without_collectives(trainer: Any) -> Iterator[None]:
    """Return a context in which a step waits for no other rank: no reduction, no broadcast of buffers."""
    strategy = trainer.strategy
    if not hasattr(strategy, "block_backward_sync"):
        yield
        return
    # With static_graph a first backward pass reduces all the same, unless the second flag says that it has.
    kept = Attributes()
    with strategy.block_backward_sync():
        for name, value in (("require_forward_param_sync", False), ("_static_graph_delay_allreduce_enqueued", True)):
            if hasattr(strategy.model, name):
                kept.take(strategy.model, name)
                setattr(strategy.model, name, value)
        try:
            yield
        finally:
            kept.restore()
