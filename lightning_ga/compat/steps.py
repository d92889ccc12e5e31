"""Run passes outside of training, without a trace: the probe's trial steps, and the measurement of exactness.

They go through Lightning's ``loops/optimization/automatic.py``, ``trainer/call.py`` and ``utilities/rank_zero.py``
(2.6.6). State outside of module, optimizers and loops is not put back.

Tested in tests/integration/test_step_counts.py.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_ga.compat.gradient_dtype import narrow
from lightning_ga.compat.patching import nothing, replaced, shadowed, sibling
from lightning_ga.snapshot.copies import coalesce_gradients
from lightning_ga.snapshot.trial_isolation import ModuleState, SwappedAttributes


@dataclass(frozen=True, slots=True)
class PassPlace:
    """The place of a pass in its window, and in its batch, which may run in several pieces."""

    index: int = 0  # in the window; the first pass zeroes gradients
    steps: bool = False  # whether the optimizer steps after it
    begins: bool = True  # whether it begins a batch of the loop, so that ``on_train_batch_start`` runs
    ends: bool = True  # whether it ends one, so that ``on_train_batch_end`` runs


FIRST_OF_WINDOW = PassPlace(ends=False)
"""What a probe runs: a pass that zeroes gradients and is over with its backward pass, before the batch's end."""
LAST_OF_WINDOW = PassPlace(index=1, steps=True)
"""A batch that adds to gradients, and after which the optimizer steps."""
WHOLE_WINDOW = PassPlace(steps=True)
"""A batch that zeroes gradients, and after which the optimizer steps."""


@contextmanager
def isolated(trainer: Any, *, begins: bool = True, steps: bool = True) -> Iterator[Callable[[], None]]:
    """Return a context for passes; the yielded function puts back all that they changed, and so does the end.

    If training ``begins``, the module's start hooks run first, and again after each putting back. Unless it ``steps``,
    no pass may let the optimizer step.
    """
    model = trainer.strategy.model
    stepping = [*trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs)]
    state = ModuleState(
        [trainer.lightning_module, model],
        stepping,
        shared=[trainer, trainer.strategy, trainer.datamodule],
        steps=steps,
    )
    _add_trainer(state.attributes, trainer)

    def prepare() -> None:
        state.attributes.swap_in_copies()
        _enter(trainer, begins=begins)

    def put_back() -> None:
        state.restore()
        prepare()

    with state.unwritten():
        try:
            prepare()
            yield put_back
        finally:
            state.restore()
            if begins and getattr(model, "find_unused_parameters", False) and not model.static_graph:
                # Passes, also under ``no_sync``, note in it which parameters they use (``c10d/reducer.cpp``); what a
                # running window has noted stays.
                model.reducer._reset_state()


def run_pass(
    trainer: Any, batch: Any, place: PassPlace = FIRST_OF_WINDOW, *, after_backward: Callable[[], object] = nothing
) -> None:
    """Run forward and backward of a micro-batch on the device, and the optimizer's step if the place says so.

    To be called within :func:`isolated`. ``after_backward`` is called between the backward pass and the step.
    """
    loop = trainer.fit_loop.epoch_loop
    strategy = trainer.strategy
    optimization = loop.automatic_optimization
    progress = loop.batch_progress
    zeroing = optimization._make_zero_grad_fn
    finish = strategy.post_backward
    stock_closure = partial(type(optimization)._make_closure, optimization)  # training may cut batches in its own

    def post_backward(loss: torch.Tensor) -> None:
        finish(loss)
        coalesce_gradients(trainer.lightning_module.parameters())
        if place.steps:
            narrow(trainer.lightning_module.parameters())
        after_backward()

    if place.begins:
        progress.increment_ready()
    batch_idx = progress.current.ready - 1
    hook = sibling(trainer, "trainer.call")._call_lightning_module_hook  # the step may need what these hooks set up
    # Ranks do not wait for each other: no reduction, which static_graph would begin all the same, no shared buffers.
    there = {
        name: value
        for name, value in {"require_forward_param_sync": False, "_static_graph_delay_allreduce_enqueued": True}.items()
        if hasattr(strategy.model, name)
    }
    with (
        muted(trainer),
        getattr(strategy, "block_backward_sync", nullcontext)(),
        replaced(strategy.model, **there),
        shadowed(loop, "_should_accumulate", lambda: not place.steps),
        shadowed(optimization, "_make_closure", stock_closure),
        shadowed(optimization, "_make_zero_grad_fn", lambda _, of: None if place.index else zeroing(0, of)),
        shadowed(strategy, "post_backward", post_backward),
    ):
        trainer._logger_connector.on_batch_start(batch)
        if place.begins:
            hook(trainer, "on_train_batch_start", batch, batch_idx)
        outputs = optimization.run(
            trainer.optimizers[0], batch_idx, loop._build_kwargs(OrderedDict(), batch, batch_idx)
        )
        if place.ends:
            hook(trainer, "on_train_batch_end", outputs, batch, batch_idx)
        trainer._logger_connector.on_batch_end()


def _add_trainer(attributes: SwappedAttributes, trainer: Any) -> None:
    """Keep what a pass changes in the Trainer, its loops and connectors; passes work on copies of counters."""
    loop = trainer.fit_loop.epoch_loop
    connector = trainer._logger_connector
    attributes.add(trainer, "_loggers", "profiler", "should_stop", "accumulate_grad_batches", copied=False)
    attributes.add(loop, "_results", copied=False)
    attributes.add(loop, "batch_progress")
    attributes.add(loop.automatic_optimization, "optim_progress")
    attributes.add(connector, *(name for name in vars(connector) if name != "trainer"))
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        attributes.add(trainer.precision_plugin, "scaler")


def _enter(trainer: Any, *, begins: bool) -> None:
    """Prepare a Trainer for passes, without loggers and profilers; if training ``begins``, run start hooks."""
    loop = trainer.fit_loop.epoch_loop
    hook = sibling(trainer, "trainer.call")._call_lightning_module_hook
    trainer._loggers = [sibling(trainer, "loggers.logger").DummyLogger() for _ in trainer._loggers]
    trainer.profiler = sibling(trainer, "profilers").PassThroughProfiler()
    loop._results = type(loop._results)(training=True)
    log = loop._results.log  # ranks run different numbers of passes: what they log is not exchanged
    vars(loop._results)["log"] = lambda *given, **settings: log(*given, **{**settings, "sync_dist": False})
    loop.batch_progress.is_last_batch = False
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        scaler._init_scale = 1.0  # so that no step is skipped: optimizer state must exist
        if scaler._scale is not None:
            scaler._scale.fill_(1.0)
    with muted(trainer):
        if begins:
            hook(trainer, "on_train_start")
            hook(trainer, "on_train_epoch_start")


@contextmanager
def muted(trainer: Any) -> Iterator[None]:
    """Return a context in which callbacks of this trainer, which it still has, are not called, and nothing warns."""
    call = sibling(trainer, "trainer.call")
    caches = sibling(trainer, "utilities.rank_zero").WarningCache
    hooks = call._call_callback_hooks

    def unless_muted(other: Any, *arguments: Any, **settings: Any) -> Any:
        return None if other is trainer else hooks(other, *arguments, **settings)

    with (
        shadowed(call, "_call_callback_hooks", unless_muted),
        replaced(caches, warn=lambda *_, **__: None),  # what warns once will still warn in training
        warnings.catch_warnings(action="ignore"),
    ):
        yield
