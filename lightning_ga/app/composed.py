"""Check a configuration when Hydra has composed it, before any of it is used.

Hydra's own section builds things too: callbacks, log handlers, sweepers. And a file of the user's own
is merged without a word, whatever its keys are.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.app.errors import did_you_mean
from lightning_ga.app.walk import walk
from lightning_ga.errors import UserError

LOGGING = (
    *("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter"),
    *("logging.handlers.RotatingFileHandler", "logging.handlers.TimedRotatingFileHandler", "colorlog.ColoredFormatter"),
)
"""What may handle log records; anything else below ``logging``, such as ``logging.os.system``, ends elsewhere."""
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
PLUGINS = re.compile(
    r"hydra\._internal\.core_plugins\.basic_\w+\.Basic(Launcher|Sweeper)"
    r"|hydra_plugins\.\w+\.\w+\.\w+(Launcher|Sweeper)|optuna\.samplers\.\w+Sampler"
)
"""Classes; what their modules have imported, such as ``basic_launcher.logging.os.system``, ends elsewhere."""
IN_FOLDER = re.compile(r"\$\{hydra\.runtime\.output_dir\}(/|\$\{hydra\.job\.name\}|[\w.-])*")
PLAIN_SECTIONS = {
    "paths": ("data_dir", "output_root", "sweep_root", "output_dir"),
    "precision": ("trainer", "float32_matmul"),
    "run": ("name", "tags"),
}
"""Sections that build nothing, with all keys that are read."""
GLOBAL = ("experiment", "debug")  # groups whose files are written from the top of the configuration


@contextmanager
def checked_composition(*, known_keys: Sequence[str], typed: Sequence[str]) -> Iterator[None]:
    """A context in which configurations that Hydra composes are checked; ``+key=value`` that was typed adds a key."""
    load = ConfigLoaderImpl.load_configuration
    added = [argument.lstrip("+").split("=")[0].split(".")[0] for argument in typed if argument.startswith("+")]

    def load_and_check(*args: Any, **kwargs: Any) -> DictConfig:
        config = composed(load, *args, **kwargs)
        content: Any = OmegaConf.to_container(config, resolve=False)
        check_hydra_section(content.pop("hydra"))
        check_keys(content, known_keys, added)
        return config

    ConfigLoaderImpl.load_configuration = load_and_check  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]


def composed(load: Callable[..., DictConfig], loader: ConfigLoaderImpl, *args: Any, **kwargs: Any) -> DictConfig:
    """Let Hydra compose; say which options there are if one of several is missing, and if a list is given a name."""
    try:
        return load(loader, *args, **kwargs)
    except MissingConfigException as error:
        if error.options is None and error.missing_cfg_file:
            error.options = loader.get_group_options(error.missing_cfg_file.rpartition("/")[0])
        raise
    except (TypeError, ValueError) as error:  # OmegaConf's own are no such errors
        if isinstance(error, UserError | OmegaConfBaseException):
            raise
        raise UserError(f"An override does not fit what it sets ({error}): --cfg job shows the values.") from error


def check_keys(content: Mapping[str, Any], known: Sequence[str], added: Sequence[str] = ()) -> None:
    """Refuse files of the user's own that would be merged to where nothing reads them."""
    for group in GLOBAL:
        if isinstance(content.get(group), Mapping):
            raise UserError(
                f"The file chosen by {group}=… does not begin with the line '# @package _global_', so that its keys "
                f"({', '.join(content[group])}) would be read by nothing: add that line."
            )
    for section, names in PLAIN_SECTIONS.items():
        found = content.get(section, {})
        if not isinstance(found, Mapping):
            raise UserError(f"{section}={found} replaces a whole section: set {section}.{names[0]}=… alone.")
        for name in found.keys() - names:
            raise UserError(f"A configuration file sets {section}.{name}, which nothing reads: {', '.join(names)} are.")
    for key in content.keys() - set(known):
        if not is_referred_to(key, content):
            hint = did_you_mean(key, known)
            who = f"+{key}=…" if key in added else "A configuration file"
            raise UserError(f"{who} sets {key}, which nothing reads{hint} The keys: {', '.join(known)}.")


def is_referred_to(key: str, content: Any) -> bool:
    """Whether an interpolation such as ``${key}`` or ``${key.part}`` reads a key."""
    return any(re.search(rf"\$\{{{re.escape(key)}[.}}\[]", text) for _, text in walk(content) if isinstance(text, str))


def check_hydra_section(section: Mapping[str, Any]) -> None:
    """Refuse what Hydra would use before the job is checked: callbacks, variables, plugins and log handlers."""
    if section["callbacks"]:
        raise UserError("hydra.callbacks would run before anything is checked: use callbacks of the Trainer instead.")
    if section["job"]["env_set"]:
        raise UserError("hydra.job.env_set would reach every process that a run starts: set variables in the shell.")
    for target in found_under("_target_", section):
        if not PLUGINS.fullmatch(str(target)):
            raise UserError(
                f"The hydra section names {target}: only Hydra's own launchers and sweepers are built there."
            )
    for key, may_be_placed in (("job_logging", True), ("hydra_logging", False)):
        check_logging(key, section[key], may_be_placed=may_be_placed)


def check_logging(key: str, section: Any, *, may_be_placed: bool) -> None:
    """Refuse log handlers and values that Python's logging would import, in a section that is not resolved yet.

    A file in the run's folder may be named where that is known once the job begins.
    """
    for name in ("()", "class", "queue", "listener"):
        for factory in found_under(name, section):
            if factory not in LOGGING:
                raise UserError(f"hydra.{key} names {factory}: only {', '.join(LOGGING)} are built.")
    for _, text in walk(section):
        if not isinstance(text, str) or text in STREAMS:
            continue
        in_folder = may_be_placed and IN_FOLDER.fullmatch(text.replace("${hydra.job.name}", "name"))
        if "://" in text or ("${" in text and not in_folder):
            raise UserError(f"hydra.{key} holds {text}, which could import any module: write a plain value.")


def found_under(name: str, content: Any) -> Iterator[Any]:
    """Every value of a key, however deep."""
    return (value for key, value in walk(content) if key.rpartition(".")[2] == name)
