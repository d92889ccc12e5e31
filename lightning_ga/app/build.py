"""From a configuration to objects: data, model and Trainer, in the order in which each needs the others."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.checkpoints import AtomicCheckpointIO
from lightning_ga.app.folders import require_free
from lightning_ga.app.metric import OptimizedMetric
from lightning_ga.app.pictures import Pictures
from lightning_ga.app.plan_report import PlanReport
from lightning_ga.app.progress import EpochLine
from lightning_ga.app.settings import Progress, Settings
from lightning_ga.errors import UserError


class Fit(NamedTuple):
    """Everything that a task needs; the run's files go to the folder."""

    config: DictConfig
    settings: Settings
    folder: Path
    model: LightningModule
    data: LightningDataModule
    trainer: Trainer
    metric: OptimizedMetric


def build(cfg: DictConfig, settings: Settings, folder: Path) -> Fit:
    """Seed, and build data, model and Trainer."""
    if settings.seed is not None:
        lightning.seed_everything(settings.seed, workers=True, verbose=False)
    torch.set_float32_matmul_precision((cfg.get("precision") or {}).get("float32_matmul", "highest"))
    metric = OptimizedMetric(settings.optimized_metric, getattr(settings.optimized_direction, "name", None))
    trainer = build_trainer(cfg, settings, folder, metric)
    data = make(cfg.data)
    follow_classes(cfg, data)
    model = make(cfg.model)
    if not isinstance(model, LightningModule) or not isinstance(data, LightningDataModule):
        raise UserError("model._target_ must name a LightningModule, and data._target_ a LightningDataModule.")
    return Fit(cfg, settings, folder, model, data, trainer, metric)


def follow_classes(cfg: DictConfig, data: LightningDataModule) -> None:
    """Give data and model the number of classes that was counted, and refuse a model with fewer outputs."""
    classes = getattr(data, "num_classes", None)
    for section in (cfg.data, cfg.model):
        if "num_classes" in section and section.num_classes is None:
            section.num_classes = classes
    outputs = cfg.model.get("num_classes")
    if isinstance(outputs, int) and isinstance(classes, int) and outputs < classes:
        raise UserError(f"model.num_classes={outputs} is less than the {classes} classes of the data: leave it out.")


def build_trainer(cfg: DictConfig, settings: Settings, folder: Path, metric: OptimizedMetric) -> Trainer:
    """The Trainer; a dry run has no loggers, no checkpoints and no bar."""
    dry_run, progress = settings.dry_run, settings.progress
    accumulate = [make(cfg.accumulate)] if cfg.get("accumulate") else []
    others: list[Callback] = [] if dry_run else make_all(cfg, "callbacks")
    loggers: list[Logger] = [] if dry_run else make_all(cfg, "logger")
    lines = [] if dry_run or progress is Progress.none else [EpochLine()]
    pictures = [] if dry_run else [Pictures(folder)]
    wants_bar = progress is Progress.bar or (progress is Progress.auto and sys.stdout.isatty())
    made = {
        "callbacks": [*accumulate, PlanReport(folder, dry_run=dry_run), metric, *pictures, *others, *lines],
        "logger": loggers or False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in others),
        "enable_progress_bar": not dry_run and (wants_bar or any(isinstance(one, ProgressBar) for one in others)),
    }
    trainer: Trainer = make(cfg.trainer, **made)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # one of the user's own stays
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    require_one_run(trainer, cfg, folder)
    return trainer


def require_one_run(trainer: Trainer, cfg: DictConfig, folder: Path) -> None:
    """Refuse files in the folder of another run, and a sweep whose jobs start processes with folders of their own."""
    launcher = trainer.strategy.launcher
    if launcher and not launcher.is_interactive_compatible and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError("A sweep (-m) cannot start several processes per job: use one device, or start each run alone.")
    checkpoints = [one.dirpath for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    for place in [*checkpoints, *(one.log_dir for one in trainer.loggers if isinstance(one, CSVLogger))]:
        if place and not Path(place).resolve().is_relative_to(folder.resolve()):
            require_free(Path(place), cfg, leaves=("*.ckpt", "metrics.csv"))


def make(node: Any, **arguments: Any) -> Any:
    """Build what a node names, of plain dicts and lists, which checkpoints can contain."""
    content: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return instantiate(content, **arguments, _convert_="all")


def make_all(cfg: DictConfig, group: str) -> list[Any]:
    """Build every named entry of a group; one that is null is left out."""
    nodes = {name: node for name, node in (cfg.get(group) or {}).items() if node}
    for name, node in nodes.items():
        if not (OmegaConf.is_dict(node) and "_target_" in node):
            raise UserError(f"{group}.{name} has no _target_: choose {group}=OPTION, or give it a class.")
    return [*map(make, nodes.values())]
