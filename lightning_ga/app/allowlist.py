"""What a configuration may build: a list of kinds, and of the packages that they may come from.

Hydra calls whatever ``_target_`` names, and ``torch.load`` or ``os.system`` are names too. So a target
must be a class of one of the kinds below, or one of a few factories. It is looked at twice: by the name
that is written, before anything is imported, and by where the found class was defined, because
``lightning.pytorch.trainer.trainer.os.system`` begins well and ends elsewhere.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.utils import _locate
from hydra.utils import get_class

from lightning_ga.app.values import walk
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
INSTEAD = {"timm.create_model": "it can unpickle files: use lightning_ga.models.build_timm, with the same arguments"}


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
    instead = f": {INSTEAD[target]}." if target in INSTEAD else way_out
    return UserError(f"{where}={target} is not on the list of what a configuration may build{instead}")
