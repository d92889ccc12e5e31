"""From a configuration to objects: what is allowed, in which order, and what cannot work."""

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from omegaconf import DictConfig, OmegaConf
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_ga.app.allowlist import check_targets
from lightning_ga.app.atomic import AtomicCheckpointIO
from lightning_ga.app.checkpoints import load_initial_weights
from lightning_ga.app.plan_report import PlanReport
from lightning_ga.app.progress import make_progress
from lightning_ga.compat.planned_trainer import settings_on_this_host
from lightning_ga.errors import UserError

HALF_PRECISION = ("16-mixed", "16-true", "16")
MOST_ON_FEW_CORES = 8  # processes, to try ranks out
TRIAL_STEPS = 100  # of a schedule that is only tried


class Fit(NamedTuple):
    """Everything that a task needs; the run's files go to the folder."""

    config: DictConfig
    folder: Path
    model: LightningModule
    data: LightningDataModule
    trainer: Trainer


def build(content: Mapping[str, Any], allow: Sequence[str] = ()) -> Fit:
    """Check what may be built (packages in ``allow`` too), seed, and build data, model and Trainer."""
    check_allowed(content["allow_targets"], allow)
    check_targets(content, allow)
    cfg = OmegaConf.create(dict(content))
    if cfg.seed is not None:
        lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    torch.set_float32_matmul_precision(cfg.precision.float32_matmul)
    check_optimizer(cfg)
    folder = Path(cfg.paths.output_dir)
    trainer = build_trainer(cfg, folder)
    data = make(cfg.data)
    follow_classes(cfg, data)
    model = build_model(cfg)
    for name, made, kind in (("model", model, LightningModule), ("data", data, LightningDataModule)):
        if not isinstance(made, kind):
            raise UserError(f"{name}._target_={cfg[name]._target_} builds no {kind.__name__}: choose one for {name}.")
    return Fit(cfg, folder, model, data, trainer)


def check_allowed(named: Sequence[str], typed: Sequence[str]) -> None:
    """Refuse packages that a file allows: what may be built is not for what is built to decide."""
    for name in named:
        if name not in typed:
            raise UserError(
                f"allow_targets={name} stands in a configuration file: if you trust it, type allow_targets=[{name}] on "
                "the command line."
            )


def follow_classes(cfg: DictConfig, data: LightningDataModule) -> None:
    """Give data and model the number of classes that was counted, and refuse a model with fewer outputs."""
    classes = getattr(data, "num_classes", None)
    for section in (cfg.data, cfg.model):
        if "num_classes" in section and section.num_classes is None:
            section.num_classes = classes
    outputs = cfg.model.get("num_classes")
    if isinstance(outputs, int) and isinstance(classes, int) and outputs < classes:
        raise UserError(
            f"model.num_classes={outputs} is less than the {classes} classes of the data: leave model.num_classes out, "
            "it follows the data."
        )


def build_model(cfg: DictConfig) -> LightningModule:
    """The model, from the weights that ``model.init_from`` names, compiled if that is asked for."""
    section = cfg.model.copy()
    weights = section.pop("init_from", None)
    decay_norms = section.optimizer.pop("decay_norms", True) if section.get("optimizer") else True
    model: LightningModule = make(section)
    if not decay_norms:
        vars(model)["decay_norms"] = False
    if weights is not None:
        print(load_initial_weights(model, str(weights)))
    if cfg.compile:
        getattr(model, "net", model).compile(mode=cfg.compile if isinstance(cfg.compile, str) else None)
    return model


def build_trainer(cfg: DictConfig, folder: Path) -> Trainer:
    """The Trainer; a dry run has no loggers, no checkpoints and no bar."""
    report = PlanReport(folder, dry_run=cfg.dry_run)
    elsewhere, ranks = settings_on_this_host(cfg.trainer) if cfg.device_memory is not None else ({}, 1)
    accumulate = [make(cfg.accumulate)] if cfg.accumulate else []
    others = [] if cfg.dry_run else make_all(cfg.callbacks)
    loggers: list[Logger] = [] if cfg.dry_run else make_all(cfg.logger)
    has_bar = any(isinstance(callback, ProgressBar) for callback in others)
    progress = [] if cfg.dry_run else make_progress(cfg.progress, folder, cfg.optimized_metric, has_bar=has_bar)
    callbacks: list[Callback] = [*accumulate, report, *others, *progress]
    trainer: Trainer = make(
        cfg.trainer,
        callbacks=callbacks,
        logger=loggers or False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in others),
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        **elsewhere,
    )
    if elsewhere:  # one process here stands for one of them
        vars(trainer.strategy)["world_size"] = ranks
    else:
        check_cpu(trainer, str(cfg.trainer.precision))
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # one of the user's own stays
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    check_launcher(trainer)
    return trainer


def make(node: Any, **arguments: Any) -> Any:
    """Build what a node names, of plain dicts and lists, which checkpoints can hold; ``decay_norms`` is the model's."""
    content = {key: value for key, value in node.items() if key != "decay_norms"}
    return instantiate(content, **arguments, _convert_="all")


def make_all(nodes: DictConfig | None) -> list[Any]:
    """Build every named entry of a section."""
    return [make(node) for node in (nodes or {}).values() if node]


def check_optimizer(cfg: DictConfig) -> None:
    """Try optimizer and schedule on one number: a wrong argument would come to light only when training starts."""
    if not cfg.get("optimizer"):
        return
    with told_as("optimizer", cfg.optimizer):
        optimizer = make(cfg.optimizer)([torch.nn.Parameter(torch.zeros(1))])
    if not cfg.get("lr_scheduler"):
        return
    with told_as("lr_scheduler", cfg.lr_scheduler), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer itself takes no steps
        make_scheduler = make(cfg.lr_scheduler)
        try:
            known: Any = inspect.signature(make_scheduler).parameters
        except ValueError:  # of arguments that it does not have, which the call names
            known = ()
        scheduler = make_scheduler(optimizer, **({"total_steps": TRIAL_STEPS} if "total_steps" in known else {}))
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            for _ in range(2):  # some arguments are used in the first step only
                scheduler.step()


@contextmanager
def told_as(name: str, section: DictConfig) -> Iterator[None]:
    """Tell any error of a constructor in one sentence: what it is given comes from the configuration alone."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
        kind = "" if isinstance(cause, TypeError | ValueError) else f"{type(cause).__name__}: "
        raise UserError(
            f"{name} ({section.get('_target_')}) could not be built: {kind}{str(cause).rstrip('.')}; "
            f"its arguments are {name}.<argument>, shown by --cfg job -p {name}."
        ) from error


def check_cpu(trainer: Trainer, precision: str) -> None:
    """Refuse float16 on a CPU, where Lightning would train in bfloat16, and far more processes than it has cores."""
    if not isinstance(trainer.accelerator, CPUAccelerator):
        return
    if precision in HALF_PRECISION:
        raise UserError(
            f"trainer.precision={precision} needs a GPU, and this run is on the CPU: use precision=bf16-mixed or "
            "precision=fp32."
        )
    cores = os.cpu_count() or 1
    if trainer.num_devices > max(MOST_ON_FEW_CORES, cores):
        raise UserError(
            f"trainer.devices={trainer.num_devices} would start as many processes on the {cores} cores here: "
            f"use trainer.devices={cores}."
        )


def check_launcher(trainer: Trainer) -> None:
    """Refuse nodes that nothing starts, and a sweep whose jobs start processes: each would make its own folder."""
    alone = isinstance(getattr(trainer.strategy, "cluster_environment", None), LightningEnvironment)
    if trainer.num_nodes > 1 and alone and not {"MASTER_ADDR", "NODE_RANK", "GROUP_RANK"} & os.environ.keys():
        raise UserError(
            f"trainer.num_nodes={trainer.num_nodes} would wait for nodes that nothing starts: start this on each by "
            "torchrun or srun, set MASTER_ADDR, MASTER_PORT and NODE_RANK there, or use trainer.num_nodes=1."
        )
    if HydraConfig.get().mode == RunMode.MULTIRUN and isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        raise UserError("A sweep (-m) cannot start several processes per job: use one device, or start each run alone.")
