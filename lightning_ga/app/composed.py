"""Check a configuration before any of it is used: each file as Hydra reads it, and what is composed of them.

Hydra's own section imports, builds and writes before a job begins. What a file may set there is a list; what is typed
is the user's own. And a file of the user's own is merged without a word, whatever its keys are.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.app.errors import did_you_mean
from lightning_ga.app.reading import checked_yaml
from lightning_ga.app.walk import walk
from lightning_ga.errors import UserError

PLUGINS = (
    r"hydra\._internal\.core_plugins\.basic_\w+\.Basic(Launcher|Sweeper)"
    r"|hydra_plugins\.\w+\.\w+\.\w+(Launcher|Sweeper)|optuna\.samplers\.\w+Sampler"
)
"""Classes; what their modules have imported, such as ``basic_launcher.logging.os.system``, ends elsewhere."""
FILE = "file://"
TEXT, NUMBER, WORD = r"[^\x00-\x1f\x7f-\x9f]*", r"-?\d+(\.\d+)?(e-?\d+)?|True|False|None", r"[\w.,:+-]*"
BY_FILES = {  # keys of the hydra section, and what a file may set them to
    r"(run|sweep)\.dir": TEXT,
    r"sweep\.subdir": r"(\$\{hydra[.:][\w.]+\}|[\w.,=+-])*",  # it is a line of a launcher's script
    r"searchpath": r"file://.*",
    r"mode|verbose|job\.(name|chdir)|job\.config\.override_dirname\.\w+": WORD,
    r"sweeper\.params\.[+~]*(?!hydra\b)[A-Za-z_][\w.]*": TEXT,  # a file that is searched for imports modules
    r"sweeper\.(direction|study_name)|launcher\.(account|backend|comment|constraint|gres|name|partition|qos)": WORD,
    r"(sweeper(?!\.params)|launcher)(\.\w+)+": NUMBER,  # no texts: setup is a program, storage a database
    r"(sweeper(\.sampler)?|launcher)\._target_": PLUGINS,
    r"(job|hydra)_logging\.(((root|loggers\.[\w.]+|handlers\.\w+)\.level)|disable_existing_loggers|version)": WORD,
    r"(job|hydra)_logging\.formatters\.\w+\.(format|datefmt)": r"(?!.*(://|\$\{)).*",  # logging imports ext://module
}
PLAIN_SECTIONS = {
    "paths": ("data_dir", "output_root", "sweep_root", "output_dir"),
    "precision": ("trainer", "float32_matmul"),
    "run": ("name", "tags"),
}
"""Sections that build nothing, with all keys that are read."""
GLOBAL = ("experiment", "debug")  # groups whose files are written from the top of the configuration


@contextmanager
def checked_composition(*, own: Path, known_keys: Sequence[str], typed: Sequence[str]) -> Iterator[None]:
    """A context in which what Hydra reads, but for the folder of its ``own`` files, and what it composes are checked.

    ``+key=value`` that was typed adds a key.
    """
    Plugins.instance()  # they register what reads files
    files: Any = SourcesRegistry.instance().resolve("file")
    loader: Any = ConfigLoaderImpl
    read, embed, load = files.load_config, loader._embed_result_config, loader.load_configuration
    added = [argument.lstrip("+").split("=")[0].split(".")[0] for argument in typed if argument.startswith("+")]

    def check_and_read(source: Any, config_path: str) -> Any:
        path = Path(source.path, source._normalize_file_name(config_path)).resolve()
        if own in path.parents or not path.is_file():
            return read(source, config_path)
        checked_yaml(path)
        result = read(source, config_path)
        result.path = f"{FILE}{path}"  # not the folder of another file, from which .. may lead
        if not isinstance(result.config, DictConfig):
            raise UserError(f"{str(path)!r} holds no keys: a configuration file is made of lines such as 'seed: 1'.")
        check_file(path, result.config)  # its search path is used before it is given its place
        return result

    def embed_and_check(result: Any, package: str | None) -> Any:
        embedded = embed(result, package)
        if result.path.startswith(FILE) and result.path != f"{FILE}{own}":
            check_file(Path(result.path.removeprefix(FILE)), embedded.config)
        return embedded

    def load_and_check(*args: Any, **kwargs: Any) -> DictConfig:
        config: DictConfig = composed(load, *args, **kwargs)
        content: Any = OmegaConf.to_container(config, resolve=False)
        check_hydra_section(content.pop("hydra"))
        check_keys(content, known_keys, added)
        return config

    files.load_config, loader.load_configuration = check_and_read, load_and_check
    loader._embed_result_config = staticmethod(embed_and_check)
    try:
        yield
    finally:
        files.load_config, loader.load_configuration = read, load
        loader._embed_result_config = staticmethod(embed)


def check_file(path: Path, config: Any) -> None:
    """Refuse what a file may not set in the hydra section; a section that is no mapping is read from elsewhere."""
    content = OmegaConf.to_container(config, resolve=False)
    section = content.get("hydra", {}) if isinstance(content, dict) else {}
    for key, value in walk(section):
        name = re.sub(r"\[\d+\]", "", key)
        if not isinstance(value, Mapping | list) and not may_be_set(name, value):
            raise UserError(
                f"{str(path)!r} sets {f'hydra.{name}'.rstrip('.')} to what would be used before anything is checked. "
                "In the hydra section files set folders, what a search tries, and numbers of sweepers, launchers and "
                "levels of logs: remove it there, and type it on the command line if you need it."
            )


def may_be_set(key: str, value: Any) -> bool:
    """Whether a file may set a key of the hydra section to a value.

    Examples:
        >>> may_be_set("launcher.timeout_min", 60), may_be_set("launcher.setup", "echo hello")
        (True, False)
    """
    return any(re.fullmatch(keys, key) and re.fullmatch(values, str(value)) for keys, values in BY_FILES.items())


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
    """Refuse what Hydra would use before the job is checked, wherever it was set: callbacks, variables and plugins."""
    if section["callbacks"]:
        raise UserError("hydra.callbacks would run before anything is checked: use callbacks of the Trainer instead.")
    if section["job"]["env_set"]:
        raise UserError("hydra.job.env_set would reach every process that a run starts: set variables in the shell.")
    for key, target in walk(section):
        if key.rpartition(".")[2] == "_target_" and not re.fullmatch(PLUGINS, str(target)):
            raise UserError(
                f"The hydra section names {target}: only Hydra's own launchers and sweepers are built there."
            )
