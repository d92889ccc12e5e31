"""What is relied on of Lightning's private parts: an upgrade that changes it fails here, by name.

What these parts do in a fit is tested where they are used; here is that they exist, and are called as they are.
"""

import inspect
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from torchmetrics import MaxMetric, MeanMetric

from lightning_ga.compat import (
    advance,
    closures,
    compiled,
    loaders,
    logged_values,
    logger_rows,
    loop_counters,
    patching,
    schedulers,
    steps,
    validation,
)

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


@pytest.fixture(params=[pl, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
def namespace(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def trainer(namespace: Any) -> Any:
    """A trainer of either namespace in its first batch."""
    return namespace.Trainer(accelerator="cpu", max_steps=1, limit_val_batches=1, **QUIET)


NAMES = {
    loop_counters: [
        *("fit_loop.epoch_progress.current.processed", "fit_loop.epoch_progress.total.processed"),
        *("fit_loop.epoch_progress.increment_completed", "fit_loop.max_batches", "fit_loop._combined_loader.limits"),
        *(f"fit_loop.epoch_loop.batch_progress.current.{name}" for name in loop_counters._COUNTS),
        *(f"fit_loop.epoch_loop.batch_progress.total.{name}" for name in loop_counters._COUNTS),
        *("fit_loop.epoch_loop.batch_progress.is_last_batch", "fit_loop.epoch_loop._should_accumulate"),
        "fit_loop.epoch_loop._accumulated_batches_reached",
        *("fit_loop._data_fetcher.fetched", "fit_loop._data_fetcher.length", "fit_loop._data_fetcher.done"),
        "fit_loop.epoch_loop.automatic_optimization._skip_backward",
        "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.current.completed",
        "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad.total.completed",
        *("fit_loop.epoch_loop.restarting", "fit_loop.epoch_loop.restarted_on_train_batch_end"),
        *("fit_loop.epoch_loop.restarted_on_last", "fit_loop.epoch_loop._batches_that_stepped"),
        "fit_loop.epoch_loop._should_check_val_fx",
    ],
    advance: [
        *("fit_loop.epoch_loop.advance", "fit_loop._data_fetcher.batches", "fit_loop._data_fetcher.prefetch_batches"),
        *("fit_loop._combined_loader.flattened", "fit_loop._data_fetcher.iterator"),
    ],
    closures: [
        "fit_loop.epoch_loop.automatic_optimization._make_closure",
        "fit_loop.epoch_loop.automatic_optimization._optimizer_zero_grad",
        *("precision_plugin.post_backward", "_results.log"),
    ],
    loaders: [
        *("fit_loop._data_source.dataloader", "fit_loop.setup_data", "fit_loop._combined_loader._iterables"),
        *("fit_loop._combined_loader._spec", "fit_loop._combined_loader._mode"),
        *("_accelerator_connector.use_distributed_sampler", "_accelerator_connector.is_distributed"),
        *("strategy.validation_step", "strategy.test_step", "strategy.predict_step"),
        *("lightning_module._on_before_batch_transfer", "_active_loop", "precision_plugin.convert_input"),
        *("fit_loop.epoch_loop.val_loop._combined_loader", "fit_loop.epoch_loop.val_loop.batch_progress.current.ready"),
    ],
    validation: ["val_check_batch", "val_check_interval", "check_val_every_n_epoch"],
    schedulers: ["lr_scheduler_configs", "fit_loop.epoch_loop.update_lr_schedulers"],
    logger_rows: ["_logger_connector.should_update_logs"],
    logged_values: [
        *("_results.log", "_results.update_metrics", "_logger_connector.on_batch_end"),
    ],
    steps: [
        *("_loggers", "profiler", "should_stop", "fit_loop.epoch_loop._results", "fit_loop.epoch_loop._build_kwargs"),
        "fit_loop.epoch_loop.automatic_optimization.run",
        "fit_loop.epoch_loop.automatic_optimization._make_zero_grad_fn",
        *("_logger_connector.on_batch_start", "_logger_connector.on_batch_end", "strategy.post_backward"),
    ],
}
"""Attributes of a Trainer in training, by the module of this package that touches them."""

CALLED = [
    ("loops.fit_loop", "_set_sampler_epoch", ["dataloader", "epoch"]),
    ("loops.training_epoch_loop", "_TrainingEpochLoop.advance", ["self", "data_fetcher"]),
    (
        "loops.training_epoch_loop",
        "_TrainingEpochLoop.update_lr_schedulers",
        ["self", "interval", "update_plateau_schedulers"],
    ),
    ("loops.training_epoch_loop", "_TrainingEpochLoop._build_kwargs", ["self", "kwargs", "batch", "batch_idx"]),
    (
        "loops.optimization.automatic",
        "_AutomaticOptimization._make_closure",
        ["self", "kwargs", "optimizer", "batch_idx"],
    ),
    ("loops.optimization.automatic", "_AutomaticOptimization._make_zero_grad_fn", ["self", "batch_idx", "optimizer"]),
    ("loops.optimization.automatic", "_AutomaticOptimization.run", ["self", "optimizer", "batch_idx", "kwargs"]),
    ("trainer.call", "_call_callback_hooks", ["trainer", "hook_name", "args", "monitoring_callbacks", "kwargs"]),
    ("trainer.call", "_call_lightning_module_hook", ["trainer", "hook_name", "args", "pl_module", "kwargs"]),
    ("trainer.call", "_call_strategy_hook", ["trainer", "hook_name", "args", "kwargs"]),
]


def test_private_names_are_there_in_training(trainer: Any, namespace: Any) -> None:
    missing = []

    def look(trainer: Any, *_: Any) -> None:
        for path in [path for paths in NAMES.values() for path in paths]:
            found = trainer
            for name in path.split("."):
                if not hasattr(found, name):
                    missing.append(path)
                    break
                found = getattr(found, name)

    hook = namespace.Callback()
    hook.on_train_batch_start = look
    trainer.callbacks.append(hook)
    trainer.fit(patching.sibling(trainer, "demos.boring_classes").BoringModel())
    assert missing == []
    assert trainer.global_step == 1


@pytest.mark.parametrize(("home", "path", "arguments"), CALLED, ids=lambda value: str(value))
def test_private_functions_take_what_they_are_given(trainer: Any, home: str, path: str, arguments: list[str]) -> None:
    found = patching.sibling(trainer, home)
    for name in path.split("."):
        found = getattr(found, name)
    assert [*inspect.signature(found).parameters] == arguments


def test_a_closure_of_lightning_has_what_is_replaced(trainer: Any) -> None:
    kind = patching.sibling(trainer, "loops.optimization.automatic").Closure
    made = kind(lambda: None, lambda loss: None, lambda: None)
    assert callable(kind.closure)
    assert "_zero_grad_fn" in vars(made)


def test_what_warns_once_asks_a_cache(trainer: Any) -> None:
    cache = patching.sibling(trainer, "utilities.rank_zero").WarningCache
    for name in ("loops.optimization.automatic", "core.module", "trainer.connectors.logger_connector.result"):
        assert patching.sibling(trainer, name).WarningCache is cache
    assert callable(cache.warn)


def test_a_logged_value_keeps_what_is_shown_of_a_step(trainer: Any) -> None:
    results = patching.sibling(trainer, "trainer.connectors.logger_connector.result")._ResultCollection(training=True)
    results.log("training_step", "loss", torch.tensor(2.0), on_step=True, sync_dist=True, sync_dist_fn=twice)
    result = results["training_step.loss"]
    assert (result._forward_cache, result.is_tensor, result.meta.on_step, result.meta.sync.should) == (
        4,
        True,
        True,
        True,
    )
    result._forward_cache = torch.tensor(3.0)
    assert results.metrics(on_step=True)["log"] == {"loss_step": 3}
    result.meta.sync.should = False
    assert result.meta.sync(torch.tensor(5.0)) == 5


def twice(value: torch.Tensor, **_: Any) -> torch.Tensor:
    return value * 2


@pytest.mark.parametrize("metric", [MeanMetric(), MaxMetric()])
def test_a_metric_enables_gradients_where_forward_computes_the_value_of_a_batch(metric: Any) -> None:
    seen = []
    update = metric.update
    metric.update = lambda *values: (seen.append(metric._enable_grad), update(*values))
    assert metric(torch.tensor(2.0)) == metric._forward_cache == 2
    assert seen.count(True) == 1
    assert metric.update_called


@pytest.mark.parametrize(("settings", "dynamic"), [({}, None), ({"dynamic": False}, False), ({"dynamic": True}, True)])
def test_a_compiled_module_keeps_its_settings(settings: dict[str, Any], dynamic: bool | None) -> None:
    module, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    other.compile(mode="reduce-overhead", **settings)
    contexts = compiled._contexts(torch.nn.ModuleList([torch.compile(module, **settings), other]))
    assert [each._dynamic for each in contexts] == [dynamic, dynamic]
    assert other._compiled_call_impl.get_compiler_config()["triton.cudagraphs"]
