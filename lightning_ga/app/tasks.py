"""What a run does with what was built: fit, validate, test, predict, and what it leaves to read."""

import math
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from sklearn.metrics import classification_report
from torch import Tensor

from lightning_ga.app import checkpoints
from lightning_ga.app.build import Fit, build, make
from lightning_ga.app.errors import one_line
from lightning_ga.app.folders import LOG, clear, is_below, require_free
from lightning_ga.app.page import write_page
from lightning_ga.app.plan_report import find_accumulate
from lightning_ga.app.plots import loss_figure
from lightning_ga.app.progress import quiet_lightning
from lightning_ga.app.run_files import CONFIG, read_run, write_json, write_table, write_text
from lightning_ga.app.terminal import interruptions_told, printed_to, warn
from lightning_ga.app.values import Config, hidden
from lightning_ga.errors import UserError, printable
from lightning_ga.plan.planned_device import planned_device
from lightning_ga.plan.units import counted

Metrics = dict[str, float]
MOST_CLASSES_SHOWN = 20
MOST_COLUMNS = 100  # classes whose probabilities get a column each


def run_task(content: Config, written: Config, allow: tuple[str, ...] = ()) -> float | None:
    """Build what a checked configuration names, with packages in ``allow`` too, and do what ``task`` says.

    The run keeps its configuration as it is ``written``. Return the optimized metric, for sweepers; nothing if the task
    does not measure it.
    """
    folder = Path(content["paths"]["output_dir"])
    log = printed_to(folder / LOG) if HydraConfig.get().output_subdir is not None else nullcontext()
    with log, quiet_lightning():
        started = time.perf_counter()
        run = build(content, allow)
        written = hidden(OmegaConf.to_container(run.config), written)  # by now, classes are counted
        checkpoint = wanted_checkpoint(run, written)
        if run.trainer.is_global_zero:
            if run.config.get("overwrite") and not (checkpoint and is_below(checkpoint, folder)):
                clear(folder)
            write_text(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(written)))
            write_json(folder / "versions.json", versions(run))
        reported = run.trainer.is_global_zero and not run.config.dry_run
        with interruptions_told(lambda: outcome(run)):
            metrics = TASKS[run.config.task](run, checkpoint)
            if reported:
                summarize(run, metrics, time.perf_counter() - started)
        page = shlex.join(["python", "-m", "lightning_ga.report", str(run.folder)])
        with interruptions_told(lambda: f"the run was done, but for its page: {page} writes it."):
            if reported:
                with for_people("report.html"):
                    write_page([run.folder])
    return metrics.get(run.config.optimized_metric)


@contextmanager
def for_people(name: str) -> Iterator[None]:
    """A context that writes what is only read by people: if that fails, it is told, and what was trained is kept."""
    try:
        yield
    except Exception as error:
        warn(f"{name} could not be written: {one_line(error)}")


def wanted_checkpoint(run: Fit, written: Config) -> Path | None:
    """The file behind ``ckpt_path``, which is told; only a fit and published weights can do without."""
    config = run.config
    if config.ckpt_path is None:
        if config.task != "fit" and not config.model.get("pretrained") and not config.model.get("init_from"):
            raise UserError(f"task={config.task} needs trained weights: give ckpt_path=best, ckpt_path=last or a path.")
        return None
    roots = [Path(config.paths[key]) for key in ("output_root", "sweep_root")]
    kind = "last" if config.task == "fit" else "best"
    path = checkpoints.find_checkpoint(str(config.ckpt_path), written["model"], roots, kind=kind)
    if run.trainer.is_global_zero:
        require_free(run.folder, config, path)
    take_checkpoint(run, path, written)
    return path


def take_checkpoint(run: Fit, path: Path, written: Config) -> None:
    """Refuse a checkpoint that this run cannot take, and tell which one it takes."""
    content = checkpoints.read_safely(path)  # Lightning 2.5 would load anything: it gets nothing but plain values
    is_fit = run.config.task == "fit"
    checkpoints.require_checkpoint(path, content, fit=is_fit)
    checkpoints.require_same_model(path, content["state_dict"], run.model.state_dict())
    if is_fit and run.config.get("optimizer"):
        weights = [torch.nn.Parameter(torch.empty_like(weight, device="meta")) for weight in run.model.parameters()]
        checkpoints.require_same_optimizer(path, content, make(run.config.optimizer)(weights))
    if run.trainer.is_global_zero:
        epoch, steps = content.get("epoch", 0) + 1, content["global_step"]
        print(printable(f"Checkpoint: {path} (epoch {epoch}, {steps:,} optimizer steps)"))
        warn(checkpoints.differences(path, written, fit=is_fit))
        if is_fit and run.config.get("lr_scheduler") and not content["lr_schedulers"]:
            warn(f"{path} holds no state of a schedule: lr_scheduler begins anew.")


def fit(run: Fit, checkpoint: Path | None) -> Metrics:
    """Train, from a checkpoint if there is one; then test the best weights."""
    memory = run.config.device_memory
    with nullcontext() if memory is None else planned_device(memory):
        run.trainer.fit(run.model, datamodule=run.data, ckpt_path=checkpoint)
    require_training(run)
    if run.config.dry_run:
        return {}
    metrics = measured(run)
    best = best_checkpoint(run)
    unmeasured = best is not None and best.save_top_k and not best.best_model_path and best.monitor not in metrics
    if best is not None and unmeasured and run.trainer.is_global_zero:
        warn(
            f"{best.monitor} was never measured, so there is no best checkpoint, and a test is of the last weights: "
            "validation runs by trainer.limit_val_batches, check_val_every_n_epoch and val_check_interval."
        )
    if best is not None and best.best_model_score is not None:
        metrics[str(best.monitor)] = float(best.best_model_score)
    with for_people("loss_curves.png"):
        figure = loss_figure({"": read_run(run.folder).curves}) if run.trainer.is_global_zero else None
        if figure is not None:
            figure.savefig(run.folder / "loss_curves.png", dpi=150)
    if run.config.test:
        if best is not None and best.best_model_path:
            # Not by ckpt_path: there, Lightning's weight averaging takes the weights that are not averaged.
            run.model.load_state_dict(checkpoints.read_safely(Path(best.best_model_path))["state_dict"])
        metrics |= test(run, None)
    return metrics


def require_training(run: Fit) -> None:
    """Say that a fit had nothing left to do, and refuse one without a batch: Lightning returns without a word."""
    trainer = run.trainer
    started = any(getattr(callback, "started", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if started or not trainer.is_global_zero:
        return
    if not trainer.global_step:
        raise UserError("Nothing was trained: the data have no batch for it (trainer.limit_train_batches, drop_last).")
    key = "max_steps" if 0 <= trainer.max_steps <= trainer.global_step else "max_epochs"
    done = trainer.global_step if key == "max_steps" else trainer.current_epoch
    print(
        f"Training was already complete ({trainer.global_step} optimizer steps): "
        f"go on with trainer.{key}={done + 1} or more."
    )


def validate(run: Fit, checkpoint: Path | None) -> Metrics:
    """Measure on the validation set."""
    run.trainer.validate(run.model, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
    return measured(run)


def test(run: Fit, checkpoint: Path | None) -> Metrics:
    """Measure on the test set, with a report per class."""
    run.trainer.test(run.model, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
    metrics = measured(run)
    confusion = getattr(run.model, "confusion", None)
    if confusion:
        names = [printable(name) for name in getattr(run.data, "class_names", ())]
        text, scores = class_report(confusion, names)
        metrics |= {f"test/{kind}_f1": scores[f"{kind} avg"]["f1-score"] for kind in ("macro", "weighted")}
        if run.trainer.is_global_zero:
            with for_people("classification_report.txt"):
                write_text(run.folder / "classification_report.txt", text)
                write_json(run.folder / "classification_report.json", scores)
                write_json(run.folder / "confusion_matrix.json", {"classes": names, "counts": confusion})
            if len(confusion) <= MOST_CLASSES_SHOWN:
                print(f"\n{text}", end="")
    return metrics


def predict(run: Fit, checkpoint: Path | None) -> Metrics:
    """Write what is predicted for every test sample to ``predictions.csv``."""
    if run.trainer.world_size > 1:
        raise UserError("task=predict runs on one device: use trainer.devices=1.")
    batches: Any = run.trainer.predict(run.model, datamodule=run.data, ckpt_path=checkpoint)
    save_predictions(run.folder / "predictions.csv", batches, run.data)
    return {}


TASKS: Mapping[str, Callable[[Fit, Path | None], Metrics]]
TASKS = {"fit": fit, "validate": validate, "test": test, "predict": predict}


def measured(run: Fit) -> Metrics:
    """The metrics of the last stage as plain numbers."""
    return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


def best_checkpoint(run: Fit) -> ModelCheckpoint | None:
    """The callback that keeps the best weights, if the run has one."""
    kept = (callback for callback in run.trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
    return next((callback for callback in kept if callback.monitor is not None), None)


def outcome(run: Fit) -> str:
    """What a run that was ended early has saved, and the command that goes on with it."""
    if run.config.task != "fit":
        return f"task={run.config.task} changes nothing: start it again."
    steps = f"{run.trainer.global_step:,} optimizer steps were done"
    files = {name: run.folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best")}
    name = next((name for name, path in files.items() if path.is_file()), None)
    typed = [argument for argument in HydraConfig.get().overrides.task if not argument.startswith("ckpt_path=")]
    line = ["python", "-m", "lightning_ga.train", *typed]
    if name is None:
        return f"{steps}, and no checkpoint had been saved yet. Start again: {shlex.join(line)}"
    onward = shlex.join([*line, f"ckpt_path={files[name]}"])
    return f"{steps}; the state after the {name} epoch is in {files[name]}. Go on with: {onward}"


def summarize(run: Fit, metrics: Metrics, seconds: float) -> None:
    """The result, on the screen as the last lines and in ``result.json``."""
    survived = getattr(find_accumulate(run.trainer), "oom_events", 0)
    events = {"oom_events": survived} if survived else {}
    shown = [f"{name} {value:.4f}" for name, value in sorted(metrics.items()) if not name.startswith("train/")]
    print(f"\nResult after {seconds:.0f} s: {', '.join(shown) or run.config.task + ' done'}")
    names = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if names:
        warn(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not finite: the training diverged, or met data "
            "that are no numbers. A lower optimizer.lr or trainer.gradient_clip_val=1 may help; "
            "+trainer.detect_anomaly=true shows where it began."
        )
    if survived:
        print(f"Survived {counted(survived, 'out-of-memory error')}: what was told of it stands above.")
    write_json(run.folder / "result.json", {**metrics, **events, "seconds": round(seconds, 1)})  # a disk may be full
    print(printable(f"Files: {run.folder}"))


def versions(run: Fit) -> dict[str, str]:
    """What the run runs with."""
    packages = ("lightning_ga", "lightning", "torch", "torchvision", "torchmetrics", "timm")
    device = run.trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        **{package: version(package) for package in packages},
        "python": platform.python_version(),
        "device": f"{device.type}: {name}",
        "system": f"{platform.system()} {platform.release()}",
    }


def class_report(confusion: Sequence[Sequence[int]], names: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Scores of every class, their macro average (plain) and weighted average (by support), as text and as numbers.

    Samples are counted in ``confusion[target][prediction]``. Classes without names have numbers. A ratio without a
    denominator (a class that was never predicted, or has no samples) is 0.
    """
    counts = np.asarray(confusion)
    targets, predictions = (np.repeat(labels, counts.ravel()) for labels in np.indices(counts.shape).reshape(2, -1))
    report = partial(
        classification_report,
        targets,
        predictions,
        labels=range(len(counts)),
        target_names=names if len(names) == len(counts) else None,
        digits=4,
        zero_division=0,
    )
    return report(), report(output_dict=True)


def save_predictions(path: Path, batches: Sequence[Tensor], data: Any) -> None:
    """Write one row for each sample, from probabilities ``(batch, classes)`` or classes ``(batch,)``.

    A row has the sample or its file, the predicted class by number and name, and probabilities.
    """
    predicted = torch.cat(list(batches)).float()
    classes = predicted.argmax(dim=1) if predicted.dim() == 2 else predicted.long()
    names = list(getattr(data, "class_names", ()))
    table: dict[str, list[Any]] = {"sample": list(range(len(classes)))}
    files = getattr(getattr(getattr(data, "splits", None), "test", None), "images", None)
    if files is not None and not isinstance(files, Tensor):
        table["file"] = list(files)
    table["prediction"] = classes.tolist()
    if names:
        table["class"] = [names[label] for label in classes.tolist()]
    if predicted.dim() == 2:
        table["probability"] = rounded(predicted.gather(1, classes.unsqueeze(1)).squeeze(1))
        if predicted.shape[1] <= MOST_COLUMNS:
            labels = names or [str(label) for label in range(predicted.shape[1])]
            table |= {f"p({label})": rounded(column) for label, column in zip(labels, predicted.T)}
    write_table(path, [list(table), *zip(*table.values())])


def rounded(column: Tensor) -> list[str]:
    """Probabilities with six digits behind the point."""
    return [f"{value:.6f}" for value in column.tolist()]
