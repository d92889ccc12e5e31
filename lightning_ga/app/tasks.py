"""What a run does with what was built: fit, validate, test, predict, and what it leaves to read."""

import csv
import functools
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.build import Fit, build
from lightning_ga.app.checkpoints import find_checkpoint
from lightning_ga.app.plots import plot_losses, read_curves
from lightning_ga.app.progress import survived_errors
from lightning_ga.app.report import counted, write_json
from lightning_ga.app.scores import class_scores, save_scores, scores_text
from lightning_ga.errors import UserError
from lightning_ga.probe.planned.device import planned_device

Metrics = dict[str, float]
MOST_CLASSES_SHOWN = 20


def run_task(cfg: DictConfig) -> float | None:
    """Build and do what ``cfg.task`` says.

    Returns:
        The optimized metric, for sweepers; nothing if the task does not measure it.
    """
    started = time.perf_counter()
    run = build(cfg)
    checkpoint = wanted_checkpoint(run)
    if run.trainer.is_global_zero:
        run.folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(run.config, run.folder / "config.yaml")
    metrics = TASKS[cfg.task](run, checkpoint)
    if run.trainer.is_global_zero and not cfg.dry_run:
        summarize(run, metrics, time.perf_counter() - started)
    return metrics.get(cfg.optimized_metric)


def wanted_checkpoint(run: Fit) -> Path | None:
    """The file behind ``ckpt_path``; only a fit and published weights can do without."""
    config = run.config
    if config.ckpt_path is not None:
        model: Any = OmegaConf.to_container(config.model)
        return find_checkpoint(
            str(config.ckpt_path), model, [Path(config.paths[key]) for key in ("output_root", "sweep_root")]
        )
    if config.task != "fit" and not config.model.get("pretrained"):
        raise UserError(f"task={config.task} needs trained weights: give ckpt_path=best, ckpt_path=last or a path.")
    return None


def fit(run: Fit, checkpoint: Path | None) -> Metrics:
    """Train, from a checkpoint if there is one; then test the best weights."""
    memory = run.config.device_memory
    with nullcontext() if memory is None else planned_device(memory):
        safely(run.trainer.fit)(run.model, datamodule=run.data, ckpt_path=checkpoint)
    tell_if_complete(run)
    if run.config.dry_run:
        return {}
    metrics = measured(run)
    best = best_checkpoint(run)
    if best is not None and best.best_model_score is not None:
        metrics[str(best.monitor)] = float(best.best_model_score)
    save_curves(run)
    if run.config.test:
        weights = Path(best.best_model_path) if best is not None and best.best_model_path else None
        metrics |= test(run, weights)
    return metrics


def tell_if_complete(run: Fit) -> None:
    """Say that a fit had nothing left to do: Lightning returns from it without a word."""
    trainer = run.trainer
    started = any(getattr(callback, "started", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if started or not trainer.is_global_zero:
        return
    key = "max_steps" if 0 <= trainer.max_steps <= trainer.global_step else "max_epochs"
    done = trainer.global_step if key == "max_steps" else trainer.current_epoch
    print(
        f"Training was already complete ({trainer.global_step} optimizer steps): "
        f"go on with trainer.{key}={done + 1} or more."
    )


def validate(run: Fit, checkpoint: Path | None) -> Metrics:
    """Measure on the validation set."""
    safely(run.trainer.validate)(run.model, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
    return measured(run)


def test(run: Fit, checkpoint: Path | None) -> Metrics:
    """Measure on the test set, with a report per class."""
    safely(run.trainer.test)(run.model, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
    metrics = measured(run)
    confusion = getattr(run.model, "confusion", None)
    if confusion:
        scores = class_scores(confusion, getattr(run.data, "class_names", ()))
        metrics["test/macro_f1"], metrics["test/weighted_f1"] = scores[-2].f1, scores[-1].f1
        if run.trainer.is_global_zero:
            save_scores(run.folder, scores)
            if len(confusion) <= MOST_CLASSES_SHOWN:
                print(f"\n{scores_text(scores)}")
    return metrics


def predict(run: Fit, checkpoint: Path | None) -> Metrics:
    """Write the predicted class of every test sample to ``predictions.csv``."""
    if run.trainer.world_size > 1:
        raise UserError("task=predict runs on one device: use trainer.devices=1.")
    batches = safely(run.trainer.predict)(run.model, datamodule=run.data, ckpt_path=checkpoint)
    with (run.folder / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sample", "prediction"])
        writer.writerows(enumerate(torch.cat(batches).tolist()))
    return {}


TASKS: Mapping[str, Callable[[Fit, Path | None], Metrics]] = {
    "fit": fit,
    "validate": validate,
    "test": test,
    "predict": predict,
}


def safely(method: Callable[..., Any]) -> Callable[..., Any]:
    """A Trainer's method that loads tensors and plain values only.

    Lightning 2.5 has no such argument; there the file has been checked when it was found.
    """
    if "weights_only" in inspect.signature(method).parameters:
        return functools.partial(method, weights_only=True)
    return method


def measured(run: Fit) -> Metrics:
    """The metrics of the last stage as plain numbers."""
    return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


def best_checkpoint(run: Fit) -> ModelCheckpoint | None:
    """The callback that keeps the best weights, if the run has one."""
    kept = [callback for callback in run.trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return next((callback for callback in kept if callback.monitor is not None), None)


def save_curves(run: Fit) -> None:
    """Draw the loss curves from the CSV log."""
    for logger in run.trainer.loggers:
        if isinstance(logger, CSVLogger) and run.trainer.is_global_zero:
            logger.save()
            path = Path(logger.log_dir) / "metrics.csv"
            if path.is_file():
                plot_losses(run.folder / "loss_curves.png", read_curves(path))


def summarize(run: Fit, metrics: Metrics, seconds: float) -> None:
    """The result, on the screen as the last lines and in ``result.json``."""
    survived = survived_errors(run.trainer)
    events = {"oom_events": survived} if survived else {}
    write_json(run.folder / "result.json", {**metrics, **events, "seconds": round(seconds, 1)})
    shown = [f"{name} {value:.4f}" for name, value in sorted(metrics.items()) if not name.startswith("train/")]
    print(f"\nResult after {seconds:.0f} s: {', '.join(shown) or run.config.task + ' done'}")
    if survived:
        print(f"Survived {counted(survived, 'out-of-memory error')}: run again in smaller parts, with the same result.")
    print(f"Files: {run.folder}")
