"""From a configuration to objects: what is allowed, in which order, and what cannot work."""

from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from omegaconf import DictConfig, OmegaConf

from lightning_ga.allowlist import check_targets
from lightning_ga.errors import UserError
from lightning_ga.progress import PlanReport

HALF_PRECISION = ("16-mixed", "16-true", "16")


class Run(NamedTuple):
    """Everything that a task needs.

    Attributes:
        config: The configuration, resolved.
        folder: Where the run's files go.
        model: The LightningModule.
        data: The datamodule.
        trainer: The Trainer, with its callbacks and loggers.
    """

    config: DictConfig
    folder: Path
    model: LightningModule
    data: LightningDataModule
    trainer: Trainer


def build(cfg: DictConfig) -> Run:
    """Check the configuration, seed, and build data, model and Trainer.

    Raises:
        UserError: If something cannot work: found before anything is trained.
    """
    check_targets(OmegaConf.to_container(cfg, resolve=True), cfg.allow_targets)
    if cfg.seed is not None:
        lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    torch.set_float32_matmul_precision(cfg.precision.float32_matmul)
    check_optimizer(cfg)
    folder = Path(cfg.paths.output_dir)
    trainer = build_trainer(cfg, folder)
    data = make(cfg.data)
    if "num_classes" in cfg.data and cfg.data.num_classes is None:
        cfg.data.num_classes = data.num_classes  # the model's configuration refers to it
    config = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(config, DictConfig)
    return Run(config, folder, make(config.model), data, trainer)


def build_trainer(cfg: DictConfig, folder: Path) -> Trainer:
    """The Trainer; a dry run has no loggers, no checkpoints and no bar."""
    report = PlanReport(folder, dry_run=cfg.dry_run)
    accumulate = [make(cfg.accumulate)] if cfg.accumulate else []
    others = [] if cfg.dry_run else make_all(cfg.callbacks)
    loggers: list[Logger] = [] if cfg.dry_run else make_all(cfg.logger)
    callbacks: list[Callback] = [*accumulate, report, *others]
    trainer: Trainer = make(
        cfg.trainer,
        callbacks=callbacks,
        logger=loggers or False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in others),
        enable_progress_bar=not cfg.dry_run,
    )
    check_precision(cfg, trainer)
    check_sweep(trainer)
    return trainer


def make(node: Any, **arguments: Any) -> Any:
    """Build what a node names; it is given plain dicts and lists, which checkpoints can hold."""
    return instantiate(node, **arguments, _convert_="all")


def make_all(nodes: DictConfig | None) -> list[Any]:
    """Build every named entry of a section."""
    return [make(node) for node in (nodes or {}).values() if node]


def check_optimizer(cfg: DictConfig) -> None:
    """Try the optimizer on one number: a wrong argument would come to light only when training starts."""
    section = cfg.get("optimizer")
    if not section:
        return
    try:
        make(section)([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer ({section._target_}) could not be built: {error}.") from error


def check_precision(cfg: DictConfig, trainer: Trainer) -> None:
    """Refuse float16 on a CPU: Lightning would train in bfloat16 without a word."""
    if str(cfg.trainer.precision) in HALF_PRECISION and isinstance(trainer.accelerator, CPUAccelerator):
        raise UserError(
            f"trainer.precision={cfg.trainer.precision} needs a GPU, and this run is on the CPU: "
            "use precision=bf16-mixed or precision=fp32."
        )


def check_sweep(trainer: Trainer) -> None:
    """Refuse a sweep whose jobs start processes of their own: each would make its own output folder."""
    if HydraConfig.get().mode == RunMode.MULTIRUN and isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        raise UserError("A sweep (-m) cannot start several processes per job: use one device, or start each run alone.")
