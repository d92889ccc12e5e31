"""From a configuration to objects: what is allowed, in which order, and what cannot work.

Hydra calls whatever ``_target_`` names, and ``torch.load`` or ``os.system`` are names too. So a target must be a class
of one of the kinds below, or one of a few factories. It is looked at twice: by the name that is written, before
anything is imported, and by where the found class was defined, because ``lightning.pytorch.trainer.trainer.os.system``
begins well and ends elsewhere.
"""

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from hydra._internal.utils import _locate
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_class, instantiate
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.checkpoints import AtomicCheckpointIO, load_initial_weights
from lightning_ga.app.plan_report import PlanReport
from lightning_ga.app.progress import make_progress
from lightning_ga.app.values import walk
from lightning_ga.compat.ranks import settings_on_this_host
from lightning_ga.errors import UserError

MODULE, TRANSFORM = "torch.nn.Module", "builtins.object"
KINDS: Mapping[str, tuple[str, ...]] = {  # package or module: what a class from there must be a kind of
    "lightning_ga": (
        *(MODULE, "lightning.pytorch.LightningDataModule", "lightning.pytorch.Callback"),
        "lightning.fabric.plugins.CheckpointIO",
    ),
    "lightning.pytorch.callbacks": ("lightning.pytorch.Callback",),
    "lightning.pytorch.loggers": ("lightning.pytorch.loggers.Logger",),
    "lightning.pytorch.plugins": (
        *("lightning.fabric.plugins.CheckpointIO", "lightning.fabric.plugins.ClusterEnvironment"),
        *("lightning.fabric.plugins.Precision", "lightning.pytorch.plugins.LayerSync"),
    ),
    "lightning.pytorch.profilers": ("lightning.pytorch.profilers.Profiler",),
    "lightning.pytorch.strategies": ("lightning.pytorch.strategies.Strategy",),
    "lightning.pytorch.trainer": ("lightning.pytorch.Trainer",),
    "lightning.pytorch.Trainer": ("lightning.pytorch.Trainer",),
    "timm.data.auto_augment": (TRANSFORM,),
    "timm.data.mixup": (TRANSFORM,),
    "timm.data.random_erasing": (TRANSFORM,),
    "timm.data.transforms": (TRANSFORM,),
    "timm.loss": (MODULE,),
    "timm.models": (MODULE,),
    "timm.optim": ("torch.optim.Optimizer",),
    "timm.scheduler": ("timm.scheduler.scheduler.Scheduler",),
    "torch.nn": (MODULE,),
    "torch.optim": ("torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler", MODULE),
    "torchmetrics": (MODULE,),
    "torchvision.models": (MODULE,),
    "torchvision.ops": (MODULE,),
    "torchvision.transforms": (TRANSFORM,),
}
NAMED = (  # what is of no such kind, and may be built
    *("lightning_ga.models.build_timm", "lightning_ga.models.to_group_norm"),
    "lightning_ga.models.schedules.warmup_cosine",
    *(f"lightning_ga.schedule.{name}" for name in ("by_samples", "by_step", "from_lr_decay", "geometric")),
    *("lightning_ga.schedule.linear", "lightning_ga.schedule.seesaw"),
    *("lightning_ga.weights.AttentionMaskTokens", "lightning_ga.weights.Samples", "lightning_ga.weights.TargetTokens"),
)
LOADERS = tuple(f"torchmetrics.{part}" for part in ("audio", "functional", "image", "multimodal", "text", "video"))
"""Metrics that load networks from files."""


def check_targets(config: Any, allow: Sequence[str] = ()) -> None:
    """Refuse targets off the list and outside of ``allow``, however deep, and text that would be resolved once more."""
    for key, value in walk(config):
        if key.rpartition(".")[2] == "_target_" and not is_allowed(value, allow, key):
            raise refused(value, key)
        if key.rpartition(".")[2] in ("_recursive_", "_partial_") and not isinstance(value, bool):
            raise UserError(f"{key}={value} must be true or false.")
        if isinstance(value, str) and "${" in value:
            raise UserError(f"{key}={value} is an interpolation that is left after resolving: write the value itself.")


def is_allowed(target: Any, allow: Sequence[str], where: str) -> bool:
    """Whether a name is on the list and leads to what is defined there."""
    if not isinstance(target, str):
        return False
    if is_below(target, allow):
        return True
    kinds = kinds_of(target)
    if not kinds or any(part.startswith("_") for part in target.split(".")):
        return False
    try:
        found = _locate(target)
    except (ImportError, ValueError, AttributeError) as error:
        raise UserError(f"{where}={target} does not exist: check its spelling.") from error
    return target in NAMED or is_builder(target, found) or is_kind(found, kinds)


def kinds_of(target: str) -> tuple[str, ...]:
    """What a class of this name must be a kind of; nothing where its package is not on the list."""
    return next((kinds for package, kinds in KINDS.items() if is_below(target, [package])), ())


def is_kind(found: Any, kinds: Sequence[str]) -> bool:
    """Whether a class was defined in a package of the list, and is of one of the kinds."""
    if not inspect.isclass(found) or "." in found.__qualname__ or found.__name__.startswith("_"):
        return False
    home = f"{found.__module__}.{found.__qualname__}"
    if not kinds_of(home) and not is_below(found.__module__, ["lightning.fabric"]):
        return False
    return not is_below(home, LOADERS) and issubclass(found, tuple(map(get_class, kinds)))


def is_builder(target: str, found: Any) -> bool:
    """Whether a target is one of torchvision's functions that build a model by its name."""
    if not target.startswith("torchvision.models.") or not inspect.isfunction(found):
        return False
    from torchvision.models import list_models

    return found.__module__.startswith("torchvision.models.") and found.__name__ in list_models()


def is_below(name: str, modules: Sequence[str]) -> bool:
    """Whether a name is one of some modules, or lies in one.

    Examples:
        >>> is_below("torch.nn.Linear", ["torch.nn"]), is_below("torch.nnx", ["torch.nn"])
        (True, False)
    """
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def refused(target: Any, where: str) -> UserError:
    """The error for a target that is off the list, with the way out where there is one."""
    package = str(target).split(".")[0]
    known = {module.split(".")[0] for module in KINDS} | sys.stdlib_module_names
    unknown = package.isidentifier() and package not in known
    way_out = f"; if you trust it, add its package: allow_targets=[{package}]." if unknown else "."
    return UserError(f"{where}={target} is not on the list of what a configuration may build{way_out}")


HALF_PRECISION = ("16-mixed", "16-true", "16")
MOST_ON_FEW_CORES = 8  # processes, to try ranks out


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
