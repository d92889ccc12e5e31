"""Measure the critical batch: branch from a checkpoint at several batches, for the same samples.

``python -m lightning_ga.batch_size ckpt_path=RUN`` does so for a run of the command line.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_ga.callback import AutoAccumulate
from lightning_ga.errors import UserError, printable
from lightning_ga.plan.accumulation import require_count
from lightning_ga.plan.config import RateRule, ScaleLr, require_choice
from lightning_ga.plan.critical_batch import BatchPoint, CriticalBatch, batches_around

_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def measure_batch_size(
    make: Callable[[], tuple[Any, Any]],
    ckpt_path: str | Path,
    *,
    batch: int,
    samples: int,
    folder: str | Path,
    seeds: int = 3,
    scale_lr: ScaleLr = "sqrt",
    scale_beta2: bool = False,
    lr: float | None = None,
    tolerance: float = 0.01,
    monitor: str = "val/loss",
    tell: Callable[[str], None] = print,
    **trainer: Any,
) -> CriticalBatch:
    """Measure the largest batch that trains as well on the same samples as smaller ones do.

    From a checkpoint, training branches at B/2, B, 2B and 4B. Each branch takes the weights and the optimizer's state,
    keeps its learning rate (by the rule; schedulers rest), and is validated after the same samples.

    Args:
        make: Returns a fresh module and its datamodule, which has a validation set.
        ckpt_path: A checkpoint of a fit with one optimizer.
        batch: Effective batch B that the checkpoint's learning rate belongs to.
        samples: That each branch trains on, over all ranks: rounded to whole epochs, or to steps of 4B within one.
        folder: For ``batch_size.json``, with which a second call goes on, and the picture ``batch_size.png``.
        seeds: Branches of each batch, which differ in the order of samples; at least two.
        scale_lr: How the learning rate follows the batch, as in ``AutoAccumulate``.
        scale_beta2: Whether Adam's half-life stays the same in samples.
        lr: Learning rate at B of all parameter groups, instead of the checkpoint's.
        tolerance: By which share of the lowest loss that of a larger batch may be higher.
        monitor: The metric of validation; lower is better.
        tell: Is given lines of progress.
        trainer: Arguments of each branch's Trainer, such as ``accelerator="cpu"``.

    Raises:
        UserError: If an argument is wrong, or the checkpoint or the metric shows nothing.
    """
    batch, seeds = require_count("batch", batch), require_count("seeds", seeds)
    if seeds < 2:
        raise UserError(f"{seeds=} gives no standard error: use at least 2.")
    require_choice(scale_lr=(scale_lr, get_args(ScaleLr)), scale_beta2=(scale_beta2, (True, False)))
    for name, value in {"tolerance": tolerance, "lr": lr}.items():
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise UserError(f"{name}={value!r} must be a number above 0.")
    samples, epochs = _whole(require_count("samples", samples), 4 * batch, make()[1])
    from lightning_ga.app.checkpoints import read_safely, require_checkpoint  # the library does without Hydra

    content = read_safely(Path(ckpt_path))
    require_checkpoint(Path(ckpt_path), content)
    run = _Branches(make, content, RateRule(scale_lr, scale_beta2), batch, lr, monitor, trainer)
    setting = {"step": content["global_step"], "batch": batch, "samples": samples, "lr": lr, "monitor": monitor}
    setting |= {"scale_lr": scale_lr, "scale_beta2": scale_beta2}
    losses, sizes = _known(Path(folder), setting), batches_around(batch, samples)
    left = [(size, seed) for seed in range(seeds) for size in sizes if f"{size}/{seed}" not in losses]
    if left:
        seconds = len(left) * run.seconds(samples / batch)
        tell(f"{len(left)} branches of {samples:,} samples each: about {seconds:.0f} s")
    for number, (size, seed) in enumerate(left, 1):
        loss = run.loss(size, seed, {"max_epochs": epochs} if epochs else {"max_steps": samples // size})
        losses[f"{size}/{seed}"] = loss
        _keep(Path(folder), {"setting": setting, "losses": losses})
        tell(f"{number} of {len(left)}: batch {size}, seed {seed}: {monitor} {loss:.4f}")
    points = (BatchPoint(size, tuple(losses[f"{size}/{seed}"] for seed in range(seeds))) for size in sizes)
    found = CriticalBatch(tuple(points), tolerance, samples)
    _draw(found, Path(folder) / "batch_size.png", monitor)
    return found


@dataclass(frozen=True, slots=True)
class _Branches:
    """Trainings that begin with a checkpoint."""

    make: Callable[[], tuple[Any, Any]]
    content: Mapping[str, Any]  # of the checkpoint
    rule: RateRule
    batch: int  # that its learning rate belongs to
    lr: float | None  # instead of the checkpoint's
    monitor: str
    trainer: Mapping[str, Any]  # arguments of it

    def loss(self, size: int, seed: int, end: Mapping[str, int]) -> float:
        """Train with a batch of so many samples until the ``end``, and validate."""
        module, data = self.make()
        pl.seed_everything(seed, workers=True, verbose=False)  # now, as what the user makes may be seeded
        settings: dict[str, Any] = {**_QUIET, "max_epochs": -1, **self.trainer, **end, "limit_val_batches": 0}
        start = pl.callbacks.LambdaCallback(on_fit_start=partial(self._begin, size))  # before the probe
        _trainer(**settings, callbacks=[AutoAccumulate(size, verify=False), start]).fit(module, datamodule=data)
        judge = _trainer(**{**_QUIET, **self.trainer})
        judge.validate(module, datamodule=data, verbose=False)
        if self.monitor not in judge.callback_metrics:
            known = ", ".join(sorted(judge.callback_metrics))
            raise UserError(f"monitor={self.monitor!r} is no metric of validation: {known}.")
        return float(judge.callback_metrics[self.monitor])

    def _begin(self, size: int, trainer: Any, module: Any) -> None:
        """Take the checkpoint's weights over, and its optimizer's state at a fixed learning rate."""
        module.load_state_dict(self.content["state_dict"])
        trainer.strategy.lr_scheduler_configs = []
        optimizer, states = trainer.optimizers[0], self.content.get("optimizer_states") or []
        if len(states) != 1 or len(trainer.optimizers) != 1:
            raise UserError("The checkpoint holds no state of one optimizer: give one of a fit, such as last.ckpt.")
        optimizer.load_state_dict(deepcopy(states[0]))  # it would train on in these tensors
        for group in optimizer.param_groups:
            rate = group["lr"] if self.lr is None else self.lr
            if rate < 0.01 * group.get("initial_lr", 0.0) or not rate:
                raise UserError(
                    f"The checkpoint's learning rate has fallen to {rate:.3g}, which shows nothing: give lr=…."
                )
            self.rule.scale(group, rate, size, self.batch)

    def seconds(self, steps: float) -> float:
        """Estimate how long a branch of so many steps takes, by two short ones."""
        taken = []
        for few in (2, 10):
            started = time.perf_counter()
            self.loss(self.batch, 0, {"max_steps": few})
            taken.append(time.perf_counter() - started)
        return taken[0] + max(0.0, taken[1] - taken[0]) / 8 * steps


def _trainer(**arguments: Any) -> pl.Trainer:
    try:
        return pl.Trainer(**arguments)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"These arguments make no Trainer: {str(error).rstrip('.')}.") from error


def _whole(samples: int, multiple: int, data: Any) -> tuple[int, int]:
    """Return the samples that every batch can train on, and epochs: whole epochs, or whole windows of the first."""
    data.prepare_data()
    data.setup("fit")
    total = len(data.train_dataloader().dataset)
    if samples >= total:
        return round(samples / total) * total, round(samples / total)
    if multiple > total:
        raise UserError(f"samples={samples} of {total} hold no window of {multiple} samples: give a smaller batch.")
    return min(-(-samples // multiple), total // multiple) * multiple, 0


_PARAMETERS = signature(measure_batch_size).parameters


def _known(folder: Path, setting: Mapping[str, Any]) -> dict[str, float]:
    """Return what an earlier call of the same setting has measured."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "batch_size.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    losses: dict[str, float] = known["losses"] if known.get("setting") == setting else {}
    return losses


def _keep(folder: Path, record: Mapping[str, Any]) -> None:
    part = folder / "batch_size.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(folder / "batch_size.json")


def _draw(found: CriticalBatch, path: Path, monitor: str) -> None:
    """Draw loss against batch, with standard errors and the bound of the tolerance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    batches, losses, errors = zip(*((point.batch, point.loss, point.error) for point in found.points))
    axes.errorbar(batches, losses, yerr=errors, marker="o", capsize=4)
    axes.axhline(found.bound, linestyle="--", color="gray", label=f"lowest + {found.tolerance:.0%}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(xlabel="effective batch, samples", ylabel=f"{monitor} after {found.samples:,} samples")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure for a run of the command line: ``ckpt_path=RUN`` and arguments of ``measure_batch_size``."""
    from omegaconf import OmegaConf
    from rich.console import Console
    from rich.table import Table
    from yaml import YAMLError  # type: ignore[import-untyped] # it ships no types

    from lightning_ga.app import build, checkpoints
    from lightning_ga.app.build import check_targets
    from lightning_ga.app.progress import quiet_lightning
    from lightning_ga.app.run_files import read_run
    from lightning_ga.app.terminal import interruptions_told

    written = list(sys.argv[1:] if arguments is None else arguments)
    try:
        given: dict[str, Any] = dict(OmegaConf.to_container(OmegaConf.from_dotlist(written)))  # type: ignore[arg-type]
    except YAMLError as error:
        raise UserError(f"{' '.join(written)} cannot be read: {' '.join(str(error).split())}.") from error
    known = {*_PARAMETERS, *signature(pl.Trainer).parameters, "ckpt_path"} - {"make", "folder", "tell", "trainer"}
    wrong = next((f"{key} is no argument" for key in given if key not in known), None)
    wrong = "ckpt_path=RUN is missing" if wrong is None and not given.get("ckpt_path") else wrong
    if wrong is not None:
        ours = ", ".join(f"{name}=" for name in _PARAMETERS if name in known - {"ckpt_path"})
        raise UserError(
            f"{wrong}: python -m lightning_ga.batch_size ckpt_path=RUN takes the folder of a run, {ours}, and "
            "arguments of the Trainer."
        )
    path = checkpoints.find_checkpoint(str(given.pop("ckpt_path")), {}, [Path("outputs")])
    run = read_run(path.parent.parent)
    if not run.config or not run.plan.get("plan"):
        raise UserError(f"{str(run.folder)!r} holds no config.yaml and plan.json that can be read: give another run.")
    config = {**run.config, "paths": {**run.config.get("paths", {}), "output_dir": str(run.folder)}}
    check_targets({key: config.get(key) for key in ("data", "model", "optimizer", "lr_scheduler", "trainer")})
    cfg = OmegaConf.create(config)

    def make() -> tuple[Any, Any]:
        data = build.make(cfg.data)
        build.follow_classes(cfg, data)
        return build.build_model(cfg), data

    section = config.get("accumulate") or {}
    follows = [key for key in ("effective_batch_size", "accumulate") if isinstance(section.get(key), dict)]
    if "batch" not in given and (follows or section.get("scale_lr", "none") != "none"):
        raise UserError(
            "Batch or learning rate of the run followed a schedule: give batch=…, the one that the rate is for."
        )
    batch = require_count("batch", given.pop("batch", run.plan["plan"]["effective_batch_size"]))
    asked = {"samples": 64 * batch, "folder": run.folder / "batch_size", **given}
    for key in ("accelerator", "devices", "precision", "gradient_clip_val"):
        asked.setdefault(key, cfg.trainer[key])
    kept = "branches that were done are kept, and the same command goes on with the others."
    with quiet_lightning(), interruptions_told(lambda: kept):
        found = measure_batch_size(make, path, batch=batch, **asked)
    table = Table("batch", "loss", "standard error", "within tolerance")
    for point in found.points:
        is_within = "yes" if point.loss <= found.bound else "no"
        table.add_row(str(point.batch), f"{point.loss:.4f}", f"{point.error:.4f}", is_within)
    Console().print(table)
    print(found.sentence())


if __name__ == "__main__":
    from lightning_ga.app.terminal import Interrupted

    try:
        main()
    except (UserError, Interrupted) as error:
        print(f"Error: {printable(str(error))}", file=sys.stderr)
        sys.exit(getattr(error, "code", 1))
