"""What a configuration may build.

Hydra calls whatever ``_target_`` names, and ``torch.load`` or ``os.system`` are names too. So a
target must be on a list of modules, twice over: by the name that is written, before anything is
imported, and by the module that the found object was defined in, because
``lightning.pytorch.trainer.trainer.os.system`` begins well and ends elsewhere.

Hydra's own section builds things as well, before the job starts: its callbacks and logging
factories are refused when the configuration is loaded.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import _locate
from omegaconf import DictConfig, OmegaConf

from lightning_ga.errors import UserError

ALLOWED = (
    "lightning_ga",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "lightning.pytorch.trainer",
    "lightning.pytorch.Trainer",
    "timm.data",
    "timm.loss",
    "timm.models",
    "timm.optim",
    "timm.scheduler",
    "timm.create_model",
    "torch.nn",
    "torch.optim",
    "torchmetrics",
    "torchvision.models",
    "torchvision.ops",
    "torchvision.transforms",
)


def check_targets(config: Any, allow: Sequence[str] = (), where: str = "") -> None:
    """Refuse a resolved configuration with a target off the list, however deep it is.

    Args:
        config: Plain dicts, lists and values.
        allow: Further packages or modules.
        where: The path of ``config``, for the message.

    Raises:
        UserError: For the first such target.
    """
    if isinstance(config, Mapping):
        if "_target_" in config:
            check_target(config["_target_"], allow, f"{where}._target_".lstrip("."))
        for key, value in config.items():
            check_targets(value, allow, f"{where}.{key}".lstrip("."))
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            check_targets(value, allow, f"{where}[{index}]")


def check_target(target: Any, allow: Sequence[str] = (), where: str = "_target_") -> None:
    """Refuse a name that is not on the list, or leads to something defined elsewhere.

    Examples:
        >>> check_target("torch.optim.Adam")
        >>> check_target("torch.load")
        Traceback (most recent call last):
        ...
        lightning_ga.errors.UserError: _target_=torch.load is not on the list of what a configuration may build...
    """
    allowed = (*ALLOWED, *allow)
    if not isinstance(target, str) or not _is_below(target, allowed):
        raise _refused(target, where)
    try:
        found = _locate(target)  # what Hydra will call
    except (ImportError, ValueError, AttributeError) as error:
        raise UserError(f"{where}={target} does not exist: check its spelling.") from error
    is_plain = inspect.isclass(found) or inspect.isfunction(found)
    if not is_plain or "." in found.__qualname__ or not _is_below(f"{found.__module__}.{found.__qualname__}", allowed):
        raise _refused(target, where)


@contextmanager
def guarded_hydra() -> Iterator[None]:
    """While this lasts, Hydra loads no configuration that would run code before the job."""
    load = ConfigLoaderImpl.load_configuration

    def load_and_check(*args: Any, **kwargs: Any) -> DictConfig:
        config = load(*args, **kwargs)
        check_hydra_section(OmegaConf.to_container(config.hydra, resolve=False))
        return config

    ConfigLoaderImpl.load_configuration = load_and_check  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]


def check_hydra_section(section: Any) -> None:
    """Refuse callbacks, and logging that is built by anything but the logging module."""
    if section["callbacks"]:
        raise UserError("hydra.callbacks would run before anything is checked: use callbacks of the Trainer instead.")
    for key in ("job_logging", "hydra_logging"):
        for factory in _factories(section[key]):
            if not _is_below(str(factory), ("logging",)):
                raise UserError(f"hydra.{key} names {factory}: only classes of Python's logging module are built.")


def _factories(config: Any) -> Iterator[Any]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in ("()", "class"):
                yield value
            yield from _factories(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _factories(value)


def _is_below(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _refused(target: Any, where: str) -> UserError:
    package = str(target).split(".")[0]
    known = {module.split(".")[0] for module in ALLOWED} | sys.stdlib_module_names
    way_out = "." if package in known else f"; if you trust it, add its package: allow_targets=[{package}]."
    return UserError(f"{where}={target} is not on the list of what a configuration may build{way_out}")
