"""What a run does: fit, validate, test, predict, export, and the files that each of these writes."""

import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from sklearn.metrics import classification_report

from lightning_ga.app.arguments import as_typed
from lightning_ga.app.build import BuiltRun, build
from lightning_ga.app.ckpt_path import find_checkpoint
from lightning_ga.app.export import save_weights
from lightning_ga.app.folders import continues, roots_of_runs
from lightning_ga.app.mistakes import one_line
from lightning_ga.app.page import PAGE, run_page
from lightning_ga.app.plan_report import count_parameters, find_accumulate
from lightning_ga.app.progress_lines import quiet_lightning
from lightning_ga.app.run_files import (
    CONFIG,
    CONFUSION,
    RESULT,
    SCORES,
    put_aside,
    read_config,
    read_run,
    walk,
    write_json,
    write_text,
)
from lightning_ga.app.settings import Config, Settings, Task, shown
from lightning_ga.app.terminal import interruptions_reported, log, number, warn
from lightning_ga.checkpoints import RECORD, newest_checkpoint, read_safely, resumable_steps
from lightning_ga.errors import UserError, printable
from lightning_ga.plan.units import counted

Metrics = dict[str, float]
OF_TRAINING = re.compile(
    r"(model|data|optimizer|lr_scheduler)\.(?!.*num_workers$)|seed|trainer\.accumulate_grad_batches|"
    r"accumulate\.(effective_batch_size|accumulate|normalize)"
)
MOST_CLASSES = 20  # of a report on the screen


def run_task(cfg: DictConfig, settings: Settings) -> dict[str, Any]:
    """Build what a configuration names, do what ``task`` says, and return the result."""
    written = shown(cfg)
    started = time.perf_counter()
    folder = Path(OmegaConf.select(cfg, "paths.output_dir") or HydraConfig.get().runtime.output_dir)
    with quiet_lightning():
        run = build(cfg, settings, folder)
        checkpoint = wanted_checkpoint(run, written)
        steps = resumable_steps(checkpoint) if checkpoint and run.trainer.is_global_zero else None
        if run.trainer.is_global_zero:
            write_text(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(written)))
            if settings.task is Task.fit and not settings.dry_run:
                for name in (RESULT, PAGE):  # of the run before a resume: this one has no result yet
                    (folder / name).unlink(missing_ok=True)
            for path in folder.glob("csv/metrics.csv"):  # of the run before a resume: Lightning would delete it
                put_aside(path, path.with_name(f"metrics-{time.time_ns()}.csv"), before=steps)
        for logger in run.trainer.loggers:
            logger.log_hyperparams({**written, "parameters": count_parameters(run.model)})
        with interruptions_reported(lambda: outcome(run, steps)):
            metrics = TASKS[settings.task](run, checkpoint)
            result: dict[str, Any] = {**metrics}
            if run.metric.name in metrics:
                result |= {"optimized_metric": run.metric.name, "optimized_direction": run.metric.direction}
            if run.trainer.is_global_zero and not settings.dry_run:
                summarize(run, metrics, result, time.perf_counter() - started)
    return result


def wanted_checkpoint(run: BuiltRun, written: Config) -> Path | None:
    """The file of ``ckpt_path``, which is printed; only a fit and published weights need none."""
    wanted = run.settings.ckpt_path
    is_fit = run.settings.task is Task.fit
    if continues(run.config):
        newest = newest_checkpoint(run.folder)
        if newest is not None:
            if run.trainer.is_global_zero:
                require_same_training(run.folder, written)
            return announced(run, newest)
    if wanted not in (None, "auto"):
        weights = run.model.state_dict()
        kind = "last" if is_fit else "best"
        roots = roots_of_runs(run.config)
        return announced(run, find_checkpoint(wanted, weights, roots, kind=kind, own=run.folder))
    if not is_fit and not written["model"].get("pretrained"):
        raise UserError(f"task={run.settings.task.name} needs trained weights: give ckpt_path=best, last or a path.")
    return None


def announced(run: BuiltRun, path: Path) -> Path:
    """A checkpoint, which is printed; a file that is none of a run is refused."""
    is_sharded = path.is_dir()
    content = read_safely(path / RECORD if is_sharded else path)  # Lightning 2.5 would load anything
    if not isinstance(content, Mapping) or not ("state_dict" in content or is_sharded) or "global_step" not in content:
        raise UserError(f"{str(path)!r} is no checkpoint of a run: give a run's own.")
    epoch = content.get("epoch", 0) + 1
    log.info(printable(f"Checkpoint: {path} (epoch {epoch}, {content['global_step']:,} optimizer steps)"))
    most = run.trainer.max_epochs or -1  # without an end
    if run.settings.task is Task.fit and 0 < most <= epoch and not continues(run.config):
        warn(f"The checkpoint is of epoch {epoch}, and trainer.max_epochs={most}: set a larger number for more epochs.")
    return path


def require_same_training(folder: Path, written: Config) -> None:
    """Refuse to continue a run with other data, another model, optimizer or batch."""
    before = of_training(read_config(folder))
    now = of_training(written)
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            earlier = as_typed(before.get(key))
            later = as_typed(now.get(key))
            raise UserError(
                f"{key} was {earlier} in the run in {str(folder)!r} and is {later} now: repeat the run's value, or "
                "give another hydra.run.dir."
            )


def of_training(config: Config) -> Config:
    """The keys that decide what is trained, in which samples and steps, and their values."""
    return {key: value for key, value in walk(config) if OF_TRAINING.match(key)}


def fit(run: BuiltRun, checkpoint: Path | None) -> Metrics:
    """Train, from a checkpoint if there is one; then test the best weights."""
    trainer = run.trainer
    trainer.fit(run.model, datamodule=run.data, ckpt_path=checkpoint)
    if not trainer.global_step and not run.settings.dry_run:
        raise UserError("Nothing was trained: see trainer.max_epochs, trainer.limit_train_batches and drop_last.")
    if run.settings.dry_run:
        return {}
    if trainer.should_stop and trainer.early_stopping_callbacks:
        log.info(f"Early stopping ended the training after epoch {trainer.current_epoch}.")
    metrics = measured(run)
    kept: Mapping[str, Any] = {}
    best = best_of(run)
    if best is not None:
        kept = read_safely(Path(best.best_model_path))
        metrics |= kept.get("callbacks", {}).get(run.metric.state_key, {}).get("values", {})  # of the same epoch
    if best is not None and best.best_model_score is not None:
        metrics[str(best.monitor)] = float(best.best_model_score)
    if run.settings.test and is_overridden("test_step", run.model) and is_overridden("test_dataloader", run.data):
        if kept:  # not by ckpt_path: there, Lightning's weight averaging loads the weights that are not averaged
            run.model.load_state_dict(kept["state_dict"])
        metrics |= test(run, None)
    return metrics


def best_of(run: BuiltRun) -> ModelCheckpoint | None:
    """The callback that has kept the best checkpoint: by the optimized metric, else by another of the user's own."""
    kept = [
        each for each in run.trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint) and each.best_model_path
    ]
    return min(kept, key=lambda each: (each.monitor != run.metric.name, each.monitor is None), default=None)


def validate(run: BuiltRun, checkpoint: Path | None) -> Metrics:
    """Measure on the validation set."""
    run.trainer.validate(run.model, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
    return measured(run)


def test(run: BuiltRun, checkpoint: Path | None) -> Metrics:
    """Measure on the test set, with a report per class."""
    run.trainer.test(run.model, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
    metrics = measured(run)
    confusion = getattr(run.model, "confusion", None)  # of ours; an own model's may be a metric
    if confusion and isinstance(confusion, list):
        names = [*map(printable, getattr(run.data, "class_names", ()))]
        text, scores = class_report(confusion, names)
        for kind in ("macro", "weighted"):
            metrics[f"test/{kind}_f1"] = scores[f"{kind} avg"]["f1-score"]
        if run.trainer.is_global_zero:
            write_text(run.folder / "classification_report.txt", text)
            write_json(run.folder / SCORES, scores)
            write_json(run.folder / CONFUSION, {"classes": names, "counts": confusion})
        if len(confusion) <= MOST_CLASSES:
            log.info(f"\n{text.rstrip()}")
    return metrics


def predict(run: BuiltRun, checkpoint: Path | None) -> Metrics:
    """Write what is predicted for every test sample, as the model returns it: probabilities of classes, too."""
    if run.trainer.world_size > 1:
        raise UserError("task=predict runs on one device: use trainer.devices=1.")
    batches: Any = run.trainer.predict(run.model, datamodule=run.data, ckpt_path=checkpoint)
    save_predictions(run.folder / "predictions", batches or ())  # None with limit_predict_batches=0
    return {}


def export(run: BuiltRun, checkpoint: Path | None) -> Metrics:
    """Write the weights without optimizer and Trainer, and show the lines that load them."""
    if run.trainer.is_global_zero:
        content: Any = {"state_dict": run.model.state_dict(), "hyper_parameters": dict(run.model.hparams)}
        if checkpoint is not None:
            content = read_safely(checkpoint)
        run.model.configure_model()
        run.model.load_state_dict(content["state_dict"], strict=run.model.strict_loading)  # another model's are refused
        code = save_weights(run.folder, run.model, content)
        log.info(f"Load them with:\n{indent(code, '  ').rstrip()}")
    return {}


TASKS: Mapping[Task, Callable[[BuiltRun, Path | None], Metrics]] = {
    Task.fit: fit,
    Task.validate: validate,
    Task.test: test,
    Task.predict: predict,
    Task.export: export,
}


def measured(run: BuiltRun) -> Metrics:
    """The metrics of the last stage as plain numbers."""
    return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


def outcome(run: BuiltRun, begun: int | None) -> str:
    """How far a run came that was ended early, and the command that goes on: from its newest checkpoint, if any.

    A run that began at so many steps, and has at most a copy of an earlier best one, is repeated in another folder.
    """
    if (run.folder / RESULT).is_file() or run.settings.task is not Task.fit:
        return f"what was done is in {run.folder}."
    own = HydraConfig.get()
    added: list[str] = []
    if own.mode == RunMode.MULTIRUN:
        added = [f"hydra.sweep.dir={own.sweep.dir}"]
    elif begun is None or begun <= max([resumable_steps(path) or 0 for path in run.folder.rglob("*.ckpt")], default=-1):
        added = [f"hydra.run.dir={run.folder}", "ckpt_path=auto"]
    replaced = ("hydra.run.dir=", *(word[: word.index("=") + 1] for word in added))
    words = [word for word in sys.argv[1:] if not word.startswith(replaced)]
    line = shlex.join(["python", "-m", "lightning_ga.train", *words, *added])
    return f"{run.trainer.global_step:,} optimizer steps were done. Resume with: {line}"


def summarize(run: BuiltRun, metrics: Metrics, result: dict[str, Any], seconds: float) -> None:
    """The result, on the screen as the last lines, in ``result.json``, and on a page."""
    texts = []
    broken = []
    for name, value in sorted(metrics.items()):
        if name == run.metric.name or not name.startswith("train"):
            texts.append(f"{name} {number(value)}")
        if not math.isfinite(value):
            broken.append(name)
    listed = ", ".join(texts) or f"{run.settings.task.name} done"
    log.info(f"\nResult after {seconds:.0f} s: {listed}")
    if broken:
        warn(f"{', '.join(broken)} is not finite: training has diverged, or the metric has nothing to measure.")
    survived = getattr(find_accumulate(run.trainer), "oom_events", 0)
    if survived:
        log.info(f"Survived {counted(survived, 'out-of-memory error')}: see the warnings above.")
        result["oom_events"] = survived
    write_json(run.folder / RESULT, {**result, "seconds": round(seconds, 1)})
    try:
        write_text(run.folder / PAGE, run_page(read_run(run.folder)))
    except Exception as error:  # it is for people only; what was trained is kept
        warn(f"report.html could not be written: {one_line(error)}")
    log.info(printable(f"Files: {run.folder}"))


def class_report(confusion: Sequence[Sequence[int]], names: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Scores of every class and their averages, as text and as numbers, of counts ``confusion[target][prediction]``."""
    counts = np.asarray(confusion)
    targets, predictions = np.indices(counts.shape).reshape(2, -1).repeat(counts.ravel(), axis=1)
    settings: dict[str, Any] = {"labels": range(len(counts)), "digits": 4, "zero_division": 0}
    if len(names) == len(counts):
        settings["target_names"] = names
    return (
        classification_report(targets, predictions, **settings),
        classification_report(targets, predictions, **settings, output_dict=True),
    )


def save_predictions(path: Path, batches: Sequence[Any]) -> None:
    """Keep tensors as ``.npy``, dicts of tensors as ``.npz``, samples along the first axis; else as ``.pt``."""
    arrays: dict[str, Any] = {}
    with suppress(LookupError, RuntimeError, TypeError):  # not of one kind or shape
        arrays = joined(batches)
    if not arrays or {"file", "allow_pickle"} & arrays.keys():  # which np.savez takes for its own arguments
        torch.save(list(batches), path.with_suffix(".pt"))
    elif "" in arrays:
        np.save(path.with_suffix(".npy"), arrays[""])
    else:
        np.savez(path.with_suffix(".npz"), **arrays)


def joined(batches: Sequence[Any]) -> dict[str, Any]:
    """The samples of all batches as arrays by name; the name of tensors without one is empty."""
    parts = [batch if isinstance(batch, Mapping) else {"": batch} for batch in batches]
    arrays = {}
    for name in dict.fromkeys(chain.from_iterable(parts)):
        tensor = torch.cat([part[name] for part in parts]).cpu()
        if tensor.dtype == torch.bfloat16:  # which NumPy lacks
            tensor = tensor.float()
        arrays[str(name)] = tensor.numpy()
    return arrays
