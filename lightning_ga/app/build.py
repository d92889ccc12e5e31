"""From a configuration to objects: data, model and Trainer, in the order in which each needs the others.

Tested in tests/app/test_train.py.
"""

import sys
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.arguments import check_arguments
from lightning_ga.app.folders import require_free
from lightning_ga.app.metric import OptimizedMetric
from lightning_ga.app.mistakes import chain, is_named
from lightning_ga.app.pictures import Pictures
from lightning_ga.app.plan_report import PlanReport, schedule_text
from lightning_ga.app.progress_lines import EpochLine, quiet_lightning
from lightning_ga.app.settings import Progress, Settings, Task
from lightning_ga.checkpoints import AtomicCheckpointIO
from lightning_ga.elastic import CheckpointEvery
from lightning_ga.errors import UserError
from lightning_ga.plan.batch_schedule import PiecewiseSchedule, as_schedule

GET = "hydra.utils.get_method"
NO_VALUES = ("Schedule", "ScheduleLike", "as_schedule", "count_items")  # of the public names of schedules and weights


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
    data = make(cfg, "data")
    follow_classes(cfg, data)
    model = make(cfg, "model")
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
    dry_run = settings.dry_run
    progress = settings.progress
    if settings.elastic and settings.task is Task.fit:
        keep_effective_batch(cfg)
    use_full_names(cfg.get("accumulate") or {})
    accumulate = []
    if cfg.get("accumulate"):
        accumulate = [make(cfg, "accumulate")]
    schedule = batch_schedule(cfg)
    text = schedule_text(schedule, "factor " * (getattr(schedule, "name", "") == "accumulate"))
    others: list[Callback] = [] if dry_run else make_all(cfg, "callbacks")
    if settings.checkpoint_every is not None and not dry_run:
        others.append(CheckpointEvery(folder / "checkpoints", settings.checkpoint_every))
    loggers: list[Logger] = [] if dry_run else make_all(cfg, "logger")
    lines = []
    if not (dry_run or progress is Progress.none):
        lines = [EpochLine(schedule)]
    pictures = [] if dry_run else [Pictures(folder)]
    report = PlanReport(folder, dry_run=dry_run, schedule=text)
    wants_bar = progress is Progress.bar or (progress is Progress.auto and sys.stdout.isatty())
    made = {
        "callbacks": [*accumulate, report, metric, *pictures, *others, *lines],
        "logger": loggers or False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in others),
        "enable_progress_bar": not dry_run and (wants_bar or any(isinstance(one, ProgressBar) for one in others)),
    }
    trainer: Trainer = make(cfg, "trainer", **made)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # one of the user's own stays
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    require_one_run(trainer, cfg, folder)
    return trainer


def keep_effective_batch(cfg: DictConfig) -> None:
    """Fix the effective batch, which would else be that of one rank × the number of ranks."""
    section: Any = cfg.get("accumulate") or {}
    if section.get("effective_batch_size") is not None:
        return
    batch_size = cfg.data.get("batch_size")
    if "_target_" not in section or section.get("accumulate") is not None or batch_size is None:
        raise UserError("With trainer=elastic ranks come and go: give the batch, accumulate.effective_batch_size=256.")
    section.effective_batch_size = batch_size * cfg.trainer.get("accumulate_grad_batches", 1)


def use_full_names(section: Any) -> None:
    """Let ``accumulate.normalize=TargetTokens`` and ``{_target_: linear, …}`` name what ``lightning_ga`` has."""
    for key, home in {"normalize": "weights", "effective_batch_size": "schedule", "accumulate": "schedule"}.items():
        value = section.get(key)
        node = value if OmegaConf.is_dict(value) else {}
        name = node.get("_target_") or value
        if not isinstance(name, str) or name == "samples" or (not node and home == "schedule"):
            continue
        known = [one for one in import_module(f"lightning_ga.{home}").__all__ if one not in NO_VALUES]
        if "." not in name and name not in known:
            raise UserError(
                f"accumulate.{key}={name} is none of {', '.join(known)}: write one of these, or my_package.NAME."
            )
        full = name if "." in name else f"lightning_ga.{home}.{name}"
        is_function = not node and not isclass(get_object(full))
        if is_function:
            section[key] = {"_target_": GET, "path": full}
        else:
            section[key] = {**node, "_target_": full}


def batch_schedule(cfg: DictConfig) -> PiecewiseSchedule | None:
    """How the configuration changes the batch or the factor in training, if it is written as a mapping or schedule."""
    for name in ("effective_batch_size", "accumulate"):
        if OmegaConf.is_dict((cfg.get("accumulate") or {}).get(name)):
            content = make(cfg, f"accumulate.{name}")
            if name == "accumulate" and isinstance(content, dict):
                content = {0: 1, **content}
            schedule = as_schedule(content, name=name)
            if isinstance(schedule, PiecewiseSchedule):
                return schedule
            return None
    return None


def starts_processes(cfg: DictConfig) -> bool:
    """Whether the Trainer starts processes itself, which begin with this one's command line."""
    with quiet_lightning():
        strategy = make(cfg, "trainer", logger=False).strategy
    environment = getattr(strategy, "cluster_environment", None)
    is_started = environment is not None and environment.creates_processes_externally  # as by srun and submitit
    return strategy.launcher is not None and not strategy.launcher.is_interactive_compatible and not is_started


def require_one_run(trainer: Trainer, cfg: DictConfig, folder: Path) -> None:
    """Refuse files in the folder of another run."""
    checkpoints = [one.dirpath for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    for place in [*checkpoints, *(one.log_dir for one in trainer.loggers if isinstance(one, CSVLogger))]:
        if place and not Path(place).resolve().is_relative_to(folder.resolve()):
            require_free(Path(place), cfg, leaves=("*.ckpt", "metrics.csv"))


def make(cfg: DictConfig, key: str, **arguments: Any) -> Any:
    """Build what a key names, of plain dicts and lists, which checkpoints can contain."""
    node = OmegaConf.select(cfg, key)
    raw, content = (OmegaConf.to_container(node, resolve=resolve) for resolve in (False, True))
    check_arguments(key, raw, content)
    OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    try:
        return instantiate(content, **arguments, _convert_="all")
    except Exception as error:
        if not any(isinstance(link, UserError) for link in chain(error)):
            check_arguments(key, raw, content, failed=True)
            typed = [word for word in words_of(key) if not is_named(word, str(error))]
            if typed:
                error.add_note(f"Typed there: {', '.join(typed)}.")
        raise


def words_of(key: str) -> list[str]:
    """What is typed of a section."""
    words = []
    if HydraConfig.initialized():
        words = HydraConfig.get().overrides.task
    return [word for word in words if word.lstrip("+").startswith(f"{key}.")]


def make_all(cfg: DictConfig, group: str) -> list[Any]:
    """Build every named entry of a group; one that is null is left out."""
    nodes = {name: node for name, node in (cfg.get(group) or {}).items() if node}
    for name, node in nodes.items():
        if not (OmegaConf.is_dict(node) and "_target_" in node):
            raise UserError(f"{group}.{name} has no _target_: choose {group}=OPTION, or give it a class.")
    return [make(cfg, f"{group}.{name}") for name in nodes]
