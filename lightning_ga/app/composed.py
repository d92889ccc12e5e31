"""What was typed, what files say, and what Hydra composes of both: put in order, and checked before any of it is used.

Hydra's own section imports, builds and writes before a job begins. What a file may set there is a list; what is typed
is the user's own. And a file of the user's own is merged without a word, whatever its keys are.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import Container, DictConfig, OmegaConf, ValueNode
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.app.errors import WITHOUT, did_you_mean
from lightning_ga.app.run_files import checked_yaml
from lightning_ga.app.values import FILE, FOLDER, RULES, shown, walk
from lightning_ga.errors import UserError

NEEDED = ("model", "data", "optimizer", "trainer", "precision", "paths")  # groups without which there is no run
HOME = re.compile(r"""(['"]?)~(?=/|\1$)""")
APART = re.compile(r"(?:^|\s)([^\s=]+)(?:\s+=\s*|=\s+)([^\s=]+)(?=\s|$)")  # key and value with blanks beside the =
SCHEME = "file://"
MOST_WORK, CHARACTERS = 3_000, 100  # interpolations resolved for a job; a text of so many characters counts as one
PLUGINS = (
    r"hydra\._internal\.core_plugins\.basic_\w+\.Basic(Launcher|Sweeper)"
    r"|hydra_plugins\.\w+\.\w+\.\w+(Launcher|Sweeper)|optuna\.samplers\.\w+Sampler"
)
"""Classes; what their modules have imported, such as ``basic_launcher.logging.os.system``, ends elsewhere."""
TEXT, NUMBER, WORD = r"[^\x00-\x1f\x7f-\x9f]*", r"-?\d+(\.\d+)?(e-?\d+)?|True|False|None", r"[\w.,:+-]*"
BY_FILES = {  # keys of the hydra section, and what a file may set them to
    r"(run|sweep)\.dir": TEXT,
    r"sweep\.subdir": r"(\$\{hydra[.:][\w.]+\}|[\w.,=+-])*",  # it is a line of a launcher's script
    r"searchpath": r"file://.*",
    r"mode|verbose|job\.(name|chdir)|job\.config\.override_dirname\.\w+": WORD,
    r"sweeper\.params\.[+~]*(?!hydra\b|.*\b_target_)[A-Za-z_][\w.]*": TEXT,  # other files are not checked, or built
    r"sweeper\.(direction|study_name)|launcher\.(account|backend|comment|constraint|gres|name|partition|qos)": WORD,
    r"(sweeper(?!\.params)|launcher)(\.\w+)+": NUMBER,  # no texts: setup is a program, storage a database
    r"(sweeper(\.sampler)?|launcher)\._target_": PLUGINS,
    r"(job|hydra)_logging\.(((root|loggers\.[\w.]+|handlers\.\w+)\.level)|disable_existing_loggers|version)": WORD,
    r"(job|hydra)_logging\.formatters\.\w+\.(format|datefmt)": r"(?!.*(://|\$\{)).*",  # logging imports ext://module
}
PLAIN_SECTIONS = {  # that build nothing, with all keys that are read
    "paths": ("data_dir", "output_root", "sweep_root", "output_dir"),
    "precision": ("trainer", "float32_matmul"),
    "run": ("name", "tags"),
}
GLOBAL = ("experiment", "debug")  # groups whose files are written from the top of the configuration


def check_arguments(arguments: Sequence[str], groups: Sequence[str]) -> None:
    """Refuse ``model=null`` and ``~model``, which leave out what a run needs, and what Hydra reads as nothing."""
    options, overrides = split_options(arguments)
    if any(option.startswith("--experimental-rerun") for option in options):
        raise UserError("--experimental-rerun unpickles a file, which can run any code: give the overrides again.")
    names = {option.partition("=")[0] for option in options}
    for option in ("--resolve", "--package", "-p"):
        if option in names and not {"--cfg", "-c", "--help", "-h"} & names:
            raise UserError(f"{option} says how a configuration is shown, and nothing shows it: add --cfg job.")
    if any(override.startswith("query=") for override in overrides) and "COMP_LINE" not in os.environ:
        raise UserError("query= is for a shell, which gives the line in COMP_LINE: set it up by -sc install=bash.")
    apart = APART.search(" ".join(overrides))
    if apart and any(not override.partition("=")[2] or " =" in override or "= " in override for override in overrides):
        raise UserError(f"{apart[0].strip()} has a blank beside the =: write {apart[1]}={apart[2]}.")
    for override in overrides:
        key, sign, value = override.partition("=")
        group = key.removeprefix("~")
        if group == key and not (key and sign):
            raise UserError(f"{override} is neither an option nor KEY=VALUE; --help shows both.")
        if group != key and group in NEEDED:
            raise UserError(
                f"{override} leaves a run without {group}, which it needs; --help lists the options of {group}."
            )
        if (key in groups or key.startswith("hydra/")) and value in ("", "null", "[]", "{}", "false", "true"):
            way_out = f"write {key}={WITHOUT[key]} to do without" if key in WITHOUT else "leave this out"
            way_out = f"a run needs one: {way_out}" if key in NEEDED else way_out
            raise UserError(f"{override} chooses no option of {key}: {way_out}; --help lists the options.")


def options_first(arguments: Sequence[str]) -> list[str]:
    """Options before overrides: Hydra takes overrides in one piece only, and Lightning appends some for its ranks.

    ``--hydra-help`` composes no run, which overrides would be of.
    """
    options, overrides = split_options(arguments)
    return [*map(at_home, options), *(map(at_home, overrides) if "--hydra-help" not in options else ())]


def at_home(override: str) -> str:
    """An override in which ``~`` is the home folder: no shell fills that in behind a =.

    Examples:
        >>> at_home("data.root=pictures~/x")
        'data.root=pictures~/x'
    """
    key, sign, value = override.partition("=")
    return f"{key}{sign}{HOME.sub(lambda found: found[1] + str(Path.home()), value)}" if HOME.match(value) else override


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options with their values, and overrides, told apart by Hydra's own parser."""
    overrides: list[str] = get_args_parser().parse_intermixed_args(list(arguments)).overrides
    return [argument for argument in arguments if argument not in overrides], overrides


def rank_overrides(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Overrides for ranks that ``torchrun`` or ``srun`` has started: all but the first keep no folder of their own.

    Each process names its folder by its own clock. Ranks that Lightning starts are told the folder of the first.

    Examples:
        >>> rank_overrides(["trainer=ddp"], {"RANK": "1"})
        ['hydra.output_subdir=null', 'hydra/job_logging=none', 'hydra.run.dir=${paths.output_root}']
        >>> rank_overrides(["trainer=ddp"], {"RANK": "0"})
        []
    """
    if is_first_rank(environment):
        return []
    if any(argument.startswith(("hydra.output_subdir=", "hydra/job_logging=")) for argument in arguments):
        return []
    told = any(argument.lstrip("+").startswith("hydra.run.dir=") for argument in arguments)
    folder = [] if told else ["hydra.run.dir=${paths.output_root}"]
    return ["hydra.output_subdir=null", "hydra/job_logging=none", *folder]


def is_first_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process is the only one, or the first of those that were started together."""
    names = ("RANK",) if "RANK" in environment else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return all(environment.get(name, "0") == "0" for name in names)


def typed_targets(arguments: Sequence[str]) -> tuple[str, ...]:
    """The packages that ``allow_targets=…`` names on the command line.

    A configuration cannot add to them: what may be built would then be decided by what is to be built.
    """
    typed = [argument for argument in split_options(arguments)[1] if argument.startswith("allow_targets=")]
    if not typed:
        return ()
    value = OverridesParser.create().parse_override(typed[-1]).value()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise UserError(f"{typed[-1]} must be a list of packages; for example allow_targets=[my_package].")
    return tuple(map(str, value))


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """A context in which attributes of others' classes and modules are replaced."""
    before = [vars(owner)[name] for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(places, before):
            setattr(owner, name, value)


@contextmanager
def checked_composition(*, own: Path, known_keys: Sequence[str], typed: Sequence[str]) -> Iterator[None]:
    """A context that checks what Hydra reads, its ``own`` folder aside, and composes; ``typed`` keys may be added."""
    Plugins.instance()  # they register what reads files, and load their modules anew
    files: Any = SourcesRegistry.instance().resolve("file")
    loader: Any = ConfigLoaderImpl
    container: Any = Container
    read, embed, load = files.load_config, loader._embed_result_config, loader.load_configuration
    resolve = container._resolve_interpolation_from_parse_tree
    work = 0

    def check_and_read(source: Any, config_path: str) -> Any:
        path = Path(source.path, source._normalize_file_name(config_path)).resolve()
        if own in path.parents or not path.is_file():
            return read(source, config_path)
        checked_yaml(path)
        result = read(source, config_path)
        result.path = f"{SCHEME}{path}"  # not the folder of another file, from which .. may lead
        if not isinstance(result.config, DictConfig):
            raise UserError(f"{str(path)!r} holds no keys: a configuration file is made of lines such as 'seed: 1'.")
        check_file(path, result.config)  # its search path is used before it is given its place
        return result

    def embed_and_check(result: Any, package: str | None) -> Any:
        embedded = embed(result, package)
        if result.path.startswith(SCHEME) and result.path != f"{SCHEME}{own}":
            check_file(Path(result.path.removeprefix(SCHEME)), embedded.config)
        return embedded

    def load_and_check(*args: Any, **kwargs: Any) -> DictConfig:
        nonlocal work
        work = 0
        config: DictConfig = composed(load, *args, **kwargs)
        content: Any = OmegaConf.to_container(config, resolve=False)
        if "task" not in content and kwargs.get("config_name") is not None:
            raise UserError(
                "The configuration that --config-name chose has no task: let its defaults begin with train."
            )
        check_keys(content, known_keys, typed)
        return config

    def resolve_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal work
        result = resolve(*args, **kwargs)
        work += 1 + (len(str(result)) // CHARACTERS if isinstance(result, ValueNode) else 0)
        if work > MOST_WORK:
            raise UserError("The interpolations of the configuration grow without bounds: write values in their place.")
        return result

    with replaced(
        (files, "load_config", check_and_read),
        (loader, "load_configuration", load_and_check),
        (loader, "_embed_result_config", staticmethod(embed_and_check)),
        (container, "_resolve_interpolation_from_parse_tree", resolve_and_count),
    ):
        yield


def check_file(path: Path, config: Any) -> None:
    """Refuse what a file may not set in the hydra section; a section that is no mapping is read from elsewhere."""
    content = OmegaConf.to_container(config, resolve=False)
    section = content.get("hydra", {}) if isinstance(content, dict) else {}
    for key, value in walk(section):
        name = re.sub(r"\[\d+\]", "", key)
        allowed = (re.fullmatch(keys, name) and re.fullmatch(values, str(value)) for keys, values in BY_FILES.items())
        if not isinstance(value, Mapping | list) and not any(allowed):
            raise UserError(
                f"{str(path)!r} sets {f'hydra.{name}'.rstrip('.')} to what would be used before anything is checked. "
                "In the hydra section files set folders, what a search tries, and numbers of sweepers, launchers and "
                "levels of logs: remove it there, and type it on the command line if you need it."
            )


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
        raise UserError(f"A value does not fit what it sets ({error}): --cfg job shows the values.") from error


def check_keys(content: Mapping[str, Any], known: Sequence[str], typed: Sequence[str] = ()) -> None:
    """Refuse files of the user's own that would be merged to where nothing reads them, or that replace a run."""
    for group in GLOBAL:
        if isinstance(content.get(group), Mapping):
            raise UserError(
                f"The file chosen by {group}=… does not begin with the line '# @package _global_', so that its keys "
                f"({', '.join(map(str, content[group]))}) would be read by nothing: add that line."
            )
    for section, names in PLAIN_SECTIONS.items():
        found = content.get(section, {})
        if not isinstance(found, Mapping):
            raise UserError(f"{section}={found} replaces a whole section: set {section}.{names[0]}=… alone.")
        for name in found.keys() - names:
            raise UserError(f"A configuration file sets {section}.{name}, which nothing reads: {', '.join(names)} are.")
    texts = [text for _, text in walk(content) if isinstance(text, str)]
    for key in map(str, content):
        if key not in known and not any(re.search(rf"\$\{{{re.escape(key)}[.}}\[]", text) for text in texts):
            added = any(re.match(rf"\++{re.escape(key)}[.=]", argument) for argument in typed)
            who = f"+{key}=…" if added else "A configuration file"
            hint = did_you_mean(key, known)
            raise UserError(f"{who} sets {key or repr(key)}, which nothing reads{hint} The keys: {', '.join(known)}.")
    if content.get("overwrite") and not any(argument.lstrip("+").startswith("overwrite=") for argument in typed):
        raise UserError("overwrite=true stands in a configuration file, and replaces a run: type it, too.")


def completions(word: str) -> list[str]:
    """How ``KEY=`` with the beginning of a value may go on; nothing for keys that take anything."""
    key, sign, begun = word.partition("=")
    rule = RULES.get(key)
    if not sign or rule is None:
        return []
    choices = [*map(shown, rule.choices), *(("best", "last") if key == "ckpt_path" else ())]
    if rule in (FILE, FOLDER):
        full = HOME.sub(str(Path.home()), begun, count=1) if HOME.match(begun) else begun
        paths = glob(f"{escape(full)}*")  # noqa: PTH207 (what was typed begins the paths, be it ./ or nothing)
        choices += [f"{begun}{path[len(full) :]}{'/' if Path(path).is_dir() else ''}" for path in paths]
    return sorted(f"{key}={choice}" for choice in choices if choice.startswith(begun))


@contextmanager
def completed_values() -> Iterator[None]:
    """A context in which Hydra's completion offers these values."""
    query: Any = CompletionPlugin._query

    def query_values(plugin: Any, config_name: str | None, line: str) -> list[str]:
        return completions(line.split(" ")[-1]) or query(plugin, config_name=config_name, line=line)

    with replaced((CompletionPlugin, "_query", query_values)):
        yield
