"""From a configuration to objects: data, model and Trainer, in the order in which each needs the others.

Tested in tests/app/test_train.py.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.arguments import check_arguments, found_at
from lightning_ga.app.folders import require_free
from lightning_ga.app.metric import OptimizedMetric
from lightning_ga.app.mistakes import is_named, link_of
from lightning_ga.app.plan_report import PlanReport
from lightning_ga.app.progress_lines import EpochLine, quiet_lightning
from lightning_ga.app.settings import Progress, Settings, Task
from lightning_ga.checkpoints import AtomicCheckpointIO
from lightning_ga.elastic import CheckpointEvery
from lightning_ga.errors import UserError

HOMES = ("lightning_ga.counters", "lightning_ga.schedule")  # of names without dots in the section accumulate


class BuiltRun(NamedTuple):
    """Everything that a task needs; the run's files go to the folder."""

    config: DictConfig
    settings: Settings
    folder: Path
    model: LightningModule
    data: LightningDataModule
    trainer: Trainer
    metric: OptimizedMetric


def build(cfg: DictConfig, settings: Settings, folder: Path) -> BuiltRun:
    """Seed, and build data, model and Trainer."""
    if settings.seed is not None:
        lightning.seed_everything(settings.seed, workers=True, verbose=False)
    torch.set_float32_matmul_precision(OmegaConf.select(cfg, "precision.float32_matmul", default="highest"))
    metric = OptimizedMetric(settings.optimized_metric, getattr(settings.optimized_direction, "name", None))
    if settings.elastic and settings.task is Task.fit:
        keep_effective_batch(cfg)
    trainer = build_trainer(cfg, settings, folder, metric)
    data = make(cfg, "data")
    follow_classes(cfg, data)
    model = make(cfg, "model")
    if not isinstance(model, LightningModule) or not isinstance(data, LightningDataModule):
        raise UserError("model._target_ must name a LightningModule, and data._target_ a LightningDataModule.")
    return BuiltRun(cfg, settings, folder, model, data, trainer, metric)


def follow_classes(cfg: DictConfig, data: LightningDataModule) -> None:
    """Give data and model the number of classes that was counted, and refuse a model with fewer outputs."""
    classes = getattr(data, "num_classes", None)
    for key in ("data", "model"):
        with typed_told(key):
            if "num_classes" in cfg[key] and cfg[key].num_classes is None:
                cfg[key].num_classes = classes
    outputs = cfg.model.get("num_classes")
    if isinstance(outputs, int) and isinstance(classes, int) and outputs < classes:
        raise UserError(f"model.num_classes={outputs} is less than the {classes} classes of the data: leave it out.")


def build_trainer(cfg: DictConfig, settings: Settings, folder: Path, metric: OptimizedMetric) -> Trainer:
    """The Trainer; a dry run has no loggers, no checkpoints and no bar."""
    callbacks: list[Callback] = []
    if cfg.get("accumulate"):
        use_full_names(cfg.accumulate)
        callbacks.append(make(cfg, "accumulate"))
    callbacks += [PlanReport(folder, dry_run=settings.dry_run), metric]
    loggers = []
    has_bar = False
    if not settings.dry_run:
        callbacks += make_all(cfg, "callbacks")
        if settings.checkpoint_every is not None:
            callbacks.append(CheckpointEvery(folder / "checkpoints", settings.checkpoint_every))
        if settings.progress is not Progress.none:
            callbacks.append(EpochLine())
        loggers = make_all(cfg, "logger")
        wants_bar = settings.progress is Progress.bar or (settings.progress is Progress.auto and sys.stdout.isatty())
        has_bar = wants_bar or has_kind(callbacks, ProgressBar)
    trainer: Trainer = make(
        cfg,
        "trainer",
        callbacks=callbacks,
        logger=loggers or False,
        enable_checkpointing=has_kind(callbacks, Checkpoint),
        enable_progress_bar=has_bar,
    )
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # one of the user's own stays
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    require_one_run(trainer, cfg, folder)
    return trainer


def has_kind(callbacks: Sequence[Callback], kind: type[Callback]) -> bool:
    """Whether one of the callbacks is of this kind."""
    return any(isinstance(callback, kind) for callback in callbacks)


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
    normalize = section.get("normalize")
    if isinstance(normalize, str) and normalize != "samples":
        path = full_name(normalize)
        section.normalize = {"_target_": path}
        if not isclass(found_at("accumulate.normalize", path)):
            section.normalize = {"_target_": "hydra.utils.get_method", "path": path}
    for key in section:
        value = section[key]
        if OmegaConf.is_dict(value) and isinstance(value.get("_target_"), str):
            value["_target_"] = full_name(value["_target_"])


def full_name(name: str) -> str:
    """The name with its module, if it is a public one of the package."""
    for home in HOMES:
        if name in import_module(home).__all__:
            return f"{home}.{name}"
    return name


def starts_processes(cfg: DictConfig) -> bool:
    """Whether the Trainer starts processes itself, which begin with this one's command line."""
    with quiet_lightning():
        strategy = make(cfg, "trainer", logger=False).strategy
    environment = getattr(strategy, "cluster_environment", None)
    is_started = environment is not None and environment.creates_processes_externally  # as by srun and submitit
    return strategy.launcher is not None and not strategy.launcher.is_interactive_compatible and not is_started


def require_one_run(trainer: Trainer, cfg: DictConfig, folder: Path) -> None:
    """Refuse files in the folder of another run."""
    places = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    places += [logger.log_dir for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    for place in places:
        if place and not Path(place).resolve().is_relative_to(folder.resolve()):
            require_free(Path(place), cfg, leaves=("*.ckpt", "metrics.csv"))


def make(cfg: DictConfig, key: str, **arguments: Any) -> Any:
    """Build what a key names, of plain dicts and lists, which checkpoints can contain."""
    with typed_told(key):
        node: Any = OmegaConf.select(cfg, key)
        raw = OmegaConf.to_container(node)
        content = OmegaConf.to_container(node, resolve=True)
        check_arguments(key, raw, content)
        OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        try:
            return instantiate(content, **arguments, _convert_="all")
        except Exception as error:
            if link_of(UserError, error) is None:
                check_arguments(key, raw, content, failed=True)
            raise


@contextmanager
def typed_told(key: str) -> Iterator[None]:
    """A context in which errors say what was typed of a section."""
    try:
        yield
    except Exception as error:
        words: Sequence[str] = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
        typed = [word for word in words if word.lstrip("+").startswith(f"{key}.")]
        unnamed = [word for word in typed if not is_named(word, str(error))]
        if unnamed and link_of(UserError, error) is None:
            error.add_note(f"Typed there: {', '.join(unnamed)}.")
        if f"{key}._target_=" in " ".join(typed) and f"{key}=own" not in words:
            error.add_note(f"{key}._target_ alone keeps the keys of the {key} that is chosen: add {key}=own.")
        raise


def make_all(cfg: DictConfig, group: str) -> list[Any]:
    """Build every named entry of a group; one that is null is left out."""
    made = []
    for name, node in (cfg.get(group) or {}).items():
        if not node:
            continue
        if not (OmegaConf.is_dict(node) and "_target_" in node):
            raise UserError(f"{group}.{name} has no _target_: choose {group}=OPTION, or give it a class.")
        made.append(make(cfg, f"{group}.{name}"))
    return made
